"""NVFP4: two E2M1 codes a byte, the lower bits first, an E4M3 scale for each 16, and a float32 number for all of a
matrix, by which compressed-tensors divides the scales and ModelOpt multiplies them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate

from moelight.formats.format import Format, TensorSpec, same_but_for_ones
from moelight.formats.fp8 import fp8
from moelight.formats.rules import NEVER, ROUTERS, FormatRow, ModuleRule, Scheme, Settings

NV_GROUP = 16  # columns that share a scale
_COMPRESSED = (".weight_packed", ".weight_scale", ".weight_global_scale")
_MODELOPT = (".weight", ".weight_scale", ".weight_scale_2")
_MAX_PATTERN_LENGTH, _MAX_STARS = 200, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class NVFP4Format(Format):
    """Bytes [rows, columns / 2], scales [rows, groups], a number [1]; ``divides``: scales are divided by the number."""

    key = "nvfp4"

    name: str = "NVFP4"
    bits: int = 4
    codes: str = "U8"
    scale: str = "F8_E4M3"
    group: int = NV_GROUP
    divides: bool = False

    @property
    def native_name(self) -> str:
        return "nvfp4 divided" if self.divides else "nvfp4"

    @property
    def unpacker(self) -> str:
        return self.native_name

    @property
    def has_offsets(self) -> bool:
        return True

    def _steps(self) -> tuple[int, int]:
        return 1, NV_GROUP

    def _tensors(self, rows: int, columns: int) -> Sequence[TensorSpec]:
        codes, scales, number = self.names
        return (
            TensorSpec(codes, ("U8",), (rows, columns // 2)),
            TensorSpec(scales, (self.scale,), (rows, self.groups(columns))),
            TensorSpec(number, ("F32",), (1,)),
        )

    def rows_of_line(self, suffix: str) -> int:
        return 0 if suffix == self.names[2] else 1

    def size_of(self, codes: Sequence[int]) -> tuple[int, int]:
        return codes[-2], 2 * codes[-1]

    def accepts(self, shape: Sequence[int], expected: Sequence[int]) -> bool:
        return same_but_for_ones(shape, expected)


def nvfp4(*, divides: bool) -> NVFP4Format:
    """NVFP4 as compressed-tensors stores it, whose number divides the scales, or as ModelOpt does."""
    return NVFP4Format(names=_COMPRESSED if divides else _MODELOPT, divides=divides)


def _scheme(scheme: Scheme) -> Format:
    fits = scheme.floating and scheme.bits == 4 and scheme.group == NV_GROUP and scheme.strategy == "tensor_group"
    if not fits or not scheme.symmetric:
        raise ValueError("nvfp4-pack-quantized weights must be float, symmetric, of 4 bits in groups of 16")
    return nvfp4(divides=True)


def _rules(settings: Settings, _: str) -> Iterable[ModuleRule]:
    """Yield the rules of ModelOpt's exports: NVFP4, or FP8 with a scale for each matrix."""
    algorithm = settings.only(("quant_algo",), ("nvfp4", "w4a16_nvfp4", "fp8"))
    for name in settings.words("ignore", "exclude_modules"):
        if len(name) > _MAX_PATTERN_LENGTH or name.count("*") > _MAX_STARS:
            raise ValueError("a pattern there is too long a one")
        yield ModuleRule(re.compile(translate(name)), None)
    yield from (ModuleRule(NEVER, None), ModuleRule(ROUTERS, None))
    stored = fp8(block=(0, 0), scale="F32", suffix=".weight_scale") if algorithm == "fp8" else nvfp4(divides=False)
    yield ModuleRule(re.compile(r".*"), stored)


ROW = FormatRow(
    format=NVFP4Format,
    suffixes=(*_COMPRESSED, *_MODELOPT),
    methods={"modelopt": _rules},
    schemes={("nvfp4-pack-quantized", True): _scheme},
)
