"""The block types of ggml: rows of blocks, with scales inside. The layouts are those of ggml/src/ggml-common.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moelight.core.errors import ConfigError
from moelight.formats.format import Format, TensorSpec, same_but_for_ones
from moelight.formats.plain import PLAIN_FORMATS
from moelight.formats.rules import FormatRow


@dataclass(frozen=True, kw_only=True, slots=True)
class GGMLFormat(Format):
    """Blocks [rows, columns / ``block`` x ``block_bytes``] of the ggml type ``name``.

    Attributes:
        shared: values of a block that share a scale.
        integers: columns of an int8 activation and of a row that share a scale where codes are integers to them; None
            where they are not.
    """

    key = "ggml"

    codes: str = "U8"
    names: tuple[str, ...] = (".weight",)
    shared: int = 32
    integers: tuple[int, int] | None = None

    def _steps(self) -> tuple[int, int]:
        return 1, self.block

    def _tensors(self, rows: int, columns: int) -> Sequence[TensorSpec]:
        return (TensorSpec(self.names[0], ("U8",), (rows, columns // self.block * self.block_bytes)),)

    @property
    def unpacker(self) -> str:
        return self.name

    @property
    def token_sums(self) -> str:
        parts = self.integers is not None and self.integers[1] < self.integers[0]
        return ("parts" if parts else "groups") if self.minima else ""

    def shared_columns(self, depth: int) -> int:
        return self.shared

    @property
    def native_name(self) -> str:
        return self.name

    @property
    def int8_reason(self) -> str | None:
        if self.integers is not None:
            return None
        served = ", ".join(name for name, stored in _TYPES.items() if stored.integers is not None)
        return f"{self.name}; int8 activations are served for the ggml types {served}"

    @property
    def gpu_int8_reason(self) -> str | None:
        if self.codebook:
            return f"{self.name}, whose points int8 activations multiply on a CPU alone"
        return self.int8_reason

    def integer_groups(self, columns: int) -> tuple[int, int]:
        return self.integers or (32, 32)

    def accepts(self, shape: Sequence[int], expected: Sequence[int]) -> bool:
        return same_but_for_ones(shape, expected)


# Types that are read: bits of a code, values and bytes of a block.
_TYPES = {
    name: GGMLFormat(name=name, bits=bits, block=block, block_bytes=block_bytes, **more)
    for name, bits, block, block_bytes, more in (
        ("Q4_0", 4, 32, 18, {"integers": (32, 32)}),
        ("Q4_1", 4, 32, 20, {"minima": True, "integers": (32, 32)}),
        ("Q5_0", 5, 32, 22, {"integers": (32, 32)}),
        ("Q5_1", 5, 32, 24, {"minima": True, "integers": (32, 32)}),
        ("Q8_0", 8, 32, 34, {"integers": (32, 32)}),
        ("Q2_K", 2, 256, 84, {"shared": 16}),
        ("Q3_K", 3, 256, 110, {"shared": 16}),
        ("Q4_K", 4, 256, 144, {"minima": True, "integers": (256, 32)}),
        ("Q5_K", 5, 256, 176, {"minima": True, "integers": (256, 32)}),
        ("Q6_K", 6, 256, 210, {"shared": 16, "integers": (256, 16)}),
        ("IQ4_NL", 4, 32, 18, {}),
        ("IQ4_XS", 4, 256, 136, {}),
        ("MXFP4", 4, 32, 17, {"integers": (32, 32)}),
        ("TQ1_0", 2, 256, 54, {}),
        ("TQ2_0", 2, 256, 66, {}),
        ("IQ2_XXS", 2, 256, 66, {"codebook": "iq2_xxs", "integers": (256, 16)}),
        ("IQ2_XS", 2, 256, 74, {"shared": 16, "codebook": "iq2_xs", "integers": (256, 16)}),
        ("IQ2_S", 2, 256, 82, {"shared": 16, "codebook": "iq2_s", "integers": (256, 16)}),
        ("IQ3_XXS", 3, 256, 98, {"codebook": "iq3_xxs", "integers": (256, 16)}),
        ("IQ3_S", 3, 256, 110, {"codebook": "iq3_s", "integers": (256, 16)}),
        ("IQ1_S", 1, 256, 50, {"codebook": "iq1", "integers": (256, 16)}),
        ("IQ1_M", 1, 256, 56, {"shared": 16, "codebook": "iq1", "integers": (256, 16)}),
    )
}
GGML_FORMATS: dict[str, Format] = {**PLAIN_FORMATS, **_TYPES}


def ggml_format(name: str) -> Format:
    """The format of the ggml type ``name``; raises ConfigError for one that is not read."""
    if name not in GGML_FORMATS:
        names = ", ".join(GGML_FORMATS)
        raise ConfigError(f"numbers of the ggml type {name} are not read; use a file of the types {names}")
    return GGML_FORMATS[name]


ROW = FormatRow(format=GGMLFormat, suffixes=(".weight",))
