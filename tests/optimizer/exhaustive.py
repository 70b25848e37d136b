"""Every policy of a small problem, enumerated without the optimizer: all N, μ, devices, orders, counts of pages on
every tier and blocks of the cache on the device, and a few sizes of prompt micro-batches where they are not fixed; what
is `USUAL` as it is. Held against the memory there is, and priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from moelight.core.policy import Policy, Shares
from moelight.hrm import costs
from moelight.hrm.cost_model import CostModel
from moelight.hrm.estimate import job_s
from moelight.hrm.footprint import fixed_bytes, kv_block_bytes, page_slots
from moelight.hrm.pass_cost import PlacementCounts
from moelight.hrm.placement import place_pages
from moelight.optimizer.problem import Problem, kv_tokens
from moelight.profiles.model import ModelProfile
from moelight.scheduler.layout import EXPERT_PLACES
from moelight.scheduler.requirements import misfit
from tests.optimizer.drawn import TOKENS, USUAL

BLOCK = 32
_ARRAYS = ("batch_size", "micro_batch_size", "micro_batch_tokens", "kv_tokens")
_COUNTS = ("resident", "from_host", "from_disk", "computed", "blocks", "ring_pages")


@dataclass(frozen=True, kw_only=True)
class Policies:
    """Policies of one variant as arrays of one length; they have the face of a policy."""

    cost_model: CostModel
    schedule: str
    batch_size: Any
    micro_batch_size: Any
    micro_batch_tokens: Any
    kv_tokens: Any
    resident: Any
    from_host: Any
    from_disk: Any
    computed: Any
    blocks: Any
    ring_pages: Any
    kv_block_size: int = BLOCK
    kv_dtype: str = "auto"
    prompt_micro_batches: int = int(USUAL["prompt_micro_batches"])
    look_ahead: int = int(USUAL["look_ahead"])
    admission: str = str(USUAL["admission"])
    residents: str = "auto"
    activations: str = "auto"

    @property
    def attention_device(self) -> str:
        return self.cost_model.attention_device

    @property
    def ffn_device(self) -> str:
        return self.cost_model.ffn_device

    @property
    def discrete(self) -> bool:
        return self.cost_model.discrete

    def at(self, index: Any) -> Policies:
        arrays = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name in (*_ARRAYS, *_COUNTS)}
        return replace(self, **arrays)


def settings_of(problem: Problem, orders: tuple[str, ...] | None = None) -> Iterator[tuple[str, str, str]]:
    """(attention device, FFN device, order)."""
    for attention in ("cpu", "gpu"):
        for ffn in ("cpu", "gpu", "split"):
            discrete = attention == "gpu" or ffn != "cpu"
            for order in orders or problem.schedules:
                fits = misfit(order, discrete=discrete, attention=attention, experts=EXPERT_PLACES[ffn]) is None
                if fits and (problem.has_gpu or not discrete):
                    yield attention, ffn, order


def acts_for(problem: Problem, attention: str, ffn: str) -> CostModel:
    return CostModel(
        model=problem.model,
        speeds=problem.speeds,
        dtype=problem.dtype,
        kv_dtype=problem.dtype,
        page_dtype=problem.dtype,
        attention_device=attention,
        ffn_device=ffn,
    )


def every(problem: Problem, attention: str, ffn: str, order: str) -> Policies:
    """All policies of one variant, whether they fit or not."""
    requests, fixed = problem.workload.num_requests, problem.count("micro_batch_tokens")
    sizes = np.array(
        [
            (n, mu, t)
            for n in range(1, requests + 1)
            for mu in range(1, n + 1)
            for t in (TOKENS if fixed is None else (fixed,))
            if t >= mu
        ]
    )
    cache = np.asarray(kv_tokens(problem, sizes[:, 0]))
    blocks = -(-cache // BLOCK) if attention == "gpu" else np.zeros(len(sizes), dtype=int)
    size = np.repeat(np.arange(len(sizes)), blocks + 1)
    on_device = np.concatenate([np.arange(block + 1) for block in blocks])
    placed = np.array(list(_placed(problem, ffn)))
    one, other = (grid.ravel() for grid in np.meshgrid(np.arange(len(size)), np.arange(len(placed)), indexing="ij"))
    chosen, at = sizes[size[one]], placed[other]
    result = Policies(
        cost_model=acts_for(problem, attention, ffn),
        schedule=order,
        batch_size=chosen[:, 0],
        micro_batch_size=chosen[:, 1],
        micro_batch_tokens=chosen[:, 2],
        kv_tokens=cache[size[one]],
        resident=at[:, 0],
        from_host=at[:, 1],
        from_disk=at[:, 2],
        computed=at[:, 3],
        blocks=on_device[one],
        ring_pages=np.full(len(one), problem.two_layers),
    )
    return with_rings(problem, result)


def with_rings(problem: Problem, some: Policies) -> Policies:
    """``some`` with every ring that they may have."""
    smallest, largest = problem.rings(some)  # type: ignore[arg-type]
    rings = np.arange(smallest, largest + 1)
    item = some.at(np.tile(np.arange(len(some.batch_size)), len(rings)))
    return replace(item, ring_pages=np.repeat(rings, len(some.batch_size)))


def fits(problem: Problem, some: Policies) -> Any:
    """Which of them the memory holds, by the ledger's own footprint."""
    used: dict[str, Any] = {"device": 0, "host": 0}
    for (_, tier), size in fixed_bytes(problem.model, some, dtype=problem.dtype).items():
        used[tier] = used[tier] + size
    counts = np.stack([some.resident, some.from_host, some.from_disk, some.computed, some.ring_pages])
    kinds, kind = np.unique(counts, axis=1, return_inverse=True)
    slots = np.array([_slots(problem.model, some.ffn_device, *map(int, column)) for column in kinds.T])[kind.ravel()]
    slot = costs.page_slot_bytes(problem.model, problem.dtype)
    block = kv_block_bytes(problem.model, some, problem.dtype)
    device = used["device"] + slots[:, 0] * slot + some.blocks * block
    host = used["host"] + slots[:, 1] * slot + (-(-some.kv_tokens // BLOCK) - some.blocks) * block
    result = host <= problem.capacity_bytes["host"]
    if problem.has_gpu:
        result &= device <= problem.capacity_bytes["device"]
    return result & (some.from_disk * costs.page_bytes(problem.model, problem.dtype) <= problem.capacity_bytes["disk"])


def seconds(problem: Problem, some: Policies) -> Any:
    """Seconds of the job under each."""
    placed = PlacementCounts(
        from_host=some.from_host,
        from_disk=some.from_disk,
        computed=some.computed,
        device_kv=some.blocks / (-(-some.kv_tokens // BLOCK)),
    )
    return job_s(some.cost_model, problem.workload, some, placed)


def least_seconds_of_all(problem: Problem) -> float:
    """The fastest policy there is; infinite where none fits."""
    least = np.inf
    for variant in settings_of(problem):
        some = every(problem, *variant)
        some = some.at(np.flatnonzero(fits(problem, some)))
        if len(some.batch_size):
            least = min(least, float(np.min(seconds(problem, some))))
    return least


def _placed(problem: Problem, ffn: str) -> Iterator[tuple[int, int, int, int]]:
    """(resident, streamed from host, streamed from disk, computed by the CPU) of all pages."""
    total = problem.model.num_moe_layers * problem.model.experts.num_experts
    for resident in range(total + 1):
        for from_disk in range(total - resident + 1):
            rest = total - resident - from_disk
            if ffn == "cpu":
                if not rest:
                    yield resident, 0, from_disk, 0
            elif ffn == "gpu":
                yield resident, rest, from_disk, 0
            else:
                yield from ((resident, rest - computed, from_disk, computed) for computed in range(rest + 1))


@lru_cache(maxsize=10_000)
def _slots(
    model: ModelProfile, ffn: str, resident: int, from_host: int, from_disk: int, computed: int, ring_pages: int
) -> tuple[int, int]:
    """Slots of pages on the device and on the host."""
    total = resident + from_host + from_disk + computed
    host = resident if ffn == "cpu" else from_host + computed
    shares = Shares(device=0.0 if ffn == "cpu" else resident / total, host=host / total, disk=from_disk / total)
    policy = Policy(model="m", ffn_device=ffn, weights=shares, cpu_experts=computed / total, ring_pages=ring_pages)
    slots = {"device": 0, "host": 0}
    for _, tier, count in page_slots(place_pages(model, policy)):
        slots[tier] += count
    return slots["device"], slots["host"]
