"""Random policies that fit a machine, as arrays: against them the planner's choice is held.

Half of them range over everything, the others keep near a given policy. Every key that a policy has is drawn: devices,
orders of work that go with them, sizes, tokens and number of prompt micro-batches, cache and its blocks, look-ahead,
admission, pinned homes. As many pages stay as memory holds, now and then fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from moelight.core.policy import ADMISSIONS, KV_BLOCK_SIZES, MOST_COUNTS, MOST_LOOK_AHEAD, Policy, Shares
from moelight.hrm import costs
from moelight.hrm.cost_model import CostModel
from moelight.hrm.estimate import job_s
from moelight.hrm.footprint import fixed_bytes, kv_block_bytes
from moelight.hrm.pass_cost import PlacementCounts
from moelight.hrm.schedule_time import SCHEDULE_TERMS
from moelight.hrm.workload_model import cache_tokens, cached_sequences
from moelight.optimizer.problem import Problem
from moelight.scheduler.layout import EXPERT_PLACES
from moelight.scheduler.requirements import misfit


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Policies of one choice of devices, order, block size, look-ahead and admission. They have the face of a policy;
    counts of pages, and of blocks of the cache on the device."""

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
    prompt_micro_batches: Any
    kv_block_size: int
    look_ahead: int
    admission: str
    residents: str
    ring_pages: Any

    @property
    def attention_device(self) -> str:
        return self.cost_model.attention_device

    @property
    def ffn_device(self) -> str:
        return self.cost_model.ffn_device

    @property
    def activations(self) -> str:
        return self.cost_model.activations

    @property
    def discrete(self) -> bool:
        return self.cost_model.discrete

    @property
    def kv_dtype(self) -> str:
        return self.cost_model.kv_dtype.name

    def __len__(self) -> int:
        return len(self.batch_size)

    def at(self, index: Any) -> Sampled:
        plain = ("cost_model", "schedule", "kv_block_size", "look_ahead", "admission", "residents")
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self) if f.name not in plain})

    def seconds(self, problem: Problem) -> Any:
        """Of the whole job under each."""
        placed = PlacementCounts(
            from_host=self.from_host,
            from_disk=self.from_disk,
            computed=self.computed,
            device_kv=self.blocks / (-(-self.kv_tokens // self.kv_block_size)),
        )
        return job_s(self.cost_model, problem.workload, self, placed)

    def policy(self, problem: Problem, index: int) -> Policy:
        """One of them, page by page and block by block."""
        one, pages = self.at(index), problem.pages
        on_cpu = self.ffn_device == "cpu"
        device, host = 0.0 if on_cpu else one.resident / pages, one.resident if on_cpu else one.from_host + one.computed
        cache, disk = one.blocks / -(-one.kv_tokens // one.kv_block_size), one.from_disk / pages
        return Policy(
            model=problem.name,
            batch_size=int(one.batch_size),
            micro_batch_size=int(one.micro_batch_size),
            micro_batch_tokens=int(one.micro_batch_tokens),
            prompt_micro_batches=int(one.prompt_micro_batches),
            kv_tokens=int(one.kv_tokens),
            attention_device=self.attention_device,
            ffn_device=self.ffn_device,
            weights=Shares(device=float(device), host=float(host / pages), disk=float(disk)),
            cpu_experts=float(one.computed / pages),
            kv=Shares(device=float(cache), host=float(1.0 - cache)),
            schedule=self.schedule,
            kv_block_size=self.kv_block_size,
            look_ahead=self.look_ahead,
            admission=self.admission,
            residents=self.residents,
            ring_pages=int(one.ring_pages),
            host_pages="pinned" if self.cost_model.pinned_pages else "staged",
        )


@dataclass(frozen=True, kw_only=True)
class Best:
    """The fastest of ``count`` policies that fit; None where none does."""

    seconds: float
    count: int
    policy: Policy | None


def best_of_samples(problem: Problem, near: Policy, count: int, seed: int = 0) -> Best:
    """The best of at least ``count`` policies that fit, or of what many draws gave."""
    rng = np.random.default_rng(seed)
    every = list(every_setting(problem))
    original = [
        s for s in every if s[1:] == (near.schedule,) and _devices(s[0]) == (near.attention_device, near.ffn_device)
    ]
    result, least, policy = 0, np.inf, None
    for _ in range(8):
        draws = [(setting, None) for setting in every] + [
            (setting, near) for setting in (*original * len(every), *every)
        ]
        for (cost_model, schedule), around in draws:
            some = drawn(problem, rng, -(-2 * count // len(draws)), cost_model, schedule, around)
            if not len(some):
                continue
            seconds = some.seconds(problem)
            index = int(np.argmin(seconds))
            result += len(some)
            if seconds[index] < least:
                least, policy = float(seconds[index]), some.policy(problem, index)
        if result >= count:
            break
    return Best(seconds=least, count=result, policy=policy)


def _devices(cost_model: CostModel) -> tuple[str, str]:
    return cost_model.attention_device, cost_model.ffn_device


def every_setting(problem: Problem) -> Iterator[tuple[CostModel, str]]:
    for attention in ("cpu", "gpu") if problem.has_gpu else ("cpu",):
        for ffn in ("cpu", "gpu", "split") if problem.has_gpu else ("cpu",):
            cost_model = CostModel(
                model=problem.model,
                speeds=problem.speeds,
                dtype=problem.dtype,
                kv_dtype=problem.dtype,
                page_dtype=problem.dtype,
                attention_device=attention,
                ffn_device=ffn,
            )
            for order in SCHEDULE_TERMS:
                if misfit(order, discrete=cost_model.discrete, attention=attention, experts=EXPERT_PLACES[ffn]) is None:
                    yield cost_model, order


def drawn(problem: Problem, rng: Any, count: int, cost_model: CostModel, schedule: str, near: Policy | None) -> Sampled:
    """As many of ``count`` draws as fit."""
    close = near is not None and rng.random() < 0.7
    block = near.kv_block_size if close else int(rng.choice(KV_BLOCK_SIZES))
    n, b, tokens, prompts = _sizes(problem, rng, count) if near is None else _sizes_near(problem, rng, count, near)
    prompts = np.minimum(prompts, MOST_COUNTS["prompt_micro_batches"])
    mu = np.where(rng.random(count) < 0.8, -(-n // b), np.minimum(n, -(-n // b) + rng.integers(0, 3, count)))
    tokens = np.maximum(tokens, mu)
    needed = cache_tokens(problem.workload, n, block, problem.model.max_positions)
    factor = np.where(rng.random(count) < 0.7, 1.0, np.exp(rng.normal(0, 0.3, count)))
    cache = np.maximum(1, np.floor(needed * factor)).astype(np.int64)
    none = np.zeros(count, dtype=np.int64)
    pinned = cost_model.ffn_device != "cpu" and (near.host_pages == "pinned" if close else rng.random() < 0.5)
    sizes = Sampled(
        cost_model=replace(cost_model, pinned_pages=pinned),
        schedule=schedule,
        batch_size=n,
        micro_batch_size=mu,
        micro_batch_tokens=tokens,
        prompt_micro_batches=prompts,
        kv_tokens=cache,
        resident=none,
        from_host=none,
        from_disk=none,
        computed=none,
        blocks=none,
        kv_block_size=block,
        look_ahead=near.look_ahead if close else int(rng.integers(1, MOST_LOOK_AHEAD + 1)),
        admission=near.admission if close else str(rng.choice(ADMISSIONS)),
        residents="static" if cost_model.discrete or rng.random() < 0.6 else "learned",
        ring_pages=none,
    )
    sizes = replace(sizes, ring_pages=_rings(problem, rng, sizes, near.ring_pages if close else 0))
    held = cached_sequences(problem.workload, cache, block, problem.model.max_positions)
    return _placed(problem, rng, sizes.at(np.flatnonzero(held >= 1)), near)


def _rings(problem: Problem, rng: Any, sizes: Sampled, near: int) -> Any:
    """Pages of rings smaller than two layers, where a policy may have them; else 0."""
    smallest, largest = problem.rings(sizes)  # type: ignore[arg-type]
    none = np.zeros(len(sizes), dtype=np.int64)
    if smallest == largest:
        return none
    drawn = np.exp(rng.uniform(np.log(smallest), np.log(largest), len(sizes)))
    if near:
        drawn = np.where(rng.random(len(sizes)) < 0.7, near * np.exp(rng.normal(0, 0.3, len(sizes))), drawn)
    small = np.clip(drawn, smallest, largest).astype(np.int64)
    return np.where(rng.random(len(sizes)) < 0.6, small, none)


def _sizes(problem: Problem, rng: Any, count: int) -> tuple[Any, Any, Any, Any]:
    requests = problem.workload.num_requests
    n = np.exp(rng.uniform(0, np.log(requests + 0.999), count)).astype(np.int64)
    n = np.where(rng.random(count) < 0.5, -(-requests // np.maximum(1, requests // n)), n)
    b = np.exp(rng.uniform(0, np.log(n + 0.999))).astype(np.int64)
    maximum = max(problem.prompt_tokens, 16)
    tokens = np.exp(rng.uniform(0, np.log(maximum + 0.999), count)).astype(np.int64)
    tokens = np.where(rng.random(count) < 0.4, 2 ** rng.integers(4, 14, count), tokens)
    prompts = np.exp(rng.uniform(0, np.log(np.maximum(maximum // tokens, 1) + 1.999))).astype(np.int64)
    return n, b, tokens, np.where(rng.random(count) < 0.3, 8, np.maximum(prompts, 1))


def _sizes_near(problem: Problem, rng: Any, count: int, near: Policy) -> tuple[Any, Any, Any, Any]:
    """Sizes a factor of 1.001 to 2.7 away, or the same, or of as many waves."""
    requests = problem.workload.num_requests

    def factor() -> Any:
        return np.exp(rng.normal(0, 1, count) * 10.0 ** rng.uniform(-3, 0, count))

    waves = np.maximum(1, np.round(-(-requests // near.batch_size) * factor())).astype(np.int64)
    n = np.where(rng.random(count) < 0.7, -(-requests // waves), np.round(near.batch_size * factor()))
    n = np.clip(np.where(rng.random(count) < 0.4, near.batch_size, n), 1, requests).astype(np.int64)
    b = np.round(near.num_micro_batches * factor()) + rng.integers(-2, 3, count)
    b = np.clip(np.where(rng.random(count) < 0.3, near.num_micro_batches, b), 1, n).astype(np.int64)
    step = np.where(rng.random(count) < 0.5, factor(), 2.0 ** rng.integers(-3, 4, count))
    tokens = np.maximum(1, np.round(near.micro_batch_tokens * np.where(rng.random(count) < 0.4, 1.0, step)))
    rides = np.where(rng.random(count) < 0.5, factor(), 2.0 ** rng.integers(-3, 5, count))
    riding = near.micro_batch_tokens * near.prompt_micro_batches * np.where(rng.random(count) < 0.4, 1.0, rides)
    return n, b, tokens.astype(np.int64), np.maximum(1, np.round(riding / tokens)).astype(np.int64)


def _placed(problem: Problem, rng: Any, sizes: Sampled, near: Policy | None) -> Sampled:
    """Homes for every page and block: first blocks on the device, then pages for the CPU, then as many pages as stay or
    a part of them, then pages in host memory, the rest on disk. Those that do not fit are left out."""
    cost_model, model, count = sizes.cost_model, problem.model, len(sizes)
    slot, block = costs.page_slot_bytes(model, cost_model.page_dtype), kv_block_bytes(model, sizes, cost_model.dtype)
    free = {tier: np.full(count, float(size)) for tier, size in problem.capacity_bytes.items()}
    for (_, tier), size in fixed_bytes(model, sizes, dtype=cost_model.dtype).items():
        free[tier] = free[tier] - size
    cache = -(-sizes.kv_tokens // sizes.kv_block_size)
    blocks = np.zeros(count)
    if cost_model.attention_device == "gpu":
        blocks = _cache_blocks(rng, np.clip(np.floor(free["device"] / block), 0, cache), cache, near)
        free["device"] = free["device"] - blocks * block
    free["host"] = free["host"] - (cache - blocks) * block
    computed = _computed(problem, rng, count, near) if cost_model.ffn_device == "split" else np.zeros(count)
    at_home = "host" if cost_model.ffn_device == "cpu" else "device"
    pages = problem.pages - computed
    resident = _most_resident(pages, np.floor(free[at_home] / slot), model.num_moe_layers)
    small = np.floor(free[at_home] / slot) - sizes.ring_pages
    more = (sizes.ring_pages > 0) & (small > resident) & (resident < pages)
    resident = np.where(more, np.minimum(small, pages), resident)
    resident = np.floor(resident * (1.0 if near is not None else rng.choice([1, 1, 0.999, 0.9, 0.5], count)))
    streamed = pages - resident
    per_layer = np.ceil(streamed / model.num_moe_layers)
    ring = np.where(sizes.ring_pages > 0, np.minimum(sizes.ring_pages, 2 * per_layer), 2 * per_layer)
    if sizes.residents == "learned":
        resident = np.where(
            (resident < pages) & (rng.random(count) < 0.5), resident - model.experts.num_experts, resident
        )
        streamed = pages - resident
        per_layer = np.ceil(streamed / model.num_moe_layers)
        ring = np.where(streamed > 0, np.maximum(2 * per_layer, model.experts.num_experts), 0)
    fits = (resident >= 0) & (resident + ring <= np.floor(free[at_home] / slot)) & (free["host"] >= 0)
    if cost_model.discrete:
        fits &= free["device"] >= 0
    from_host = np.zeros(count)
    if at_home == "device":
        room = np.floor(free["host"] / slot) - computed
        wanted = np.where(rng.random(count) < 0.7, streamed, np.floor(streamed * rng.random(count)))
        deep = ring
        ring = 0 if cost_model.pinned_pages else np.minimum(per_layer, ring)  # where no page comes from disk
        shallow = (wanted >= streamed) & (streamed + ring <= room)
        from_host = np.where(shallow, streamed, np.clip(np.minimum(wanted, room - deep), 0, streamed))
        fits &= np.where(shallow, True, from_host + np.where(from_host < streamed, deep, ring) <= room)
    from_disk = streamed - from_host
    fits &= from_disk * costs.page_bytes(model, cost_model.page_dtype) <= problem.capacity_bytes["disk"]
    counts = {"resident": resident, "from_host": from_host, "from_disk": from_disk, "computed": computed}
    full = {name: values.astype(np.int64) for name, values in {**counts, "blocks": blocks}.items()}
    return replace(sizes, **full).at(np.flatnonzero(fits))


def _cache_blocks(rng: Any, maximum: Any, cache: Any, near: Policy | None) -> Any:
    count, part = len(maximum), np.floor(rng.random(len(maximum)) * (maximum + 1))
    kind = rng.random(count)
    if near is None:
        return np.where(kind < 0.3, 0, np.where(kind < 0.6, maximum, np.minimum(part, maximum)))
    moved = np.round(near.kv.device * cache) + np.where(
        kind < 0.3, 0, np.round(rng.normal(0, 1, count) * 10.0 ** rng.uniform(0, 3, count))
    )
    return np.clip(np.where(kind < 0.7, moved, part), 0, maximum)


def _computed(problem: Problem, rng: Any, count: int, near: Policy | None) -> Any:
    anywhere = np.floor(rng.random(count) ** 2 * (problem.pages + 1))
    if near is None:
        return anywhere
    moved = near.cpu_experts * problem.pages + rng.normal(0, 1, count) * 10.0 ** rng.uniform(0, 2, count)
    return np.where(rng.random(count) < 0.7, np.clip(np.round(moved), 0, problem.pages), anywhere)


def _most_resident(pages: Any, slots: Any, layers: int) -> Any:
    """The most pages that stay beside a ring for two layers of the others, by halving; -1 where none fit."""

    def fits(resident: Any) -> Any:
        return resident + 2 * np.ceil((pages - resident) / layers) <= slots

    low, high = np.where(fits(np.zeros_like(pages)), 0.0, -1.0), pages.astype(float)
    for _ in range(20):
        middle = np.ceil((low + high) / 2)
        good = fits(middle) & (middle >= 0)
        low, high = np.where(good, middle, low), np.where(good, high, np.maximum(middle - 1, low))
    return np.where(fits(pages), pages, low)
