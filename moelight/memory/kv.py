"""The paged key/value cache in host memory: blocks of tokens, handed to sequences through block tables. No padding.

One block of a sequence is the same index in every layer, so a sequence has one table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.core.errors import MoelightError
from moelight.memory.arena import typed
from moelight.profiles.model import AttentionSpec


class KVCache:
    """``layer(l)`` gives that layer's key and value caches, each ``[blocks, Hkv, block_size, D]``."""

    def __init__(
        self, arena: Tensor, spec: AttentionSpec, *, num_layers: int, blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        shape = (num_layers, 2, blocks, spec.num_kv_heads, block_size, spec.head_dim)
        pool = typed(arena, dtype, shape)
        self.block_size = block_size
        self._layers = [(pool[layer, 0], pool[layer, 1]) for layer in range(num_layers)]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of ``layer``."""
        return self._layers[layer]


class BlockPool:
    """Which blocks are free. A block belongs to one sequence from ``take`` to ``give_back``."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` blocks, lowest free ones first."""
        if count > len(self._free):
            raise MoelightError(f"{count} KV blocks asked for, {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """Return blocks from ``take``."""
        self._free.extend(reversed(blocks))
