"""Who is least likely to be asked for at the next visit of its layer leaves; nobody comes who is less likely still."""

from __future__ import annotations

from collections.abc import Container
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from moelight.experts.access import FloatArray
from moelight.experts.eviction import Eviction, Setting

# Visits that a share of use looks back on, about. On recorded routing of steady work 64 are better by a hundredth of
# the hits, and as much worse where the tasks change every few hundred visits.
MEMORY = 32
RATE = 0.3  # of learning, the first step's; AdaGrad makes the later ones shorter
FIRST_SHARE = 0.1  # of an expert that nobody has seen


class Reuse(Eviction):
    """Chances are learned while it runs, from the accesses alone.

    A visit is one batch of one layer. Before each, an expert's chance of being used is taken as ``sigmoid(w0 + w1 *
    logit(share) + w2 * last)``, with ``share`` of the layer's recent visits that used it and ``last`` 1 where the last
    one did; the three weights of a layer follow its visits by one step of logistic regression each. A miss is brought
    in only if its chance is above that of the one who would leave for it, else it is a bypass. Without that, every
    visit to a layer would push out what the layers to come are about to need.

    It does best where each layer has a budget of its own. Arrays have an item for each of the ``population`` keys from
    ``Setting.first`` on.
    """

    has_visit = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._first, self._experts = setting.first, setting.experts
        layers = self.population // self._experts
        self._share = np.full(self.population, FIRST_SHARE)
        self._logit = np.zeros(self.population)  # of the shares
        self._last = np.zeros(self.population)
        # The logit of each chance: what everything is ordered by.
        self._chance = np.zeros(self.population)
        self._weights = [[0.0, 1.0, 0.5] for _ in range(layers)]
        self._squares = [[1e-3] * 3 for _ in range(layers)]
        self._visits = [0] * layers
        self._here = np.zeros(self.population, np.bool_)
        self._pinned = np.zeros(self.population, np.bool_)
        self._count = 0
        self._visited = slice(0, 0)
        # Whoever is below it is not brought in at this visit: others of the batch deserve the places more. None: to be
        # found, as the queue.
        self._bar: float | None = None
        # Unpinned residents that are not held, the next to leave last.
        self._queue: list[int] | None = None

    def __len__(self) -> int:
        return self._count

    def visit(self, first: int, used: NDArray[np.bool_]) -> None:
        if self.capacity >= self.population:
            return
        start = first - self._first
        self._visited = part = slice(start, start + self._experts)
        layer = start // self._experts
        now = used.astype(np.float64)
        share, logit, last = self._share[part], self._logit[part], self._last[part]
        if self._visits[layer]:
            self._learn(layer, now - 1.0 / (1.0 + np.exp(-self._chance[part])), logit, last)
        self._visits[layer] += 1
        share += (now - share) * max(1.0 / MEMORY, 1.0 / (self._visits[layer] + 2))
        last[:] = now
        self._judge(part, layer)

    def expect(self, first: int, shares: FloatArray) -> None:
        start = first - self._first
        part, layer = slice(start, start + self._experts), start // self._experts
        self._share[part] = np.clip(shares, 0.0, 1.0)
        self._visits[layer] = MEMORY
        self._judge(part, layer)

    def _judge(self, part: slice, layer: int) -> None:
        """The chances of one layer, from its shares and its last visit."""
        share, logit = self._share[part], self._logit[part]
        # A hundredth away from never and from always, whose logits are infinite.
        np.log((share + 0.01) / (1.01 - share), out=logit)
        bias, of_share, of_last = self._weights[layer]
        np.multiply(logit, of_share, out=self._chance[part])
        self._chance[part] += of_last * self._last[part] + bias
        self._queue = self._bar = None

    def _learn(self, layer: int, missed: FloatArray, logit: FloatArray, last: FloatArray) -> None:
        """One step for the weights of ``layer``, from what its last chances were off by."""
        slopes = float(missed.mean()), float(missed @ logit) / self._experts, float(missed @ last) / self._experts
        weights, squares = self._weights[layer], self._squares[layer]
        for at, slope in enumerate(slopes):
            squares[at] += slope * slope
            weights[at] += RATE * slope / sqrt(squares[at])

    def _find_bar(self) -> float:
        """The chance of the last who would stay if all who may leave and all who are missing were ranked together."""
        part = self._visited
        used = self._last[part] > 0.0
        leaving = self._here & ~self._pinned
        missing = used & ~self._here[part]
        leaving[part] &= ~used
        rivals = np.concatenate([self._chance[leaving], self._chance[part][missing]])
        places = self.capacity - self._count + int(np.count_nonzero(leaving))
        if places <= 0:
            return inf
        return -inf if len(rivals) <= places else float(np.partition(rivals, -places)[-places])

    def hold(self, keys: Container[int]) -> None:
        super().hold(keys)
        self._queue = None

    def settle(self) -> None:
        self._queue = None

    def touch(self, key: int, score: float) -> None:
        pass

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        at = key - self._first
        if asked:
            if self._bar is None:
                self._bar = self._find_bar()
            if self._chance[at] < self._bar:
                return False
        if self._count >= self.capacity:
            queue = self._leaving()
            if not queue or self._chance[queue[-1] - self._first] >= self._chance[at]:
                return False
            self.drop()
        self.enter(key, score)
        return True

    def enter(self, key: int, score: float) -> None:
        self._here[key - self._first] = True
        self._count += 1
        if key not in self.held:
            self._queue = None

    def _leaving(self) -> list[int]:
        """Unpinned residents that are not held, the next to leave last."""
        if self._queue is None:
            self._queue = [key for key in self.order()[::-1] if key not in self.held]
        return self._queue

    def drop(self) -> bool:
        queue = self._leaving()
        if not queue:
            return False
        key = queue.pop()
        self._here[key - self._first] = False
        self._count -= 1
        self.gone.append(key)
        return True

    def remove(self, key: int) -> None:
        at = key - self._first
        self._here[at] = self._pinned[at] = False
        self._count -= 1
        self._queue = None

    def pin(self, key: int) -> bool:
        self._pinned[key - self._first] = True
        self._queue = None
        return True

    def unpin(self, key: int) -> None:
        self._pinned[key - self._first] = False
        self._queue = None

    def order(self) -> list[int]:
        found = np.flatnonzero(self._here & ~self._pinned)
        ranked: list[int] = (found[np.argsort(self._chance[found], kind="stable")] + self._first).tolist()
        return ranked
