"""Fits a policy into the memory there is: how many sequences, how large a micro-batch, which pages stay.

Every candidate pair of N and micro-batch size is tried with as many resident pages as fit, priced by
``hrm.estimate``, and the fastest is taken. Refuses to know files and devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moelight.core.dtypes import DType
from moelight.core.errors import BudgetError, ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.units import format_bytes
from moelight.hrm.costs import page_slot_bytes
from moelight.hrm.estimate import Estimate, Rates, estimate
from moelight.hrm.footprint import Footprint, footprint
from moelight.profiles.model import ModelProfile
from moelight.profiles.stored import pages
from moelight.profiles.workload import Workload

MOST_SEQUENCES = 256
MICRO_BATCH_TOKENS = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16)
KV_ROUNDING_TOKENS = 32  # a sequence may leave that much of its last block empty


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A policy, what it takes and promises, and one sentence why."""

    policy: Policy
    footprint: Footprint
    estimate: Estimate
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the user fixed; None leaves the choice to the plan."""

    batch_size: int | None = None
    micro_batch_size: int | None = None
    schedule: str = "cgopipe"


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """Bytes that may be used per tier; ``device`` is None on a machine without a GPU."""

    host: int
    device: int | None = None


def fit(
    name: str,
    model: ModelProfile,
    workload: Workload,
    budgets: Budgets,
    *,
    dtype: DType,
    rates: Rates,
    wishes: Wishes,
) -> Plan:
    """The fastest policy that fits ``budgets``, for the model called ``name``.

    Raises:
        BudgetError: not even one sequence fits; names the bytes that would be enough.
        ConfigError: a wish is impossible in itself (see `Policy`).
    """
    best: Plan | None = None
    short: BudgetError | None = None
    for candidate in _candidates(name, model, workload, wishes, discrete=budgets.device is not None):
        try:
            policy = _fill(model, candidate, budgets, dtype)
        except BudgetError as error:
            short = error if short is None else min(short, error, key=_ease)
            continue
        priced = estimate(model, policy, workload, dtype=dtype, rates=rates)
        if best is None or priced.tokens_per_s > best.estimate.tokens_per_s:
            taken = footprint(model, policy, dtype=dtype, kv_dtype=dtype)
            best = Plan(policy=policy, footprint=taken, estimate=priced, why="")
    if best is None:
        raise short or ConfigError(f"no policy was tried for {name}")
    return replace(best, why=_why(best, model))


def _candidates(
    name: str, model: ModelProfile, workload: Workload, wishes: Wishes, *, discrete: bool
) -> Iterator[Policy]:
    """N from the most that the job could use down to 1, with micro-batches from large to small."""
    if wishes.batch_size is not None:
        sizes = [wishes.batch_size]
    else:
        most = min(workload.num_requests, MOST_SEQUENCES)
        sizes = sorted({most, *(1 << p for p in range(9) if 1 << p < most)}, reverse=True)
    processor = "gpu" if discrete else "cpu"
    average = min(workload.prompt_len + workload.gen_len, model.max_positions)
    longest = min(workload.max_prompt_len + workload.gen_len, model.max_positions)
    for n in sizes:
        # A link is hidden behind several micro-batches; without one, more of them only read the weights again.
        planned = -(-n // 4) if discrete else n
        mu = planned if wishes.micro_batch_size is None else wishes.micro_batch_size
        kv_tokens = max(n * average, longest) + KV_ROUNDING_TOKENS * n
        for tokens in dict.fromkeys(max(size, mu) for size in MICRO_BATCH_TOKENS):
            yield Policy(
                model=name,
                batch_size=n,
                micro_batch_size=min(mu, tokens),
                micro_batch_tokens=tokens,
                kv_tokens=kv_tokens,
                ffn_device=processor,
                schedule=wishes.schedule,
            )


def _fill(model: ModelProfile, policy: Policy, budgets: Budgets, dtype: DType) -> Policy:
    """``policy`` with as many pages near, then on the host, as the budgets allow."""
    total, slot = len(pages(model)), page_slot_bytes(model, dtype)
    if budgets.device is None:
        empty = replace(policy, weights=Shares(disk=1.0))
        near = _resident(model, empty, "host", budgets.host, dtype)
        return replace(policy, weights=_shares(total, host=near))
    empty = replace(policy, weights=Shares(disk=1.0))
    near = _resident(model, empty, "device", budgets.device, dtype)
    settled = replace(policy, weights=_shares(total, device=near))
    host = footprint(model, settled, dtype=dtype, kv_dtype=dtype).total("host")
    if host > budgets.host:
        raise _too_small(model, "host", budgets.host, host)
    return replace(policy, weights=_shares(total, device=near, host=min(total - near, (budgets.host - host) // slot)))


def _resident(model: ModelProfile, empty: Policy, tier: str, budget: int, dtype: DType) -> int:
    """The most pages that can stay on ``tier`` beside everything else and the ring of those that cannot."""
    total, slot = len(pages(model)), page_slot_bytes(model, dtype)
    taken = footprint(model, empty, dtype=dtype, kv_dtype=dtype)
    ring = taken.bytes_of("ring") // slot
    fixed = taken.total(tier) - ring * slot
    room = (budget - fixed) // slot
    if room >= total:
        return total
    if room < ring:
        raise _too_small(model, tier, budget, min(fixed + ring * slot, fixed + total * slot))
    layers = model.num_moe_layers
    resident = min(total - 1, room)
    while resident + 2 * -(-(total - resident) // layers) > room:
        resident -= 1
    return resident


def _ease(error: BudgetError) -> tuple[bool, int]:
    """Smallest for the refusal that is mended most easily: what lacks host memory only has enough on the device."""
    return error.tier == "device", error.needed_bytes


def _shares(total: int, *, device: int = 0, host: int = 0) -> Shares:
    disk = (total - device - host) / total
    return Shares(device=device / total, host=host / total, disk=disk)


def _too_small(model: ModelProfile, tier: str, budget: int, needed: int) -> BudgetError:
    return BudgetError(
        f"--{tier}-memory {format_bytes(budget)} is too small for {model.name}: "
        f"at least {format_bytes(needed, round_up=True)} is needed on this workload",
        tier=tier,
        needed_bytes=needed,
    )


def _why(plan: Plan, model: ModelProfile) -> str:
    policy, weights = plan.policy, plan.policy.weights
    near = "device" if policy.ffn_device == "gpu" else "host"
    share = weights.device if near == "device" else weights.host
    stays = "all experts stay" if share == 1 else f"{share:.0%} of the experts stay"
    streams = "" if share == 1 else ", the rest streams in every pass"
    return (
        f"{model.name}: N = {policy.batch_size} in micro-batches of {policy.micro_batch_size}; {stays} in {near} memory"
        f" ({format_bytes(plan.footprint.total(near))} used){streams}; {plan.estimate.binding} binds"
    )
