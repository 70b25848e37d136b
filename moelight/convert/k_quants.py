"""Numbers rounded to the K types of ggml, which gguf-py only reads: Q2_K to Q6_K, by the algorithms of its reference
implementation without an importance matrix (`ggml/src/ggml-quants.c`: ``quantize_row_q4_K_ref`` and its kin).

Shapes: n blocks of 256 numbers, G groups of a block, S numbers of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

BLOCK = 256
_ALL_ZERO = 1e-15  # magnitudes below are taken for zero
_STEPS = range(-9, 10)
_PASSES = 5  # over the codes of a group of Q3_K


def quantize_k(values: Tensor, kind: str) -> Tensor:
    """The blocks uint8 [rows, bytes] of ``values`` [rows, columns], any float dtype, columns a multiple of 256."""
    rows, columns = values.shape
    return K_TYPES[kind](values.reshape(-1, BLOCK).float()).view(rows, -1) if rows * columns else values.byte()


def _affine(
    x: Tensor, weights: Tensor, maximum: int, first: float, steps: int, *, absolute: bool
) -> tuple[Tensor, Tensor]:
    """Scale and minimum (as a number to subtract) [n, G] of the groups ``x`` [n, G, S] with the least weighted error
    among codes from 0 to ``maximum`` (``make_qkx2_quants``)."""
    least, high = x.amin(-1).clamp_max(0), x.amax(-1)
    flat = high == least
    sum_w, sum_x = weights.sum(-1), (weights * x).sum(-1)

    def error_of(codes: Tensor, scale: Tensor, least: Tensor) -> Tensor:
        error = codes.mul(scale.unsqueeze(-1)).add_(least.unsqueeze(-1)).sub_(x)
        return (error.abs_() if absolute else error.square_()).mul_(weights).sum(-1)

    def codes_at(count: float, least: Tensor) -> Tensor:
        inverse = count / torch.where(flat, 1.0, high - least)
        return (x - least.unsqueeze(-1)).mul_(inverse.unsqueeze(-1)).round_().clamp_(0, maximum)

    scale = (high - least) / maximum
    best = error_of(codes_at(maximum, least), scale, least)
    for step in range(steps + 1):
        codes = codes_at(first + 0.1 * step + maximum, least)
        weighted = codes * weights
        sum_l, sum_l2, sum_xl = weighted.sum(-1), (weighted * codes).sum(-1), (weighted * x).sum(-1)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        divisor = torch.where(determinant > 0, determinant, 1.0)
        new_scale, new_least = (sum_w * sum_xl - sum_x * sum_l) / divisor, (sum_l2 * sum_x - sum_l * sum_xl) / divisor
        above = new_least > 0
        new_scale = torch.where(above, sum_xl / torch.where(sum_l2 > 0, sum_l2, 1.0), new_scale)
        new_least = torch.where(above, 0.0, new_least)
        error = error_of(codes, new_scale, new_least)
        better = (determinant > 0) & (error < best)
        scale, least = torch.where(better, new_scale, scale), torch.where(better, new_least, least)
        best = torch.where(better, error, best)
    return torch.where(flat, 0.0, scale), -least


def _symmetric(x: Tensor, maximum: int) -> Tensor:
    """Scale [n, G] of the groups ``x`` [n, G, S] with codes from -``maximum`` on (``make_qx_quants`` with weights
    x²)."""
    extreme = _extreme(x)
    zero = extreme.abs() < _ALL_ZERO
    divisor = torch.where(zero, 1.0, extreme)
    weights = x * x
    scale = best = torch.zeros_like(extreme)
    for step in (0, *(step for step in _STEPS if step)):
        inverse = -(maximum + 0.1 * step) / divisor
        codes = (x * inverse.unsqueeze(-1)).round_().clamp_(-maximum, maximum - 1)
        weighted = codes * weights
        sum_lx, sum_l2 = (weighted * x).sum(-1), (weighted * codes).sum(-1)
        fits = sum_l2 > 0
        fitted = sum_lx / torch.where(fits, sum_l2, 1.0)
        better = fits & (sum_lx * sum_lx > best * sum_l2) if step else fits
        scale, best = torch.where(better, fitted, scale), torch.where(better, fitted * sum_lx, best)
    return torch.where(zero, 0.0, scale)


def _refined(x: Tensor, maximum: int) -> Tensor:
    """As `_symmetric`, by changing one code after another while that lessens the error (``make_q3_quants``)."""
    extreme = _extreme(x)
    zero = extreme.abs() < _ALL_ZERO
    codes = (x * (-maximum / torch.where(zero, 1.0, extreme)).unsqueeze(-1)).round_().clamp_(-maximum, maximum - 1)
    weights = x * x
    sum_lx, sum_l2 = (weights * x * codes).sum(-1), (weights * codes * codes).sum(-1)
    for _ in range(_PASSES):
        for index in range(x.shape[-1]):
            value, weight, code = x[..., index], weights[..., index], codes[..., index]
            rest_lx, rest_l2 = sum_lx - weight * value * code, sum_l2 - weight * code * code
            positive = rest_lx > 0
            new = (value * rest_l2 / torch.where(positive, rest_lx, 1.0)).round_().clamp_(-maximum, maximum - 1)
            new_lx, new_l2 = rest_lx + weight * value * new, rest_l2 + weight * new * new
            better = positive & (new != code) & (new_l2 > 0) & (new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2)
            codes[..., index] = torch.where(better, new, code)
            sum_lx, sum_l2 = torch.where(better, new_lx, sum_lx), torch.where(better, new_l2, sum_l2)
    scale = torch.where(sum_l2 > 0, sum_lx / torch.where(sum_l2 > 0, sum_l2, 1.0), 0.0)
    return torch.where(zero, 0.0, scale)


def _extreme(x: Tensor) -> Tensor:
    """The number of largest magnitude of each group, with its sign."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1)


