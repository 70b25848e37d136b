"""Matrices whose numbers are quantised, and the numbers: one function for each kind of `profiles.stored`, the reference
for kernels.

Shapes: R rows (outputs), C columns (inputs), G groups of columns. Results are float32, or a narrower dtype rounded once
from it, which equals what the reference libraries compute in that dtype; memory beyond the result is a few times that
of the rows asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moelight.core.errors import ConfigError
from moelight.hrm.footprint import DEQUANTISED_ROWS
from moelight.kernels import arguments, native
from moelight.kernels.arguments import FLOATS, as_dlpack, check_tensor, lend
from moelight.profiles.stored import AWQ, GGML, GPTQ, MXFP4, PACKED, PLAIN, SCALED, StoredFormat

Parts = Mapping[str, Tensor]  # by suffix, as `StoredFormat.parts` lists them

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MXFP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # ggml halves the scale instead
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# The place in an AWQ word of each of its eight rows.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_E8M0_BIAS = 127
_K = 256  # numbers of a super-block


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedMatrix:
    """A matrix [``rows``, ``columns``] stored as ``stored``: ``parts`` are its tensors, on one device, contiguous."""

    stored: StoredFormat
    rows: int
    columns: int
    parts: Parts

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The matrix [R, C] as numbers of ``dtype``."""
        device = next(iter(self.parts.values())).device
        out = torch.empty(self.shape, dtype=dtype, device=device)
        for begin, block in self.row_blocks():
            out[begin : begin + len(block)].copy_(block)
        return out

    def row_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """``(first row, numbers)`` over all rows, in float32."""
        return row_blocks(self.stored, self.parts, self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """Quantised matrices ``parts`` below one another, each multiplied by its own ``activations`` (`integers`)."""

    parts: tuple[QuantizedMatrix, ...]
    activations: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.rows for part in self.parts), self.parts[0].columns

    def rows(self, places: Tensor, out: Tensor) -> Tensor:
        """The numbers of rows ``places`` (int64 [n]) of its only part, whose stored rows are by themselves -> ``out``
        [n, C]."""
        (whole,) = self.parts
        steps = {suffix: whole.stored.rows_of_line(suffix) for suffix in whole.parts}
        chosen = {suffix: part[places] if steps[suffix] else part for suffix, part in whole.parts.items()}
        some = QuantizedMatrix(stored=whole.stored, rows=len(places), columns=whole.columns, parts=chosen)
        return cpu_dequantize(some, out.dtype, out=out)


