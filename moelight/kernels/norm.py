"""Operations on a token's row between two products: root-mean-square norm, residual sum, rotary embedding.

Selects the implementation: the extension for tensors in CPU memory where it is built, else `reference.py`. Every wrong
argument of a `cpu_` function is a ValueError that names it.

Legend: T tokens, G heads of a token, H elements, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moelight.kernels import checks, native, reference
from moelight.kernels.dlpack import as_dlpack


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, add: Tensor | None = None) -> Tensor:
    """`cpu_rms_norm`, on any device."""
    if x.device.type == "cpu":
        return cpu_rms_norm(x, weight, eps, add=add)
    if add is not None:
        x += add
    return reference.rms_norm(x, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`cpu_rotate`, on any device."""
    return cpu_rotate(x, cos, sin) if x.device.type == "cpu" else reference.rotate(x, cos, sin)


def cpu_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    add: Tensor | None = None,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Root-mean-square norm over the last dimension -> `out`, or a new tensor of x's shape.

    x        [T, H] or [T, G, H]: float32, bfloat16 or float16; there may be a gap between tokens
    weight   [H], dtype of x
    add      as x: added to x first, in place
    out      as x, and may be x
    threads  None for torch.get_num_threads()

    Rounded as HF transformers does: normalised in float32, rounded to x's dtype, then scaled. The result of a row
    is bit for bit independent of other rows and of the number of threads.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride or number.
    """
    _, _, threads = checks.check_scalars(1.0, None, threads)
    eps = _epsilon(eps)
    extension = native.extension()
    if extension is None:
        _rows("x", x)
        checks._layout("weight", weight, 1, x.dtype)
        checks._shape("weight", weight, (x.shape[-1],))
        if add is not None:
            _like("add", add, x)
        out = _output(out, x)
        if add is not None:
            x += add
        return out.copy_(reference.rms_norm(x, weight, eps))
    rows, added = _headed("x", x), None if add is None else _headed("add", add)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    extension.rms_norm(rows, as_dlpack("weight", weight), eps, added, _headed("out", out), threads)
    return out


def cpu_rotate(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor | None = None, threads: int | None = None) -> Tensor:
    """Rotate every head by its token's position -> `out`, or a new [T, heads, D]; element i is paired with i + D / 2.

    x         [T, heads, D]: float32, bfloat16 or float16, D even; there may be a gap between tokens
    cos, sin  [T, D], dtype of x; the second half repeats the first
    out       as x, and may be x
    threads   None for torch.get_num_threads()

    Rounded as HF transformers does: both products, then their sum.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape or stride.
    """
    _, _, threads = checks.check_scalars(1.0, None, threads)
    extension = native.extension()
    if extension is None:
        _rows("x", x)
        if x.ndim != 3 or x.shape[2] % 2:
            raise ValueError(f"x: must be [T, heads, D] with an even D, has shape {list(x.shape)}")
        for name, angles in (("cos", cos), ("sin", sin)):
            checks._layout(name, angles, 2, x.dtype)
            checks._shape(name, angles, (x.shape[0], x.shape[2]))
        return _output(out, x).copy_(reference.rotate(x, cos, sin))
    rows = as_dlpack("x", x)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    extension.rotate(rows, as_dlpack("cos", cos), as_dlpack("sin", sin), as_dlpack("out", out), threads)
    return out


def _epsilon(eps: object) -> float:
    if not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        raise ValueError(f"eps: must be a finite number from 0 on, is {eps!r}")
    return float(eps)


def _rows(name: str, tensor: Tensor) -> None:
    checks._tensor(name, tensor)
    if tensor.dtype not in checks.FLOATS:
        raise ValueError(f"{name}: must be float32, bfloat16 or float16, is {tensor.dtype}")
    if tensor.ndim not in (2, 3):
        raise ValueError(f"{name}: must have 2 or 3 dimensions, has shape {list(tensor.shape)}")
    checks._layout(name, tensor, tensor.ndim, tensor.dtype)


def _like(name: str, tensor: Tensor, x: Tensor) -> None:
    checks._layout(name, tensor, x.ndim, x.dtype)
    checks._shape(name, tensor, tuple(x.shape))


def _output(out: Tensor | None, x: Tensor) -> Tensor:
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype)
    _like("out", out, x)
    return out


def _headed(name: str, x: Tensor) -> object:
    """[T, G, H], or [T, H] as tokens of one head, exported to the extension."""
    return as_dlpack(name, x.unsqueeze(1) if getattr(x, "ndim", 0) == 2 else x)
