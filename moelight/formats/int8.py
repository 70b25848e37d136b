"""int8: signed bytes times scales, less zero points."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.formats.format import Format
from moelight.formats.rules import TORCHAO_NAMES, FormatRow, Scheme
from moelight.formats.scaled import ScaledFormat, scheme_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Format(ScaledFormat):
    """Signed bytes."""

    key = "int8"

    codes: str = "I8"


def _scheme(scheme: Scheme) -> Format:
    return Int8Format(name=f"int{scheme.bits} {scheme.described}", **scheme_fields(scheme))


ROW = FormatRow(
    format=Int8Format,
    suffixes=(".weight", ".weight_scale", ".weight_zero_point", *TORCHAO_NAMES),
    schemes=dict.fromkeys(
        (("int-quantized", False), ("naive-quantized", False), ("float-quantized", False)),
        _scheme,
    ),
)
