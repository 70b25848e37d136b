"""Which experts come next: guesses about layers to come, learned from what earlier batches chose.

Knows keys and counters of whole batches; refuses to know pages and devices. A guess never changes a result.
Layers are numbered 0..L-1 in the order in which a pass visits them; behind the last comes the first of the next pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from moelight.core.errors import ConfigError, did_you_mean
from moelight.experts.policy import STRATEGIES, PrefetchRules

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Matrix = np.ndarray[Any, np.dtype[np.float32]]

FREQUENCY_DECAY = 0.98  # a batch is half forgotten after 34 more of its layer: some sentences at batch 1
AFFINITY_DECAY = 0.99  # and a transition after 69 more of its expert: a row of the matrix needs more to be learned
_NOTHING: Ints = np.zeros(0, dtype=np.int64)


class Predictor(Protocol):
    """What all predictors can do.

    ``steps`` is the number of layers ahead that it is worth asking about.
    """

    steps: int

    def observe(self, layer: int, ids: Ints, counts: Ints, mass: Floats | None) -> None:
        """A batch chose the distinct experts ``ids`` [n] of ``layer``, for ``counts`` [n] tokens each, with the summed
        router weights ``mass`` [n] (None: nobody knows them, tokens count)."""

    def predict(self, layer: int, budget: int) -> Ints:
        """At most ``budget`` distinct experts [<= budget] that the next batch of ``layer`` may choose, the likeliest
        first; equally likely ones by id."""

    def hint(self, layer: int, ids: Ints, mass: Floats) -> None:
        """Somebody computed ``layer``'s router ahead of time: it would choose ``ids`` [n] with weights ``mass`` [n]."""

    def reset(self) -> None:
        """Forget everything."""


def likeliest(scores: Floats | Ints | Matrix, budget: int) -> Ints:
    """The at most ``budget`` places of ``scores`` [E] that are above zero, the highest first, equal ones by place."""
    order = np.argsort(-scores, kind="stable")[: max(0, budget)]
    return order[scores[order] > 0]


class Nothing:
    """Guesses nothing: strategy ``none``."""

    steps = 1

    def observe(self, layer: int, ids: Ints, counts: Ints, mass: Floats | None) -> None:
        """Nothing is learned."""

    def predict(self, layer: int, budget: int) -> Ints:  # noqa: ARG002
        """No expert."""
        return _NOTHING

    def hint(self, layer: int, ids: Ints, mass: Floats) -> None:
        """Nothing is learned."""

    def reset(self) -> None:
        """There is nothing to forget."""


class Previous(Nothing):
    """What a layer's last batch chose, by router weight; it will choose so again."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._mass = np.zeros((num_layers, num_experts))

    def observe(self, layer: int, ids: Ints, counts: Ints, mass: Floats | None) -> None:
        row = self._mass[layer]
        row.fill(0.0)
        row[ids] = counts if mass is None else mass

    def predict(self, layer: int, budget: int) -> Ints:
        return likeliest(self._mass[layer], budget)

    def reset(self) -> None:
        self._mass.fill(0.0)


class Frequency(Nothing):
    """What a layer chooses most: the share of tokens of each expert, averaged over batches with ``decay`` a batch."""

    def __init__(self, num_layers: int, num_experts: int, *, decay: float = FREQUENCY_DECAY) -> None:
        self._decay = decay
        self._share = np.zeros((num_layers, num_experts))

    def observe(self, layer: int, ids: Ints, counts: Ints, mass: Floats | None) -> None:  # noqa: ARG002
        row = self._share[layer]
        row *= self._decay
        if ids.size:
            row[ids] += counts * ((1.0 - self._decay) / counts.sum())

    def predict(self, layer: int, budget: int) -> Ints:
        return likeliest(self._share[layer], budget)

    def reset(self) -> None:
        self._share.fill(0.0)


class History(Nothing):
    """What most of a layer's last ``window`` batches chose; with ``steps`` above 1, ``lookahead``."""

    def __init__(self, num_layers: int, num_experts: int, *, window: int = 50, steps: int = 1) -> None:
        self.steps = steps
        self._chosen = np.zeros((num_layers, num_experts), dtype=np.int64)
        self._batches: list[deque[Ints]] = [deque() for _ in range(num_layers)]
        self._window = window

    def observe(self, layer: int, ids: Ints, counts: Ints, mass: Floats | None) -> None:  # noqa: ARG002
        batches, row = self._batches[layer], self._chosen[layer]
        if len(batches) == self._window:
            row[batches.popleft()] -= 1
        batches.append(ids.copy())
        row[ids] += 1

    def predict(self, layer: int, budget: int) -> Ints:
        return likeliest(self._chosen[layer], budget)

    def reset(self) -> None:
        self._chosen.fill(0)
        for batches in self._batches:
            batches.clear()


