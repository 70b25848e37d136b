"""Blocks of ggml (`moelight.formats.ggml`): uint8 [n, bytes of a block] to float32 [n, values of a block].

The layouts are those of ggml/src/ggml-common.h, the arithmetic that of ggml-quants.c (dequantize_row_*).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from moelight.formats.codebook import CODEBOOKS
from moelight.formats.ggml import GGMLFormat
from moelight.kernels.formats.reference import E8M0_BIAS, Reference, Tensors, WholeNumbers

_MXFP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # ggml halves the scale instead
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_K = 256  # values of a super-block
# Whole numbers int32 [n, values of a block], of each part its step and `low` int32 [n, parts], scales and `least`
# float32 [n, 1]: a value is whole x step x scale - low x least; None where there are no steps, or no `low`.
Integers = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]


class GGMLReference(Reference):
    """Blocks [R, C / values of a block x bytes of a block]."""

    def values(self, stored: GGMLFormat, tensors: Tensors, begin: int, end: int, columns: int) -> Tensor:
        blocks = tensors[stored.names[0]][begin:end].reshape(-1, stored.block_bytes)
        return _VALUES[stored.name](blocks).view(end - begin, columns)

    def integers(self, stored: GGMLFormat, tensors: Tensors, rows: int, columns: int) -> WholeNumbers:
        blocks = tensors[stored.names[0]].reshape(-1, stored.block_bytes)
        integers, steps, lows, scales, least = _INTEGERS[stored.name](blocks)
        steps, lows, least = (None if item is None else item.reshape(rows, -1) for item in (steps, lows, least))
        return WholeNumbers(
            integers.reshape(rows, -1), scales.reshape(rows, -1), *stored.integer_groups(columns), steps, lows, least
        )


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 number at byte ``at`` of each block [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _pieces(values: Tensor, width: int, bits: int) -> Tensor:
    """Codes of ``bits`` bits from bytes [n, b], in order: of ``width`` bytes first the lowest bits of all, then
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


def _five_bits(codes: Tensor) -> Tensor:
    """Codes [n, 32] whose fifth bits are four bytes ahead of the others."""
    return _pieces(codes[:, 4:], 16, 4) | (_bits(codes[:, :4]) << 4)


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_five_bits(blocks[:, 2:]).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _five_bits(blocks[:, 4:]).float() + _half(blocks, 2)


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


def _mxfp4_scale(blocks: Tensor) -> Tensor:
    """Half the scale of each block [n, 1]."""
    exponents = blocks[:, :1].int() - (E8M0_BIAS + 1)
    return torch.ldexp(torch.ones(exponents.shape, device=blocks.device), exponents)


def _mxfp4_codes(blocks: Tensor) -> Tensor:
    """Twice the values of the codes, int32."""
    doubled = torch.tensor(_MXFP4_DOUBLED, dtype=torch.int32, device=blocks.device)
    return doubled[_pieces(blocks[:, 1:], 16, 4).int()]


def _mxfp4_block(blocks: Tensor) -> Tensor:
    return _mxfp4_scale(blocks) * _mxfp4_codes(blocks).float()


def _tq1_0(blocks: Tensor) -> Tensor:
    def digits(values: Tensor, count: int) -> Tensor:
        """The first ``count`` ternary digits of bytes [n, b], which are fractions of 256: first those of all bytes."""
        powers = torch.tensor([3**digit for digit in range(count)], dtype=torch.uint8, device=values.device)
        return (((values.unsqueeze(1) * powers.view(1, -1, 1)).int() * 3) >> 8).flatten(1)

    parts = (digits(blocks[:, :32], 5), digits(blocks[:, 32:48], 5), digits(blocks[:, 48:52], 4))
    return _half(blocks, 52) * (torch.cat(parts, dim=1).float() - 1)


def _tq2_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 64) * (_pieces(blocks[:, :64], 32, 2).float() - 1)


@cache
def points_on(device: torch.device, codebook: str) -> Tensor:
    """The points of ``codebook``, int8 [indices, values of a point], in the memory of ``device``: once a process."""
    return torch.tensor(CODEBOOKS[codebook].points(), dtype=torch.int8).to(device)


