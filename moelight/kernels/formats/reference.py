"""The reference implementation of a format: its values, its integers, its rounding.

Shapes: R rows (outputs), C columns (inputs), G groups of columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelight.formats.format import Format

Tensors = Mapping[str, Tensor]  # by suffix, as `Format.tensors` lists them
E8M0_BIAS = 127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class WholeNumbers(NamedTuple):
    """A matrix as numbers ``values`` (int32 [R, C]) times ``scales`` (float32 [R, groups of ``group`` columns]); where
    a group has parts (of ``part`` columns) times ``steps``, less ``lows`` times ``least``: int32 [R, parts], or None,
    and as ``scales``."""

    values: Tensor
    scales: Tensor
    group: int
    part: int
    steps: Tensor | None = None
    lows: Tensor | None = None
    least: Tensor | None = None


class Reference(ABC):
    """The functions of one stored format. ``stored`` is the format with its parameters, ``tensors`` are those of a
    matrix [rows, columns]."""

    @abstractmethod
    def values(self, stored: Any, tensors: Tensors, begin: int, end: int, columns: int) -> Tensor:
        """Rows ``begin`` to ``end`` of the matrix, float32 [R, C]."""

    def integers(self, stored: Any, tensors: Tensors, rows: int, columns: int) -> WholeNumbers:
        """The matrix as integers and scales: the values with all scales one, which for codes that are integers less
        zero points are integers, and the scales."""
        group, part = stored.integer_groups(columns)
        ones = dict(tensors)
        ones[stored.names[1]] = torch.ones_like(tensors[stored.names[1]], dtype=torch.float32)
        integers = self.values(stored, ones, 0, rows, columns)
        scales = self.scales(stored, tensors, rows, columns)
        first = torch.arange(0, columns, group, device=scales.device) // (stored.group or columns)
        return WholeNumbers(integers.int(), scales[:, first], group, part)

    def scales(self, stored: Any, tensors: Tensors, rows: int, columns: int) -> Tensor:
        """The scales of each row, float32 [R, G]."""
        return tensors[stored.names[1]].float().reshape(rows, -1)


class ByColumnReference(Reference):
    """The functions of a matrix that is stored by columns (GPTQ, AWQ), scales [G, R]."""

    def scales(self, stored: Any, tensors: Tensors, rows: int, columns: int) -> Tensor:
        return tensors[stored.names[1]].float().t()


class Encoder(Reference):
    """The functions of a format that values are rounded to (`convert.rounding`): symmetric codes, scales by row."""

    code_dtype: torch.dtype

    @abstractmethod
    def codes(self, stored: Any, quotients: Tensor) -> Tensor:
        """The codes of ``quotients`` [R, C], which it destroys, as stored bytes [R, bytes of a row]."""

    def code_bytes(self, stored: Any, columns: int) -> int:
        """Bytes of a row of codes."""
        return columns * int(stored.bits) // 8

    def max_code(self, stored: Any) -> float:
        """Return the code of the largest magnitude of a group: half the range of integers."""
        return ((1 << stored.bits) - 1) / 2

    def rounded_scales(self, stored: Any, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """The scales in ``dtype`` of groups with the magnitudes ``largest``; 1 for groups of zeros."""
        scales = (largest / self.max_code(stored)).to(dtype)
        return torch.where(scales == 0, torch.ones_like(scales), scales)


def nibbles(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte, the first in the lower bits: words of eight are the same bytes."""
    both = codes.view(torch.int16)
    return (both | (both >> 4)).to(torch.uint8)


def e2m1_values(pairs: Tensor) -> Tensor:
    """The values of two E2M1 codes a byte [R, C / 2], the first in the lower bits, float32 [R, C]."""
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    return torch.tensor(_E2M1, device=codes.device)[codes.int()]


def signed_codes(bits: int, quotients: Tensor) -> Tensor:
    """The nearest integers of ``bits`` bits, int8; destroys ``quotients``."""
    half = 1 << (bits - 1)
    return quotients.clamp_(-half, half - 1).round_().to(torch.int8)  # five times as fast as to uint8


def words(packed: Tensor, bits: int, dim: int = -1) -> Tensor:
    """The codes of ``bits`` bits of int32 ``packed``, along ``dim``, which has the size 1."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    shape = [1] * packed.ndim
    shape[dim] = len(shifts)
    return (packed >> shifts.view(shape)) & ((1 << bits) - 1)


def group_of(stored: Format, columns: int, device: torch.device) -> Tensor:
    """The group of each column [C]."""
    return torch.arange(columns, device=device) // (stored.group or columns)


def codes_by_row(packed: Tensor, bits: int, begin: int, end: int, offsets: tuple[int, ...] | None = None) -> Tensor:
    """Codes [any, R] of rows ``begin`` to ``end`` out of words ``packed`` [any, R / codes a word]. ``offsets``: the
    offset in a word of each of its rows."""
    per_word = 32 // bits
    first, last = begin // per_word, -(-end // per_word)
    codes = words(packed[:, first:last].unsqueeze(-1), bits)
    if offsets is not None:
        codes = codes[..., list(offsets)]
    return codes.flatten(1)[:, begin - first * per_word :][:, : end - begin]


def by_output(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """(codes [C, R] - zeros [G, R]) x scales [G, R], as [R, C]."""
    return ((codes.float() - zeros.float()[groups]) * scales.float()[groups]).t().contiguous()