def numbers_of(weight: Tensor | QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """``weight`` if it is a tensor, else its numbers as ``dtype``."""
    return weight.numbers(dtype) if isinstance(weight, QuantizedMatrix) else weight


def cpu_dequantize(
    matrix: QuantizedMatrix, dtype: torch.dtype, out: Tensor | None = None, threads: int | None = None
) -> Tensor:
    """The numbers of ``matrix`` -> `out` [R, C] of ``dtype`` (a float), or a new tensor; the GIL is released.

    Equal to ``matrix.numbers(dtype)`` to the bit, except that any NaN may be any other. Natively where the extension is
    built, without memory beyond the result; ``threads`` None stands for torch.get_num_threads().
    """
    if dtype not in FLOATS:
        raise ValueError(f"dtype: must be one of {', '.join(map(str, FLOATS))}, is {dtype}")
    threads, extension = arguments.check_threads(threads), native.extension()
    if out is not None:
        check_tensor("out", out, dtype, matrix.shape)
    if extension is None or matrix.stored.kind == PLAIN:
        numbers = parts_checked("matrix", matrix).numbers(dtype)
        return numbers if out is None else out.copy_(numbers)
    out = torch.empty(matrix.shape, dtype=dtype) if out is None else out
    extension.dequantize(lend_matrix("matrix", matrix), *lend(out=out), threads)
    return out


def lend_matrix(name: str, matrix: QuantizedMatrix) -> object:
    """What the extension takes for ``matrix``, whose parts it checks: format and sizes, and DLPack capsules of codes,
    scales, zero points and order; of plain numbers the capsule alone."""
    form, parts = matrix.stored, matrix.parts
    if form.kind == PLAIN:
        return as_dlpack(name, parts_checked(name, matrix).parts[form.names[0]])
    kind = form.name if form.kind == GGML else form.kind
    if form.kind == SCALED:
        kind = "int8" if form.codes == "I8" else "fp8"
    lent: list[object] = [None] * 4
    needed = (True, form.kind != GGML, form.zero_points, form.order)
    for place, suffix in enumerate(form.names):
        if not needed[place]:
            continue
        if suffix not in parts:
            raise ValueError(f"{name}: its part {suffix} is missing")
        lent[place] = as_dlpack(name, parts[suffix])
    return (kind, form.bits, matrix.rows, matrix.columns, form.group, form.group_rows, form.zero_bias, *lent)


def parts_checked(name: str, matrix: QuantizedMatrix, device: torch.device | None = arguments.CPU) -> QuantizedMatrix:
    """``matrix``, all of whose parts are there, dense, on ``device`` (None: any but meta) and of the right size; raises
    ValueError that names ``name``."""
    try:
        parts = matrix.stored.parts(matrix.rows, matrix.columns)
    except ConfigError as error:
        raise ValueError(f"{name}: {error}") from None
    for part in parts:
        if part.suffix not in matrix.stored.names:
            continue
        found = arguments.check_dense(name, matrix.parts.get(part.suffix), device)
        if not found.is_contiguous() or found.numel() != math.prod(part.shape):
            shape = f"contiguous {list(part.shape)}, is {list(found.shape)}"
            raise ValueError(f"{name}: its part {part.suffix} must be {shape}")
    return matrix


def unpack(
    stored: StoredFormat, parts: Parts, begin: int, end: int, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rows ``begin`` to ``end`` [R, C] of the matrix whose tensors are ``parts``, which `weights.stored_matrix`
    checked."""
    return _KINDS[stored.kind](stored, parts, begin, end, columns).to(dtype)


def row_blocks(
    stored: StoredFormat,
    parts: Parts,
    rows: int,
    columns: int,
    *,
    most: int = DEQUANTISED_ROWS,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[int, Tensor]]:
    """``(first row, numbers [at most ``most``, C])`` over all rows."""
    for begin in range(0, rows, most):
        yield begin, unpack(stored, parts, begin, min(rows, begin + most), columns, dtype)


def _plain(stored: StoredFormat, parts: Parts, begin: int, end: int, columns: int) -> Tensor:
    return parts[stored.names[0]][begin:end, :columns].float()


def _scaled(stored: StoredFormat, parts: Parts, begin: int, end: int, columns: int) -> Tensor:
    """8-bit codes [R, C], scales and zero points [row groups, G]."""
    weight, scales, *rest = (parts[name] for name in stored.names if name in parts)
    numbers = weight[begin:end].float()
    if stored.zero_points:
        numbers = numbers - _grid(stored, rest[0], begin, end, columns)
    return numbers * _grid(stored, scales, begin, end, columns)


def _grid(stored: StoredFormat, values: Tensor, begin: int, end: int, columns: int) -> Tensor:
    """The value of each number [R, C or 1] from one for each block."""
    each = stored.group_rows
    values = values.view(torch.float8_e8m0fnu) if values.dtype == torch.uint8 else values
    grid = values.float().reshape(-1, stored.groups(columns))
    rows = torch.arange(begin, end, device=grid.device)
    some = rows // each if each else torch.zeros_like(rows)
    found = grid[some]
    return found.repeat_interleave(stored.group, dim=1)[:, :columns] if stored.group else found


def _packed(stored: StoredFormat, parts: Parts, begin: int, end: int, columns: int) -> Tensor:
    """Words [R, C / codes a word], scales [R, G], packed zero points [R / codes a word, G]."""
    weight, scale, zero = stored.names
    codes = _words(parts[weight][begin:end].unsqueeze(-1), stored).flatten(1)[:, :columns]
    scales = parts[scale].reshape(-1, stored.groups(columns))[begin:end].float()
    if stored.zero_points:
        first, last = begin // stored.per_word, -(-end // stored.per_word)
        zeros = _words(parts[zero][first:last].unsqueeze(1), stored, dim=1).flatten(0, 1)
        zeros = zeros[begin - first * stored.per_word :][: end - begin].float()
    else:
        zeros = torch.full_like(scales, 1 << (stored.bits - 1))
    groups = _group_of(stored, columns, scales.device)
    return (codes.float() - zeros[:, groups]) * scales[:, groups]


def _gptq(stored: StoredFormat, parts: Parts, begin: int, end: int, columns: int) -> Tensor:
    """Words [C / codes a word, R], scales [G, R], packed zero points [G, R / codes a word], order [C]."""
    weight, scale, zero, order = stored.names
    codes = _words(parts[weight][:, begin:end].unsqueeze(1), stored, dim=1).flatten(0, 1)
    zeros = _zeros_by_row(stored, parts[zero], begin, end)
    zeros = (zeros + stored.zero_bias) & ((1 << stored.bits) - 1)
    groups = parts[order].long() if stored.order else _group_of(stored, columns, codes.device)
    return _by_output(codes, zeros, parts[scale][:, begin:end], groups)


def _awq(stored: StoredFormat, parts: Parts, begin: int, end: int, columns: int) -> Tensor:
    """Words [C, R / 8], scales [G, R], packed zero points [G, R / 8]."""
    weight, scale, zero = stored.names
    codes = _zeros_by_row(stored, parts[weight], begin, end)
    zeros = _zeros_by_row(stored, parts[zero], begin, end)
    return _by_output(codes, zeros, parts[scale][:, begin:end], _group_of(stored, columns, codes.device))


def _zeros_by_row(stored: StoredFormat, words: Tensor, begin: int, end: int) -> Tensor:
    """Codes [any, R] of rows ``begin`` to ``end`` out of words [any, R / codes a word]."""
    first, last = begin // stored.per_word, -(-end // stored.per_word)
    codes = _words(words[:, first:last].unsqueeze(-1), stored)
    if stored.kind == AWQ:
        codes = codes[..., list(_AWQ_PLACES)]
    return codes.flatten(1)[:, begin - first * stored.per_word :][:, : end - begin]


def _by_output(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """(codes [C, R] - zeros [G, R]) x scales [G, R], as [R, C]."""
    found = (codes.float() - zeros.float()[groups]) * scales.float()[groups]
    return found.t().contiguous()


def _words(words: Tensor, stored: StoredFormat, dim: int = -1) -> Tensor:
    """The codes of int32 ``words``, along ``dim``, which has the size 1."""
    shifts = torch.arange(0, 32, stored.bits, dtype=torch.int32, device=words.device)
    shape = [1] * words.ndim
    shape[dim] = len(shifts)
    return (words >> shifts.view(shape)) & ((1 << stored.bits) - 1)


def _group_of(stored: StoredFormat, columns: int, device: torch.device) -> Tensor:
    """The group of each column [C]."""
    return torch.arange(columns, device=device) // (stored.group or columns)


def _mxfp4(stored: StoredFormat, parts: Parts, begin: int, end: int, columns: int) -> Tensor:
    """Bytes [R, C / 2] of two numbers each, exponents [R, C / 32] biased by 127."""
    weight, scale = stored.names
    pairs = parts[weight][begin:end].reshape(end - begin, -1)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    values = torch.tensor(_E2M1, device=codes.device)[codes.int()].view(
        end - begin, columns // stored.group, stored.group
    )
    exponents = parts[scale].view(torch.uint8)[begin:end].reshape(end - begin, -1, 1).int() - _E8M0_BIAS
    return torch.ldexp(values, exponents).flatten(1)


def _ggml(stored: StoredFormat, parts: Parts, begin: int, end: int, columns: int) -> Tensor:
    blocks = parts[stored.names[0]][begin:end].reshape(-1, stored.block_bytes)
    return numbers_of_blocks(stored, blocks).view(end - begin, columns)


def numbers_of_blocks(stored: StoredFormat, blocks: Tensor) -> Tensor:
    """The numbers of blocks of a ggml format, uint8 [n, bytes of a block] -> float32 [n, numbers of a block]."""
    return _GGML_BLOCKS[stored.name](blocks)


def k_numbers(stored: StoredFormat, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Of blocks of Q4_K, Q5_K or Q6_K: whole numbers int32 [n, 256], of each part its step and `low` int32 [n, parts],
    scales and `least` float32 [n, 1]; a number is whole x step x scale - low x least."""
    if stored.name == "Q6_K":
        return _q6_codes(blocks).int() - 32, _q6_scales(blocks).int(), None, _half(blocks, 208), None
    steps, lows = _k_scales(blocks[:, 4:16])
    codes = _q4_codes(blocks) if stored.name == "Q4_K" else _q5_codes(blocks)
    return codes.int(), steps.int(), lows.int(), _half(blocks, 0), _half(blocks, 2)


_KINDS: dict[str, Callable[[StoredFormat, Parts, int, int, int], Tensor]] = {
    PLAIN: _plain,
    SCALED: _scaled,
    PACKED: _packed,
    GPTQ: _gptq,
    AWQ: _awq,
    MXFP4: _mxfp4,
    GGML: _ggml,
}

# ---------------------------------------------------------------------------------------------------------------------
# Blocks of ggml, uint8 [n, bytes of a block] to float32 [n, numbers of a block]; the layouts are those of
# ggml/src/ggml-common.h, the arithmetic that of ggml-quants.c (dequantize_row_*).


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 number at byte ``at`` of each block [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _pieces(values: Tensor, width: int, bits: int) -> Tensor:
    """Codes of ``bits`` bits from bytes [n, b], in order: of each ``width`` bytes first the lowest bits of all, then
    the next ones [n, b x 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=values.device).view(1, 1, -1, 1)
    return ((values.reshape(len(values), -1, 1, width) >> shifts) & ((1 << bits) - 1)).flatten(1)


def _bits(values: Tensor) -> Tensor:
    """The bits of bytes [n, b], the lowest of each byte first [n, 8 b]."""
    return ((values.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=values.device)) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_pieces(blocks[:, 2:], 16, 4).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _pieces(blocks[:, 4:], 16, 4).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _pieces(blocks[:, 6:], 16, 4) | (_bits(blocks[:, 2:6]) << 4)
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _pieces(blocks[:, 8:], 16, 4) | (_bits(blocks[:, 4:8]) << 4)
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    codes = _pieces(blocks[:, 16:80], 32, 2).view(-1, 16, 16).float()
    steps = (_half(blocks, 80) * (scales & 15).float()).unsqueeze(-1)
    least = (_half(blocks, 82) * (scales >> 4).float()).unsqueeze(-1)
    return (steps * codes - least).view(-1, _K)


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = _pieces(blocks[:, 96:104], 8, 4), _pieces(blocks[:, 104:108], 4, 2)
    scales = (low | (high << 4)).float() - 32
    above = 1 - _pieces(blocks[:, :32], 32, 1).float()  # the third bit, inverted
    codes = (_pieces(blocks[:, 32:96], 32, 2).float() - 4 * above).view(-1, 16, 16)
    return ((_half(blocks, 108) * scales).unsqueeze(-1) * codes).view(-1, _K)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of 6 bits [n, 8] from 12 bytes: the upper two bits of the first eight bytes belong to the last
    four of each."""
    first, second, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (both & 15) | ((first >> 2) & 48)), dim=1)
    least = torch.cat((second & 63, (both >> 4) | ((second >> 2) & 48)), dim=1)
    return scales.float(), least.float()


def _q4_codes(blocks: Tensor) -> Tensor:
    return _pieces(blocks[:, 16:], 32, 4)


def _q5_codes(blocks: Tensor) -> Tensor:
    return _pieces(blocks[:, 48:], 32, 4) | (_pieces(blocks[:, 16:48], 32, 1) << 4)


def _q6_codes(blocks: Tensor) -> Tensor:
    return _pieces(blocks[:, :128], 64, 4) | (_pieces(blocks[:, 128:192], 32, 2) << 4)


def _q6_scales(blocks: Tensor) -> Tensor:
    return blocks[:, 192:208].contiguous().view(torch.int8).float()


def _q4_k(blocks: Tensor) -> Tensor:
    return _k_blocks(blocks, _q4_codes(blocks))


def _q5_k(blocks: Tensor) -> Tensor:
    return _k_blocks(blocks, _q5_codes(blocks))


def _k_blocks(blocks: Tensor, codes: Tensor) -> Tensor:
    scales, least = _k_scales(blocks[:, 4:16])
    steps = (_half(blocks, 0) * scales).unsqueeze(-1)
    below = (_half(blocks, 2) * least).unsqueeze(-1)
    return (steps * codes.view(-1, 8, 32).float() - below).view(-1, _K)


def _q6_k(blocks: Tensor) -> Tensor:
    steps = (_half(blocks, 208) * _q6_scales(blocks)).unsqueeze(-1)
    return (steps * (_q6_codes(blocks).float() - 32).view(-1, 16, 16)).view(-1, _K)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * torch.tensor(_IQ4, device=blocks.device)[_pieces(blocks[:, 2:], 16, 4).int()].float()


def _iq4_xs(blocks: Tensor) -> Tensor:
    low = _pieces(blocks[:, 4:8], 1, 4)
    high = (
        (blocks[:, 2:4].unsqueeze(-1) >> torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)) & 3
    ).flatten(1)
    steps = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    codes = torch.tensor(_IQ4, device=blocks.device)[_pieces(blocks[:, 8:], 16, 4).int()].float()
    return (steps.unsqueeze(-1) * codes.view(-1, 8, 32)).view(-1, _K)


def _mxfp4_block(blocks: Tensor) -> Tensor:
    exponents = blocks[:, :1].int() - (_E8M0_BIAS + 1)
    halved = torch.ldexp(torch.ones(exponents.shape, device=blocks.device), exponents)
    return halved * torch.tensor(_MXFP4_DOUBLED, device=blocks.device)[_pieces(blocks[:, 1:], 16, 4).int()].float()


_GGML_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4_block,
}
