"""GPTQ: integers in 32-bit words along a column, with zero points and an order of columns; and what it shares with
AWQ."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from moelight.formats.format import CELLS, FLOATS, Format, RepackTable, TensorSpec, first_of, per_group
from moelight.formats.packed import PackedFormat
from moelight.formats.rules import NEVER, ROUTERS, FormatRow, ModuleRule, Settings, pattern_of, within

_MAX_REPACKED_ROWS = 1 << 18  # whose words fit the buffer that they are reordered by way of


@dataclass(frozen=True, kw_only=True, slots=True)
class WordsByColumn(Format):
    """Integers in words, stored [columns, rows]: scales [groups, rows], words of zero points [groups, rows / codes a
    word]."""

    transposed = True

    codes: str = "I32"

    @abstractmethod
    def _words(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the words of codes."""

    def _tensors(self, rows: int, columns: int) -> Sequence[TensorSpec]:
        weight, scales, zeros, order = (*self.names, "")[:4]
        groups = self.groups(columns)
        tensors = [
            TensorSpec(weight, ("I32",), self._words(rows, columns)),
            TensorSpec(scales, first_of(self.scale, FLOATS), (groups, rows)),
            TensorSpec(zeros, ("I32",), (groups, rows * self.bits // 32)),
        ]
        return (*tensors, TensorSpec(order, ("I32",), (columns,))) if self.order else tensors

    def repacked_format(self, rows: int, columns: int) -> Format | None:
        """Packed integers; None where columns have an order, or words or groups do not come out even."""
        if (self.order and not self.in_order) or rows > _MAX_REPACKED_ROWS:
            return None
        group = self.group if self.groups(columns) > 1 else 0
        if columns % self.per_word or columns % (group or 1):
            return None
        return PackedFormat(
            name=self.name,
            bits=self.bits,
            scale=self.scale,
            group=group,
            zero_points=self.zero_points,
            names=self.names[:3],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTQFormat(WordsByColumn):
    """Words [columns / codes a word, rows], the lowest bits first."""

    key = "gptq"

    def _steps(self) -> tuple[int, int]:
        return self.per_word, self.per_word

    def _words(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-columns * self.bits // 32), rows

    def spelled(self, exists: Callable[[str], bool]) -> Format:
        """Without an order that is not stored, where columns are said to be in the order of their groups."""
        return replace(self, order=False) if self.in_order and not exists(self.names[3]) else self

    def size_of(self, codes: Sequence[int]) -> tuple[int, int]:
        return codes[-1], codes[0] * self.per_word

    def repack_table(self, suffix: str, shape: Sequence[int], itemsize: int) -> RepackTable | None:
        weight, scale, zero = self.names[:3]
        if suffix not in (weight, scale, zero):
            return None
        codes = (self.bits, self.zero_bias) if suffix == zero and self.zero_bias else (0, 0)
        return CELLS[itemsize], shape[0], shape[1], False, *codes


def gptq(*, bits: int, group: int, order: bool = True, in_order: bool = False, zero_bias: int = 1) -> GPTQFormat:
    """GPTQ: zero points always stored, also symmetric ones; ``order`` as ``g_idx`` is, also without ``desc_act``."""
    return GPTQFormat(
        name=f"GPTQ int{bits}{per_group(group)}",
        bits=bits,
        scale="F16",
        group=group,
        zero_points=True,
        zero_bias=zero_bias,
        order=order,
        in_order=in_order,
        names=(".qweight", ".scales", ".qzeros", ".g_idx"),
    )


def _rules(settings: Settings, _: str) -> Iterable[ModuleRule]:
    settings.only(("quant_method",), ("gptq",))
    version = settings.only(("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    settings.only(("pack_dtype",), ("int32",))
    settings.only(("is_marlin_format",), (False,))
    bias = 1 if version == "gptq" else 0
    default = _format(settings, bias)
    dynamic = settings.values.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ValueError("dynamic there must be an object")
    for pattern, overrides in dynamic.items():
        excluded = pattern.startswith("-:")
        modules = re.compile(rf"(?:{pattern_of(pattern.removeprefix('-:').removeprefix('+:')).pattern}).*")
        values = {**settings.values, **overrides} if isinstance(overrides, dict) else settings.values
        yield ModuleRule(modules, None if excluded else _format(Settings(values), bias))
    if settings.only(("lm_head",), (False, True)):
        yield ModuleRule(re.compile(r"lm_head"), default)
    yield from (ModuleRule(NEVER, None), ModuleRule(ROUTERS, None))
    blocks = settings.values.get("modules_in_block_to_quantize")
    if blocks is None:
        yield ModuleRule(re.compile(r".*"), default)
        return
    if not isinstance(blocks, list):
        raise ValueError("modules_in_block_to_quantize there must be a list")
    for block in blocks:
        for name in Settings({"it": block if isinstance(block, list) else [block]}).words("it"):
            yield ModuleRule(within(re.escape(name)), default)


def _format(settings: Settings, bias: int) -> GPTQFormat:
    bits = settings.integer("bits", 0, lambda bits: bits in (2, 4, 8), "2, 4 or 8")
    in_order = settings.values.get("desc_act") is False
    return gptq(bits=bits, group=settings.group(), in_order=in_order, zero_bias=bias)


ROW = FormatRow(
    format=GPTQFormat,
    suffixes=(".qweight", ".scales", ".qzeros", ".g_idx"),
    methods={"gptq": _rules},
)
