"""How far the default policy is from the best there can be, where the disk is the cost: recorded routing, simulated.

Room for a quarter of the experts; pages of 3 MB from a disk of 3.8 GB/s with 0.1 ms before each; 0.1 ms of compute a
layer, 0.1 ms an expert; experts that are near are computed while the others are read. For each cell:

    default    hits, and tokens per second over no cache, of `DEFAULT_POLICY`, with the guesses of its routers
    most hits  of anybody who knows the future (`experts.eviction`), beginning with whom it likes
    belady     its tokens per second over no cache, nothing guessed
    bound      no cache over the longer of two times that nobody can be under: of reading what such an optimum misses,
               one page after the other from the first moment on, and of computing everything
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import numpy as np

from experts_sections.traces import Routing, collect, workload
from experts_sections.value import MODELS, ROOM
from moelight.core.schedule import Page
from moelight.experts.cache import ExpertCache
from moelight.experts.policy import DEFAULT_POLICY
from moelight.paging.residency import ModelFacts, ResidencyManager

PROMPTS = 480
PAGE_S, EXPERT_S, LAYER_S = 1e-4 + 3e6 / 3.8e9, 1e-4, 1e-4


@dataclass(kw_only=True, slots=True)
class Clock:
    """One unit that computes and one disk; ``arrivals``: of what was guessed about the layer that comes next."""

    now: float = 0.0
    disk_free: float = 0.0
    arrivals: dict[int, float] | None = None

    def layer(self, hits: int, missing: list[int]) -> None:
        """``hits`` experts that are near, and ``missing`` ones that are read, but for those on their way."""
        guessed = self.arrivals or {}
        present = max((guessed[key] for key in missing if key in guessed), default=self.now)
        for _ in range(sum(key not in guessed for key in missing)):
            present = self.disk_free = max(self.disk_free, self.now) + PAGE_S
        self.arrivals = {}
        self.now = max(self.now + hits * EXPERT_S, present) + len(missing) * EXPERT_S

    def fetch_ahead(self, keys: list[int], since: float) -> None:
        self.arrivals = {}
        for key in keys:
            self.disk_free = max(self.disk_free, since) + PAGE_S
            self.arrivals[key] = self.disk_free


Step = tuple[int, np.ndarray]  # a layer and its tokens


def steps(routing: Routing, batch: int) -> Iterator[Step]:
    for tokens in routing.passes(batch):
        for layer in range(routing.ids.shape[1]):
            yield layer, tokens


def without_cache(routing: Routing, batch: int) -> float:
    """Seconds."""
    clock = Clock()
    for layer, tokens in steps(routing, batch):
        clock.now += LAYER_S
        clock.layer(0, np.unique(routing.ids[tokens, layer]).tolist())
    return clock.now


def by_default(routing: Routing, batch: int) -> tuple[float, float]:
    """Seconds, and the hit rate."""
    _, layers, top_k = routing.ids.shape
    experts = routing.probs.shape[2]
    facts = ModelFacts(moe_layers=(True,) * layers, num_experts=experts, top_k=top_k, page_bytes=1, facts={})
    begin = [Page(layer=at, expert=e) for at in range(layers) for e in range(round(ROOM * experts))]
    near, clock = ResidencyManager(DEFAULT_POLICY, facts, resident=begin), Clock()
    for layer, tokens in steps(routing, batch):
        clock.now += LAYER_S
        routed = clock.now
        ids = routing.ids[tokens, layer].astype(np.int64)
        result = near.choose(layer, ids, np.take_along_axis(routing.probs[tokens, layer], ids, axis=1))
        clock.layer(len(result.hits), result.misses.tolist())
        if layer + 1 < layers:
            ahead = routing.ahead["before"][tokens, layer]
            likely = np.argsort(-ahead, axis=1)[:, :top_k]
            near.hint(layer + 1, likely, np.take_along_axis(ahead, likely, axis=1))
            clock.fetch_ahead(near.prediction(layer + 1).tolist(), routed)
    return clock.now, near.residency.cache.stats.hit_rate


def at_best(routing: Routing, batch: int) -> tuple[float, float, float]:
    """Seconds of the optimum of hits without guesses; its hit rate; and the seconds that nobody can be under."""
    _, layers, _ = routing.ids.shape
    experts = routing.probs.shape[2]
    asked = [(layer, np.unique(routing.ids[tokens, layer])) for layer, tokens in steps(routing, batch)]
    future = [(layer, ids.tolist()) for layer, ids in asked]
    slots = layers * round(ROOM * experts)
    cache = ExpertCache(capacity=slots, num_layers=layers, num_experts=experts, eviction="belady", future=future)
    cache.fill(list(dict.fromkeys((layer, expert) for layer, ids in future for expert in ids)))
    clock = Clock()
    for layer, ids in asked:
        clock.now += LAYER_S
        result = cache.access(layer, ids[None])
        clock.layer(len(result.hits), result.misses.tolist())
    stats = cache.stats
    computing = len(asked) * LAYER_S + stats.accesses * EXPERT_S
    return clock.now, stats.hit_rate, max(computing, int(stats.misses.sum()) * PAGE_S)


def run(args: Any) -> dict[str, Any]:
    """The table, and its geometric means."""
    result: dict[str, dict[str, float]] = {}
    print(f"\n{'':16}{'default':>16}{'most hits':>11}{'belady':>8}{'bound':>7}{'share':>7}", flush=True)
    for model in args.models:
        for task in ("mixed", "add"):
            routing = collect(MODELS[model][0], workload(task, PROMPTS))
            for batch in args.batches:
                plain_s = without_cache(routing, batch)
                default_s, hits = by_default(routing, batch)
                belady_s, maximum, least_s = at_best(routing, batch)
                row = {
                    "default_hits": hits,
                    "default": plain_s / default_s,
                    "most_hits": maximum,
                    "belady": plain_s / belady_s,
                    "bound": plain_s / least_s,
                    "share": least_s / default_s,
                }
                result[f"{model} {task} {batch}"] = row
                shown = "".join(f"{row[key]:{width}.{digits}f}" for key, width, digits in _COLUMNS)
                print(f"{model + ' ' + task + ' ' + str(batch):16}{shown}", flush=True)
    means = {key: geometric_mean(row[key] for row in result.values()) for key in next(iter(result.values()))}
    print(f"{'geometric mean':16}{''.join(f'{means[key]:{width}.{digits}f}' for key, width, digits in _COLUMNS)}")
    return {"cells": result, "geometric_mean": means}


_COLUMNS = (
    ("default_hits", 8, 3), ("default", 8, 2), ("most_hits", 11, 3), ("belady", 8, 2), ("bound", 7, 2), ("share", 7, 2),
)  # fmt: skip
