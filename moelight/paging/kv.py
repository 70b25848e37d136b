"""The paged KV cache: blocks of tokens, assigned to sequences through block tables, with the same index in every layer.
Two layouts: a `paged_cache` for CPU attention, a `token_cache` for attention on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from moelight.core.errors import MoelightError
from moelight.paging.arena import typed
from moelight.profiles.model import AttentionSpec


def paged_cache(
    arena: Tensor, spec: AttentionSpec, *, num_layers: int, blocks: int, block_size: int, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer for CPU attention, each ``[blocks, Hkv, block_size, D]``."""
    pool = typed(arena, dtype, (num_layers, 2, blocks, spec.num_kv_heads, block_size, spec.head_dim))
    return [(layer[0], layer[1]) for layer in pool]


def token_cache(arena: Tensor, spec: AttentionSpec, *, num_layers: int, slots: int, dtype: torch.dtype) -> Tensor:
    """Keys and values for device attention ``[layers, slots, 2, Hkv, D]``: slot block * block_size + offset holds those
    of a token."""
    return typed(arena, dtype, (num_layers, slots, 2, spec.num_kv_heads, spec.head_dim))


class BlockPool:
    """Allocator of KV blocks with reference counts and a prefix index.

    Blocks below ``host_blocks`` are in host memory, the other ``device_blocks`` on the device. Allocations keep the
    device's share of blocks as exactly as whole blocks allow, per ``take``, in total, and evenly along the sequence;
    one tier replaces the other only when that one is exhausted.

    A block is in use until every sequence that took or shares it has released it. A block with a key can be found even
    when free, until it is reallocated: on each tier, free blocks without a key are reallocated first, then the least
    recently released.
    """

    def __init__(self, blocks: int, device_blocks: int = 0) -> None:
        self.blocks, self.host_blocks = blocks, blocks - device_blocks
        # The free blocks of each tier in the order of their reallocation.
        self._on_host = OrderedDict.fromkeys(range(self.host_blocks))
        self._on_device = OrderedDict.fromkeys(range(self.host_blocks, blocks))
        self._holders = [0] * blocks
        self._keys: dict[int, bytes] = {}
        self._found: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self._on_host) + len(self._on_device)

    def free_beside(self, shared: Sequence[int]) -> int:
        return self.free - sum(not self._holders[block] for block in shared)

    def take(self, count: int) -> list[int]:
        """Allocate blocks in the order of a sequence's positions, lowest free ones of each tier first."""
        if count > self.free:
            raise MoelightError(f"{count} KV blocks asked for, {self.free} are free")
        there, twice = self._device_part(count), 2 * max(count, 1)
        before = [(2 * i * there + count) // twice for i in range(count + 1)]
        sides = [before[i + 1] > before[i] for i in range(count)]
        taken = [(self._on_device if on_device else self._on_host).popitem(last=False)[0] for on_device in sides]
        for block in taken:
            self._holders[block] = 1
            self._unname(block)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of ``blocks``, which `find` returned."""
        for block in blocks:
            if not self._holders[block]:
                del self._side(block)[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each of ``blocks``; the last of them are reallocated first."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                side = self._side(block)
                side[block] = None
                side.move_to_end(block, last=block in self._keys)

    def find(self, key: bytes) -> int | None:
        """The block indexed under ``key``."""
        return self._found.get(key)

    def name(self, block: int, key: bytes) -> bool:
        """Index ``block``, which is in use, under ``key``; False if another block has that key."""
        if key in self._found:
            return False
        self._keys[block], self._found[key] = key, block
        return True

    def forget(self, block: int) -> None:
        if self._unname(block) and not self._holders[block]:
            self._side(block).move_to_end(block, last=False)

    def forget_all(self) -> None:
        for block in list(self._keys):
            self.forget(block)

    def _unname(self, block: int) -> bool:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._found[key]
        return key is not None

    def _side(self, block: int) -> OrderedDict[int, None]:
        return self._on_host if block < self.host_blocks else self._on_device

    def _device_part(self, count: int) -> int:
        """Of the next ``count`` blocks; keeps all blocks in use closest to the device's share."""
        if not self.blocks:
            return 0
        device_blocks = self.blocks - self.host_blocks
        in_use = device_blocks - len(self._on_device)
        wanted = round((self.blocks - self.free + count) * device_blocks / self.blocks) - in_use
        least = count * device_blocks // self.blocks
        most = -(-count * device_blocks // self.blocks)
        part = min(max(wanted, least), most)
        return min(max(part, count - len(self._on_host)), len(self._on_device))