def _values_at(codebook: str, index: Tensor) -> Tensor:
    """The values of the points at indices [n, m], float32 [n, m x values of a point]."""
    return points_on(index.device, codebook)[index.int()].flatten(1).float()


def _numbers(values: Tensor, size: int) -> Tensor:
    """Unsigned integers of ``size`` bytes, int64 [n, b / size] of bytes [n, b]."""
    shifts = torch.arange(0, 8 * size, 8, device=values.device)
    return (values.reshape(len(values), -1, size).long() << shifts).sum(-1)


def _fields(packed: Tensor, width: int, count: int) -> Tensor:
    """The lowest ``count`` fields of ``width`` bits of integers [n, m], the lowest first [n, m x count]."""
    shifts = torch.arange(0, width * count, width, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << width) - 1)).flatten(1)


def _even_signs(seven: Tensor) -> Tensor:
    """Bytes of eight signs, of which an even number is negative, from the first seven."""
    parity = seven ^ (seven >> 4)
    parity = parity ^ (parity >> 2)
    return seven | (((parity ^ (parity >> 1)) & 1) << 7)


# Scales float32 [n, 1], the upper bits of steps [n, parts], and whole numbers float32 [n, 256] of blocks: a value is
# scale x (2 step + 1) x whole number.
Points = tuple[Tensor, Tensor, Tensor]


def _signed(values: Tensor, signs: Tensor) -> Tensor:
    """Values [n, 256], negative where a bit of the bytes ``signs`` [n, 32] is set."""
    return values * (1 - 2 * _bits(signs.to(torch.uint8)).float())


def _iq2_xxs(blocks: Tensor) -> Points:
    parts = blocks[:, 2:].reshape(-1, 8, 8)  # four indices; four fields of signs, a scale
    packed = _numbers(parts[:, :, 4:].flatten(1), 4)
    values = _values_at("iq2_xxs", parts[:, :, :4].flatten(1))
    return _half(blocks, 0) * 0.125, packed >> 28, _signed(values, _even_signs(_fields(packed, 7, 4)))


def _iq2_xs(blocks: Tensor) -> Points:
    codes = _numbers(blocks[:, 2:66], 2)
    values = _signed(_values_at("iq2_xs", codes & 511), _even_signs(codes >> 9))
    return _half(blocks, 0) * 0.125, _pieces(blocks[:, 66:], 1, 4), values


def _iq2_s(blocks: Tensor) -> Points:
    index = blocks[:, 2:34].int() | (_pieces(blocks[:, 66:74], 1, 2).int() << 8)
    values = _signed(_values_at("iq2_s", index), blocks[:, 34:66])
    return _half(blocks, 0) * 0.125, _pieces(blocks[:, 74:], 1, 4), values


def _iq3_xxs(blocks: Tensor) -> Points:
    packed = _numbers(blocks[:, 66:], 4)
    values = _signed(_values_at("iq3_xxs", blocks[:, 2:66]), _even_signs(_fields(packed, 7, 4)))
    return _half(blocks, 0) * 0.25, packed >> 28, values


def _iq3_s(blocks: Tensor) -> Points:
    index = blocks[:, 2:66].int() | (_bits(blocks[:, 66:74]).int() << 8)
    return _half(blocks, 0), _pieces(blocks[:, 106:], 1, 4), _signed(_values_at("iq3_s", index), blocks[:, 74:106])


def _shifted(values: Tensor, lower: Tensor) -> Tensor:
    """Eight times values [n, 256], which are an eighth lower in the parts of ``lower`` [n, parts], and in all others an
    eighth higher."""
    shifts = torch.where(lower != 0, -1.0, 1.0)
    return (8 * values.view(*lower.shape, -1) + shifts.unsqueeze(-1)).flatten(1)


