"""The paged key/value cache: blocks of tokens, handed to sequences through block tables. No padding.

One block of a sequence is the same index in every layer, so a sequence has one table. Two layouts: `KVCache` for the
CPU's attention, which reads blocks where they lie; `TokenCache` for attention on the device, whose contexts are copied.
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


class TokenCache:
    """``layer(l)`` gives that layer's cache ``[slots, 2, Hkv, D]``: a token's key and value lie side by side in slot
    block * block_size + offset, so tokens that follow each other move in one piece."""

    def __init__(self, arena: Tensor, spec: AttentionSpec, *, num_layers: int, slots: int, dtype: torch.dtype) -> None:
        self._pool = typed(arena, dtype, (num_layers, slots, 2, spec.num_kv_heads, spec.head_dim))

    def layer(self, layer: int) -> Tensor:
        """Keys and values of ``layer``."""
        return self._pool[layer]


def put(into: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write token t of k and v [T, Hkv, D] to slot ``slots[t]`` (int64) of ``into`` [slots, 2, Hkv, D]."""
    into[:, 0].index_copy_(0, slots, k)
    into[:, 1].index_copy_(0, slots, v)


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
