"""Memory of large results of the CPU's kernels, kept for the next result of about that size.

The C library gives large blocks back to the system when they are freed, and the system zeroes every page of the next
one: 4 % of the processor's time with many prompts (docs/log.md), whose layers need the same blocks one after the other.
While an engine is open, freed blocks are kept until `release`, after each pass: at most as many bytes as were in use at
once. Elsewhere `empty` is `torch.empty`.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

LARGE_BYTES = 4 << 20
_MOST_WASTE = 2  # a block serves results of at least one over this of its bytes


class CachingAllocator:
    """Blocks that are free, or were ``returned`` by whichever thread dropped the last view of their tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines = self._used = self._most_used = 0
        self._free: list[mmap.mmap] = []
        self._returned: deque[mmap.mmap] = deque()

    @contextmanager
    def caching(self) -> Iterator[None]:
        """While it is entered by anyone, large results come from kept blocks."""
        with self._lock:
            self._engines += 1
        try:
            yield
        finally:
            with self._lock:
                self._engines -= 1
            self.release()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of CPU memory whose numbers are undefined."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < LARGE_BYTES or not self._engines:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            block = self._take(size)
        view = memoryview(block)  # held by the storage of the tensor
        weakref.finalize(view, self._returned.append, block).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=count).view(tuple(shape))

    def release(self) -> None:
        """Give blocks that no tensor uses back to the system."""
        with self._lock:
            self._collect()
            self._free.clear()
            self._most_used = self._used

    @property
    def kept_bytes(self) -> int:
        """Bytes of blocks that no tensor uses."""
        with self._lock:
            self._collect()
            return sum(map(len, self._free))

    def _take(self, size: int) -> mmap.mmap:
        """The smallest free block that serves ``size`` bytes, or a new one."""
        self._collect()
        fitting = [block for block in self._free if size <= len(block) <= _MOST_WASTE * size]
        if fitting:
            block = min(fitting, key=len)
            self._free.remove(block)
        else:
            block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
        self._used += len(block)
        self._most_used = max(self._most_used, self._used)
        return block

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._used -= len(block)
            self._free.append(block)
        while sum(map(len, self._free)) > self._most_used:
            self._free.pop(0)


RESULTS = CachingAllocator()
