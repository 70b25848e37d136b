"""Predictors of the experts of coming layers, learned from earlier batches; the quality of predictions, and confidence
in them. Layers are numbered 0..L-1 in the order of a pass; the last is followed by the first layer of the next pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from moelight.core.errors import ConfigError, did_you_mean
from moelight.experts.eviction import BoolArray, FloatArray, IntArray
from moelight.experts.policy import STRATEGIES, PrefetchRules

Matrix = np.ndarray[Any, np.dtype[np.float32]]

FREQUENCY_DECAY = 0.98  # a batch has half its weight after 34 more of its layer: some sentences at batch 1
AFFINITY_DECAY = 0.99  # a transition has half its weight after 69 more of its expert: a matrix row needs more samples
_NOTHING: IntArray = np.zeros(0, dtype=np.int64)


def likeliest(scores: FloatArray | IntArray | Matrix, budget: int) -> IntArray:
    """Return the indices of at most ``budget`` positive ``scores`` [E], the highest first, ties by index."""
    order = np.argsort(-scores, kind="stable")[: max(0, budget)]
    return order[scores[order] > 0]


class NoPredictor:
    """Predicts nothing (strategy ``none``), and the base of all predictors. ``steps``: number of coming layers that the
    predictor can predict; ``scores``: [L, E], the higher, the likelier."""

    steps = 1

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.scores = np.zeros((num_layers, num_experts))

    def observe(self, layer: int, ids: IntArray, counts: IntArray, mass: FloatArray | None) -> None:
        """Record a batch: the distinct experts ``ids`` [n] of ``layer``, for ``counts`` [n] tokens each, with the
        summed router weights ``mass`` [n] (None: unknown, token counts are used)."""

    def predict(self, layer: int, budget: int) -> IntArray:
        """At most ``budget`` experts that the next batch of ``layer`` may choose, the likeliest first, ties by id."""
        return likeliest(self.scores[layer], budget)

    def hint(self, layer: int, ids: IntArray, mass: FloatArray) -> None:
        """Record the router of ``layer``, evaluated early: it would choose ``ids`` [n] with weights ``mass`` [n]."""


class PreviousPredictor(NoPredictor):
    """Predicts the choice of the layer's last batch, by router weight."""

    def observe(self, layer: int, ids: IntArray, counts: IntArray, mass: FloatArray | None) -> None:
        self.scores[layer].fill(0.0)
        self.scores[layer, ids] = counts if mass is None else mass


class NextRouterPredictor(NoPredictor):
    """Predicts by the layer's own router, which the caller applies to the hidden state of the layer before; a `hint`
    gives the sufficiently certain experts and is valid for one batch."""

    def observe(self, layer: int, ids: IntArray, counts: IntArray, mass: FloatArray | None) -> None:  # noqa: ARG002
        self.scores[layer].fill(0.0)

    def hint(self, layer: int, ids: IntArray, mass: FloatArray) -> None:
        self.scores[layer].fill(0.0)
        self.scores[layer, ids] = mass


class FrequencyPredictor(NoPredictor):
    """Predicts the experts with the largest share of tokens, averaged over batches with ``decay`` per batch."""

    def __init__(self, num_layers: int, num_experts: int, *, decay: float = FREQUENCY_DECAY) -> None:
        super().__init__(num_layers, num_experts)
        self._decay = decay

    def observe(self, layer: int, ids: IntArray, counts: IntArray, mass: FloatArray | None) -> None:  # noqa: ARG002
        self.scores[layer] *= self._decay
        if ids.size:
            self.scores[layer, ids] += counts * ((1.0 - self._decay) / counts.sum())


