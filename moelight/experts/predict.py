"""Predictors of the experts of coming layers, learned from the routing of earlier batches.

Works on keys and counters of whole batches; does not depend on pages or devices. A prediction never changes a result.
Layers are numbered 0..L-1 in the order in which a pass visits them; the last layer is followed by the first layer of
the next pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from moelight.core.errors import ConfigError, did_you_mean
from moelight.experts.policy import STRATEGIES, PrefetchRules

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Matrix = np.ndarray[Any, np.dtype[np.float32]]

FREQUENCY_DECAY = 0.98  # a batch has half its weight after 34 more of its layer: some sentences at batch 1
AFFINITY_DECAY = 0.99  # a transition has half its weight after 69 more of its expert: a matrix row needs more samples
_NOTHING: Ints = np.zeros(0, dtype=np.int64)


class Predictor(Protocol):
    """Interface of all predictors.

    ``steps`` is the number of coming layers that the predictor can predict.
    """

    steps: int

    def observe(self, layer: int, ids: Ints, counts: Ints, mass: Floats | None) -> None:
        """Record a batch: it chose the distinct experts ``ids`` [n] of ``layer``, for ``counts`` [n] tokens each, with
        the summed router weights ``mass`` [n] (None: unknown, token counts are used)."""

    def predict(self, layer: int, budget: int) -> Ints:
        """Return at most ``budget`` distinct experts that the next batch of ``layer`` may choose, the likeliest first,
        ties by id."""

    def hint(self, layer: int, ids: Ints, mass: Floats) -> None:
        """Record an early evaluation of the router of ``layer``: it would choose ``ids`` [n] with weights ``mass``
        [n]."""

    def reset(self) -> None:
        """Discard everything learned."""


def likeliest(scores: Floats | Ints | Matrix, budget: int) -> Ints:
    """Return the indices of at most ``budget`` positive ``scores`` [E], the highest first, ties by index."""
    order = np.argsort(-scores, kind="stable")[: max(0, budget)]
    return order[scores[order] > 0]


class NoPredictor:
    """Predicts nothing: strategy ``none``."""

    steps = 1

    def observe(self, layer: int, ids: Ints, counts: Ints, mass: Floats | None) -> None:
        """Do nothing."""

    def predict(self, layer: int, budget: int) -> Ints:  # noqa: ARG002
        """Return no expert."""
        return _NOTHING

    def hint(self, layer: int, ids: Ints, mass: Floats) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


class PreviousPredictor(NoPredictor):
    """Predicts the choice of the layer's last batch, by router weight."""

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


class FrequencyPredictor(NoPredictor):
    """Predicts the most frequent experts: the share of tokens of each expert, averaged over batches with ``decay`` per
    batch."""

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


class HistoryPredictor(NoPredictor):
    """Predicts the experts that most of a layer's last ``window`` batches chose; with ``steps`` above 1, strategy
    ``lookahead``."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Transitions:
    """Learned state of an `AffinityPredictor`: ``matrix`` [L, E, E] float32 and ``times`` [L, E] int64."""

    matrix: Matrix
    times: Ints


class AffinityPredictor(NoPredictor):
    """Predicts experts from the choice of the layer before, by learned transition probabilities.

    ``matrix`` [L, E, E] float32: P(j in the layer after l | i in l). Each time i is chosen in l and the layer after l
    is observed next, the row of i moves towards the choice of that layer, by 1 / times at first (so that the row is the
    exact share), by 1 - ``decay`` later. ``times`` [L, E] int64: number of updates of each row. A batch that chose more
    than half of the experts is ignored, since there every expert follows every other one.
    """

    def __init__(
        self, num_layers: int, num_experts: int, *, threshold: float = 0.3, decay: float = AFFINITY_DECAY
    ) -> None:
        self.matrix: Matrix = np.zeros((num_layers, num_experts, num_experts), dtype=np.float32)
        self.times = np.zeros((num_layers, num_experts), dtype=np.int64)
        self.threshold = threshold
        self._least = 1.0 - decay
        self._last: _LastBatch | None = None

    def learned(self, transitions: Transitions) -> None:
        """Continue from ``transitions`` of a saved profile.

        Raises:
            ConfigError: the transitions are of another model.
        """
        matrix, times = transitions.matrix, transitions.times
        if matrix.shape != self.matrix.shape or times.shape != self.times.shape:
            raise ConfigError(f"affinity of shape {matrix.shape}; this model needs {self.matrix.shape}")
        self.matrix[...], self.times[...], self._last = matrix, times, None

    def observe(self, layer: int, ids: Ints, counts: Ints, mass: Floats | None) -> None:
        last, half = self._before(layer), self.times.shape[1] // 2
        if last is not None and last.ids.size <= half and ids.size <= half:
            times = self.times[last.layer]
            seen = times[last.ids] + 1
            times[last.ids] = seen
            now = np.zeros(len(times), dtype=np.float32)
            now[ids] = 1.0
            rate = np.maximum(self._least, 1.0 / seen).astype(np.float32)
            self.matrix[last.layer][last.ids] = last.rows + rate[:, None] * (now - last.rows)
        rows = self.matrix[layer].take(ids, axis=0)
        self._last = _LastBatch(layer, ids.copy(), np.array(counts if mass is None else mass, dtype=np.float32), rows)

    def predict(self, layer: int, budget: int) -> Ints:
        """Return experts that follow at least one expert of the layer before with at least the threshold probability,
        ordered by the router weight of the experts that they follow."""
        last = self._before(layer)
        if last is None:
            return _NOTHING
        scores = last.mass @ last.rows
        scores[last.rows.max(axis=0) < self.threshold] = 0.0
        return likeliest(scores, budget)

    def _before(self, layer: int) -> _LastBatch | None:
        """Return the batch of the layer before ``layer`` if it was the last batch and chose an expert."""
        last = self._last
        return last if last and (last.layer + 1) % len(self.times) == layer and last.ids.size else None

    def reset(self) -> None:
        self.matrix.fill(0.0)
        self.times.fill(0)
        self._last = None


class _LastBatch(NamedTuple):
    """One batch: the ``mass`` of its ``ids``, and the transition row of each id, ``rows`` [n, E]."""

    layer: int
    ids: Ints
    mass: Matrix
    rows: Matrix


class NextRouterPredictor(NoPredictor):
    """Predicts by the layer's own router, applied to the hidden state of the layer before. The caller evaluates the
    router and passes the sufficiently certain experts as a `hint`, which is valid for one batch."""

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
    """Return a new predictor for ``rules``.

    Raises:
        ConfigError: an unknown strategy; the message suggests the nearest name.
    """
    shape = num_layers, num_experts
    makers: dict[str, Callable[[], Predictor]] = {
        "none": NoPredictor,
        "previous": lambda: PreviousPredictor(*shape),
        "frequency": lambda: FrequencyPredictor(*shape),
        "history": lambda: HistoryPredictor(*shape, window=rules.history_window),
        "lookahead": lambda: HistoryPredictor(*shape, window=rules.history_window, steps=rules.lookahead),
        "affinity": lambda: AffinityPredictor(*shape, threshold=rules.affinity_threshold),
        "next_router": lambda: NextRouterPredictor(*shape),
    }
    if rules.strategy not in makers:
        near = did_you_mean(rules.strategy, STRATEGIES)
        raise ConfigError(f"unknown predictor {rules.strategy!r}{near}; known: {', '.join(STRATEGIES)}")
    return makers[rules.strategy]()
