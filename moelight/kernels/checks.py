"""Argument checks of attention, for the reference implementations; the extension has the same checks.

Depends only on shapes, dtypes, strides and ranges. Every error is a ValueError that names the argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from moelight.core.policy import KV_BLOCK_SIZES
from moelight.kernels.reference import ACTIVATIONS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
SOFTCAPS = (1e-6, 1e6)
_FOREVER = 1 << 62


def check_scalars(scale: object, window: object, threads: object) -> tuple[float, int | None, int]:
    """Check the three numbers of a call; return them, `threads` resolved."""
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale: must be a finite number, is {scale!r}")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window: must be a positive integer or None, is {window!r}")
    if threads is None:
        threads = torch.get_num_threads()
    elif not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads: must be a positive integer or None, is {threads!r}")
    return scale, window if window is None else min(window, _FOREVER), min(threads, _FOREVER)


def check_softcap(cap: object) -> float | None:
    """Check the cap of scores; beyond these bounds it has no meaning that float32 could hold."""
    if cap is None:
        return None
    if not isinstance(cap, (int, float)) or not SOFTCAPS[0] <= cap <= SOFTCAPS[1]:
        raise ValueError(f"softcap: must be a number from {SOFTCAPS[0]} to {SOFTCAPS[1]} or None, is {cap!r}")
    return float(cap)


def check_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    window: int | None,
    out: Tensor | None,
) -> None:
    """Check the arguments of `cpu_gqa_decode`, except those of `check_decode_extras`."""
    blocks, kv_heads, block_size, head_dim = _caches(k_cache, v_cache)
    _tensor("q", q)
    _layout("q", q, 3, _new_dtype("q", q, k_cache))
    batch, q_heads, _ = q.shape
    _shape("q", q, (batch, q_heads, head_dim))
    if q_heads < 1 or q_heads % kv_heads:
        raise ValueError(f"q: its {q_heads} heads are no multiple of the cache's {kv_heads}")
    if out is not None:
        _layout("out", out, 3, q.dtype)
        _shape("out", out, tuple(q.shape))
    _sequences(block_tables, seq_lens, batch, window, blocks, block_size)


def check_decode_extras(
    q: Tensor,
    k_cache: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
) -> None:
    """Check the optional arguments of `cpu_gqa_decode`, once q and k_cache are checked."""
    batch, q_heads, head_dim = q.shape
    _scales(k_cache, k_scale, v_scale)
    if sinks is not None:
        _layout("sinks", sinks, 1, torch.float32)
        _shape("sinks", sinks, (q_heads,))
    for name, one, other in (("k_new", k_new, v_new), ("v_new", v_new, k_new)):
        if one is None and other is not None:
            raise ValueError(f"{name}: k_new and v_new come together")
        if one is not None:
            _layout(name, one, 3, q.dtype)
            _shape(name, one, (batch, k_cache.shape[1], head_dim))


def check_append(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Check the arguments of `cpu_kv_append`."""
    blocks, kv_heads, block_size, head_dim = _caches(k_cache, v_cache)
    _layout("slots", slots, 1, torch.int64)
    _tensor("k_new", k_new)
    dtype = _new_dtype("k_new", k_new, k_cache)
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        _layout(name, new, 3, dtype)
        _shape(name, new, (slots.shape[0], kv_heads, head_dim))
    _scales(k_cache, k_scale, v_scale)
    _slots(slots, blocks * block_size)


def check_latent_decode(
    q_nope_absorbed: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor | None,
) -> None:
    """Check the arguments of `cpu_mla_decode`."""
    blocks, block_size, row = _latent_cache(cache)
    _layout("q_nope_absorbed", q_nope_absorbed, 3, cache.dtype)
    batch, heads, latent = q_nope_absorbed.shape
    if heads < 1 or latent < 1:
        raise ValueError(f"q_nope_absorbed: is empty: shape {list(q_nope_absorbed.shape)}")
    _layout("q_rope", q_rope, 3, cache.dtype)
    rotary = q_rope.shape[2]
    _shape("q_rope", q_rope, (batch, heads, rotary))
    if rotary < 1:
        raise ValueError(f"q_rope: is empty: shape {list(q_rope.shape)}")
    if latent + rotary != row:
        raise ValueError(f"cache: its rows have {row} elements, the queries {latent} + {rotary}")
    if out is not None:
        _layout("out", out, 3, cache.dtype)
        _shape("out", out, tuple(q_nope_absorbed.shape))
    _sequences(block_tables, seq_lens, batch, None, blocks, block_size)


