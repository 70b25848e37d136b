"""The paged key/value cache: blocks of tokens, handed to sequences through block tables. No padding.

One block of a sequence is the same index in every layer, so a sequence has one table. Two layouts: `KVCache` for the
CPU's attention, which reads blocks where they lie; `TokenCache` for attention on the device, whose contexts are copied,
one on each side of the link where blocks are.
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
    """Which blocks are free. A block belongs to one sequence from ``take`` to ``give_back``.

    Blocks below ``host_blocks`` are in host memory, the ``device_blocks`` others on the device. What is taken holds the
    pool's share of device blocks as exactly as whole blocks allow, each sequence within one block and all together,
    evenly along the sequence; only where one side has run out does the other stand in.
    """

    def __init__(self, blocks: int, device_blocks: int = 0) -> None:
        self.blocks, self.host_blocks = blocks, blocks - device_blocks
        self._on_host = list(range(self.host_blocks - 1, -1, -1))
        self._on_device = list(range(blocks - 1, self.host_blocks - 1, -1))

    @property
    def free(self) -> int:
        """Blocks nobody owns."""
        return len(self._on_host) + len(self._on_device)

    def take(self, count: int) -> list[int]:
        """``count`` blocks in the order of a sequence's positions, lowest free ones of each side first."""
        if count > self.free:
            raise MoelightError(f"{count} KV blocks asked for, {self.free} are free")
        there, twice = self._device_part(count), 2 * max(count, 1)
        before = [(2 * i * there + count) // twice for i in range(count + 1)]
        sides = [before[i + 1] > before[i] for i in range(count)]
        return [(self._on_device if on_device else self._on_host).pop() for on_device in sides]

    def give_back(self, blocks: list[int]) -> None:
        """Return blocks from ``take``."""
        for block in reversed(blocks):
            (self._on_host if block < self.host_blocks else self._on_device).append(block)

    def _device_part(self, count: int) -> int:
        """How many of the next ``count`` blocks are on the device: the whole number beside its share of ``count`` that
        keeps all blocks in use nearest to the share."""
        if not self.blocks:
            return 0
        device_blocks = self.blocks - self.host_blocks
        in_use = device_blocks - len(self._on_device)
        wanted = round((self.blocks - self.free + count) * device_blocks / self.blocks) - in_use
        least = count * device_blocks // self.blocks
        most = -(-count * device_blocks // self.blocks)
        part = min(max(wanted, least), most)
        return min(max(part, count - len(self._on_host)), len(self._on_device))
