"""Result of one cache access and the counters of a cache: values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Result of one batch of one layer. Ids ascend; each is in exactly one of `hits`, `misses` and `kept_out`.

    Attributes:
        hits: int64 [n], expert ids that were resident, in the slots ``hit_slots`` int64 [n].
        misses: int64 [m], expert ids that were not resident; ``slots`` int64 [m] is the destination slot of each, -1 if
            it bypasses the cache.
        kept_out: int64 [o], expert ids that were not resident and that the caller excluded from admission.
        evictions: int64 [e, 2], evicted (layer, expert), in order. Their slots may be among ``slots``.
        counts: int64 [num_experts], tokens of each expert.
    """

    layer: int
    hits: IntArray
    hit_slots: IntArray
    misses: IntArray
    slots: IntArray
    kept_out: IntArray
    evictions: IntArray
    counts: IntArray


class Prefetch(NamedTuple):
    """Admitted predictions: ``ids`` int64 [n] into ``slots`` int64 [n]; ``evictions`` int64 [e, 2] were evicted for
    them."""

    ids: IntArray
    slots: IntArray
    evictions: IntArray


class CacheStats:
    """Counters of a cache.

    Attributes:
        hits, misses: int64 [L, E], accesses; one for each distinct id of a batch.
        tokens: int64 [L, E], (token, expert) pairs.
        evictions: all evicted pages; ``expired`` and ``pressed`` count those evicted by time to live and by memory
            pressure.
        bypasses: misses that were not admitted.
        prefetched: predicted experts that were admitted.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.hits = np.zeros((num_layers, num_experts), np.int64)
        self.misses = np.zeros((num_layers, num_experts), np.int64)
        self.tokens = np.zeros((num_layers, num_experts), np.int64)
        self.evictions = self.expired = self.pressed = self.bypasses = self.prefetched = 0

    @property
    def accesses(self) -> int:
        return int(self.hits.sum() + self.misses.sum())

    @property
    def hit_rate(self) -> float:
        """Hits per access; 0 before the first access."""
        accesses = self.accesses
        return int(self.hits.sum()) / accesses if accesses else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the counters for JSON; ``hit_rate`` of a layer without accesses is None."""
        layers = [
            {"layer": layer, "accesses": (hits := int(h.sum())) + (misses := int(m.sum())), "hits": hits}
            | ({"hit_rate": hits / (hits + misses)} if hits + misses else {"hit_rate": None})
            for layer, (h, m) in enumerate(zip(self.hits, self.misses, strict=True))
        ]
        return {
            "accesses": self.accesses,
            "hits": int(self.hits.sum()),
            "misses": int(self.misses.sum()),
            "hit_rate": self.hit_rate,
            "evictions": self.evictions,
            "expired": self.expired,
            "pressed": self.pressed,
            "bypasses": self.bypasses,
            "prefetched": self.prefetched,
            "layers": layers,
        }