def _scaled(scale: Tensor, maximum: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [n, G] from 0 to ``maximum`` of ``scale`` [n, G], and the float16 [n] that they are multiples of."""
    largest = scale.amax(-1).clamp_min(0)
    inverse = torch.where(largest > 0, maximum / torch.where(largest > 0, largest, 1.0), 0.0)
    codes = (scale * inverse.unsqueeze(-1)).round_().clamp_(0, maximum)
    return codes.byte(), (largest / maximum).half()


def _codes(x: Tensor, scale: Tensor, least: Tensor | None, low: int, high: int) -> Tensor:
    """The codes int16 [n, G, S], ``low`` to ``high``, of ``x`` under stored ``scale`` and ``least`` [n, G]; those of a
    scale of zero mean nothing."""
    shifted = x if least is None else x + least.unsqueeze(-1)
    divisor = torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    return (shifted / divisor).round_().clamp_(low, high).short()


def _bytes_of(half: Tensor) -> Tensor:
    return half.unsqueeze(-1).contiguous().view(torch.uint8)


def _with_minima(x: Tensor, bits: int, first: float, steps: int) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K as stored, uint8 [n, 16], and codes uint8 [n, 256]."""
    groups = x.view(-1, 8, 32)
    weights = groups.square().mean(-1, keepdim=True).sqrt_() + groups.abs()
    maximum = (1 << bits) - 1
    scale, least = _affine(groups, weights, maximum, first, steps, absolute=False)
    (scales, d), (minima, d_min) = _scaled(scale, 63), _scaled(least, 63)
    codes = _codes(groups, d.float()[:, None] * scales.float(), d_min.float()[:, None] * minima.float(), 0, maximum)
    packed = torch.cat(
        (
            scales[:, :4] | (scales[:, 4:] >> 4 << 6),
            minima[:, :4] | (minima[:, 4:] >> 4 << 6),
            (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4),
        ),
        dim=1,
    )
    return torch.cat((_bytes_of(d), _bytes_of(d_min), packed), dim=1), codes.byte().view(-1, BLOCK)


def _q4_k(x: Tensor) -> Tensor:
    head, codes = _with_minima(x, 4, -1.0, 20)
    halves = codes.view(-1, 4, 2, 32)
    return torch.cat((head, (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)), dim=1)


def _q5_k(x: Tensor) -> Tensor:
    head, codes = _with_minima(x, 5, -0.5, 15)
    halves = codes.view(-1, 4, 2, 32)
    high = torch.zeros(len(x), 32, dtype=torch.uint8)
    for chunk in range(4):
        for half in range(2):
            high |= halves[:, chunk, half] >> 4 << (2 * chunk + half)
    low = (halves[:, :, 0] & 15) | ((halves[:, :, 1] & 15) << 4)
    return torch.cat((head, high, low.flatten(1)), dim=1)


def _q6_k(x: Tensor) -> Tensor:
    groups = x.view(-1, 16, 16)
    scale = _symmetric(groups, 32)
    extreme = _extreme(scale)
    zero = extreme.abs() < _ALL_ZERO
    inverse = -128.0 / torch.where(zero, 1.0, extreme)
    d = (1 / inverse).half()
    scales = (scale * inverse.unsqueeze(-1)).round_().clamp_(-128, 127)
    codes = (_codes(groups, d.float()[:, None] * scales, None, -32, 31) + 32).byte().view(-1, 2, 4, 32)
    low = torch.cat(
        ((codes[:, :, 0] & 15) | ((codes[:, :, 2] & 15) << 4), (codes[:, :, 1] & 15) | ((codes[:, :, 3] & 15) << 4)), -1
    )
    high = codes[:, :, 0] >> 4 | (codes[:, :, 1] >> 4 << 2) | (codes[:, :, 2] >> 4 << 4) | (codes[:, :, 3] >> 4 << 6)
    blocks = (low.flatten(1), high.flatten(1), scales.to(torch.int8).view(torch.uint8), _bytes_of(d))
    return torch.where(zero.unsqueeze(-1), 0, torch.cat(blocks, dim=1)).byte()


def _pairs_of_bits(codes: Tensor) -> Tensor:
    """``codes`` uint8 [n, 256], two bits each, in bytes [n, 64]."""
    quarters = codes.view(-1, 2, 4, 32)
    return _combined([quarters[:, :, part] << (2 * part) for part in range(4)]).flatten(1)


def _combined(parts: list[Tensor]) -> Tensor:
    """Bits of ``parts``, no two of which overlap, in one."""
    result = parts[0]
    for part in parts[1:]:
        result = result | part
    return result


def _q2_k(x: Tensor) -> Tensor:
    groups = x.view(-1, 16, 16)
    scale, least = _affine(groups, groups.abs(), 3, -0.5, 15, absolute=True)
    (scales, d), (minima, d_min) = _scaled(scale, 15), _scaled(least, 15)
    codes = _codes(groups, d.float()[:, None] * scales.float(), d_min.float()[:, None] * minima.float(), 0, 3)
    packed = _pairs_of_bits(codes.byte().view(-1, BLOCK))
    return torch.cat((scales | (minima << 4), packed, _bytes_of(d), _bytes_of(d_min)), dim=1)


def _q3_k(x: Tensor) -> Tensor:
    groups = x.view(-1, 16, 16)
    scale = _refined(groups, 4)
    extreme = _extreme(scale)
    zero = extreme == 0
    inverse = -32.0 / torch.where(zero, 1.0, extreme)
    d = torch.where(zero, 0.0, 1 / inverse).half()
    scales = torch.where(zero.unsqueeze(-1), 0.0, (scale * inverse.unsqueeze(-1)).round_().clamp_(-32, 31) + 32)
    effective = d.float()[:, None] * (scales - 32)
    codes = (_codes(groups, effective, None, -4, 3) + 4).byte().view(-1, BLOCK)
    eighths = (codes > 3).byte().view(-1, 8, 32)
    mask = _combined([eighths[:, part] << part for part in range(8)])
    stored = scales.byte()
    fours = (stored >> 4).view(-1, 4, 4)
    packed = torch.cat(
        (
            (stored[:, :8] & 15) | ((stored[:, 8:] & 15) << 4),
            _combined([fours[:, part] << (2 * part) for part in range(4)]),
        ),
        dim=1,
    )
    return torch.cat((mask, _pairs_of_bits(codes & 3), packed, _bytes_of(d)), dim=1)


K_TYPES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
