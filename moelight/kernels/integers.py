"""Products of tokens rounded to int8 with quantised matrices whose codes stay whole numbers: the reference for kernels.

A token is cut into groups of columns: the groups in which a row of the matrix has its scales, or 128, 64 or 32 columns
that lie in one, or the block of 256 whose parts have scales (ggml's K formats; llama.cpp rounds activations so, too).
Each group is a float32 scale, its largest magnitude over 127, times int8 numbers, rounded to nearest, ties to even. A
sum takes the groups in order, each product and each sum rounded to float32: the exact sum of the products of whole
numbers, those of a part times its step, times the scale of the row; less, where a format takes something off, the exact
sum of each part's `low` times its numbers, times the row's `least`; times the scale of the token. Nothing else has any
influence on a bit of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moelight.kernels import quantized
from moelight.kernels.quantized import QuantizedMatrix
from moelight.profiles.stored import AWQ, GGML, GPTQ, MXFP4, SCALED, StoredFormat

INT8 = "int8"
ACTIVATIONS = ("auto", INT8)
_LEAST_MAGNITUDE = 1e-30  # below it, a group of a token is zero


class WholeNumbers(NamedTuple):
    """A matrix as numbers ``whole`` (int32 [R, C]) times ``scales`` (float32 [R, groups of ``group`` columns]); where a
    group has parts (of ``part`` columns) times ``steps``, less ``lows`` times ``least``: int32 [R, parts], or None, and
    as ``scales``."""

    whole: Tensor
    scales: Tensor
    group: int
    part: int
    steps: Tensor | None = None
    lows: Tensor | None = None
    least: Tensor | None = None


def check_integers(name: str, activations: str, *weights: object) -> None:
    """Raise ValueError unless ``weights``, of which some may be None, can be multiplied so."""
    for weight in weights if is_rounded(activations) else ():
        if weight is None:
            continue
        if not isinstance(weight, QuantizedMatrix):
            raise ValueError(f"{name}: int8 activations need quantised matrices")
        if (why := no_integers(weight)) is not None:
            raise ValueError(f"{name}: {why}")


def is_rounded(activations: str) -> bool:
    """True if ``activations``, of `ACTIVATIONS` (else ValueError), are rounded to int8."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: must be auto or int8, is {activations!r}")
    return activations == INT8


def no_integers(weight: QuantizedMatrix) -> str | None:
    """The reason why ``weight`` is no matrix of whole numbers times scales, or None."""
    why = weight.stored.without_integers
    order = weight.parts[weight.stored.names[3]] if why is None and weight.stored.order else None
    if order is not None and not torch.equal(order.long(), _groups(weight)):
        why = "int8 activations need columns in the order of their groups"
    return why


def _groups(matrix: QuantizedMatrix) -> Tensor:
    device = next(iter(matrix.parts.values())).device
    return torch.arange(matrix.columns, device=device) // (matrix.stored.group or matrix.columns)


