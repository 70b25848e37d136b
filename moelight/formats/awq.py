"""AWQ of the ``gemm`` version: eight 4-bit codes a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 of its rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moelight.formats.format import CELLS, RepackTable, per_group
from moelight.formats.gptq import WordsByColumn
from moelight.formats.rules import NEVER, ROUTERS, FormatRow, ModuleRule, Settings, within


@dataclass(frozen=True, kw_only=True, slots=True)
class AWQFormat(WordsByColumn):
    """Words [columns, rows / 8]."""

    key = "awq"
    scattered = True

    def _steps(self) -> tuple[int, int]:
        return self.per_word, self.group or 1

    def _words(self, rows: int, columns: int) -> tuple[int, int]:
        return columns, rows * self.bits // 32

    def size_of(self, codes: Sequence[int]) -> tuple[int, int]:
        return codes[-1] * self.per_word, codes[0]

    def repack_table(self, suffix: str, shape: Sequence[int], itemsize: int) -> RepackTable | None:
        weight, scale, zero = self.names[:3]
        lines, width = shape
        if suffix == weight:
            return "awq codes", lines // self.per_word, width * self.per_word, False, 0, 0
        if suffix == scale:
            return CELLS[itemsize], lines, width, False, 0, 0
        return (CELLS[itemsize], lines, width, True, self.bits, 0) if suffix == zero else None


def awq(*, group: int) -> AWQFormat:
    """AWQ in 4 bits."""
    return AWQFormat(
        name=f"AWQ int4{per_group(group)}",
        bits=4,
        scale="F16",
        group=group,
        zero_points=True,
        names=(".qweight", ".scales", ".qzeros"),
    )


def _rules(settings: Settings, _: str) -> Iterable[ModuleRule]:
    settings.integer("bits", 4, lambda bits: bits == 4, "4")
    settings.only(("version", "format"), ("gemm",))
    settings.only(("zero_point",), (True,))
    yield from (ModuleRule(within(name), None) for name in settings.words("modules_to_not_convert"))
    yield from (ModuleRule(NEVER, None), ModuleRule(ROUTERS, None))
    yield ModuleRule(re.compile(r".*"), awq(group=settings.group()))


ROW = FormatRow(format=AWQFormat, suffixes=(".qweight", ".scales", ".qzeros"), methods={"awq": _rules})
