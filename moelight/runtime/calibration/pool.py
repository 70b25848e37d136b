"""Operand pool of the measurements: far larger than any cache, so that every operand is read from memory.

A pass alternates layers, so no weight is in a cache when it is needed; measurements cycle through the pool likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from moelight.core.units import MiB, align_up

SHARE_OF_FREE = 4  # the pool takes at most this fraction of free memory: 1 / SHARE_OF_FREE
LEAST_TURNS = 3  # least number of operand groups that the pool must hold
_SEED_NUMBERS = 4 * MiB
_ALIGNMENT = 64


class Pool:
    """``numbers`` [N] of ``dtype`` on ``device``, all initialized."""

    def __init__(self, size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate about ``size`` bytes.

        Raises:
            RuntimeError: the device has too little free memory.
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
        """Device of the numbers."""
        return self.numbers.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the numbers."""
        return self.numbers.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numbers.nbytes

    def holds(self, *shapes: tuple[int, ...]) -> bool:
        """True if the pool holds at least `LEAST_TURNS` groups of tensors of ``shapes``."""
        return LEAST_TURNS * sum(map(prod, shapes)) <= self.numbers.numel()

    def groups(self, *shapes: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Yield groups of neighbouring tensors of ``shapes``, in turn through the pool, without end.

        Each group begins where the last group taken from the pool ended, by any iterator.
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