def round_tokens(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [T, C] -> int8 numbers as int32 [T, groups, ``group``], with zeros behind the last column, and scales float32
    [T, groups]."""
    tokens, columns = x.shape
    groups = -(-columns // group)
    padded = torch.zeros(tokens, groups * group, device=x.device)
    padded[:, :columns] = x.float()
    parts = padded.view(tokens, groups, group)
    largest = parts.abs().amax(-1)
    scales = largest / 127
    factors = torch.full_like(largest, 127) / largest  # not the reciprocal times 127
    lost, small = ~largest.isfinite(), largest < _LEAST_MAGNITUDE
    factors[lost | small] = 0
    scales[small], scales[lost] = 0, torch.nan
    numbers = torch.where((lost | small).unsqueeze(-1), 0, parts * factors.unsqueeze(-1))
    return numbers.round().int(), scales


def integer_product(x: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """x [T, C] times ``matrix`` [R, C] -> float32 [T, R]."""
    found = whole_numbers(matrix)
    numbers, token_scales = round_tokens(x, found.group)
    rows, columns = matrix.shape
    padded = torch.zeros(rows, numbers.shape[1] * found.group, dtype=torch.int32, device=x.device)
    padded[:, :columns] = found.whole
    # whole numbers are exact in float64
    tokens, codes = (each.reshape(len(each), -1, found.part).double() for each in (numbers, padded))
    sums, parts = torch.zeros(len(x), rows, device=x.device), found.group // found.part
    for g in range(token_scales.shape[1]):
        exact, low = torch.zeros((2, len(x), rows), dtype=torch.float64, device=x.device)
        for p in range(g * parts, (g + 1) * parts):
            product = tokens[:, p] @ codes[:, p].t()
            exact += product if found.steps is None else product * found.steps[:, p]
            if found.lows is not None:
                low += tokens[:, p].sum(-1, keepdim=True) * found.lows[:, p]
        value = exact.float() * found.scales[:, g]
        if found.least is not None:
            value = value - low.float() * found.least[:, g]
        sums = sums + value * token_scales[:, g, None]
    return sums


def whole_numbers(matrix: QuantizedMatrix) -> WholeNumbers:
    """``matrix``, of a format with integers, as whole numbers and scales."""
    stored, columns = matrix.stored, matrix.columns
    group, part = stored.integer_groups(columns)
    if part < group:
        blocks = matrix.parts[stored.names[0]].reshape(-1, stored.block_bytes)
        found = [
            None if each is None else each.reshape(matrix.rows, -1) for each in quantized.k_numbers(stored, blocks)
        ]
        whole, steps, lows, scales, least = found
        assert whole is not None and scales is not None
        return WholeNumbers(whole, scales, group, part, steps, lows, least)
    whole, scales = _parts(stored)(matrix)
    return WholeNumbers(whole.int(), scales[:, torch.arange(0, columns, group)], group, part)


_Found = tuple[Tensor, Tensor]  # of each number [R, C]: whole numbers, scales


def _parts(stored: StoredFormat) -> Callable[[QuantizedMatrix], _Found]:
    if stored.kind == GGML:
        return _BLOCKS[stored.name]
    return _mxfp4 if stored.kind == MXFP4 else _grouped


def _grouped(matrix: QuantizedMatrix) -> _Found:
    """Codes less zero points, with scales: the numbers with all scales one, and those of codes one above zero."""
    stored, parts = matrix.stored, dict(matrix.parts)
    scale = stored.names[1]
    given = parts[scale]
    parts[scale] = torch.ones_like(given, dtype=torch.float32)
    whole = quantized.unpack(stored, parts, 0, matrix.rows, matrix.columns)
    if stored.kind == SCALED:
        grid = given.view(torch.float8_e8m0fnu) if given.dtype == torch.uint8 else given
        grid = grid.float().reshape(-1, stored.groups(matrix.columns))
        each = stored.group_rows or matrix.rows
        by_row = grid.repeat_interleave(each, 0)[: matrix.rows]
    elif stored.kind in (GPTQ, AWQ):
        by_row = given.float().t()
    else:
        by_row = given.float().reshape(matrix.rows, -1)
    return whole, by_row[:, _groups(matrix)]


def _mxfp4(matrix: QuantizedMatrix) -> _Found:
    weight, scale = matrix.stored.names
    exponents = matrix.parts[scale].view(torch.uint8).reshape(matrix.rows, -1).int()
    ones = {weight: matrix.parts[weight], scale: torch.full_like(exponents, 128, dtype=torch.uint8)}
    twice = quantized.unpack(matrix.stored, ones, 0, matrix.rows, matrix.columns)
    scales = torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents - 128)
    return twice, scales.repeat_interleave(matrix.stored.group, 1)


def _small(scale_bytes: int) -> Callable[[QuantizedMatrix], _Found]:
    """Blocks of 32 whose scale comes first: the numbers with a scale of one."""

    def found(matrix: QuantizedMatrix) -> _Found:
        blocks = matrix.parts[matrix.stored.names[0]].reshape(-1, matrix.stored.block_bytes)
        ones = blocks.clone()
        if scale_bytes == 1:
            scales = torch.ldexp(torch.ones(len(blocks), 1, device=blocks.device), blocks[:, :1].int() - 128)
            ones[:, 0] = 128
        else:
            scales = blocks[:, :2].contiguous().view(torch.float16).float()
            ones[:, :2] = torch.tensor([1.0], dtype=torch.float16, device=blocks.device).view(torch.uint8)
        whole = quantized.numbers_of_blocks(matrix.stored, ones)
        return whole.reshape(matrix.shape), scales.expand(whole.shape).reshape(matrix.shape)

    return found


_BLOCKS = {"Q8_0": _small(2), "Q4_0": _small(2), "MXFP4": _small(1)}
