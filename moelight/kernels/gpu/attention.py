"""Attention of a ragged batch on the device: decoding rows, new prompts, and chunks of prompts after cached tokens.

One call a layer: a Triton program launched at most twice, or torch where `serving` selects it. Keys and values of new
tokens are read from ``k`` and ``v``, cached ones where they lie: in slots of the device's cache, or of the buffer to
which they were transferred. Nothing synchronizes the device. Every wrong argument is a ValueError that names it.

Legend: T tokens, S sequences, N slots of a cache or buffer, Hq query heads, Hkv key/value heads, D head size, P block
size in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moelight.core.policy import KV_BLOCK_SIZES
from moelight.hrm.footprint import CHUNK_ROWS, GATHER_BYTES, QUANTISING_BYTES
from moelight.kernels import arguments, reference
from moelight.kernels.arguments import FLOATS, check_tensor
from moelight.kernels.device import Device, compute_capability, on_host
from moelight.kernels.gpu import serving, tiles
from moelight.kernels.gpu.serving import triton_dtype

MOST_HEAD_DIM = 256
_BUFFER = -(1 << 30)  # `attention_triton.IN_BUFFER`
_FOREVER = (1 << 30) - 1
_ALIGNMENT_BYTES = 16
_FETCH_PROGRAMS = 16  # 16 KiB each in flight: more than any link's rate times its latency
_FETCH_NUMBERS = 4096

Ints = np.ndarray | Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptForm:
    """``tile_tokens``: tokens of a tile; ``most_tokens``: prompts with more new tokens are torch's, each by its own
    call, because it uses tensor cores that Triton does not use."""

    tile_tokens: int
    most_tokens: int


class RaggedBatch:
    """Sequences of a batch: their rows, and a table of the blocks of their cached tokens.

    Attributes:
        rows: T.
        decoding: the first sequences, of one row each, computed by the decode form; the others by the prompt form.
        block_size: P.
        apart: sequences that the prompt form leaves to torch.
        spans: (first row, last row, first position, first position that is seen) of each sequence.
        tiers: whether some block of the table is in the cache, and in the buffer.
        table: int32, of even length: all that the kernel reads; `land` replaces it by its copy on the device.
    """

    def __init__(
        self,
        counts: Ints,
        starts: Ints,
        seen_from: Ints,
        entries: Ints,
        *,
        decoding: int,
        block_size: int,
        form: PromptForm,
    ) -> None:
        """``counts`` new tokens of each sequence follow ``starts`` cached ones, of which those from ``seen_from`` on
        are in ``entries``: in order of the sequences, for each of their blocks with a seen token the slot of the
        block's first token in the cache, or `in_buffer` of its place in the buffer, which may be below 0 if the first
        tokens are not seen."""
        count, start, lowest = (np.asarray(values, dtype=np.int64) for values in (counts, starts, seen_from))
        last = np.cumsum(count)
        self.rows, self.decoding = int(last[-1]) if len(last) else 0, decoding
        self.block_size, self.tile_tokens = block_size, form.tile_tokens
        self._entries = np.asarray(entries, dtype=np.int64)
        self._blocks = np.where(lowest < start, -(-start // block_size) - lowest // block_size, 0)
        self._base = np.cumsum(self._blocks) - self._blocks - lowest // block_size
        self._check(count, start, lowest)
        self.tiers = bool((self._entries >= 0).any()), bool((self._entries < 0).any())
        self.spans = tuple(zip(*((last - count).tolist(), last.tolist(), start.tolist(), lowest.tolist()), strict=True))
        fields = np.stack((last - count, count, start, lowest, self._base), axis=1)
        self.apart = tuple(np.flatnonzero(count > form.most_tokens).tolist())
        tile_counts = np.where(count > form.most_tokens, 0, -(-count // form.tile_tokens))[decoding:]
        sequence = np.repeat(np.arange(decoding, len(count)), tile_counts)
        number = np.arange(len(sequence)) - np.repeat(np.cumsum(tile_counts) - tile_counts, tile_counts)
        first = number * form.tile_tokens
        longest = np.argsort(-(start[sequence] + first), kind="stable")  # the longest programs begin first
        pairs = np.stack((sequence, first), axis=1)[longest]
        parts = [fields.ravel(), pairs.ravel(), self._entries]
        self._cuts = [part.size for part in parts]
        parts.append(np.zeros(sum(self._cuts) % 2, dtype=np.int64))
        self.land(torch.from_numpy(np.concatenate(parts).astype(np.int32)))

    def land(self, table: Tensor) -> None:
        """Use ``table``, a copy of ``table`` on the device of the queries."""
        self.table = table
        self.sequences, self.tiles, self.entries = table[: sum(self._cuts)].split(self._cuts)

    @property
    def tile_count(self) -> int:
        return self._cuts[1] // 2

    @cached_property
    def extents(self) -> tuple[int, int]:
        """Slots of the cache, and of the buffer, up to the last that is read; not for each call on a device."""
        slots = self._slots
        return int(slots.max(initial=-1)) + 1, int((slots - _BUFFER)[slots < 0].max(initial=-1)) + 1

    @cached_property
    def _slots(self) -> np.ndarray:
        """Return for each seen cached token, in order of sequences and positions, its slot in the cache, or
        `in_buffer`."""
        size, none = self.block_size, np.zeros(0, dtype=np.int64)
        parts = [none]
        for (_, _, start, lowest), base in zip(self.spans, self._base.tolist(), strict=True):
            position = np.arange(lowest, start)
            parts.append(self._entries[base + position // size] + position % size)
        return np.concatenate(parts)

    @cached_property
    def gathered(self) -> tuple[Tensor, Tensor, list[int]]:
        """For torch: slot or place int64 of each cached token and whether it is in the cache, on the device of
        ``table``; and where each sequence's tokens begin. Uploaded at the first use."""
        slots, cuts = self._slots, [start - lowest for _, _, start, lowest in self.spans]
        device, both = self.table.device, (slots >= 0, np.where(slots < 0, slots - _BUFFER, slots))
        near, index = (Device(device).landed(array) for array in both)
        return index, near, np.cumsum([0, *cuts]).tolist()

    def _check(self, count: np.ndarray, start: np.ndarray, lowest: np.ndarray) -> None:
        if not len(count) == len(start) == len(lowest):
            raise ValueError(f"starts: {len(start)} and seen_from: {len(lowest)} entries for {len(count)} sequences")
        if not 0 <= self.decoding <= len(count) or (count[: self.decoding] != 1).any():
            raise ValueError(f"decoding: must be a number of first sequences with one row each, is {self.decoding}")
        if (count < 1).any() or (lowest < 0).any() or (lowest > start).any() or (start + count > _FOREVER).any():
            raise ValueError("seen_from: must be from 0 to starts, and counts at least 1")
        if self.block_size not in KV_BLOCK_SIZES:
            raise ValueError(f"block_size: must be one of {KV_BLOCK_SIZES}, is {self.block_size!r}")
        if len(self._entries) != self._blocks.sum():
            raise ValueError(f"entries: must be {self._blocks.sum()}, one a block with cached tokens that are seen")


