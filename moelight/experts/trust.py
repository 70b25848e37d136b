"""How far guesses are to be trusted: what came of earlier ones of the same rank.

A page that nobody asks for delays those that somebody does, by all its time on the link or the disk: a guess is worth
acting on only if it is likely to come true. How likely that is depends on the model, the predictor and the place in its
list; so all guesses are counted, also those that are not acted on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moelight.experts.access import IntArray

# On recorded routing fetching ahead gains most if guesses are at least .7 to .8 sure; for pages of a few MB
# (docs/log.md).
SURE = 0.75
DECAY = 0.98  # a guess is half forgotten after 34 more of its rank
_RANKS = 64


class Trust:
    """The share of guesses of each rank that came true."""

    def __init__(self) -> None:
        self._right = np.full(_RANKS, 0.0)
        self._made = np.full(_RANKS, 1.0)  # one that was wrong: nobody is trusted unseen
        self._open: dict[int, IntArray] = {}

    def likely(self, row: int, ids: IntArray) -> IntArray:
        """Of the guesses ``ids`` about ``row``, the likeliest first, those that are worth acting on."""
        self._open[row] = ids
        ranks = np.minimum(np.arange(len(ids)), _RANKS - 1)
        return ids[self._right[ranks] >= SURE * self._made[ranks]]

    def settle(self, row: int, chosen: NDArray[Any]) -> None:
        """``row`` has chosen; what was guessed about it came true or not."""
        ids = self._open.pop(row, None)
        if ids is None or not len(ids):
            return
        ranks = np.minimum(np.arange(len(ids)), _RANKS - 1)
        self._right[ranks] = self._right[ranks] * DECAY + np.isin(ids, chosen)
        self._made[ranks] = self._made[ranks] * DECAY + 1.0
