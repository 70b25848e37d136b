"""What the expert cache itself costs: batches of a layer, and single accesses, for each eviction."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from moelight.experts.cache import ExpertCache

EVICTIONS = ("lru", "lfu", "slru", "score", "frequency_threshold", "lfu | lru", "reuse")
PREDICTORS = ("none", "previous", "frequency", "history", "affinity")
TOKENS, TOP_K, EXPERTS, LAYERS = 2048, 8, 64, 16
SINGLES, KEYS, SLOTS = 200_000, 4096, 1000


def best_s(work: Callable[[], Any], rounds: int = 5) -> float:
    """Seconds of processor time of the fastest round."""
    result = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        result.append(time.process_time() - began)
    return min(result)


def batch_us(
    eviction: str, *, capacity: int, scored: bool = False, dtype: type = np.int64, predictor: str = "none"
) -> float:
    """Microseconds of one access of 2,048 tokens x top-8 over 64 experts, through the layers of a pass in turn."""
    rng = np.random.default_rng(0)
    cache = ExpertCache(
        capacity=capacity, num_layers=LAYERS, num_experts=EXPERTS, eviction=eviction, predictor=predictor
    )
    batches = [np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K].astype(dtype) for _ in range(4)]
    weights = rng.random((TOKENS, TOP_K)) if scored else None

    def one_pass() -> None:
        for layer in range(LAYERS):
            cache.access(layer, batches[layer % 4], weights)
            cache.prefetch_ahead(layer)

    for _ in range(3):
        one_pass()
    return best_s(one_pass, 20) / LAYERS * 1e6


def single_ns(eviction: str, scored: bool = False) -> tuple[float, float]:
    """Nanoseconds of one access of one id, and the hit rate, on a trace of Zipf's law over 64 layers x 64 experts."""
    rng = np.random.default_rng(1)
    shares = 1.0 / np.arange(1, KEYS + 1)
    keys = rng.permutation(KEYS)[rng.choice(KEYS, SINGLES, p=shares / shares.sum())]
    scores = rng.random(SINGLES) if scored else None
    cache = ExpertCache(capacity=SLOTS, num_layers=64, num_experts=64, eviction=eviction)
    cache.access_each(keys // 64, keys % 64, scores)
    seconds = best_s(lambda: cache.access_each(keys // 64, keys % 64, scores), 3)
    return seconds / SINGLES * 1e9, cache.stats.hit_rate


def measure() -> dict[str, Any]:
    """Figures of this section: per eviction, batches where all experts fit, where a quarter of them does, and single
    accesses; and the default eviction with each predictor, guesses included."""
    rows = {}
    for eviction in EVICTIONS:
        scored = eviction == "score"
        ns, rate = single_ns(eviction, scored)
        rows[eviction] = {
            "batch_all_fit_us": batch_us(eviction, capacity=LAYERS * EXPERTS, scored=scored),
            "batch_quarter_us": batch_us(eviction, capacity=LAYERS * EXPERTS // 4, scored=scored),
            "batch_int32_us": batch_us(eviction, capacity=LAYERS * EXPERTS, scored=scored, dtype=np.int32),
            "single_ns": ns,
            "single_hit_rate": rate,
        }
    predicted = {
        predictor: {
            "batch_all_fit_us": batch_us("slru", capacity=LAYERS * EXPERTS, scored=True, predictor=predictor),
            "batch_quarter_us": batch_us("slru", capacity=LAYERS * EXPERTS // 4, scored=True, predictor=predictor),
        }
        for predictor in PREDICTORS
    }
    return {
        "evictions": rows,
        "slru_with_predictor": predicted,
        "tokens": TOKENS,
        "top_k": TOP_K,
        "experts": EXPERTS,
        "slots": SLOTS,
        "keys": KEYS,
    }