def check_latent_append(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Check the arguments of `cpu_mla_append`."""
    blocks, block_size, row = _latent_cache(cache)
    _layout("slots", slots, 1, torch.int64)
    _layout("new", new, 2, cache.dtype)
    _shape("new", new, (slots.shape[0], row))
    _slots(slots, blocks * block_size)


def _caches(k_cache: Tensor, v_cache: Tensor) -> tuple[int, int, int, int]:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _tensor(name, cache)
        if cache.dtype not in {*FLOATS, torch.int8}:
            raise ValueError(f"{name}: must be float32, bfloat16, float16 or int8, is {cache.dtype}")
        _layout(name, cache, 4, k_cache.dtype)
    _shape("v_cache", v_cache, tuple(k_cache.shape))
    blocks, kv_heads, block_size, head_dim = k_cache.shape
    if kv_heads < 1:
        raise ValueError(f"k_cache: is empty: shape {list(k_cache.shape)}")
    if block_size not in KV_BLOCK_SIZES:
        raise ValueError(f"k_cache: block size must be one of {KV_BLOCK_SIZES}, shape is {list(k_cache.shape)}")
    if not 8 <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(f"k_cache: head size must be a multiple of 8 from 8 to {MAX_HEAD_DIM}, is {head_dim}")
    return blocks, kv_heads, block_size, head_dim


def _new_dtype(name: str, tensor: Tensor, k_cache: Tensor) -> torch.dtype:
    """Dtype of queries and new rows: that of the cache, or any float beside int8."""
    if k_cache.dtype != torch.int8:
        return k_cache.dtype
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: must be float32, bfloat16 or float16, is {tensor.dtype}")
    return tensor.dtype


def _scales(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != (k_cache.dtype == torch.int8):
            raise ValueError(f"{name}: int8 caches need it, others have none")
        if scale is not None:
            _layout(name, scale, 3, torch.float32)
            _shape(name, scale, tuple(k_cache.shape[:3]))


def _latent_cache(cache: Tensor) -> tuple[int, int, int]:
    _tensor("cache", cache)
    if cache.dtype not in FLOATS:
        raise ValueError(f"cache: must be float32, bfloat16 or float16, is {cache.dtype}")
    _layout("cache", cache, 3, cache.dtype)
    blocks, block_size, row = cache.shape
    if block_size < 1 or row < 1:
        raise ValueError(f"cache: is empty: shape {list(cache.shape)}")
    return blocks, block_size, row


def _tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: must be a tensor, is {type(value).__name__}")
    if value.layout != torch.strided or value.device.type != "cpu":
        raise ValueError(f"{name}: must be a dense tensor in CPU memory")


def _layout(name: str, tensor: Tensor, ndim: int, dtype: torch.dtype) -> None:
    _tensor(name, tensor)
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: must be {dtype}, is {tensor.dtype}")
    if tensor.ndim != ndim:
        raise ValueError(f"{name}: must have {ndim} dimensions, has shape {list(tensor.shape)}")
    if len(tensor) > 0 and not tensor[0].is_contiguous():
        raise ValueError(f"{name}: must be contiguous beyond its first dimension")
    row = tensor[:1].numel()
    if len(tensor) > 1 and (tensor.stride(0) < row or (ndim == 1 and tensor.stride(0) != 1)):
        raise ValueError(f"{name}: rows overlap or are not contiguous")


def _shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name}: must have shape {list(expected)}, has {list(tensor.shape)}")


def _slots(slots: Tensor, room: int) -> None:
    for token, slot in enumerate(slots.tolist()):
        if not 0 <= slot < room:
            raise ValueError(f"slots: entry {token} is {slot}, the cache has {room} slots")


def _sequences(
    block_tables: Tensor, seq_lens: Tensor, batch: int, window: int | None, blocks: int, block_size: int
) -> None:
    _layout("block_tables", block_tables, 2, torch.int32)
    _shape("block_tables", block_tables, (batch, block_tables.shape[1]))
    _layout("seq_lens", seq_lens, 1, torch.int32)
    _shape("seq_lens", seq_lens, (batch,))
    room = block_tables.shape[1] * block_size
    for b, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= room:
            raise ValueError(f"seq_lens: entry {b} is {length}, the block table holds 0 to {room}")
        first = 0 if window is None else max(0, length - window) // block_size
        for i, block in enumerate(block_tables[b, first : -(-length // block_size)].tolist(), start=first):
            if not 0 <= block < blocks:
                raise ValueError(f"block_tables: entry [{b}, {i}] is {block}, the cache has {blocks} blocks")


INTEGERS = (torch.int8, torch.uint8)
GROUP_STEP = 32

Tensors = Sequence[Tensor | None]


def check_ffn_scalars(group_size: object, threads: object) -> tuple[int | None, int]:
    """Check the group size and the number of threads; return both, `threads` resolved."""
    if group_size is not None and (
        isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1 or group_size % GROUP_STEP
    ):
        raise ValueError(f"group_size: must be a positive multiple of {GROUP_STEP} or None, is {group_size!r}")
    if threads is None:
        threads = torch.get_num_threads()
    elif not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads: must be a positive integer or None, is {threads!r}")
    return group_size if group_size is None else min(group_size, _FOREVER), min(threads, _FOREVER)


def check_activation(name: object) -> None:
    """Check that ``name`` is in `reference_ffn.ACTIVATIONS`."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation: must be one of {', '.join(ACTIVATIONS)}, is {name!r}")