def _iq1_s(blocks: Tensor) -> Points:
    packed = _numbers(blocks[:, 34:], 2)
    index = blocks[:, 2:34].int() | (_fields(packed, 3, 4) << 8)
    return _half(blocks, 0) * 0.125, (packed >> 12) & 7, _shifted(_values_at("iq1", index), packed >> 15)


def _iq1_m(blocks: Tensor) -> Points:
    upper = blocks[:, 49::2]  # four bits of the scale in each
    scale = ((upper[:, ::2] >> 4) | (upper[:, 1::2] & 0xF0)).contiguous().view(torch.float16).float()
    codes = _pieces(blocks[:, 32:48], 1, 4).int()
    index = blocks[:, :32].int() | ((codes & 7) << 8)
    return scale * 0.125, _fields(_numbers(blocks[:, 48:], 2), 3, 4), _shifted(_values_at("iq1", index), codes & 8)


_POINTS: dict[str, Callable[[Tensor], Points]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}


def _point_values(points: Callable[[Tensor], Points]) -> Callable[[Tensor], Tensor]:
    def values(blocks: Tensor) -> Tensor:
        scale, steps, integers = points(blocks)
        steps = scale * (2 * steps.float() + 1)  # exact, as their products with integers are
        return (steps.unsqueeze(-1) * integers.view(*steps.shape, -1)).flatten(1)

    return values


def _point_integers(points: Callable[[Tensor], Points]) -> Callable[[Tensor], Integers]:
    """Those of sixteen parts, of which two may have one step."""

    def integers(blocks: Tensor) -> Integers:
        scale, steps, values = points(blocks)
        return values.int(), (2 * steps.int() + 1).repeat_interleave(16 // steps.shape[1], 1), None, scale, None

    return integers


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
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
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    **{name: _point_values(points) for name, points in _POINTS.items()},
}


def _k_integers(codes: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Integers]:
    def integers(blocks: Tensor) -> Integers:
        steps, lows = _k_scales(blocks[:, 4:16])
        return codes(blocks).int(), steps.int(), lows.int(), _half(blocks, 0), _half(blocks, 2)

    return integers


def _q6_integers(blocks: Tensor) -> Integers:
    return _q6_codes(blocks).int() - 32, _q6_scales(blocks).int(), None, _half(blocks, 208), None


def _q8_0_integers(blocks: Tensor) -> Integers:
    return blocks[:, 2:].contiguous().view(torch.int8).int(), None, None, _half(blocks, 0), None


def _q4_0_integers(blocks: Tensor) -> Integers:
    return _pieces(blocks[:, 2:], 16, 4).int() - 8, None, None, _half(blocks, 0), None


def _q4_1_integers(blocks: Tensor) -> Integers:
    return _with_minimum(blocks, _pieces(blocks[:, 4:], 16, 4))


def _q5_0_integers(blocks: Tensor) -> Integers:
    return _five_bits(blocks[:, 2:]).int() - 16, None, None, _half(blocks, 0), None


def _q5_1_integers(blocks: Tensor) -> Integers:
    return _with_minimum(blocks, _five_bits(blocks[:, 4:]))


def _with_minimum(blocks: Tensor, codes: Tensor) -> Integers:
    """Those of blocks that begin with a scale and a minimum, the negative of what is taken off."""
    ones = torch.ones((len(blocks), 1), dtype=torch.int32, device=blocks.device)
    return codes.int(), None, ones, _half(blocks, 0), -_half(blocks, 2)


def _mxfp4_integers(blocks: Tensor) -> Integers:
    return _mxfp4_codes(blocks), None, None, _mxfp4_scale(blocks), None


_INTEGERS: dict[str, Callable[[Tensor], Integers]] = {
    "Q8_0": _q8_0_integers,
    "Q4_0": _q4_0_integers,
    "Q4_1": _q4_1_integers,
    "Q5_0": _q5_0_integers,
    "Q5_1": _q5_1_integers,
    "Q4_K": _k_integers(_q4_codes),
    "Q5_K": _k_integers(_q5_codes),
    "Q6_K": _q6_integers,
    "MXFP4": _mxfp4_integers,
    **{name: _point_integers(points) for name, points in _POINTS.items()},
}
