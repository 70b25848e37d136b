"""Plain values: floats as they are, without scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moelight.formats.format import FLOATS, ITEM_BYTES, Format, TensorSpec
from moelight.formats.rules import FormatRow


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainFormat(Format):
    """Values of the dtype ``codes``."""

    key = "plain"

    names: tuple[str, ...] = (".weight",)

    def _tensors(self, rows: int, columns: int) -> Sequence[TensorSpec]:
        return (TensorSpec(self.names[0], (self.codes,), (rows, columns)),)

    @property
    def is_quantised(self) -> bool:
        return False

    @property
    def int8_reason(self) -> str | None:
        return f"{self.name}, whose numbers are no integers times scales, as int8 activations need them"


def plain(dtype: str) -> PlainFormat:
    """Values of the safetensors dtype ``dtype``."""
    return PlainFormat(name=dtype, bits=8 * ITEM_BYTES[dtype], codes=dtype)


PLAIN_FORMATS = {dtype: plain(dtype) for dtype in FLOATS}
ROW = FormatRow(format=PlainFormat, suffixes=(".weight",))