class HistoryPredictor(NoPredictor):
    """Predicts the experts that most of a layer's last ``window`` batches chose; ``steps`` above 1 is ``lookahead``."""

    def __init__(self, num_layers: int, num_experts: int, *, window: int = 50, steps: int = 1) -> None:
        super().__init__(num_layers, num_experts)
        self.steps = steps
        self._batches: list[deque[IntArray]] = [deque() for _ in range(num_layers)]
        self._window = window

    def observe(self, layer: int, ids: IntArray, counts: IntArray, mass: FloatArray | None) -> None:  # noqa: ARG002
        batches, row = self._batches[layer], self.scores[layer]
        if len(batches) == self._window:
            row[batches.popleft()] -= 1
        batches.append(ids.copy())
        row[ids] += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Transitions:
    """Learned state of an `AffinityPredictor`: ``matrix`` [L, E, E] float32 and ``times`` [L, E] int64."""

    matrix: Matrix
    times: IntArray


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
        """Continue from ``transitions`` of a saved profile; raises ConfigError for another model's shape."""
        matrix, times = transitions.matrix, transitions.times
        if matrix.shape != self.matrix.shape or times.shape != self.times.shape:
            raise ConfigError(f"affinity of shape {matrix.shape}; this model needs {self.matrix.shape}")
        self.matrix[...], self.times[...], self._last = matrix, times, None

    def observe(self, layer: int, ids: IntArray, counts: IntArray, mass: FloatArray | None) -> None:
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

    def predict(self, layer: int, budget: int) -> IntArray:
        """Experts that follow an expert of the layer before with at least the threshold probability, ordered by the
        router weight of the experts that they follow."""
        last = self._before(layer)
        if last is None:
            return _NOTHING
        scores = last.mass @ last.rows
        scores[last.rows.max(axis=0) < self.threshold] = 0.0
        return likeliest(scores, budget)

    def _before(self, layer: int) -> _LastBatch | None:
        """The batch of the layer before ``layer``, if it was the last batch and chose an expert."""
        last = self._last
        return last if last and (last.layer + 1) % len(self.times) == layer and last.ids.size else None


class _LastBatch(NamedTuple):
    """One batch: the ``mass`` of its ``ids``, and the transition row of each id, ``rows`` [n, E]."""

    layer: int
    ids: IntArray
    mass: Matrix
    rows: Matrix


def make_predictor(rules: PrefetchRules, *, num_layers: int, num_experts: int) -> NoPredictor:
    """Return a new predictor for ``rules``."""
    makers: dict[str, Callable[..., NoPredictor]] = {
        "none": NoPredictor,
        "previous": PreviousPredictor,
        "frequency": FrequencyPredictor,
        "history": partial(HistoryPredictor, window=rules.history_window),
        "lookahead": partial(HistoryPredictor, window=rules.history_window, steps=rules.lookahead),
        "affinity": partial(AffinityPredictor, threshold=rules.affinity_threshold),
        "next_router": NextRouterPredictor,
    }
    if rules.strategy not in makers:
        near = did_you_mean(rules.strategy, STRATEGIES)
        raise ConfigError(f"unknown predictor {rules.strategy!r}{near}; known: {', '.join(STRATEGIES)}")
    return makers[rules.strategy](num_layers, num_experts)