def check_types(dtype: object, weight_dtype: object) -> tuple[int, int]:
    """Check the dtypes of tokens and weights; return their indices in `FLOATS` and `FLOATS + INTEGERS`, which are the
    extension's."""
    stored = FLOATS + INTEGERS
    if dtype not in FLOATS:
        raise ValueError(f"dtype: must be float32, bfloat16 or float16, is {dtype}")
    if weight_dtype not in stored:
        raise ValueError(f"weight_dtype: must be float32, bfloat16, float16, int8 or uint8, is {weight_dtype}")
    return FLOATS.index(dtype), stored.index(weight_dtype)


def check_sizes(**named: object) -> None:
    """Check that all sizes are positive integers; ``tokens`` may be 0."""
    for name, size in named.items():
        least = 0 if name == "tokens" else 1
        if isinstance(size, bool) or not isinstance(size, int) or not least <= size < 1 << 31:
            raise ValueError(f"{name}: must be an integer from {least} up, is {size!r}")


def check_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, group_size: int | None, out: Tensor | None
) -> None:
    """Check the arguments of `cpu_linear`."""
    _tokens("x", x)
    _matrix_layout("weight", weight, 2)
    shape = (weight.shape[0], x.shape[1])
    _stored("weight", weight, shape, weight.dtype)
    _bias("bias", bias, shape, x.dtype)
    _scale("scale", scale, weight.dtype, shape, group_size)
    _out(out, (x.shape[0], shape[0]), x.dtype)


def check_experts(
    x: Tensor,
    gate_up: Tensors,
    down: Tensors,
    offsets: Tensor,
    optional: Mapping[str, Tensors | None],
    group_size: int | None,
    out: Tensor | None,
) -> None:
    """Check the arguments of `cpu_expert_ffn`; ``optional``: biases and scales by name."""
    _tokens("x", x)
    busy = _busy(offsets, x.shape[0])
    count, hidden = offsets.shape[0] - 1, x.shape[1]
    wide = _list("gate_up", gate_up, count, busy)
    narrow = _list("down", down, count, busy)
    _out(out, (x.shape[0], hidden), x.dtype)
    if not busy:
        return
    _matrix_layout("gate_up", wide[0], 2)
    if wide[0].shape[0] % 2:
        raise ValueError(f"gate_up: must have an even number of rows, shape is {list(wide[0].shape)}")
    inner = wide[0].shape[0] // 2
    for name, weights, shape in (("gate_up", wide, (2 * inner, hidden)), ("down", narrow, (hidden, inner))):
        biases, scales = optional[f"{name}_bias"], optional[f"{name}_scale"]
        for weight in weights:
            _stored(name, weight, shape, weights[0].dtype)
        if biases is not None:
            some = _list(f"{name}_bias", biases, count, busy)
            for bias in some:
                _bias(f"{name}_bias", bias, shape, x.dtype)
                if bias.dtype != some[0].dtype:
                    raise ValueError(f"{name}_bias: its tensors must have one dtype")
        if scales is None:
            _scale(f"{name}_scale", None, weights[0].dtype, shape, group_size)
        else:
            for scale in _list(f"{name}_scale", scales, count, busy):
                _scale(f"{name}_scale", scale, weights[0].dtype, shape, group_size)


