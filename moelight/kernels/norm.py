"""Operations on a token's row between two products: root-mean-square norm, residual sum, rotary embedding.

Native for tensors in CPU memory where the extension is built, Triton on a device that it serves, else `reference.py`.
Every wrong argument of a `cpu_` function, or of Triton's, is a ValueError that names it. ``threads`` None stands for
torch.get_num_threads().

Legend: T tokens, G heads of a token, H elements, D head size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moelight.kernels import arguments, native, reference
from moelight.kernels.arguments import FLOATS, as_dlpack, check_tensor, lend, stored
from moelight.kernels.caching_allocator import RESULTS
from moelight.kernels.device import Device
from moelight.kernels.gpu import serving
from moelight.kernels.gpu.routing import by_hand

_HEAD_NUMBERS = 1024  # half as many as a program of `finish_heads` holds


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, add: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`cpu_rms_norm`, on any device; x [T, H]."""
    if native.on_cpu(x):
        return cpu_rms_norm(x, weight, eps, add=add, out=out)
    if serving.serves(x.device, x.dtype)[0]:
        return _norm_in_triton(x, weight, arguments.check_number("eps", eps, 0), add, out)
    if add is not None:
        x += add
    return stored(reference.rms_norm(x, weight, eps), out)


def rms_norm_mixed(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    add: Tensor | None = None,
    out: Tensor | None = None,
    finite: Tensor | None = None,
) -> Tensor:
    """The norm of mixed precision -> ``out``, or a new [T, H]: computed in float32, rounded once, on any device.

    x       [T, H] float32, bfloat16 or float16
    weight  [H], any of these dtypes
    add     [T, H], any of these dtypes: added to x first, in place
    out     [T, H] in `dtype`, and may be x
    finite  float32 [1]: is NaN or infinite once a result was; nobody waits for it
    """
    if not native.on_cpu(x) and serving.serves(x.device, dtype)[0]:
        if out is None:
            out = torch.empty(x.shape, dtype=dtype, device=x.device)
        return _norm_in_triton(x, weight, arguments.check_number("eps", eps, 0), add, out, once=True, finite=finite)
    if add is not None:
        x += add
    result = stored(_norm_once(x, weight, eps, dtype), out)
    if finite is not None:
        finite += result.sum(dtype=torch.float32)
    return result


def finish_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    queries: int,
    keys: int,
    clip: float | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    mixed: bool = False,
) -> None:
    """From the product to queries, keys and values, in place and on any device.

    qkv      [T, heads, D] float32, bfloat16 or float16, D even: ``queries`` heads, ``keys`` heads, then values
    cos, sin [T, D] in dtype of qkv, contiguous: queries and keys are rotated by them, as by `cpu_rotate`
    clip     all numbers are first brought within ±clip
    norms    [D] each: every query and key is then normed as by `cpu_rms_norm`, with ``eps``
    mixed    norms as by `rms_norm_mixed`; if a query or key of a token is not finite, its values become NaN, to which
             the token itself attends: attention would lose it, because a score of -inf weighs nothing
    """
    if not native.on_cpu(qkv) and serving.serves(qkv.device, qkv.dtype)[0]:
        _finish_in_triton(qkv, cos, sin, queries, keys, clip, norms, eps, mixed=mixed)
        return
    if clip is not None:
        qkv.clamp_(-clip, clip)
    turned, values = qkv.tensor_split((queries + keys,), dim=1)
    for heads, weight in zip(turned.split((queries, keys), dim=1), norms or (), strict=norms is not None):
        if mixed:
            heads.copy_(_norm_once(heads, weight, eps, qkv.dtype))
        elif native.on_cpu(qkv):
            cpu_rms_norm(heads, weight, eps, out=heads)
        else:
            heads.copy_(reference.rms_norm(heads, weight, eps))
    if native.on_cpu(qkv):
        cpu_rotate(turned, cos, sin, out=turned)
    else:
        turned.copy_(reference.rotate(turned, cos, sin))
    if mixed:
        values.add_(turned.sum((1, 2), keepdim=True, dtype=torch.float32), alpha=0)


