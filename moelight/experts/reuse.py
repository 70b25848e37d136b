"""Reuse eviction: evict the expert least likely to be used at the next visit of its layer, and bypass misses that are
less likely still."""

from __future__ import annotations

from collections.abc import Container
from math import inf

import numpy as np
from numpy.typing import NDArray

from moelight.experts.access import FloatArray
from moelight.experts.eviction import Eviction, EvictionContext

# Approximate windows, in visits, of the shares of use: short windows follow changing tasks, long ones separate rare
# experts where nothing changes. The weight of each is learned (docs/log.md).
HORIZONS = (16, 128, 1024)
RATE = 0.3  # learning rate of the first step; AdaGrad shortens later steps
FIRST_SHARE = 0.1  # of an expert without observations
EXPECTED_VISITS = 64  # weight of profile shares, in visits; more gains on mixed work, loses on one task (docs/log.md)
_LEAST_STEPS = np.array([[1.0 / each] for each in HORIZONS])
_WEIGHTS = (0.0, *(1.0 / len(HORIZONS) for _ in HORIZONS), 0.5)


class Reuse(Eviction):
    """Eviction by use probabilities that are learned online, from the accesses alone.

    A visit is one batch of one layer. Before each visit, the probability that an expert is used is
    ``sigmoid(w0 + sum of w_h * logit(share_h) + w * last)``, where ``share_h`` is the share of about the last ``h``
    visits of the layer that used it (for each ``h`` of `HORIZONS`), and ``last`` is 1 if the last visit did. The
    weights of a layer are updated by one step of logistic regression per visit. A miss is admitted only if its
    probability is above that of its victim, else it is a bypass; otherwise every visit to a layer would evict the
    experts that the coming layers need.

    Works best with one budget per layer. Arrays over keys have one item for each of the ``population`` keys from
    ``EvictionContext.first`` on; H is the number of horizons, E the number of experts of a layer.
    """

    has_visit = True

    def __init__(self, setting: EvictionContext) -> None:
        super().__init__(setting)
        self._first, self._experts = setting.first, setting.experts
        layers = self.population // self._experts
        self._shares = np.full((layers, len(HORIZONS), self._experts), FIRST_SHARE)
        # [layers, H + 1, E]: logits of the shares, then 1 for experts that the last visit used.
        self._features = np.zeros((layers, len(HORIZONS) + 1, self._experts))
        # Logit of each probability, the eviction order.
        self._chance = np.zeros(self.population)
        self._weights = np.tile(_WEIGHTS, (layers, 1))  # [layers, 1 + H + 1], the bias first
        self._squares = np.full_like(self._weights, 1e-3)
        self._visits = [0] * layers
        self._here = np.zeros(self.population, np.bool_)
        self._pinned = np.zeros(self.population, np.bool_)
        self._count = 0
        # Admission time of each key; of equal probabilities, as in layers without visits, the oldest key is evicted.
        self._entered = np.zeros(self.population, np.int64)
        self._number = 0
        self._visited = slice(0, 0)
        self._used = np.zeros(0, np.bool_)  # experts of the visited layer that the last visit used
        # Least logit for admission at this visit, so that likelier experts of the batch get the slots. None: not
        # computed yet, likewise for the queue.
        self._bar: float | None = None
        # Unpinned residents that are not held, the next to be evicted last.
        self._queue: list[int] | None = None

    def __len__(self) -> int:
        return self._count

    def visit(self, first: int, used: NDArray[np.bool_]) -> None:
        if self.capacity >= self.population:
            return
        start = first - self._first
        self._visited, self._used = slice(start, start + self._experts), used
        layer = start // self._experts
        now = used.astype(np.float64)
        if self._visits[layer]:
            self._learn(layer, now)
        self._visits[layer] += 1
        shares = self._shares[layer]
        shares += (now - shares) * np.maximum(_LEAST_STEPS, 1.0 / (self._visits[layer] + 2))
        self._features[layer, -1] = now
        self._judge(layer)

    def expect(self, first: int, shares: FloatArray) -> None:
        layer = (first - self._first) // self._experts
        self._shares[layer] = np.clip(shares, 0.0, 1.0)
        self._visits[layer] = EXPECTED_VISITS
        self._judge(layer)

    def _part(self, layer: int) -> slice:
        return slice(layer * self._experts, (layer + 1) * self._experts)

    def _judge(self, layer: int) -> None:
        """Compute the probabilities of one layer from its shares and its last visit."""
        shares, features, chance = self._shares[layer], self._features[layer], self._chance[self._part(layer)]
        # Offset by 0.01 from 0 and 1, whose logits are infinite.
        np.log((shares + 0.01) / (1.01 - shares), out=features[:-1])
        bias, *weights = self._weights[layer].tolist()
        # Not a matrix product: experts with equal features must get bitwise equal probabilities.
        chance.fill(bias)
        for weight, feature in zip(weights, features, strict=True):
            chance += weight * feature
        self._queue = self._bar = None

    def _learn(self, layer: int, used: FloatArray) -> None:
        """Update the weights of ``layer`` by one step, from the error of its last probabilities."""
        missed = used - 1.0 / (1.0 + np.exp(-self._chance[self._part(layer)]))
        slopes = np.concatenate([[missed.sum()], self._features[layer] @ missed]) / self._experts
        self._squares[layer] += slopes * slopes
        self._weights[layer] += RATE * slopes / np.sqrt(self._squares[layer])

    def _find_bar(self) -> float:
        """Return the lowest probability that is kept when all evictable residents and all missing experts are ranked
        together."""
        part = self._visited
        used = self._used
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

    def flush(self) -> None:
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
        self._number += 1
        self._here[key - self._first], self._entered[key - self._first] = True, self._number
        self._count += 1
        if key not in self.held:
            self._queue = None

    def _leaving(self) -> list[int]:
        """Return the unpinned residents that are not held, the next to be evicted last."""
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
        ranked: list[int] = (found[np.lexsort((self._entered[found], self._chance[found]))] + self._first).tolist()
        return ranked
