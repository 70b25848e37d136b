"""MLX's affine groups: unsigned codes of a row as one string of bits, the lowest first, times a scale, plus a bias, as
mlx-lm writes them. Layouts are those of `mlx.core.quantize`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moelight.formats.format import FLOATS, Format, TensorSpec, first_of, per_group
from moelight.formats.rules import FormatRow, ModuleRule, Settings

BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_NAMES = (".weight", ".scales", ".biases")
_STACK = ".switch_mlp."  # in names of stacks of experts, which `weights.loose_experts` takes apart


@dataclass(frozen=True, kw_only=True, slots=True)
class MLXFormat(Format):
    """Words [rows, columns x bits / 32], scales and biases [rows, groups] of one dtype."""

    key = "mlx"
    plain_if_unfit = True

    codes: str = "U32"
    names: tuple[str, ...] = _NAMES

    @property
    def int8_reason(self) -> str | None:
        return f"{self.name}, whose groups have a minimum of their own; int8 activations need integers times scales"

    @property
    def has_offsets(self) -> bool:
        return True

    @property
    def of_one_dtype(self) -> tuple[str, ...]:
        return self.names[1:]

    def _steps(self) -> tuple[int, int]:
        return 1, self.group

    def _tensors(self, rows: int, columns: int) -> Sequence[TensorSpec]:
        codes, scales, biases = self.names
        grid, floats = (rows, self.groups(columns)), first_of(self.scale, FLOATS)
        return (
            TensorSpec(codes, ("U32", "I32"), (rows, columns * self.bits // 32)),
            TensorSpec(scales, floats, grid),
            TensorSpec(biases, floats, grid),
        )

    def size_of(self, codes: Sequence[int]) -> tuple[int, int]:
        return codes[-2], codes[-1] * 32 // self.bits


def mlx(*, bits: int, group: int, scale: str = "BF16") -> MLXFormat:
    """Codes of ``bits`` bits in groups of ``group``, scales and biases of the safetensors dtype ``scale``."""
    return MLXFormat(name=f"MLX int{bits}{per_group(group)}", bits=bits, group=group, scale=scale)


def _rules(settings: Settings, scale: str) -> Iterable[ModuleRule]:
    """Yield the rules of a config: modules by name, then all others, of which those without scales are plain."""
    for name, entry in settings.values.items():
        if isinstance(entry, (dict, bool)):
            pattern = re.escape(name).replace(re.escape(_STACK), r"\.experts\.\d+\.")
            values = {**settings.values, **(entry if isinstance(entry, dict) else {})}
            yield ModuleRule(re.compile(pattern), None if entry is False else _format(Settings(values), scale))
    yield ModuleRule(re.compile(r".*"), _format(settings, scale))


def _format(settings: Settings, scale: str) -> Format:
    settings.only(("mode",), ("affine",))
    bits = settings.integer("bits", 4, lambda bits: bits in BITS, f"one of {', '.join(map(str, BITS))}")
    group = settings.integer("group_size", 64, lambda size: size in GROUPS, f"one of {', '.join(map(str, GROUPS))}")
    return mlx(bits=bits, group=group, scale=scale)


def _recognises(values: Mapping[str, Any]) -> bool:
    return type(values.get("bits")) is int and type(values.get("group_size")) is int


ROW = FormatRow(format=MLXFormat, suffixes=_NAMES, methods={"mlx": _rules}, recognises=_recognises)