class Quality:
    """Counters of one predictor's predictions.

    Attributes:
        issued: predictions; each (layer, expert) counts once between two visits of its layer.
        useful, unused: issued predictions that the next visit of the layer chose, or did not.
        used: experts that visits chose, predicted or not.
        late: useful predictions whose transfer was not complete in time; counted by the pager.
        stall_removed_s: seconds of stall avoided by predictions that were in time; counted by the pager.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.issued, self.useful, self.unused, self.used, self.late = 0, 0, 0, 0, 0
        self.stall_removed_s = 0.0
        self._pending = np.zeros((num_layers, num_experts), dtype=np.bool_)

    def predicted(self, layer: int, ids: IntArray) -> None:
        row = self._pending[layer]
        self.issued += len(ids) - int(np.count_nonzero(row[ids]))
        row[ids] = True

    def visited(self, layer: int, ids: IntArray) -> None:
        """Record a batch that chose the distinct ``ids`` of ``layer``, and resolve the predictions for this visit."""
        row = self._pending[layer]
        useful = int(np.count_nonzero(row[ids]))
        self.used += len(ids)
        self.useful += useful
        self.unused += int(np.count_nonzero(row)) - useful
        row.fill(False)

    @property
    def precision(self) -> float:
        """Share of the resolved predictions that were useful; 0 before any."""
        settled = self.useful + self.unused
        return self.useful / settled if settled else 0.0

    @property
    def recall(self) -> float:
        """Share of the chosen experts that were predicted; 0 before any."""
        return self.useful / self.used if self.used else 0.0

    def as_dict(self) -> dict[str, Any]:
        names = ("issued", "useful", "unused", "late", "used", "precision", "recall", "stall_removed_s")
        return {name: getattr(self, name) for name in names}


class Prefetcher:
    """The current predictor and its budget; each predictor keeps its state and counters while another is used."""

    def __init__(self, rules: PrefetchRules, *, num_layers: int, num_experts: int) -> None:
        self.rules = rules
        self.num_layers, self.num_experts = num_layers, num_experts
        self.qualities: dict[str, Quality] = {}
        self._predictors: dict[str, NoPredictor] = {}
        self._known: Transitions | None = None
        self.use(rules.strategy)

    def use(self, strategy: str) -> None:
        rules = replace(self.rules, strategy=strategy)
        if strategy not in self._predictors:
            shape = {"num_layers": self.num_layers, "num_experts": self.num_experts}
            made = self._predictors[strategy] = make_predictor(rules, **shape)
            self.qualities[strategy] = Quality(**shape)
            if self._known is not None and isinstance(made, AffinityPredictor):
                made.learned(self._known)
        self.rules = rules

    def know(self, transitions: Transitions) -> None:
        """Set the transitions with which ``affinity`` starts; errors as `AffinityPredictor.learned`."""
        self._known = transitions
        if (affinity := self.affinity) is not None:
            affinity.learned(transitions)

    def allow(self, budget: int) -> None:
        """Set the ``budget`` of prefetched experts per layer."""
        self.rules = replace(self.rules, budget=budget)

    @property
    def is_on(self) -> bool:
        return self.rules.strategy != "none"

    @property
    def predictor(self) -> NoPredictor:
        return self._predictors[self.rules.strategy]

    @property
    def quality(self) -> Quality:
        return self.qualities[self.rules.strategy]

    @property
    def affinity(self) -> AffinityPredictor | None:
        """The affinity predictor, whose transitions can be saved; None if it was never used."""
        predictor = self._predictors.get("affinity")
        return predictor if isinstance(predictor, AffinityPredictor) else None

    def observe(self, layer: int, ids: IntArray, counts: IntArray, mass: FloatArray | None = None) -> None:
        """Resolve the predictions for this visit, then observe the batch as `NoPredictor.observe`."""
        if self.is_on:
            self.quality.visited(layer, ids)
            self.predictor.observe(layer, ids, counts, mass)

    def hint(self, layer: int, ids: IntArray, mass: FloatArray) -> None:
        self.predictor.hint(layer, ids, mass)

    def ahead(self, layer: int, resident: BoolArray | None = None) -> Iterator[tuple[int, IntArray]]:
        """Yield ``(coming layer, experts)`` to prefetch after ``layer`` has routed, the most urgent first.

        The budget is spent on the next layer, the unused part on the layers after it, up to the steps of the predictor.
        ``resident`` experts [L, E] cost no budget; they count as predictions if likelier than one to prefetch.
        """
        left = self.rules.budget
        for step in range(1, self.predictor.steps + 1):
            if left <= 0:
                return
            target = (layer + step) % self.num_layers
            ids = self.predictor.predict(target, self.num_experts)
            missing = np.ones(len(ids), np.bool_) if resident is None else ~resident[target, ids]
            last = int(np.searchsorted(missing.cumsum(), left)) + 1
            ids, missing = ids[:last], missing[:last]
            self.quality.predicted(target, ids)
            wanted = ids[missing]
            left -= len(wanted)
            if wanted.size:
                yield target, wanted


# A page that is prefetched and not used delays other pages by its whole time on the link or the disk, so a prediction
# is worth a prefetch only if it is likely to be right, which depends on the model and the predictor. All predictions
# are counted, including those that are not prefetched. On recorded routing, prefetch gains most at a probability of .7
# to .8, for pages of a few MB (docs/log.md).
SURE = 0.75
RECORD_DECAY = 0.995  # of the counts, at each batch that resolves predictions
_KINDS = 64
_MARGIN_STEP = 0.125  # of the logarithm; the last kind includes all larger margins


class _HitRecord:
    """Accuracy of the predictions of each kind, an index below `_KINDS`."""

    def __init__(self) -> None:
        self._right = np.zeros(_KINDS)
        self._made = np.ones(_KINDS)  # one wrong prediction as prior, so that an unseen kind has no confidence

    def chance(self, kinds: IntArray) -> FloatArray:
        return np.asarray(self._right[kinds] / self._made[kinds])

    def resolve(self, kinds: IntArray, came_true: BoolArray) -> None:
        """Record predictions of these ``kinds`` as right or wrong."""
        self._right *= RECORD_DECAY
        self._made *= RECORD_DECAY
        np.add.at(self._right, kinds, came_true)
        np.add.at(self._made, kinds, 1.0)


class PrefetchConfidence(_HitRecord):
    """Confidence of ranked predictions, the likeliest first, by rank."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, IntArray] = {}

    @staticmethod
    def _kinds(ids: IntArray) -> IntArray:
        return np.minimum(np.arange(len(ids)), _KINDS - 1)

    def likely(self, row: int, ids: IntArray) -> IntArray:
        """Return those of the predicted ``ids`` of layer ``row`` that are worth a prefetch."""
        self._open[row] = ids
        return ids[self.chance(self._kinds(ids)) >= SURE]

    def flush(self, row: int, chosen: np.ndarray[Any, Any]) -> None:
        """Resolve the predictions for ``row``, which has routed to ``chosen``."""
        ids = self._open.pop(row, _NOTHING)
        if ids.size:
            self.resolve(self._kinds(ids), np.isin(ids, chosen))


