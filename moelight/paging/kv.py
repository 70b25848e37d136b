"""The paged KV cache: blocks of tokens, assigned to sequences through block tables, with the same index in every layer,
whatever its width. Two layouts: a `paged_cache` for CPU attention, a `token_cache` for attention on the device.

An int8 cache holds codes, and beside them a float32 scale for the key and the value of each head and token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moelight.core.dtypes import DType
from moelight.core.errors import MoelightError
from moelight.hrm.costs import kv_row_bytes
from moelight.profiles.model import AttentionSpec
from moelight.weights.torch_dtypes import to_torch


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedRows:
    """Tokens of one layer for device attention: ``values`` [tokens, 2, Hkv, D], or latents and rotary keys [tokens, 1,
    1, R + Rr]; if those are int8 codes, ``scales`` float32 [tokens, 2, Hkv]."""

    values: Tensor
    scales: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)


def paged_cache(
    arena: Tensor, specs: Sequence[AttentionSpec], *, blocks: int, block_size: int, dtype: DType
) -> list[tuple[Tensor, ...]]:
    """The cache for CPU attention of each layer, one after another in ``arena``: keys and values ``[blocks, Hkv,
    block_size, D]`` each, behind int8 ones their scales float32 ``[blocks, Hkv, block_size]`` each; or latents and
    rotary keys ``[blocks, block_size, R + Rr]``; nothing without attention. D: `AttentionSpec.cached_head_dim`."""
    caches: list[tuple[Tensor, ...]] = []
    tokens = blocks * block_size
    for spec, part in zip(specs, _by_layer(arena, specs, tokens, dtype), strict=True):
        if spec.latent is not None:
            caches.append((part.view(to_torch(dtype)).view(blocks, block_size, spec.cache_width),))
        elif spec.num_kv_heads:
            values, scales = _numbers_and_scales(part, spec, tokens, dtype)
            shape = (2, blocks, spec.num_kv_heads, block_size)
            caches.append((*values.view(*shape, spec.cached_head_dim), *(() if scales is None else scales.view(shape))))
        else:
            caches.append(())
    return caches


def token_cache(arena: Tensor, specs: Sequence[AttentionSpec], *, slots: int, dtype: DType) -> list[CachedRows]:
    """The cache for device attention of each layer, one after another in ``arena``: slot block * block_size + offset
    holds what `rows_of` says of a token."""
    parts = zip(specs, _by_layer(arena, specs, slots, dtype), strict=True)
    return [rows_of(part, spec, dtype) for spec, part in parts]


def rows_of(part: Tensor, spec: AttentionSpec, dtype: DType) -> CachedRows:
    """``part``, bytes, as tokens of one layer, as many as it holds: all numbers, then all scales; no token without
    attention."""
    tokens = part.numel() // max(kv_row_bytes(spec, dtype), 1)
    values, scales = _numbers_and_scales(part, spec, tokens, dtype)
    shape = (2, spec.num_kv_heads) if spec.latent is None else (1, 1)
    width = spec.cached_head_dim if spec.latent is None else spec.cache_width
    rows = None if scales is None else scales.view(tokens, *shape)
    return CachedRows(values=values.view(tokens, *shape, width), scales=rows)


def _numbers_and_scales(part: Tensor, spec: AttentionSpec, tokens: int, dtype: DType) -> tuple[Tensor, Tensor | None]:
    """The numbers of ``tokens`` tokens in ``part``, bytes, and the scales behind int8 ones, both flat."""
    values = part[: tokens * spec.cache_width * dtype.itemsize]
    if not dtype.group:
        return values.view(to_torch(dtype)), None
    return values.view(torch.int8), part[values.numel() : tokens * kv_row_bytes(spec, dtype)].view(torch.float32)


def _by_layer(arena: Tensor, specs: Sequence[AttentionSpec], tokens: int, dtype: DType) -> Iterator[Tensor]:
    """``arena``, bytes, in parts for ``tokens`` tokens of each layer."""
    sizes = [tokens * kv_row_bytes(spec, dtype) for spec in specs]
    return iter(arena[: sum(sizes)].split(sizes))


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
        on_device, twice = self._device_part(count), 2 * max(count, 1)
        before = [(2 * i * on_device + count) // twice for i in range(count + 1)]
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
        """Return how many of the next ``count`` blocks go to the device, keeping the blocks in use closest to its
        share."""
        if not self.blocks:
            return 0
        device_blocks = self.blocks - self.host_blocks
        in_use = device_blocks - len(self._on_device)
        wanted = round((self.blocks - self.free + count) * device_blocks / self.blocks) - in_use
        least = count * device_blocks // self.blocks
        maximum = -(-count * device_blocks // self.blocks)
        part = min(max(wanted, least), maximum)
        return min(max(part, count - len(self._on_host)), len(self._on_device))