class Affinity(Nothing):
    """How likely an expert is after one of the layer before, learned as batches go by.

    ``matrix`` [L, E, E] float32: P(j in the layer behind l | i in l). Each time i is chosen in l and the layer behind
    it was observed next, its row goes towards what was chosen there, by 1 / times at first (so that it is the exact
    share), by 1 - ``decay`` later. ``times`` [L, E] int64: how often that was.
    """

    def __init__(
        self, num_layers: int, num_experts: int, *, threshold: float = 0.3, decay: float = AFFINITY_DECAY
    ) -> None:
        self.matrix: Matrix = np.zeros((num_layers, num_experts, num_experts), dtype=np.float32)
        self.times = np.zeros((num_layers, num_experts), dtype=np.int64)
        self.threshold = threshold
        self._least = 1.0 - decay
        self._last: tuple[int, Ints, Floats | Ints] | None = None

    def learned(self, matrix: Matrix, times: Ints) -> None:
        """Go on from ``matrix`` [L, E, E] and ``times`` [L, E], from a saved profile.

        Raises:
            ConfigError: they are of another model.
        """
        if matrix.shape != self.matrix.shape or times.shape != self.times.shape:
            raise ConfigError(f"affinity of shape {matrix.shape}; this model needs {self.matrix.shape}")
        self.matrix[...], self.times[...], self._last = matrix, times, None

    def observe(self, layer: int, ids: Ints, counts: Ints, mass: Floats | None) -> None:
        layers, experts = self.times.shape
        if self._last is not None and (self._last[0] + 1) % layers == layer and self._last[1].size:
            before, chosen, _ = self._last
            self.times[before, chosen] += 1
            rate = np.maximum(self._least, 1.0 / self.times[before, chosen]).astype(np.float32)[:, None]
            now = np.zeros(experts, dtype=np.float32)
            now[ids] = 1.0
            rows = self.matrix[before, chosen]
            rows += rate * (now - rows)
            self.matrix[before, chosen] = rows
        self._last = layer, ids.copy(), (counts if mass is None else mass).copy()

    def predict(self, layer: int, budget: int) -> Ints:
        """Experts that follow at least one of those just chosen in the layer before with at least the threshold; in
        order of the router weight that they follow."""
        if self._last is None or (self._last[0] + 1) % len(self.times) != layer or not self._last[1].size:
            return _NOTHING
        before, chosen, mass = self._last
        rows = self.matrix[before, chosen]
        scores = mass.astype(np.float32) @ rows
        # A probability of zero is never worth a fetch, whatever the threshold; nor is a row that was never learned.
        scores[rows.max(axis=0) < self.threshold] = 0.0
        return likeliest(scores, budget)

    def reset(self) -> None:
        self.matrix.fill(0.0)
        self.times.fill(0)
        self._last = None


class NextRouter(Nothing):
    """What the layer's own router said of the hidden state of the layer before: only somebody above the waterline can
    compute that, and gives it as a `hint`. A hint is good for one batch."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._mass = np.zeros((num_layers, num_experts))

    def observe(self, layer: int, ids: Ints, counts: Ints, mass: Floats | None) -> None:  # noqa: ARG002
        self._mass[layer].fill(0.0)

    def predict(self, layer: int, budget: int) -> Ints:
        return likeliest(self._mass[layer], budget)

    def hint(self, layer: int, ids: Ints, mass: Floats) -> None:
        row = self._mass[layer]
        row.fill(0.0)
        row[ids] = mass

    def reset(self) -> None:
        self._mass.fill(0.0)


def make_predictor(rules: PrefetchRules, *, num_layers: int, num_experts: int) -> Predictor:
    """The predictor that ``rules`` name, with nothing learned.

    Raises:
        ConfigError: an unknown strategy; names the nearest.
    """
    shape = num_layers, num_experts
    makers: dict[str, Callable[[], Predictor]] = {
        "none": Nothing,
        "previous": lambda: Previous(*shape),
        "frequency": lambda: Frequency(*shape),
        "history": lambda: History(*shape, window=rules.history_window),
        "lookahead": lambda: History(*shape, window=rules.history_window, steps=rules.lookahead),
        "affinity": lambda: Affinity(*shape, threshold=rules.affinity_threshold),
        "next_router": lambda: NextRouter(*shape),
    }
    if rules.strategy not in makers:
        near = did_you_mean(rules.strategy, STRATEGIES)
        raise ConfigError(f"unknown predictor {rules.strategy!r}{near}; known: {', '.join(STRATEGIES)}")
    return makers[rules.strategy]()
