"""Matrices in memory, of any format, as kernels take them. Floats are the format `plain`; as a weight a tensor stands
for such a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from moelight.core.errors import ConfigError
from moelight.formats.matrix import Matrix
from moelight.formats.plain import PLAIN_FORMATS
from moelight.kernels import arguments, native
from moelight.kernels.arguments import FLOATS, as_dlpack, check_tensor, lend, lend_given
from moelight.kernels.caching_allocator import RESULTS
from moelight.kernels.formats.reference import group_of

Weight: TypeAlias = Tensor | Matrix[Tensor]
Weights: TypeAlias = Sequence[Weight | None]
Stack: TypeAlias = tuple[Matrix[Tensor], ...]  # below one another: all quantised, or one of floats
VALUES = ".weight"  # of `PlainFormat`
INT8 = "int8"
ACTIVATIONS = ("auto", INT8)
_PLAIN = {to: PLAIN_FORMATS[name] for to, name in zip(FLOATS, ("F32", "BF16", "F16"), strict=True)}


def stack_of(tensor: Tensor) -> Stack:
    """``tensor`` [R, C] of floats, on any device, as a stack of one matrix."""
    rows, columns = tensor.shape
    return (Matrix(stored=_PLAIN[tensor.dtype], rows=rows, columns=columns, tensors={VALUES: tensor}),)


def floats_of(stack: Stack) -> Tensor | None:
    """The tensor of `stack_of`; None for quantised matrices."""
    return None if stack[0].stored.is_quantised else stack[0].tensors[VALUES]


def as_matrix(
    name: str, weight: object, device: torch.device | None = arguments.CPU, *, gap: bool = True
) -> Matrix[Tensor]:
    """``weight``, or of a tensor [R, C] of floats, which `check_tensor` accepts, the matrix; raises ValueError that
    names ``name``."""
    if isinstance(weight, Matrix):
        return weight
    tensor = arguments.check_dense(name, weight, device)
    check_tensor(name, upright(tensor), FLOATS, (None, None), device=device, gap=gap)
    return stack_of(tensor)[0]


def matrix_of(weight: Weight) -> Matrix[Tensor]:
    """`as_matrix` of a weight that has been checked."""
    return weight if isinstance(weight, Matrix) else stack_of(weight)[0]


def upright(tensor: Tensor) -> Tensor:
    """``tensor``, or its transpose if that has the contiguous rows."""
    transposed = tensor.ndim == 2 and tensor.shape[1] > 1 and tensor.stride(1) != 1 and tensor.stride(0) == 1
    return tensor.t() if transposed else tensor


def lend_weight(name: str, weight: Weight) -> object:
    """The extension's arguments for ``weight``: of floats a DLPack capsule; else format and sizes, and capsules of
    codes, scales, zero points and order."""
    if not isinstance(weight, Matrix):
        return as_dlpack(name, weight)
    form, parts = weight.stored, weight.tensors
    if (floats := floats_of((weight,))) is not None:
        return as_dlpack(name, floats)
    lent: list[object] = [None] * 4
    needed = (True, True, form.has_offsets, form.order)
    for index, suffix in enumerate(form.names):
        if not needed[index]:
            continue
        if suffix not in parts:
            raise ValueError(f"{name}: its part {suffix} is missing")
        lent[index] = as_dlpack(name, parts[suffix])
    return (
        form.native_name,
        form.bits,
        weight.rows,
        weight.columns,
        form.group,
        form.group_rows,
        form.zero_bias,
        *lent,
    )


def multiply(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    *,
    activations: str = "auto",
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """`kernels.ffn.cpu_linear` by the extension, which is available."""
    extension, threads = native.extension(), arguments.check_threads(threads)
    assert extension is not None
    lent = [as_dlpack("x", x), lend_weight("weight", weight), *lend_given(bias=bias)]
    if out is None:
        out = RESULTS.empty((_rows("x", x.shape), _rows("weight", weight.shape)), x.dtype)
    extension.linear(*lent, activations, *lend(out=out), threads)
    return out


def _rows(name: str, shape: Sequence[int]) -> int:
    if len(shape) != 2:
        raise ValueError(f"{name}: must be a tensor of two dimensions")
    return shape[0]


def parts_checked(name: str, matrix: Matrix[Tensor], device: torch.device | None = arguments.CPU) -> Matrix[Tensor]:
    """``matrix``, all of whose parts are there, dense, on ``device`` (None: any but meta) and of the right size; raises
    ValueError that names ``name``."""
    try:
        parts = matrix.stored.tensors(matrix.rows, matrix.columns)
    except ConfigError as error:
        raise ValueError(f"{name}: {error}") from None
    for part in parts:
        if part.suffix not in matrix.stored.names:
            continue
        tensor = arguments.check_dense(name, matrix.tensors.get(part.suffix), device)
        dense = tensor.is_contiguous() or not matrix.stored.is_quantised
        if not dense or tensor.numel() != math.prod(part.shape):
            shape = f"contiguous {list(part.shape)}, is {list(tensor.shape)}"
            raise ValueError(f"{name}: its part {part.suffix} must be {shape}")
    return matrix


def check_integers(name: str, activations: str, *weights: object) -> None:
    """Raise ValueError unless ``weights``, of which some may be None, can be multiplied so."""
    for weight in weights if is_rounded(activations) else ():
        if weight is not None and (reason := no_integers(as_matrix(name, weight))) is not None:
            raise ValueError(f"{name}: {reason}")


def is_rounded(activations: str) -> bool:
    """True if ``activations``, of `ACTIVATIONS` (else ValueError), are rounded to int8."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: must be auto or int8, is {activations!r}")
    return activations == INT8


def no_integers(weight: Matrix[Tensor]) -> str | None:
    """The reason why ``weight`` is no matrix of whole numbers times scales, or None."""
    reason = weight.stored.int8_reason
    order = weight.tensors[weight.stored.names[3]] if reason is None and weight.stored.order else None
    if order is not None and not torch.equal(order.long(), group_of(weight.stored, weight.columns, order.device)):
        reason = "int8 activations need columns in the order of their groups"
    return reason
