"""Prefetch budget and the quality of predictions, over the predictors.

Returns the predicted experts; the caller transfers them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from moelight.experts.policy import PrefetchRules
from moelight.experts.predict import AffinityPredictor, Floats, Ints, Predictor, Transitions, make_predictor

Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Quality:
    """Counters of one predictor's predictions.

    Attributes:
        issued: predictions; each (layer, expert) counts once between two visits of its layer, however often it is
            repeated.
        useful: issued predictions that the next visit of the layer chose.
        unused: issued predictions that the next visit of the layer did not choose.
        used: experts that visits chose, predicted or not.
        late: useful predictions whose transfer was not complete in time; counted by the pager.
        stall_removed_s: seconds of stall avoided by predictions that were in time; counted by the pager.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.issued, self.useful, self.unused, self.used, self.late = 0, 0, 0, 0, 0
        self.stall_removed_s = 0.0
        self._pending = np.zeros((num_layers, num_experts), dtype=np.bool_)

    def predicted(self, layer: int, ids: Ints) -> None:
        """Record the prediction of ``ids`` of ``layer``."""
        row = self._pending[layer]
        self.issued += len(ids) - int(np.count_nonzero(row[ids]))
        row[ids] = True

    def visited(self, layer: int, ids: Ints) -> None:
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
        """Return the counters for JSON."""
        return {
            "issued": self.issued,
            "useful": self.useful,
            "unused": self.unused,
            "late": self.late,
            "used": self.used,
            "precision": self.precision,
            "recall": self.recall,
            "stall_removed_s": self.stall_removed_s,
        }


class Prefetcher:
    """The current predictor and its budget. The predictor can be exchanged at any time; the state and counters of the
    previous one are kept for later use."""

    def __init__(self, rules: PrefetchRules, *, num_layers: int, num_experts: int) -> None:
        self.rules = rules
        self.num_layers, self.num_experts = num_layers, num_experts
        self.qualities: dict[str, Quality] = {}
        self._predictors: dict[str, Predictor] = {}
        self._known: Transitions | None = None
        self.use(rules.strategy)

    def use(self, strategy: str) -> None:
        """Make ``strategy`` the current predictor.

        Raises:
            ConfigError: an unknown strategy.
        """
        rules = replace(self.rules, strategy=strategy)
        shape = {"num_layers": self.num_layers, "num_experts": self.num_experts}
        if strategy not in self._predictors:
            self._predictors[strategy] = make_predictor(rules, **shape)
            self.qualities[strategy] = Quality(**shape)
            if self._known is not None and (found := self.affinity) is not None and strategy == "affinity":
                found.learned(self._known)
        self.rules = rules

    def know(self, transitions: Transitions) -> None:
        """Set the transitions with which ``affinity`` starts, now or at its first use.

        Raises:
            ConfigError: the transitions are of another model.
        """
        self._known = transitions
        if (found := self.affinity) is not None:
            found.learned(transitions)

    def allow(self, budget: int) -> None:
        """Set the ``budget`` of prefetched experts per layer."""
        self.rules = replace(self.rules, budget=budget)

    @property
    def is_on(self) -> bool:
        """True if the strategy is not ``none``."""
        return self.rules.strategy != "none"

    @property
    def predictor(self) -> Predictor:
        """The current predictor."""
        return self._predictors[self.rules.strategy]

    @property
    def quality(self) -> Quality:
        """Counters of the current predictor."""
        return self.qualities[self.rules.strategy]

    @property
    def affinity(self) -> AffinityPredictor | None:
        """The affinity predictor, whose transitions can be saved; None if it was never used."""
        found = self._predictors.get("affinity")
        return found if isinstance(found, AffinityPredictor) else None

    def observe(self, layer: int, ids: Ints, counts: Ints, mass: Floats | None = None) -> None:
        """Resolve the predictions for this visit, then observe the batch as `Predictor.observe`."""
        if self.is_on:
            self.quality.visited(layer, ids)
            self.predictor.observe(layer, ids, counts, mass)

    def hint(self, layer: int, ids: Ints, mass: Floats) -> None:
        """As `Predictor.hint`."""
        self.predictor.hint(layer, ids, mass)

    def ahead(self, layer: int, resident: Mask | None = None) -> Iterator[tuple[int, Ints]]:
        """Yield ``(coming layer, experts)`` to prefetch after ``layer`` has routed, the most urgent first.

        The budget is spent on the next layer; the unused part goes to the layers after it, up to the steps of the
        predictor. Experts that are already in the fast tier (``resident`` [L, E]) cost no budget; they count as
        predictions if they are likelier than an expert to prefetch.
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