def _busy(offsets: Tensor, tokens: int) -> list[int]:
    """Experts that have rows."""
    _matrix_layout("offsets", offsets, 1)
    if offsets.dtype != torch.int32:
        raise ValueError(f"offsets: must be int32, is {offsets.dtype}")
    if len(offsets) > 1 and offsets.stride(0) != 1:
        raise ValueError("offsets: must be contiguous")
    cuts = offsets.tolist()
    if not cuts or cuts[0] != 0 or cuts[-1] != tokens or any(last < first for first, last in pairwise(cuts)):
        raise ValueError(f"offsets: must rise from 0 to the {tokens} rows of x, is {cuts}")
    return [expert for expert, (first, last) in enumerate(pairwise(cuts)) if last > first]


def _list(name: str, tensors: Tensors, count: int, busy: Sequence[int]) -> list[Tensor]:
    """Tensors of the experts that have rows."""
    if not isinstance(tensors, (list, tuple)):
        raise ValueError(f"{name}: must be a list with one tensor per expert, is {type(tensors).__name__}")
    if len(tensors) != count:
        raise ValueError(f"{name}: has {len(tensors)} entries, offsets is for {count} experts")
    for expert, tensor in enumerate(tensors):
        if tensor is not None or expert in busy:
            _tensor(name, tensor)
    return [tensors[expert] for expert in busy]


def _matrix_layout(name: str, tensor: Tensor, ndim: int) -> None:
    _tensor(name, tensor)
    if tensor.ndim != ndim:
        raise ValueError(f"{name}: must have {ndim} dimensions, has shape {list(tensor.shape)}")
    if ndim == 2 and tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name}: must be contiguous beyond its first dimension")
    if len(tensor) > 1 and tensor.stride(0) < (tensor.shape[1] if ndim == 2 else 1):
        raise ValueError(f"{name}: rows overlap")


def _tokens(name: str, tensor: Tensor) -> None:
    _matrix_layout(name, tensor, 2)
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: must be float32, bfloat16 or float16, is {tensor.dtype}")


def _stored(name: str, weight: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    _matrix_layout(name, weight, 2)
    if weight.dtype not in FLOATS + INTEGERS or weight.dtype != dtype:
        raise ValueError(f"{name}: must be float32, bfloat16, float16, int8 or uint8, all alike, is {weight.dtype}")
    rows, depth = shape
    if rows < 1 or depth < 1:
        raise ValueError(f"{name}: is empty")
    if weight.dtype == torch.uint8 and depth % 2:
        raise ValueError(f"{name}: two values a byte fill no row of {depth} values")
    columns = depth // 2 if weight.dtype == torch.uint8 else depth
    if tuple(weight.shape) != (rows, columns):
        raise ValueError(f"{name}: must have shape {[rows, columns]}, has {list(weight.shape)}")


def _bias(name: str, bias: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if bias is None:
        return
    _matrix_layout(name, bias, 1)
    if bias.dtype not in {torch.float32, dtype}:
        raise ValueError(f"{name}: must be float32 or {dtype}, is {bias.dtype}")
    if bias.shape[0] != shape[0] or not bias.is_contiguous():
        raise ValueError(f"{name}: must be contiguous of shape [{shape[0]}], has {list(bias.shape)}")


def _scale(name: str, scale: Tensor | None, dtype: torch.dtype, shape: tuple[int, int], group_size: int | None) -> None:
    if (scale is None) != (dtype in FLOATS):
        raise ValueError(f"{name}: must be given with integer weights, and with no others")
    if scale is None:
        return
    rows, depth = shape
    groups = 1 if group_size is None else -(-depth // group_size)
    _tensor(name, scale)
    flat = scale.ndim == 1 and groups == 1
    _matrix_layout(name, scale, 1 if flat else 2)
    if scale.dtype != torch.float32:
        raise ValueError(f"{name}: must be float32, is {scale.dtype}")
    if tuple(scale.shape) != ((rows,) if flat else (rows, groups)) or not scale.is_contiguous():
        raise ValueError(f"{name}: must be contiguous of shape {[rows, groups]}, has {list(scale.shape)}")


def _out(out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if out is None:
        return
    _matrix_layout("out", out, 2)
    if out.dtype != dtype:
        raise ValueError(f"out: must be {dtype}, is {out.dtype}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out: must have shape {list(shape)}, has {list(out.shape)}")
