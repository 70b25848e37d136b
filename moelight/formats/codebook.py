"""The codebooks of ggml's types of 1 to 3 bits: an index stands for several values at once, a point of a lattice.

The points are those of ggml/src/ggml-common.h (``iq2xxs_grid`` and its like). A file of `codebooks/` has the points of
one codebook in ascending order of their numbers, whose digits, the first one lowest, are the places of the values among
``levels``: each number less the one before. The extension includes the same files (csrc/quantized/codebooks.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

_FILES = Path(__file__).with_name("codebooks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Codebook:
    """Points of ``width`` values, all of them among ``levels``, in the file ``name``."""

    name: str
    width: int
    levels: tuple[int, ...]

    def points(self) -> tuple[tuple[int, ...], ...]:
        """The values of each index."""
        return _points(self)


@cache
def _points(codebook: Codebook) -> tuple[tuple[int, ...], ...]:
    text = (_FILES / f"{codebook.name}.inc").read_text(encoding="ascii")
    count = len(codebook.levels)
    return tuple(
        tuple(codebook.levels[number // count**digit % count] for digit in range(codebook.width))
        for number in accumulate(int(step) for step in text.split(",") if step.strip())
    )


CODEBOOKS: Mapping[str, Codebook] = MappingProxyType(
    {
        name: Codebook(name=name, width=width, levels=levels)
        for name, width, levels in (
            ("iq1", 8, (-1, 0, 1)),
            ("iq2_xxs", 8, (8, 25, 43)),
            ("iq2_xs", 8, (8, 25, 43)),
            ("iq2_s", 8, (8, 25, 43)),
            ("iq3_xxs", 4, (4, 12, 20, 28, 36, 44, 52, 62)),
            ("iq3_s", 4, (1, 3, 5, 7, 9, 11, 13, 15)),
        )
    }
)