def in_buffer(position: Any) -> Any:
    """The table entry of a block whose first token is, or would be, at ``position`` of the buffer."""
    return position + _BUFFER


def prompt_form(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> PromptForm:
    """The form of prompts, for `RaggedBatch`; it depends on nothing of a batch, so neither does a row's result."""
    group = heads // kv_heads
    tile = _tile(device, dtype, group, head_dim, decodes=False)
    max_tokens, slow = _FOREVER, dtype != torch.float32 and Device(device).cuda
    if slow and compute_capability(device.index) < tiles.UNITS_SINCE:
        max_tokens = serving.MOST_TOKENS_WITHOUT_UNITS
    return PromptForm(tile_tokens=max(1, tile.rows // group), most_tokens=max_tokens)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: RaggedBatch,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    cache: Tensor | None = None,
    buffer: Tensor | None = None,
    cache_scale: Tensor | None = None,
    buffer_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal softmax(scale * q k^T) v of every sequence over its cached and new tokens -> ``out``, or a new tensor.

    q, out      [T, Hq, D]: float32, bfloat16 or float16, Hq a multiple of Hkv, D a multiple of 8 up to 256
    k, v        [T, Hkv, D], dtype of q: the new tokens'
    batch       the sequences of the rows; its table is on the device of q
    window      a row attends to the last `window` positions, its own included; None for all
    sinks       float32 [Hq]: one logit per head that joins the softmax and is dropped
    softcap     scores become softcap * tanh(score / softcap)
    cache, buffer  [N, 2, Hkv, D], dtype of q, or int8 both: keys and values of cached tokens
    cache_scale, buffer_scale  float32 [N, 2, Hkv]: factors of the rows of int8 caches, whose products are rounded to
                q's dtype

    Sums in float32. A row's result depends on its own sequence up to its own position alone; with Triton, bit for bit.
    On a device, entries of the table are not checked.
    """
    scale = arguments.check_number("scale", scale)
    window, softcap = arguments.check_window(window), arguments.check_softcap(softcap)
    _check(q, k, v, batch, sinks, (cache, buffer), (cache_scale, buffer_scale), out)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    rest: dict[str, Any] = {"window": window, "sinks": sinks, "softcap": softcap, "cache": cache, "buffer": buffer}
    rest |= {"cache_scale": cache_scale, "buffer_scale": buffer_scale}
    if not serving.serves(q.device, q.dtype)[0]:
        return attend_in_torch(q, k, v, batch, scale, **rest, out=out)
    from moelight.kernels.gpu import attention_triton

    with Device(q.device).context():
        for decodes, programs in ((True, batch.decoding), (False, batch.tile_count)):
            if programs:
                tile = _tile(q.device, q.dtype, q.shape[1] // k.shape[1], q.shape[2], decodes=decodes)
                positional, constants = attention_arguments(
                    q, k, v, batch, scale, tile, decodes=decodes, **rest, out=out
                )
                if not decodes and batch.tile_tokens != tile.rows // (q.shape[1] // k.shape[1]):
                    raise ValueError(f"batch: its tiles have {batch.tile_tokens} tokens, see `prompt_form`")
                grid = (programs, k.shape[1])
                attention_triton.attend[grid](*positional, **constants, **tiles.launch_options(tile))
    return attend_in_torch(q, k, v, batch, scale, **rest, out=out, only=batch.apart) if batch.apart else out


def attend_in_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: RaggedBatch,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    cache: Tensor | None = None,
    buffer: Tensor | None = None,
    cache_scale: Tensor | None = None,
    buffer_scale: Tensor | None = None,
    out: Tensor | None = None,
    only: Sequence[int] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """`attend` through torch's fused attention, one sequence after another, or ``only`` some; of a context it gathers
    at most `GATHER_BYTES` at a time, or one head. ``chunk``: a row at position p attends to none before
    p // chunk * chunk."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    group, pools = q.shape[1] // k.shape[1], ((cache, cache_scale), (buffer, buffer_scale))
    quantised = cache_scale is not None or buffer_scale is not None
    for s in range(len(batch.spans)) if only is None else only:
        first, last, start, lowest = batch.spans[s]
        end = start + last - first
        max_heads = k.shape[1] if start == lowest else _heads_at_a_time(end - lowest, q, batch, quantised=quantised)
        for head in range(0, k.shape[1], max_heads):
            heads = slice(head, min(head + max_heads, k.shape[1]))
            query_heads = slice(heads.start * group, heads.stop * group)
            keys, values = k[first:last, heads], v[first:last, heads]
            if start > lowest:
                keys, values = _with_context((keys, values), batch, s, pools, heads)
            sink = None if sinks is None else sinks[query_heads]
            chunk_tokens = chunk or end
            for begin in range(
                start // chunk_tokens * chunk_tokens, end, chunk_tokens
            ):  # rows and keys of one chunk after another
                rows = slice(first + max(begin, start) - start, first + min(begin + chunk_tokens, end) - start)
                seen = slice(max(begin - lowest, 0), begin + chunk_tokens - lowest)
                parts = q[rows, query_heads], keys[seen], values[seen]
                out[rows, query_heads] = _attend_one(*parts, scale, window, sink, softcap)
    return out


def _heads_at_a_time(tokens: int, q: Tensor, batch: RaggedBatch, *, quantised: bool) -> int:
    copies = 3 if all(batch.tiers) else 2  # the pieces of both tiers, and the whole
    element_bytes = copies * q.element_size() + (QUANTISING_BYTES if quantised else 0)
    return max(1, GATHER_BYTES // (tokens * 2 * q.shape[2] * element_bytes))


def latents_in_torch(
    q: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    batch: RaggedBatch,
    scale: float,
    *,
    cache: Tensor | None = None,
    buffer: Tensor | None = None,
) -> Tensor:
    """Latent attention of every sequence over its cached and new tokens, as `kernels.attention.cpu_mla_decode` defines
    it, one sequence after another -> [T, H, R].

    q, q_rope      [T, H, R], absorbed, and [T, H, Rr]
    rows           [T, 1, R + Rr]: of the new tokens
    cache, buffer  [N, 1, 1, R + Rr], of cached tokens
    """
    queries, out = torch.cat((q, q_rope), dim=-1), torch.empty_like(q, memory_format=torch.contiguous_format)
    for s, (first, last, start, lowest) in enumerate(batch.spans):
        keys = rows[first:last]
        if start > lowest:
            (keys,) = _with_context((keys,), batch, s, ((cache, None), (buffer, None)), slice(0, 1))
        parts = queries[first:last], keys, keys[..., : q.shape[2]]
        out[first:last] = _attend_one(*parts, scale, None, None, None)
    return out


def _with_context(
    new: Sequence[Tensor],
    batch: RaggedBatch,
    sequence: int,
    pools: Sequence[tuple[Tensor | None, Tensor | None]],
    heads: slice,
) -> tuple[Tensor, ...]:
    """Keys and values (or rows of latents) of cached and ``new`` tokens, each [cached + new, heads, D]."""
    index, in_cache, cuts = batch.gathered
    some, count = slice(cuts[sequence], cuts[sequence + 1]), cuts[sequence + 1] - cuts[sequence]
    both = new[0].new_empty((count + len(new[0]), len(new), *new[0].shape[1:]))
    for which, tensor in enumerate(new):
        both[count:, which] = tensor
    tiers = [(pool, scales) for (pool, scales), present in zip(pools, batch.tiers, strict=True) if present]
    parts = []
    for pool, scales in tiers:
        assert pool is not None
        if len(tiers) == 1 and scales is None:
            torch.index_select(pool[:, :, heads], 0, index[some], out=both[:count])
            return both.unbind(1)
        row = index[some].clamp(max=len(pool) - 1)  # of a token of the other tier: any row
        rows = pool[:, :, heads].index_select(0, row)
        if scales is not None:
            rows = rows.float() * scales[:, :, heads].index_select(0, row).unsqueeze(-1)
        parts.append(rows)
    both[:count] = parts[0] if len(parts) == 1 else torch.where(in_cache[some].view(-1, 1, 1, 1), parts[0], parts[1])
    return both.unbind(1)


def _attend_one(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    """Attention of the last tokens of a sequence, q [n, Hq, D], to its keys [m, Hkv, D] and values [m, Hkv, Dv]
    -> [n, Hq, Dv]."""
    count, kv_heads, context = q.shape[0], k.shape[1], k.shape[0] - q.shape[0]
    if window is not None and k.shape[0] > count + window - 1:  # more than any row sees
        context = window - 1
        k, v = k[-count - context :], v[-count - context :]
    masked = count > 1 and (context > 0 or (window is not None and count > window))
    plain = sinks is None and softcap is None
    # Batch = kv heads, heads = the queries that share one: keys and values are expanded views, never copies.
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    keys, values = (tensor.permute(1, 0, 2).unsqueeze(1) for tensor in (k, v))
    if count == 1 and plain:
        attended = functional.scaled_dot_product_attention(grouped.transpose(1, 2), keys, values, scale=scale)
        return attended.transpose(1, 2).permute(2, 0, 1, 3).flatten(1, 2)
    keys, values = (tensor.expand(-1, grouped.shape[1], -1, -1) for tensor in (keys, values))
    if plain and not masked:
        attended = functional.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale)
        return attended.permute(2, 0, 1, 3).flatten(1, 2)
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    for first in range(0, count, CHUNK_ROWS):
        last = min(first + CHUNK_ROWS, count)
        mask, seen = _mask(first, last, context, window, q.device), context + last
        if plain:
            part = functional.scaled_dot_product_attention(
                grouped[:, :, first:last], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=scale
            )
            out[first:last] = part.permute(2, 0, 1, 3).flatten(1, 2)
        else:
            both = k[:seen], v[:seen]
            out[first:last] = reference.attend(q[first:last], *both, scale, mask, sinks=sinks, softcap=softcap)
    return out


def _mask(first: int, last: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """bool [rows, positions], true where rows ``first`` to ``last`` attend to positions 0 to ``context + last``."""
    position = torch.arange(context + first, context + last, device=device).unsqueeze(1)
    key_position = torch.arange(context + last, device=device)
    seen = key_position <= position
    if window is not None:
        seen &= key_position > position - window
    return seen


def append(
    k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, *, rows: Tensor | None = None, cache_scale: Tensor | None = None
) -> None:
    """Write rows ``rows`` (None: all) of k and v [T, Hkv, D] to the slots ``slots`` of ``cache`` [N, 2, Hkv, D].

    rows, slots  int64 [n]; on a device they are not checked; slots differ from each other
    cache        dtype of k and v; or int8, with ``cache_scale`` float32 [N, 2, Hkv], which is written too: a row's
                 largest magnitude / 127, its codes the nearest multiples of that; nan for a row that is not finite
    """
    _check_append(k, v, cache, slots, rows, cache_scale)
    count, (_, kv_heads, head_dim) = len(slots), k.shape
    if not serving.serves(k.device, k.dtype)[0]:
        append_in_torch(k, v, cache, slots, rows=rows, cache_scale=cache_scale)
        return
    from moelight.kernels.gpu import attention_triton

    if count:
        with Device(k.device).context():
            attention_triton.append[(count,)](
                k,
                v,
                cache,
                cache if cache_scale is None else cache_scale,
                slots if rows is None else rows,
                slots,
                k.stride(0),
                v.stride(0),
                kv_heads,
                PICKED=rows is not None,
                INT8=cache_scale is not None,
                D=head_dim,
                BD=_padded(head_dim),
                BH=_padded(kv_heads),
            )


def through_int8(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [T, Hkv, D] as an int8 cache gives them back (`append`, then `attend`), new tensors in their dtype."""
    _check_rows(k, v)
    (tokens, kv_heads, head_dim), served = k.shape, serving.serves(k.device, k.dtype)[0]
    if not served or not tokens:
        return through_int8_in_torch(k, v)
    from moelight.kernels.gpu import attention_triton

    out = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (k, v))
    with Device(k.device).context():
        attention_triton.through_int8[(tokens,)](
            *(k, v, *out, k.stride(0), v.stride(0), kv_heads),
            BY_HAND=on_host(k) and k.dtype == torch.bfloat16,
            D=head_dim,
            BD=_padded(head_dim),
            BH=_padded(kv_heads),
        )
    return out[0], out[1]


def through_int8_in_torch(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`through_int8` in torch, on any device."""
    keys, values = (reference.dequantise(*reference.quantise(tensor), k.dtype) for tensor in (k, v))
    return keys, values


def append_in_torch(
    k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, *, rows: Tensor | None = None, cache_scale: Tensor | None = None
) -> None:
    """`append` in torch, on any device."""
    for which, tensor in enumerate((k, v)):
        values = tensor if rows is None else tensor.index_select(0, rows)
        if cache_scale is not None:
            values, factors = reference.quantise(values)
            cache_scale[:, which].index_copy_(0, slots, factors)
        cache[:, which].index_copy_(0, slots, values)


def fetch(source: Tensor, into: Tensor, pieces: Tensor) -> None:
    """Copy rows of ``source``, in host memory that `serving.reads_host` accepts, to ``into`` on the device: one launch.

    source, into  [N, ...] of one dtype and row shape, contiguous; rows of a multiple of 4 bytes
    pieces        int32 [n, 3] on the device, not checked there: first row of the source, first row of ``into``, count
    """
    check_tensor("source", source, into.dtype, (None, *into.shape[1:]), gap=False)
    check_tensor("into", into, source.dtype, into.shape, device=None, gap=False)
    check_tensor("pieces", pieces, torch.int32, (None, 3), device=into.device, gap=False)
    if on_host(pieces):
        arguments.check_indices("pieces", pieces, max(len(source), len(into)) + 1)
    from moelight.kernels.gpu import attention_triton

    words = (tensor.view(len(tensor), -1).view(torch.int32) for tensor in (source, into))
    width, count = into[0].numel() * into.element_size() // 4, len(pieces)
    with Device(into.device).context():
        grid = (min(count, _FETCH_PROGRAMS),)
        attention_triton.fetch[grid](*words, pieces, count, width, BW=_FETCH_NUMBERS)


def attention_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: RaggedBatch,
    scale: float,
    tile: tiles.AttentionTile,
    *,
    decodes: bool,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    cache: Tensor | None,
    buffer: Tensor | None,
    cache_scale: Tensor | None,
    buffer_scale: Tensor | None,
    out: Tensor,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and constants of `attention_triton.attend` in one of its forms."""
    (_, heads, head_dim), kv_heads, padded = q.shape, k.shape[1], _padded(q.shape[2])
    pools = [tensor for tensor in (cache, buffer) if tensor is not None] or [q]
    scales = [tensor for tensor in (cache_scale, buffer_scale) if tensor is not None] or [q]
    by_hand = on_host(q) and q.dtype == torch.bfloat16
    arguments = (
        *(q, k, v, out, pools[0], pools[-1], scales[0], scales[-1]),
        *(batch.sequences, batch.tiles, batch.entries, out if sinks is None else sinks),
        *(scale, softcap or 1.0, min(window or 0, _FOREVER)),
        *(q.stride(0), k.stride(0), v.stride(0), kv_heads),
    )
    constants = {
        "DECODES": decodes,
        "CACHED": cache is not None or buffer is not None,
        "INT8": scales[0] is not q,
        "SINKS": sinks is not None,
        "CAPPED": softcap is not None,
        "WINDOWED": window is not None,
        "GROUP": heads // kv_heads,
        "D": head_dim,
        "BD": padded,
        "P": batch.block_size,
        "BM": tile.rows,
        "BN": tile.keys,
        "DEPTH": min(tile.depth, padded),
        "ALIGNMENT": math.gcd(_ALIGNMENT_BYTES, head_dim * pools[0].element_size()),
        "PRODUCT": triton_dtype(torch.float32 if by_hand else q.dtype),
        "BY_HAND": by_hand,
    }
    return arguments, constants


def _tile(device: torch.device, dtype: torch.dtype, group: int, head_dim: int, *, decodes: bool) -> tiles.AttentionTile:
    card, itemsize = tiles.UNITS_SINCE, 2  # of the interpreter, for which few large tiles are best
    if Device(device).cuda:
        card, itemsize = compute_capability(device.index), dtype.itemsize
    return tiles.choose_attention(card, itemsize=itemsize, head_dim=_padded(head_dim), group=group, decodes=decodes)


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: object,
    sinks: Tensor | None,
    pools: tuple[Tensor | None, Tensor | None],
    scales: tuple[Tensor | None, Tensor | None],
    out: Tensor | None,
) -> None:
    tokens, heads, head_dim = check_tensor("q", q, FLOATS, (None, None, None), device=None)
    if not 8 <= head_dim <= MOST_HEAD_DIM or head_dim % 8:
        raise ValueError(f"q: head size must be a multiple of 8 from 8 to {MOST_HEAD_DIM}, is {head_dim}")
    _, kv_heads, _ = check_tensor("k", k, q.dtype, (tokens, None, head_dim), device=q.device)
    check_tensor("v", v, q.dtype, k.shape, device=q.device)
    _check_alignment(q=q, k=k, v=v, cache=pools[0], buffer=pools[1])
    if not kv_heads or not heads or heads % kv_heads:
        raise ValueError(f"q: its {heads} heads are no multiple of the {kv_heads} of keys and values")
    if not isinstance(batch, RaggedBatch) or batch.rows != tokens or batch.table.device != q.device:
        raise ValueError(f"batch: must be a RaggedBatch of the {tokens} rows of q, its table on {q.device}")
    if sinks is not None:
        check_tensor("sinks", sinks, torch.float32, (heads,), device=q.device)
    if out is not None:
        check_tensor("out", out, q.dtype, q.shape, device=q.device, gap=False)
    stored = torch.int8 if any(scale is not None for scale in scales) else q.dtype
    for tier, (name, pool, scale) in enumerate(zip(("cache", "buffer"), pools, scales, strict=True)):
        if pool is None and batch.tiers[tier]:
            raise ValueError(f"{name}: must be given, the batch has cached tokens there")
        if (scale is not None) != (pool is not None and stored == torch.int8):
            raise ValueError(f"{name}_scale: int8 caches need it, others have none")
        if pool is not None:
            shape = check_tensor(name, pool, stored, (None, 2, kv_heads, head_dim), device=q.device, gap=False)
            if scale is not None:
                check_tensor(f"{name}_scale", scale, torch.float32, shape[:3], device=q.device, gap=False)
            if on_host(q) and batch.extents[tier] > len(pool):
                raise ValueError(f"{name}: has {len(pool)} slots, the batch names slot {batch.extents[tier] - 1}")


def _check_alignment(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        stride = 0 if tensor is None else tensor.stride(0) * tensor.element_size()
        if tensor is not None and (tensor.data_ptr() % _ALIGNMENT_BYTES or stride % _ALIGNMENT_BYTES):
            raise ValueError(f"{name}: its rows must begin at multiples of {_ALIGNMENT_BYTES} bytes")


def _check_rows(k: Tensor, v: Tensor) -> torch.Size:
    shape = check_tensor("k", k, FLOATS, (None, None, None), device=None)
    check_tensor("v", v, k.dtype, shape, device=k.device)
    return shape


def _check_append(
    k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, rows: Tensor | None, cache_scale: Tensor | None
) -> None:
    tokens, kv_heads, head_dim = _check_rows(k, v)
    stored = k.dtype if cache_scale is None else torch.int8
    shape = check_tensor("cache", cache, stored, (None, 2, kv_heads, head_dim), device=k.device, gap=False)
    if cache_scale is not None:
        check_tensor("cache_scale", cache_scale, torch.float32, shape[:3], device=k.device, gap=False)
    (count,) = check_tensor("slots", slots, torch.int64, (tokens if rows is None else None,), device=k.device)
    arguments.check_indices("slots", slots, shape[0])
    if rows is not None:
        check_tensor("rows", rows, torch.int64, (count,), device=k.device)
        arguments.check_indices("rows", rows, tokens)
