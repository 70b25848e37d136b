"""The region that gauges take their operands from: far larger than any cache, so that every operand comes from memory.

Layers alternate in a pass, so no weight is ever in a cache when it is needed; gauges go round the pool likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from moelight.core.units import MiB, align_up

SHARE_OF_FREE = 4  # the pool takes at most one part in so many
LEAST_TURNS = 3  # an operand comes back after as many others at the earliest
_SEED_NUMBERS = 4 * MiB
_ALIGNMENT = 64


class Pool:
    """``numbers`` [N] of ``dtype`` on ``device``, all of them written."""

    def __init__(self, size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        """About ``size`` bytes.

        Raises:
            RuntimeError: the device has no such memory left.
        """
        count = max(_ALIGNMENT, size // dtype.itemsize // _ALIGNMENT * _ALIGNMENT)
        self.numbers = torch.empty(count, dtype=dtype, device=device)
        self._reached = 0
        written = min(count, _SEED_NUMBERS)
        self.numbers[:written].normal_(std=0.02)
        while written < count:
            some = min(written, count - written)
            self.numbers[written : written + some] = self.numbers[:some]
            written += some

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.numbers.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""
        return self.numbers.dtype

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numbers.nbytes

    def holds(self, *shapes: tuple[int, ...]) -> bool:
        """Whether there is room for several such groups of tensors."""
        return LEAST_TURNS * sum(map(prod, shapes)) <= self.numbers.numel()

    def groups(self, *shapes: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Groups of neighbouring tensors of ``shapes``, one after another through the pool, round and round.

        Each group begins where the last one taken from the pool ended, whoever took it.
        """
        sizes = [prod(shape) for shape in shapes]
        while True:
            if self._reached + sum(sizes) > self.numbers.numel():
                self._reached = 0
            cuts = []
            for size, shape in zip(sizes, shapes, strict=True):
                cuts.append(self.numbers[self._reached : self._reached + size].view(shape))
                self._reached += size
            self._reached = align_up(self._reached, _ALIGNMENT)
            yield tuple(cuts)
