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

import torch
from torch import Tensor

from moelight.formats.matrix import Matrix
from moelight.kernels.formats.reference import WholeNumbers, group_of
from moelight.kernels.formats.table import reference_of

INT8 = "int8"
ACTIVATIONS = ("auto", INT8)
_LEAST_MAGNITUDE = 1e-30  # below it, a group of a token is zero


def check_integers(name: str, activations: str, *weights: object) -> None:
    """Raise ValueError unless ``weights``, of which some may be None, can be multiplied so."""
    for weight in weights if is_rounded(activations) else ():
        if weight is None:
            continue
        if not isinstance(weight, Matrix):
            raise ValueError(f"{name}: int8 activations need quantised matrices")
        if (reason := no_integers(weight)) is not None:
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
    values = torch.where((lost | small).unsqueeze(-1), 0, parts * factors.unsqueeze(-1))
    return values.round().int(), scales


def integer_product(x: Tensor, matrix: Matrix[Tensor]) -> Tensor:
    """x [T, C] times ``matrix`` [R, C] -> float32 [T, R]."""
    integers = whole_numbers(matrix)
    values, token_scales = round_tokens(x, integers.group)
    rows, columns = matrix.shape
    padded = torch.zeros(rows, values.shape[1] * integers.group, dtype=torch.int32, device=x.device)
    padded[:, :columns] = integers.values
    # whole numbers are exact in float64
    tokens, codes = (tensor.reshape(len(tensor), -1, integers.part).double() for tensor in (values, padded))
    sums, parts = torch.zeros(len(x), rows, device=x.device), integers.group // integers.part
    for g in range(token_scales.shape[1]):
        exact, low = torch.zeros((2, len(x), rows), dtype=torch.float64, device=x.device)
        for p in range(g * parts, (g + 1) * parts):
            product = tokens[:, p] @ codes[:, p].t()
            exact += product if integers.steps is None else product * integers.steps[:, p]
            if integers.lows is not None:
                low += tokens[:, p].sum(-1, keepdim=True) * integers.lows[:, p]
        value = exact.float() * integers.scales[:, g]
        if integers.least is not None:
            value = value - low.float() * integers.least[:, g]
        sums = sums + value * token_scales[:, g, None]
    return sums


def whole_numbers(matrix: Matrix[Tensor]) -> WholeNumbers:
    """``matrix``, of a format with integers, as whole numbers and scales."""
    stored = matrix.stored
    return reference_of(stored).integers(stored, matrix.tensors, matrix.rows, matrix.columns)
