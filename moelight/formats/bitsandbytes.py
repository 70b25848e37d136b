"""bitsandbytes: 4-bit codes of the numbers of NF4 or FP4, two a byte, the first in the upper bits, times the largest
magnitude of each block of columns; and LLM.int8(), signed bytes times the largest magnitude of each row over 127.

Magnitudes of blocks may be codes themselves ("double quantisation"). They are computed once, when a matrix is read, so
that it has a float32 scale for each block in memory. Layouts are those of bitsandbytes 0.50: `QuantState.as_dict`,
`Linear8bitLt._save_to_state_dict`. Rounded activations (LLM.int8()) are not computed: activations stay exact.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from moelight.formats.format import DerivedScales, Description, DescriptionError, Format, TensorSpec, same_but_for_ones
from moelight.formats.int8 import Int8Format
from moelight.formats.rules import EXPERTS, NEVER, FormatRow, ModuleRule, Settings, within

_BLOCK, _MAX_BLOCK = 64, 1 << 12  # values that share a scale, by rows
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = (
    *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0),
    *(0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
    *(0.0, -0.0052083334885537624, -0.6666666865348816, -1.0),
    *(-0.3333333432674408, -0.5, -0.1666666716337204, -0.25),
)
CODE_VALUES = {"nf4": NF4, "fp4": FP4}
_NAMES = (".weight", ".weight.absmax")
_STATE = ".weight.quant_state.bitsandbytes__"
_MAP, _NESTED_MAP, _NESTED = ".weight.quant_map", ".weight.nested_quant_map", ".weight.nested_absmax"
_FORMAT, _INT8_NAMES = ".weight_format", (".weight", ".SCB")
_PER_127 = 7.874015718698502e-3  # by which bitsandbytes multiplies: 1 / 127 in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class BitsAndBytesFormat(Format):
    """Bytes [rows, columns / 2], scales [rows, groups]; ``code_type``: a key of `CODE_VALUES`."""

    key = "bitsandbytes"
    beside: ClassVar[tuple[str, ...]] = (_MAP, _NESTED_MAP, _NESTED, *(_STATE + code_type for code_type in CODE_VALUES))

    bits: int = 4
    codes: str = "U8"
    scale: str = "F32"
    group: int = _BLOCK
    names: tuple[str, ...] = _NAMES
    code_type: str = "nf4"

    @property
    def native_name(self) -> str:
        return self.code_type

    @property
    def unpacker(self) -> str:
        return self.code_type

    @property
    def int8_reason(self) -> str | None:
        return f"{self.name}, whose numbers are no integers times scales, as int8 activations need them"

    def _steps(self) -> tuple[int, int]:
        return 1, 2

    def groups(self, columns: int) -> int:
        return columns // math.gcd(self.group, columns)

    def _tensors(self, rows: int, columns: int) -> Sequence[TensorSpec]:
        codes, scales = self.names
        return (
            TensorSpec(codes, ("U8",), (rows, columns // 2)),
            TensorSpec(scales, ("F32",), (rows, self.groups(columns))),
        )

    def size_of(self, codes: Sequence[int]) -> tuple[int, int]:
        return codes[-2], 2 * codes[-1]

    def accepts(self, shape: Sequence[int], expected: Sequence[int]) -> bool:
        """A list of scales by rows, too."""
        return tuple(shape) == tuple(expected) or same_but_for_ones(shape, (math.prod(expected),))

    def described(self, codes: Sequence[int], read: Callable[[str], bytes | None]) -> Description:
        suffix = _STATE + self.code_type
        state = _state(suffix, self.name, read(suffix))
        if state.get("quant_type") != self.code_type:
            raise DescriptionError(suffix, f"says the quant_type {str(state.get('quant_type'))[:20]!r}")
        if read(_MAP) != struct.pack("<16f", *CODE_VALUES[self.code_type]):
            raise DescriptionError(_MAP, f"does not hold the numbers of {self.name}")
        shape, block = state.get("shape"), state.get("blocksize")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
            raise DescriptionError(suffix, "says no shape of a matrix")
        if type(block) is not int or not 2 <= block <= _MAX_BLOCK or block & (block - 1):
            raise DescriptionError(suffix, f"says the blocksize {str(block)[:20]!r}, which is no power of two")
        rows, columns = shape
        if columns % 2:
            raise DescriptionError(suffix, "has an odd number of columns", "use a checkpoint that is not quantised")
        stored = replace(self, group=math.gcd(block, columns))  # blocks may go on in the next row
        scales = _scales(state, suffix, rows * stored.groups(columns), block // stored.group)
        return Description(stored=stored, shape=(rows, columns), scales=scales)


def _state(suffix: str, name: str, text: bytes | None) -> dict[str, Any]:
    """The description of a matrix in the tensor ``suffix``."""
    if text is None:
        raise DescriptionError(
            suffix, f"is missing, and config.json says that the matrix is {name}", "correct quantization_config"
        )
    with contextlib.suppress(ValueError, RecursionError):
        state = json.loads(text)
        if isinstance(state, dict):
            return state
    raise DescriptionError(suffix, "is no JSON object")


def _scales(state: Mapping[str, Any], suffix: str, count: int, repeats: int) -> DerivedScales | None:
    """How the ``count`` scales of a matrix are computed, of which ``repeats`` are of one block; None: they are
    stored."""
    if "nested_blocksize" not in state:
        return DerivedScales(suffix=_NAMES[1], count=count, repeats=repeats) if repeats > 1 else None
    block, offset = state["nested_blocksize"], state.get("nested_offset")
    if type(block) is not int or block < 1 or state.get("nested_dtype") != "float32":
        raise DescriptionError(suffix, "says no float32 scales of blocks of scales")
    if not isinstance(offset, float) or not math.isfinite(offset):
        raise DescriptionError(suffix, "says no finite nested_offset")
    return DerivedScales(
        suffix=_NAMES[1],
        count=count,
        table=_NESTED_MAP,
        scales=_NESTED,
        block=block,
        offset=offset,
        repeats=repeats,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LLMInt8Format(Int8Format):
    """Signed bytes, of each row the largest magnitude, which is 127 scales."""

    beside: ClassVar[tuple[str, ...]] = (_FORMAT,)

    name: str = "LLM.int8()"
    scale: str = "F32"
    names: tuple[str, ...] = _INT8_NAMES

    def described(self, codes: Sequence[int], read: Callable[[str], bytes | None]) -> Description:
        if (order := read(_FORMAT)) not in (None, b"\0"):  # others are tiles of a GPU
            number = int.from_bytes(order or b"", "little")
            raise DescriptionError(_FORMAT, f"is {number}, and only 0, by rows, is read", "save the model again")
        rows, columns = self.size_of(codes)
        scales = DerivedScales(suffix=_INT8_NAMES[1], count=rows, factor=_PER_127)
        return Description(stored=self, shape=(rows, columns), scales=scales)


def bitsandbytes(code_type: str) -> BitsAndBytesFormat:
    """Codes of the type "nf4" or "fp4" in blocks of 64."""
    return BitsAndBytesFormat(name=f"bitsandbytes {code_type.upper()}", code_type=code_type)


def _rules(settings: Settings, _: str) -> Iterable[ModuleRule]:
    """Yield the rules of a config of transformers. Routers are linear layers, and quantised, in families where they are
    in transformers; version 5 has stacks of experts, which stay plain."""
    eight, four = (settings.only((f"load_in_{bits}bit", f"_load_in_{bits}bit"), (False, True)) for bits in (8, 4))
    if eight == four:
        raise ValueError("either load_in_4bit or load_in_8bit there must be true")
    stored: Format = LLMInt8Format()
    if four:
        code_type = settings.only(("bnb_4bit_quant_type",), ("fp4", "nf4"))
        stored = bitsandbytes(code_type)
    skipped = settings.words("llm_int8_skip_modules")
    yield from (ModuleRule(within(re.escape(name)), None) for name in skipped)
    if settings.values.get("llm_int8_skip_modules") is not None:  # else transformers skips the head
        yield ModuleRule(re.compile(r"(?:.*\.)?lm_head"), stored)
    yield ModuleRule(NEVER, None)
    if settings.stacks_experts:
        yield ModuleRule(EXPERTS, None)
    yield ModuleRule(re.compile(r".*"), stored)


ROW = FormatRow(
    format=BitsAndBytesFormat,
    suffixes=(*_NAMES, *BitsAndBytesFormat.beside, _INT8_NAMES[1], _FORMAT),
    methods={"bitsandbytes": _rules},
)
