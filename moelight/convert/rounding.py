"""Numbers of a matrix rounded to a stored format: to the nearest code, ties to the even one. The inverse of
`kernels.quantized` for the formats that `convert.contents` writes.

Shapes: R rows (outputs), C columns (inputs), G groups of columns. Quotients are float32, of the scale as it is stored;
memory beyond the result is some megabytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.formats.format import SHAPE, Format
from moelight.kernels.formats.reference import E8M0_BIAS, Encoder
from moelight.kernels.formats.table import encoder_of

_BLOCK = 1 << 17  # numbers at a time: they stay in a core's cache
_COLUMNS = 128  # whose errors are fed back together
_TINY = 1e-30
DAMPING = 0.1  # of the mean square (docs/log.md)
SHARES = tuple(share / 100 for share in (100, *range(55, 100, 3), 103, 106))
_SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}


def round_matrix(stored: Format, weight: Tensor, inputs: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors by suffix, as `Format.tensors` lists them, of ``weight`` [R, C] in any float dtype.

    For symmetric codes whose scales belong to rows: packed or plain integers, E4M3, MXFP4. The scale of a group is its
    largest magnitude over the largest code (over half the range of integers), of MXFP4 the power of two below, or above
    from 1.75 times that on.

    ``inputs`` float32 [n, C], beside packed integers: what the matrix multiplies. The scale of a group is then the
    multiple (`SHARES`) of the usual one that makes the sum of squared errors least, each weighted by the mean square of
    its input; and the error of a column is made up for by the columns that are rounded after it (GPTQ).

    Raises ValueError if some number is not finite, or a scale would not be.
    """
    rows, columns = weight.shape
    shapes = {part.suffix: (part.shape, part.dtypes[0]) for part in stored.tensors(rows, columns)}
    codes_name, scale_name = stored.names[:2]
    encoder, scale_dtype = encoder_of(stored), _SCALES[shapes[scale_name][1]]
    codes = torch.empty(rows, encoder.code_bytes(stored, columns), dtype=torch.uint8)
    scales = torch.empty(shapes[scale_name][0], dtype=scale_dtype)
    step = max(1, _BLOCK // columns)
    buffer = torch.empty(min(step, rows), columns)
    importance = None if inputs is None else inputs.square().mean(0).view(stored.groups(columns), -1)
    for begin in range(0, rows, step):
        grouped = (
            buffer[: min(step, rows - begin)].copy_(weight[begin : begin + step]).view(-1, *_groups(stored, columns))
        )
        scale = _scale(encoder, stored, grouped, scale_dtype)
        scales[begin : begin + step] = scale if importance is None else _least_error(stored, grouped, scale, importance)
    if inputs is not None:
        weight = _compensated(stored, weight.float(), _numbers(scales), inputs)
    for begin in range(0, rows, step):
        block = buffer[: min(step, rows - begin)].copy_(weight[begin : begin + step])
        block.view(len(block), *_groups(stored, columns)).div_(_numbers(scales[begin : begin + step]).unsqueeze(-1))
        codes[begin : begin + step] = encoder.codes(stored, block)
    tensors = {codes_name: codes.view(encoder.code_dtype), scale_name: scales}
    return tensors | ({SHAPE: torch.tensor([rows, columns])} if stored.stores_shape else {})


def _groups(stored: Format, columns: int) -> tuple[int, int]:
    """Groups of columns, and columns of each."""
    return stored.groups(columns), columns // stored.groups(columns)


def _scale(encoder: Encoder, stored: Format, grouped: Tensor, dtype: torch.dtype) -> Tensor:
    """The stored scales [R, G] of ``grouped`` [R, G, C / G]; 1 for groups of zeros."""
    largest = torch.maximum(grouped.amax(-1), -grouped.amin(-1))  # in less than half the time of aminmax
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("holds numbers that are not finite")
    scale = encoder.rounded_scales(stored, largest, dtype)
    if not bool(torch.isfinite(scale).all()):
        raise ValueError(f"needs scales that {str(dtype).removeprefix('torch.')} does not hold")
    return scale


def _least_error(stored: Format, grouped: Tensor, usual: Tensor, importance: Tensor) -> Tensor:
    """The best scales [R, G] of ``grouped`` [R, G, C / G], multiples of the ``usual`` ones; ``importance`` [G, C / G].
    The first of equals."""
    half = 1 << (stored.bits - 1)
    best, least = usual, torch.full(usual.shape, torch.inf)
    error = torch.empty_like(grouped)
    for share in SHARES:
        scale = torch.where(usual == 1, usual, (usual.float() * share).to(usual.dtype))
        scale = torch.where(scale == 0, usual, scale)
        factors = scale.float().unsqueeze(-1)
        torch.div(grouped, factors, out=error)
        error.clamp_(-half, half - 1).round_().mul_(factors).sub_(grouped).square_().mul_(importance)
        errors = error.sum(-1)
        better = errors < least
        best, least = torch.where(better, scale, best), torch.where(better, errors, least)
    return best


def _compensated(stored: Format, weight: Tensor, scales: Tensor, inputs: Tensor) -> Tensor:
    """Numbers [R, C] of codes times ``scales`` [R, G], in place of ``weight`` [R, C]: the columns of larger ``inputs``
    first, each rounded to nearest; its error, times how the others can stand in for it on ``inputs``, is taken from
    those that follow."""
    squares = inputs.t() @ inputs / len(inputs)
    order = squares.diagonal().argsort(descending=True, stable=True)
    squares = squares[order][:, order]
    squares.diagonal().add_(DAMPING * squares.diagonal().mean().clamp_min(_TINY))
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(squares)), upper=True)
    left, group_of = weight[:, order], order // (weight.shape[1] // scales.shape[1])
    half = 1 << (stored.bits - 1)
    for begin in range(0, left.shape[1], _COLUMNS):
        end = min(begin + _COLUMNS, left.shape[1])
        errors = torch.empty(len(left), end - begin)
        for column in range(begin, end):
            scale, wanted = scales[:, group_of[column]], left[:, column].clone()
            rounded = (wanted / scale).round_().clamp_(-half, half - 1).mul_(scale)
            error = errors[:, column - begin] = (wanted - rounded) / factor[column, column]
            left[:, column] = rounded
            left[:, column + 1 : end].addr_(error, factor[column, column + 1 : end], alpha=-1)
        left[:, end:].addmm_(errors, factor[begin:end, end:], alpha=-1)
    return torch.empty_like(weight).index_copy_(1, order, left)


def _numbers(scale: Tensor) -> Tensor:
    """The float32 values of stored scales."""
    if scale.dtype == torch.uint8:
        return torch.exp2(scale.float() - E8M0_BIAS)
    return scale.float()
