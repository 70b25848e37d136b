"""Operations on a token's row between two products: root-mean-square norm, residual sum, rotary embedding.

Native for tensors in CPU memory where the extension is built, else `reference.py`. Every wrong argument of a `cpu_`
function is a ValueError that names it. ``threads`` None stands for torch.get_num_threads().

Legend: T tokens, G heads of a token, H elements, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.kernels import arguments, native, reference
from moelight.kernels.arguments import FLOATS, as_dlpack, check_tensor, lend, stored


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, add: Tensor | None = None) -> Tensor:
    """`cpu_rms_norm`, on any device."""
    if x.device.type == "cpu":
        return cpu_rms_norm(x, weight, eps, add=add)
    if add is not None:
        x += add
    return reference.rms_norm(x, weight, eps)


def rms_norm_mixed(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    add: Tensor | None = None,
    finite: Tensor | None = None,
) -> Tensor:
    """`rms_norm` of float32 rows -> `dtype`, computed in float32 and rounded once; any device.

    x       float32 [T, H]
    weight  [H], any dtype
    add     [T, H], any dtype: added to x first, in place
    finite  float32 [1]: remains finite as long as every result is, at no cost of a synchronisation
    """
    if add is not None:
        x += add
    if x.device.type == "cpu":
        found = cpu_rms_norm(x, weight.float(), eps).to(dtype)
    else:
        found = reference.rms_norm(x, weight, eps).to(dtype)
    if finite is not None:
        finite += found.sum(dtype=torch.float32)
    return found


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

    Rounded as HF transformers does: normalised in float32, rounded to x's dtype, then scaled. The result of a row
    is bit for bit independent of other rows and of the number of threads.
    """
    threads, eps = arguments.check_threads(threads), arguments.check_number("eps", eps, 0)
    extension = native.extension()
    if extension is None:
        shape = check_tensor("x", x, FLOATS, (None,) * (2 if getattr(x, "ndim", 0) == 2 else 3))
        check_tensor("weight", weight, x.dtype, shape[-1:])
        for name, tensor in (("add", add), ("out", out)):
            if tensor is not None:
                check_tensor(name, tensor, x.dtype, shape)
        if add is not None:
            x += add
        return stored(reference.rms_norm(x, weight, eps), out)
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

    Rounded as HF transformers does: both products, then their sum.
    """
    threads = arguments.check_threads(threads)
    extension = native.extension()
    if extension is None:
        tokens, heads, size = check_tensor("x", x, FLOATS, (None,) * 3)
        if size % 2:
            raise ValueError(f"x: must be [T, heads, D] with an even D, has shape {list(x.shape)}")
        for name, tensor, shape in (
            ("cos", cos, (tokens, size)),
            ("sin", sin, (tokens, size)),
            ("out", x if out is None else out, (tokens, heads, size)),
        ):
            check_tensor(name, tensor, x.dtype, shape)
        return stored(reference.rotate(x, cos, sin), out)
    rows = as_dlpack("x", x)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    extension.rotate(rows, *lend(cos=cos, sin=sin, out=out), threads)
    return out


def _headed(name: str, x: Tensor) -> object:
    """[T, G, H], or [T, H] as tokens of one head, exported to the extension."""
    return as_dlpack(name, x.unsqueeze(1) if getattr(x, "ndim", 0) == 2 else x)
