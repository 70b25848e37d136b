"""What the default order of leaving finds on recorded routing: chosen experts of real prompts, a quarter with room.

``routing.npz`` holds, for the bundled model (``demo``) and one of 64 experts (``many``), on problems of all tasks
(``mixed``) and of one (``add``), as `benchmarks/experts_sections/traces.py` records them: ``MODEL_TASK_ids`` uint8
[tokens, layers, k], and ``MODEL_TASK_spans`` int32 [prompts, 3]: first token of each prompt, of its answer, its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moelight.experts.cache import ExpertCache
from moelight.experts.policy import DEFAULT_POLICY
from tests.cases import thorough

ROUTING = Path(__file__).parent / "routing.npz"
EXPERTS = {"demo": 8, "many": 64}
NOISE = 0.002  # of some 5,000 to 20,000 accesses
# Hit rates of shares over 32 visits alone, which three horizons replaced.
BEFORE = {
    ("demo", "mixed", 1): 0.4137,
    ("demo", "mixed", 2): 0.3407,
    ("demo", "mixed", 4): 0.2951,
    ("demo", "add", 1): 0.3549,
    ("demo", "add", 2): 0.3185,
    ("demo", "add", 4): 0.2790,
    ("many", "mixed", 1): 0.3966,
    ("many", "mixed", 2): 0.3609,
    ("many", "mixed", 4): 0.3109,
    ("many", "add", 1): 0.3651,
    ("many", "add", 2): 0.3454,
    ("many", "add", 4): 0.3053,
}


def fed(spans: np.ndarray, places: int) -> Iterator[list[int]]:
    """Tokens of each pass: a place brings a whole prompt, then one token after the other, then the next prompt."""
    waiting = iter(spans.tolist())
    queues: list[list[list[int]]] = [[] for _ in range(places)]
    while True:
        for queue in queues:
            if not queue:
                span = next(waiting, None)
                if span is None:
                    return
                first, answer, end = span
                queue += [list(range(first, answer)), *([token] for token in range(answer, end))]
        yield [token for queue in queues for token in queue.pop(0)]


@pytest.mark.parametrize(("model", "task", "batch"), thorough(BEFORE, but=[*BEFORE][::3]))
def test_recorded_routing_finds_no_less(model: str, task: str, batch: int) -> None:
    with np.load(ROUTING) as recorded:
        ids, spans = recorded[f"{model}_{task}_ids"].astype(np.int64), recorded[f"{model}_{task}_spans"]
    layers, experts = ids.shape[1], EXPERTS[model]
    cache = ExpertCache.of(DEFAULT_POLICY, num_layers=layers, num_experts=experts)
    assert cache.capacity == layers * experts // 4
    for tokens in fed(spans, batch):
        for layer in range(layers):
            cache.access(layer, ids[tokens, layer])
    assert cache.stats.hit_rate >= BEFORE[model, task, batch] - NOISE, cache.stats.hit_rate
