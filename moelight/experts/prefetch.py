"""Who is asked for guesses, how many are acted on, and what they were worth.

Knows predictors and their quality; what is done about a guess is the pager's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from moelight.experts.policy import PrefetchRules
from moelight.experts.predict import AffinityPredictor, Floats, Ints, Predictor, TransitionPredictor, make_predictor

Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Quality:
    """What one predictor's guesses were worth.

    Attributes:
        issued: guesses, each (layer, expert) once between two visits of its layer, however often it was repeated.
        useful: of those, the ones that the layer's next visit chose. ``unused``: the ones that it did not.
        used: experts that visits chose, guessed or not.
        late: useful guesses that were not there in time; stall_removed_s: seconds that nobody waited thanks to those
            that were. The pager adds to both.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.issued, self.useful, self.unused, self.used, self.late = 0, 0, 0, 0, 0
        self.stall_removed_s = 0.0
        self._pending = np.zeros((num_layers, num_experts), dtype=np.bool_)

    def guessed(self, layer: int, ids: Ints) -> None:
        """``ids`` of ``layer`` were predicted."""
        row = self._pending[layer]
        self.issued += len(ids) - int(np.count_nonzero(row[ids]))
        row[ids] = True

    def visited(self, layer: int, ids: Ints) -> None:
        """A batch chose the distinct ``ids`` of ``layer``: guesses about this visit are settled."""
        row = self._pending[layer]
        useful = int(np.count_nonzero(row[ids]))
        self.used += len(ids)
        self.useful += useful
        self.unused += int(np.count_nonzero(row)) - useful
        row.fill(False)

    @property
    def precision(self) -> float:
        """Of the guesses that are settled, the share that was right; 0 before any."""
        settled = self.useful + self.unused
        return self.useful / settled if settled else 0.0

    @property
    def recall(self) -> float:
        """Of the experts that were chosen, the share that was guessed; 0 before any."""
        return self.useful / self.used if self.used else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    """The predictor in force and its budget. Another one may take over at any time: what the first has learned, and
    its figures, are kept for its return."""

    def __init__(self, rules: PrefetchRules, *, num_layers: int, num_experts: int) -> None:
        self.rules = rules
        self.num_layers, self.num_experts = num_layers, num_experts
        self.qualities: dict[str, Quality] = {}
        self._predictors: dict[str, Predictor] = {}
        self._known: TransitionPredictor | None = None
        self.use(rules.strategy)

    def use(self, strategy: str) -> None:
        """Ask ``strategy`` from now on.

        Raises:
            ConfigError: there is none of that name.
        """
        rules = replace(self.rules, strategy=strategy)
        shape = {"num_layers": self.num_layers, "num_experts": self.num_experts}
        if strategy not in self._predictors:
            self._predictors[strategy] = make_predictor(rules, **shape)
            self.qualities[strategy] = Quality(**shape)
            if self._known is not None and (found := self.affinity) is not None and strategy == "affinity":
                found.learned(self._known)
        self.rules = rules

    def know(self, transitions: TransitionPredictor) -> None:
        """What ``affinity`` goes on from, whenever it is used for the first time.

        Raises:
            ConfigError: it is of another model.
        """
        self._known = transitions
        if (found := self.affinity) is not None:
            found.learned(transitions)

    def allow(self, budget: int) -> None:
        """Fetch at most ``budget`` guesses a layer from now on."""
        self.rules = replace(self.rules, budget=budget)

    @property
    def is_on(self) -> bool:
        """Whether anybody is asked."""
        return self.rules.strategy != "none"

    @property
    def predictor(self) -> Predictor:
        """The one in force."""
        return self._predictors[self.rules.strategy]

    @property
    def quality(self) -> Quality:
        """Of the one in force."""
        return self.qualities[self.rules.strategy]

    @property
    def affinity(self) -> AffinityPredictor | None:
        """What is worth saving, if there is any."""
        found = self._predictors.get("affinity")
        return found if isinstance(found, AffinityPredictor) else None

    def observe(self, layer: int, ids: Ints, counts: Ints, mass: Floats | None = None) -> None:
        """As `Predictor.observe`; settles the guesses about this visit first."""
        if self.is_on:
            self.quality.visited(layer, ids)
            self.predictor.observe(layer, ids, counts, mass)

    def hint(self, layer: int, ids: Ints, mass: Floats) -> None:
        """As `Predictor.hint`."""
        self.predictor.hint(layer, ids, mass)

    def ahead(self, layer: int, resident: Mask | None = None) -> Iterator[tuple[int, Ints]]:
        """``(layer to come, experts)`` worth fetching now that ``layer`` has chosen, the most urgent first.

        The budget is spent on the next layer; what of it is left, because too few come to mind, goes to the layers
        behind it that the predictor looks at. Experts that are there already (``fast_tier`` [L, E]) cost nothing of it; they
        count as guesses as far as they are likelier than one that is worth fetching.
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
            self.quality.guessed(target, ids)
            wanted = ids[missing]
            left -= len(wanted)
            if wanted.size:
                yield target, wanted