def _norm_once(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    norm = cpu_rms_norm if native.on_cpu(x) else reference.rms_norm
    return norm(x.float(), weight.float(), eps).to(dtype)


def _norm_in_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    add: Tensor | None,
    out: Tensor | None,
    *,
    once: bool = False,
    finite: Tensor | None = None,
) -> Tensor:
    """``once``: only the result is rounded, and dtypes may differ."""
    from moelight.kernels.gpu import rows_triton

    rows, width = check_tensor("x", x, FLOATS, (None, None), device=None)
    dtypes = FLOATS if once else x.dtype
    check_tensor("weight", weight, dtypes, (width,), device=x.device)
    for name, tensor in (("add", add), ("out", out)):
        if tensor is not None:
            check_tensor(name, tensor, dtypes, (rows, width), device=x.device)
    if finite is not None:
        check_tensor("finite", finite, torch.float32, (1,), device=x.device)
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    added, padded = x if add is None else add, 1 << (width - 1).bit_length()
    watch = out if finite is None else finite
    arguments = (x, added, weight, out, watch, width, x.stride(0), added.stride(0), out.stride(0), eps)
    flags = {"ADD": add is not None, "ONCE": once, "WATCHED": finite is not None, "BY_HAND": by_hand(out)}
    with Device(x.device).context():
        rows_triton.rms_norm[(rows,)](*arguments, **flags, PADDED=padded, **launch_options(padded))
    return out


def _finish_in_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    queries: int,
    keys: int,
    clip: float | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    *,
    mixed: bool,
) -> None:
    from moelight.kernels.gpu import rows_triton

    tokens, every, size = check_tensor("qkv", qkv, FLOATS, (None, None, None), device=None)
    if size % 2 or queries + keys > every:
        raise ValueError(f"qkv: must be [T, heads, D], D even, for {queries} + {keys} heads, is {list(qkv.shape)}")
    check_tensor("cos", cos, qkv.dtype, (tokens, size), device=qkv.device, gap=False)
    check_tensor("sin", sin, qkv.dtype, (tokens, size), device=qkv.device, gap=False)
    weights = norms or (qkv, qkv)
    for name, weight in zip(("q_norm", "k_norm"), norms or (), strict=norms is not None):
        check_tensor(name, weight, FLOATS if mixed else qkv.dtype, (size,), device=qkv.device)
    if not qkv.numel():
        return
    rotated = queries + keys
    heads = rotated if clip is None and not mixed else every
    padded = 1 << (size // 2 - 1).bit_length()
    block = max(1, min(_HEAD_NUMBERS // padded, 1 << (heads - 1).bit_length()))
    limit = 0.0 if clip is None else _rounded(clip, qkv.dtype)
    arguments = (qkv, cos, sin, *weights, heads, queries, rotated, size, qkv.stride(0), size, limit, eps)
    constants = {"CLIP": clip is not None, "NORM": norms is not None, "MIXED": mixed, "BY_HAND": by_hand(qkv)}
    with Device(qkv.device).context():
        rows_triton.finish_heads[(tokens, 1 if mixed else -(-heads // block))](
            *arguments, **constants, BH=block, PADDED=padded, **launch_options(2 * block * padded)
        )


@cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    """``number`` in ``dtype``, to which torch rounds a bound too."""
    return torch.tensor(number, dtype=dtype).item()


def launch_options(count: int) -> dict[str, Any]:
    """Warps of a program over ``count``; sums and products are rounded apart, as torch rounds them."""
    return {"num_warps": max(1, min(16, count // 512)), "enable_fp_fusion": False}


def cpu_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    add: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Root-mean-square norm over the last dimension -> `out`, or a new tensor of x's shape.

    x        [T, H] or [T, G, H]: float32, bfloat16 or float16; there may be a gap between tokens
    weight   [H], dtype of x
    add      as x: added to x first, in place
    gate     as x: silu of it is a factor of the result
    out      as x, and may be x

    Rounded as HF transformers does: normalised in float32, rounded to x's dtype, then scaled, and rounded again before
    the gate. The result of a row
    is bit for bit independent of other rows and of the number of threads.
    """
    threads, eps = arguments.check_threads(threads), arguments.check_number("eps", eps, 0)
    extension = native.extension()
    if extension is None:
        shape = check_tensor("x", x, FLOATS, (None,) * (2 if getattr(x, "ndim", 0) == 2 else 3))
        check_tensor("weight", weight, x.dtype, shape[-1:])
        for name, tensor in (("add", add), ("gate", gate), ("out", out)):
            if tensor is not None:
                check_tensor(name, tensor, x.dtype, shape)
        if add is not None:
            x += add
        return stored(reference.rms_norm(x, weight, eps, gate=gate), out)
    rows, added = _headed("x", x), None if add is None else _headed("add", add)
    factor = None if gate is None else _headed("gate", gate)
    if out is None:
        out = RESULTS.empty(x.shape, x.dtype)
    extension.rms_norm(rows, as_dlpack("weight", weight), eps, added, factor, _headed("out", out), threads)
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
        out = RESULTS.empty(x.shape, x.dtype)
    extension.rotate(rows, *lend(cos=cos, sin=sin, out=out), threads)
    return out


def _headed(name: str, x: Tensor) -> object:
    """[T, G, H], or [T, H] as tokens of one head, exported to the extension."""
    return as_dlpack(name, x.unsqueeze(1) if getattr(x, "ndim", 0) == 2 else x)