class RouterConfidence(_HitRecord):
    """Confidence of predictions of a layer's own router, evaluated one layer early, by the margin of each token's
    choice: the logarithm of its weight over the smallest chosen weight of the token."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._open: dict[int, list[tuple[np.ndarray[Any, Any], IntArray]]] = {}

    def add(self, row: int, ids: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> None:
        """Record that the router of ``row`` would choose ``ids`` [T, k] with ``weights`` [T, k] for the next tokens."""
        least = weights.min(axis=1, keepdims=True)
        margin = np.log(np.maximum(weights, 1e-30) / np.maximum(least, 1e-30))
        kinds = np.minimum(margin / _MARGIN_STEP, _KINDS - 1).astype(np.int64)
        self._open.setdefault(row, []).append((ids, kinds))

    def likely(self, row: int) -> tuple[IntArray, FloatArray]:
        """Return the experts of ``row`` that are worth a prefetch, and the probability that any token chooses each."""
        missed = np.ones(self._num_experts)
        for ids, kinds in self._open.get(row, ()):
            np.multiply.at(missed, ids.ravel(), 1.0 - self.chance(kinds.ravel()))
        sure = np.flatnonzero(1.0 - missed >= SURE)
        return sure, 1.0 - missed[sure]

    def flush(self, row: int, chosen: np.ndarray[Any, Any]) -> None:
        """Resolve the predictions for ``row``: it routed the recorded tokens, in their order, to ``chosen`` [T, k]."""
        first = 0
        for ids, kinds in self._open.pop(row, ()):
            chosen_rows = chosen[first : first + len(ids)]
            first += len(ids)
            self.resolve(kinds.ravel(), (ids[:, :, None] == chosen_rows[:, None, :]).any(axis=2).ravel())
