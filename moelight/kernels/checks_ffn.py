"""Argument checks of linear layers and experts, for the reference implementations; the extension has the same checks.

Depends only on shapes, dtypes, strides and ranges. Every error is a ValueError that names the argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from moelight.kernels.reference_ffn import ACTIVATIONS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8)
GROUP_STEP = 32
_FOREVER = 1 << 62

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
    _layout("weight", weight, 2)
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
    _layout("gate_up", wide[0], 2)
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
    _layout("offsets", offsets, 1)
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


def _tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: must be a tensor, is {type(value).__name__}")
    if value.layout != torch.strided or value.device.type != "cpu":
        raise ValueError(f"{name}: must be a dense tensor in CPU memory")


def _layout(name: str, tensor: Tensor, ndim: int) -> None:
    _tensor(name, tensor)
    if tensor.ndim != ndim:
        raise ValueError(f"{name}: must have {ndim} dimensions, has shape {list(tensor.shape)}")
    if ndim == 2 and tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name}: must be contiguous beyond its first dimension")
    if len(tensor) > 1 and tensor.stride(0) < (tensor.shape[1] if ndim == 2 else 1):
        raise ValueError(f"{name}: rows overlap")


def _tokens(name: str, tensor: Tensor) -> None:
    _layout(name, tensor, 2)
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: must be float32, bfloat16 or float16, is {tensor.dtype}")


def _stored(name: str, weight: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    _layout(name, weight, 2)
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
    _layout(name, bias, 1)
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
    _layout(name, scale, 1 if flat else 2)
    if scale.dtype != torch.float32:
        raise ValueError(f"{name}: must be float32, is {scale.dtype}")
    if tuple(scale.shape) != ((rows,) if flat else (rows, groups)) or not scale.is_contiguous():
        raise ValueError(f"{name}: must be contiguous of shape {[rows, groups]}, has {list(scale.shape)}")


def _out(out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if out is None:
        return
    _layout("out", out, 2)
    if out.dtype != dtype:
        raise ValueError(f"out: must be {dtype}, is {out.dtype}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out: must have shape {list(shape)}, has {list(out.shape)}")
