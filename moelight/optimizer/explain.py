"""Explain a plan in one sentence, compute what-ifs, and name the missing memory if nothing fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from moelight.core.dtypes import INT4, INT8
from moelight.core.errors import BudgetError
from moelight.core.policy import Policy
from moelight.core.units import format_bytes
from moelight.hrm.costs import kv_token_bytes
from moelight.hrm.estimate import cost_model_of
from moelight.hrm.machine_model import Unit, slowed_unit
from moelight.optimizer.allowed import AUTO, WEIGHTS, allowed_caches, allowed_weights
from moelight.optimizer.candidates import around, first_sample, scattered
from moelight.optimizer.placement import FreeMemory, Solution, fill, free_memory
from moelight.optimizer.plan import Plan, WhatIf
from moelight.optimizer.problem import Candidates, Problem, variants
from moelight.optimizer.search import feasible, keep_best
from moelight.profiles.model import ModelProfile

WORTH_SAYING = 0.01
STEP, ROUNDS, DRAWN = 0.5, 3, 250
_LANES = {
    "h2d": "the link to the device",
    "d2h": "the link from the device",
    "exchange": "the link between ranks",
    "device": "the GPU",
    "cpu": "the CPU",
    "dram": "host memory bandwidth",
    "stage": "copying into pinned memory",
    "disk": "the disk",
}


def explain_policy(plan: Plan, model: ModelProfile) -> str:
    """One sentence: sizes, placement, and the binding lane."""
    policy, tier = plan.policy, "host" if plan.policy.ffn_device == "cpu" else "device"
    lane, pages = plan.estimate.binding, "layers" if model.dense else "experts"
    activations = activations_text(policy, model)
    rounded = f", {activations}" if activations else ""
    return (
        f"{model.name}: N = {policy.batch_size} in micro-batches of {policy.micro_batch_size}, {policy.schedule}"
        f"{rounded}; "
        f"{_placed(policy, tier, pages)} ({format_bytes(plan.use_of(tier).total_bytes)} of it used); "
        f"{_LANES.get(lane, lane)} binds"
    )


def activations_text(policy: Policy, model: ModelProfile) -> str:
    """The activations of ``policy``, and the formats of experts that they leave exact; empty if none are rounded."""
    exact = () if model.stored is None else model.stored.exact
    pages = "layers" if model.dense else "experts"
    beside = f" ({pages} in {' and '.join(exact)} exact)" if exact else ""
    return "" if policy.activations == "auto" else f"{policy.activations} activations{beside}"


def what_if(problem: Problem, result: Solution) -> tuple[WhatIf, ...]:
    """The gain of doubling each part of the machine, and of experts and of keys and values in fewer bits, best first,
    without gains below 1 %. Devices and schedule are kept and only sizes near the chosen ones are tried, so that
    planning anew can only gain more."""
    now_s = _seconds(problem, result)
    gains = {f"twice the {label}": now_s / _seconds(better, result) - 1.0 for label, better in _better(problem).items()}
    for label, formats in _fewer_bits(problem, result).items():
        gains[label] = now_s / _seconds(problem, result, **formats) - 1.0
    return worth_saying(gains)


def worth_saying(gains: Mapping[str, float]) -> tuple[WhatIf, ...]:
    """The gains by change that reach `WORTH_SAYING`, best first."""
    worthwhile = (WhatIf(change=change, gain=gain) for change, gain in gains.items() if gain >= WORTH_SAYING)
    return tuple(sorted(worthwhile, key=lambda change: -change.gain))


def _fewer_bits(problem: Problem, result: Solution) -> dict[str, dict[str, str]]:
    """Number formats that the plan does not use and that take fewer bytes, as keys of a policy, in words."""
    policy, model, better = result.candidate, problem.model, dict[str, dict[str, str]]()
    if policy.weight_dtype == AUTO and len(allowed_weights(WEIGHTS, model)) > 1:
        better["experts in int4"] = {"weight_dtype": INT4.name}
    if policy.kv_dtype == AUTO and len(allowed_caches(model)) > 1:
        better["keys and values in int8"] = {"kv_dtype": INT8.name}
    return {label: formats for label, formats in better.items() if problem.fixed.keys().isdisjoint(formats)}


def _seconds(problem: Problem, result: Solution, **formats: Any) -> float:
    """Seconds of the job at the best sizes near those of ``result``, with its devices, schedule and number formats, or
    with other ``formats``."""
    candidate = replace(result.candidate, **formats)
    shown = Policy(
        model=problem.name,
        **{name: getattr(candidate, name) for name in ("attention_device", "ffn_device", "weight_dtype", "kv_dtype")},
        host_pages=candidate.host_pages,
    )
    here = replace(
        candidate,
        cost_model=cost_model_of(problem.model, shown, problem.speeds, problem.dtype),
        computed=result.placed.computed,
        device_kv=result.placed.device_kv or np.nan,
        resident=np.inf,
        spilled=0.0,
    )
    best = keep_best(problem, None, around(problem, here, step=STEP))
    draw = np.random.default_rng(0)
    for _ in range(ROUNDS if best is not None else 0):
        best = keep_best(problem, best, scattered(problem, best.candidates, draw, DRAWN))
    return np.inf if best is None else float(best.least)


def _better(problem: Problem) -> dict[str, Problem]:
    speeds, better = problem.speeds, {}
    changes: dict[str, dict[str, Any]] = {
        "link bandwidth": {"h2d": 2 * speeds.h2d, "d2h": 2 * speeds.d2h} if problem.has_gpu else {},
        "GPU": {"gpu": _twice(speeds.gpu)} if speeds.gpu is not None else {},
        "CPU": {"cpu": _twice(speeds.cpu)},
        "host memory bandwidth": {"dram": 2 * speeds.dram, "stage": 2 * speeds.stage},
        "disk bandwidth": {"disk": 2 * speeds.disk} if speeds.disk else {},
    }
    for tier in ("device", "host"):
        if tier in problem.capacity_bytes:
            better[f"{tier} memory"] = _with(problem, tier, 2 * problem.capacity_bytes[tier])
    for change, faster in changes.items():
        if faster:
            better[change] = replace(problem, speeds=replace(speeds, **faster))
    return better


def _twice(unit: Unit) -> Unit:
    """The unit at twice its rates, with the same overheads."""
    return replace(slowed_unit(unit, 0.5), task_s=unit.task_s, launch_s=unit.launch_s)


def _placed(policy: Policy, tier: str, pages: str) -> str:
    share = policy.weights.host if tier == "host" else policy.weights.device
    text = f"all {pages} stay" if share == 1 else f"{share:.0%} of the {pages} stay"
    text += f" in {tier} memory"
    if policy.cpu_experts:
        text += f", the CPU computes {policy.cpu_experts:.0%} where they lie"
    through = f" through a ring of {policy.ring_pages}" if policy.ring_pages else ""
    return text + ("" if share + policy.cpu_experts > 1 - 1e-9 else f", the rest streams in every pass{through}")


_TIERS = ("host", "device")  # a candidate that lacks host memory alone fits the device, so it is easier to fix
_PLENTY = 1 << 60


def infeasible_error(problem: Problem) -> BudgetError:
    """The error that names the memory missing for the candidate nearest to fitting: one tier, or host and device."""
    looks = [_smallest(first_sample(problem, variant)) for variant in variants(problem)]
    for tier in _TIERS:
        if (needed := _least(problem, looks, tier)) is not None:
            return _too_small(problem, tier, needed)
    plenty = _with(problem, "host", _PLENTY)
    if (needed := _least(plenty, looks, "device")) is not None:
        host = _least(_with(problem, "device", needed), looks, "host")
        also = "" if host is None else f", and {format_bytes(host, round_up=True)} of host memory"
        return _too_small(problem, "device", needed, also)
    return _on_disk(problem)


def _too_small(problem: Problem, tier: str, needed: int, also: str = "") -> BudgetError:
    capacity = problem.capacity_bytes[tier]
    text = (
        f"--{tier}-memory {format_bytes(capacity)} is too small for {problem.model.name}: at least "
        f"{format_bytes(needed, round_up=True)} is needed on this workload, "
        f"{format_bytes(needed - capacity, round_up=True)} more{also}"
    )
    hint = _with_a_limit(problem) or _without_a_fix(problem)
    return BudgetError(text + hint, tier=tier, needed_bytes=needed)


def _with(problem: Problem, tier: str, size: int) -> Problem:
    return replace(problem, capacity_bytes={**problem.capacity_bytes, tier: size})


def _smallest(candidates: Candidates) -> Candidates:
    """Return the candidates with the fewest sequences; memory use grows with N."""
    sizes = candidates.batch_size
    return candidates.at(np.flatnonzero(sizes == np.min(sizes, initial=_PLENTY)))


def _least(problem: Problem, looks: list[Candidates], tier: str) -> int | None:
    """The least bytes of ``tier`` with which some candidate fits; None if more of ``tier`` does not help."""
    if tier not in problem.capacity_bytes:
        return None

    bare = _with(problem, tier, 0)
    some = [(candidates, free_memory(bare, candidates)) for candidates in looks if candidates.batch_size.size]

    def fitting(size: int) -> list[tuple[Candidates, FreeMemory]]:
        sized = ((candidate, free, replace(free, **{tier: getattr(free, tier) + size})) for candidate, free in some)
        return [
            (candidate, free)
            for candidate, free, enlarged in sized
            if np.any(fill(problem, candidate, free=enlarged)[1])
        ]

    low, high, some = problem.capacity_bytes[tier], _PLENTY, fitting(_PLENTY)
    if not some:
        return None
    while high - low > 1:  # nothing fits in `low`, and of each of `some` a candidate fits in `high`
        middle = min((low + high) // 2, 2 * low + 1)
        fits = fitting(middle)
        low, high, some = (low, middle, fits) if fits else (middle, high, some)
    return high


def _with_a_limit(problem: Problem) -> str:
    """Describe the requirements of the longest answer, if the problem is feasible with a limit of answers; else
    empty."""
    work, model = problem.workload, problem.model
    limited = replace(work, max_gen_len=None)
    if work.max_gen_len is None or not feasible(replace(problem, workload=limited)):
        return ""
    longest = min(work.max_prompt_len + work.max_gen_len, model.max_positions)
    need = format_bytes(longest * kv_token_bytes(model, problem.dtype), round_up=True)
    return (
        f"; an answer without max_tokens may reach a length of {longest:,} tokens, whose KV cache takes {need}: set "
        f"max_tokens (--max-tokens)"
    )


def _without_a_fix(problem: Problem) -> str:
    """A hint at the one fixed value without which the problem is feasible; empty if there is none."""
    for key in problem.fixed:
        rest = {name: value for name, value in problem.fixed.items() if name != key}
        if feasible(replace(problem, fixed=rest)):
            return f"; without --fix {key}={problem.fixed[key]} it fits"
    return ""


def _on_disk(problem: Problem) -> BudgetError:
    """The error for a disk too small for the expert pages, where more memory does not help."""
    free = free_memory(problem, next(variants(problem)))
    needed = free.pages * free.page_bytes
    capacity = problem.capacity_bytes.get("disk", 0)
    return BudgetError(
        f"--disk {format_bytes(capacity)} is too small for {problem.model.name}: its experts take "
        f"{format_bytes(needed, round_up=True)}, {format_bytes(needed - capacity, round_up=True)} more"
        f"{_without_a_fix(problem)}",
        tier="disk",
        needed_bytes=needed,
    )
