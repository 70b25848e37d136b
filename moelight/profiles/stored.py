"""How checkpoints store the numbers of a matrix: formats as data, the tensors that each takes, their exact bytes.

A matrix has one row for each output and one column for each input, whatever the order on disk. `kernels.quantized`
gives the numbers, `quantization` says which matrix of a checkpoint has which format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moelight.core.dtypes import DType
from moelight.core.errors import ConfigError
from moelight.core.units import align_up

PLAIN, SCALED, PACKED, GPTQ, AWQ, MXFP4, GGML = "plain", "scaled", "packed", "gptq", "awq", "mxfp4", "ggml"
# Bytes of a number by its safetensors name.
ITEM_BYTES = {
    **dict.fromkeys(("F8_E4M3", "F8_E8M0", "I8", "U8"), 1),
    **dict.fromkeys(("BF16", "F16"), 2),
    **dict.fromkeys(("F32", "I32"), 4),
    "I64": 8,
}
MX_GROUP = 32  # columns of a block of MXFP4
SHAPE = ".weight_shape"  # of a part that repeats the size of the matrix
# Every suffix under which a format keeps something: a matrix with one that its format has not is stored otherwise.
SUFFIXES = (
    *(".weight", ".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".weight_g_idx", ".weight_packed"),
    *(".weight_global_scale", ".weight_shape", ".qweight", ".qzeros", ".scales", ".g_idx", "_blocks", "_scales"),
    *("_scale", "_scale_inv", ".scale"),
)
PART_ALIGNMENT = 16  # bytes; of each part of an expert's page
_WORD = 32  # bits
# ggml types whose codes are whole numbers to int8 activations; of blocks of 256 the columns of an activation and of a
# row that share a scale.
_INTEGER_BLOCKS = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
_BLOCK_GROUPS = {"Q4_K": (256, 32), "Q5_K": (256, 32), "Q6_K": (256, 16)}
_LEAST_GROUP, _MOST_GROUP = 32, 128  # columns of an activation in int8 that share a scale
_MOST_REPACKED_ROWS = 1 << 18  # whose words fit the buffer that they are turned by way of
_FLOATS, _EXPONENTS = ("F16", "BF16", "F32"), ("U8", "F8_E8M0")  # of scales; exponents of two, biased by 127


class StoredPart(NamedTuple):
    """A tensor that holds a part of a matrix: its name is that of the module and ``suffix``; ``dtypes`` are the
    safetensors names that it may have, the one that is counted first."""

    suffix: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtypes[0]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFormat:
    """How the numbers of a matrix [rows, columns] are stored.

    Attributes:
        name: for people; of a ggml format that of its type (``Q4_K``).
        kind: what `kernels.quantized` distinguishes. ``plain``: numbers. ``scaled``: 8-bit codes times scales.
            ``packed``: codes in 32-bit words along a row, the lowest bits first (compressed-tensors). ``gptq``: the
            same along a column, so [columns, rows]. ``awq``: [columns, rows], eight 4-bit codes of a word in the order
            0, 2, 4, 6, 1, 3, 5, 7 of its rows. ``mxfp4``: two E2M1 numbers a byte, the lower bits first, and a power
            of two for each 32. ``ggml``: rows of blocks, scales inside.
        bits: of a code.
        codes: safetensors name of the stored codes.
        scale: that of the scales, where a config says it; a checkpoint may have any of `StoredPart.dtypes`.
        group, group_rows: columns and rows that share a scale; 0: all of them.
        zero_points: each scale has a zero point, of ``bits`` bits; else codes are signed, or biased by half their range
            where they are packed.
        zero_bias: added to stored zero points, modulo 2^bits (1: the first version of GPTQ's format).
        order: of GPTQ: each column says its group (``g_idx``), as columns may be quantised in another order.
        in_order: the config says that they are in the order of their groups.
        names: suffixes of codes, scales, zero points, order.
        block, block_bytes: numbers and bytes of a ggml block.
    """

    name: str
    kind: str
    bits: int
    codes: str = ""
    scale: str = ""
    group: int = 0
    group_rows: int = 1
    zero_points: bool = False
    zero_bias: int = 0
    order: bool = False
    in_order: bool = False
    names: tuple[str, ...] = (".weight", ".weight_scale", ".weight_zero_point")
    block: int = 1
    block_bytes: int = 0

    @property
    def transposed(self) -> bool:
        """True if a stored row holds one input of all outputs."""
        return self.kind in (GPTQ, AWQ)

    @property
    def per_word(self) -> int:
        """Codes of a 32-bit word."""
        return _WORD // self.bits

    def groups(self, columns: int) -> int:
        """Groups of columns."""
        return -(-columns // self.group) if self.group else 1

    def row_groups(self, rows: int) -> int:
        return -(-rows // self.group_rows) if self.group_rows else 1

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        """The tensors of a matrix, all of them required; raises ConfigError if a matrix of this size has no such
        format."""
        self._check(rows, columns)
        weight, scales, zeros, order = (*self.names, "", "", "")[:4]
        groups = self.groups(columns)
        scale_dtypes = _first(self.scale, _EXPONENTS if self.kind == MXFP4 else _FLOATS)
        if self.kind == PLAIN:
            return (StoredPart(weight, (self.codes,), (rows, columns)),)
        if self.kind == GGML:
            return (StoredPart(weight, ("U8",), (rows, columns // self.block * self.block_bytes)),)
        if self.kind == MXFP4:
            return (
                StoredPart(weight, ("U8", "I8"), (rows, columns // 2)),
                StoredPart(scales, scale_dtypes, (rows, groups)),
            )
        words, bits = -(-columns * self.bits // _WORD), self.bits
        if self.kind == PACKED:
            found = [StoredPart(weight, ("I32",), (rows, words)), StoredPart(scales, scale_dtypes, (rows, groups))]
            if self.zero_points:
                found.append(StoredPart(zeros, ("I32",), (-(-rows * bits // _WORD), groups)))
            return (*found, StoredPart(SHAPE, ("I64", "I32"), (2,)))
        if self.kind == SCALED:
            grid = (self.row_groups(rows), groups)
            found = [
                StoredPart(weight, (self.codes,), (rows, columns)),
                StoredPart(scales, _first(self.scale, (*_FLOATS, *_EXPONENTS)), grid),
            ]
            return (*found, *([StoredPart(zeros, (self.codes,), grid)] if self.zero_points else []))
        stored = (columns, rows * bits // _WORD) if self.kind == AWQ else (words, rows)
        found = [
            StoredPart(weight, ("I32",), stored),
            StoredPart(scales, scale_dtypes, (groups, rows)),
            StoredPart(zeros, ("I32",), (groups, rows * bits // _WORD)),
        ]
        return (*found, *([StoredPart(order, ("I32",), (columns,))] if self.order else []))

    def repacked(self, rows: int, columns: int) -> StoredFormat | None:
        """The packed integers that a matrix of GPTQ or AWQ becomes where its parts are turned to lie by rows
        (`kernels.repack`): the same numbers in the same bytes, without an order. None where it has one, or words or
        groups that do not come out even, or is another format."""
        if not self.transposed or (self.order and not self.in_order) or rows > _MOST_REPACKED_ROWS:
            return None
        group = self.group if self.groups(columns) > 1 else 0
        if columns % self.per_word or columns % (group or 1):
            return None
        return replace(self, kind=PACKED, group=group, zero_bias=0, order=False, in_order=False, names=self.names[:3])

    def bytes_for(self, rows: int, columns: int) -> int:
        """Bytes of a matrix, scales, zero points and order included; raises as `parts` does."""
        return sum(part.nbytes for part in self.parts(rows, columns))

    def paged_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix in an expert's page; raises as `parts` does."""
        parts = (part for part in self.parts(rows, columns) if part.suffix != SHAPE)
        return sum(align_up(part.nbytes, PART_ALIGNMENT) for part in parts)

    @property
    def without_integers(self) -> str | None:
        """The reason why numbers are not whole numbers that int8 activations could be multiplied by, or None."""
        if self.kind == GGML:
            if self.name not in _INTEGER_BLOCKS:
                return f"{self.name}; int8 activations are served for the ggml types {', '.join(_INTEGER_BLOCKS)}"
            return None
        if self.kind == PLAIN or self.codes == "F8_E4M3":
            return f"{self.name}, whose numbers are no integers times scales, as int8 activations need them"
        if self.bits not in (4, 8):
            return f"{self.name}; int8 activations are served for codes of 4 and 8 bits"
        if self.group % _LEAST_GROUP:
            return f"{self.name}; int8 activations need groups of a multiple of {_LEAST_GROUP} columns"
        return None

    def integer_groups(self, columns: int) -> tuple[int, int]:
        """Columns of an activation that share a scale where they meet whole numbers, and of a row that do."""
        if self.kind in (GGML, MXFP4):
            return _BLOCK_GROUPS.get(self.name, (_LEAST_GROUP, _LEAST_GROUP))
        group = self.group if 0 < self.group < columns else _MOST_GROUP
        size = next(size for size in (_MOST_GROUP, 64, _LEAST_GROUP) if group % size == 0)
        return size, size

    def rows_of_line(self, suffix: str) -> int:
        """Rows of the matrix in each index of the first dimension of the part ``suffix``: 0 if the part is of all rows,
        -1 if its first dimension is not of rows."""
        if suffix == SHAPE:
            return 0
        if self.transposed:
            return -1
        if self.kind == SCALED and suffix != self.names[0]:
            return self.group_rows
        return self.per_word if self.kind == PACKED and suffix == self.names[2] else 1

    def bits_per_weight(self, rows: int, columns: int) -> float:
        return 8 * self.bytes_for(rows, columns) / (rows * columns)

    def _check(self, rows: int, columns: int) -> None:
        """Raise ConfigError unless blocks, groups and words come out even where the format has no other rule."""
        step_rows = step_columns = 1
        if self.kind == GGML:
            step_columns = self.block
        elif self.kind == MXFP4:
            step_columns = MX_GROUP
        elif self.kind == GPTQ:
            step_rows = step_columns = self.per_word
        elif self.kind == AWQ:
            step_rows, step_columns = self.per_word, self.group or 1
        elif self.kind == PACKED:
            step_columns = self.group or 1
        for what, size, step in (("rows", rows, step_rows), ("columns", columns, step_columns)):
            if size % step:
                raise ConfigError(f"{self.name} needs a multiple of {step} {what}, and a matrix has {size}")


def _first(dtype: str, others: tuple[str, ...]) -> tuple[str, ...]:
    return (dtype, *(each for each in others if each != dtype))


def plain(dtype: str) -> StoredFormat:
    """Numbers of the safetensors dtype ``dtype``."""
    return StoredFormat(name=dtype, kind=PLAIN, bits=8 * ITEM_BYTES[dtype], codes=dtype)


def gptq(*, bits: int, group: int, order: bool = True, in_order: bool = False, zero_bias: int = 1) -> StoredFormat:
    """GPTQ: zero points always stored, also symmetric ones; ``order`` as ``g_idx`` is, also without ``desc_act``."""
    return StoredFormat(
        name=f"GPTQ int{bits}{_of(group)}",
        kind=GPTQ,
        bits=bits,
        codes="I32",
        scale="F16",
        group=group,
        zero_points=True,
        zero_bias=zero_bias,
        order=order,
        in_order=in_order,
        names=(".qweight", ".scales", ".qzeros", ".g_idx"),
    )


def awq(*, group: int) -> StoredFormat:
    """AWQ in 4 bits, of the ``gemm`` version."""
    return StoredFormat(
        name=f"AWQ int4{_of(group)}",
        kind=AWQ,
        bits=4,
        codes="I32",
        scale="F16",
        group=group,
        zero_points=True,
        names=(".qweight", ".scales", ".qzeros"),
    )


def fp8(*, block: tuple[int, int], scale: str, suffix: str = ".weight_scale_inv") -> StoredFormat:
    """E4M3 numbers times a scale for each ``block`` of (rows, columns); 0: all of them."""
    named = {(1, 0): " per channel", (0, 0): " per tensor"}.get(block, f" in blocks of {block[0]}x{block[1]}")
    return StoredFormat(
        name=f"FP8{named}",
        kind=SCALED,
        bits=8,
        codes="F8_E4M3",
        scale=scale,
        group_rows=block[0],
        group=block[1],
        names=(".weight", suffix, ".weight_zero_point"),
    )


def mxfp4(names: tuple[str, str]) -> StoredFormat:
    """MXFP4 under the suffixes ``names`` of codes and scales."""
    return StoredFormat(name="MXFP4", kind=MXFP4, bits=4, codes="U8", scale="U8", group=MX_GROUP, names=names)


def _of(group: int) -> str:
    return f" in groups of {group}" if group else " per channel"


# Types of ggml that are read: bits of a code, numbers of a block, bytes of a block.
_GGML = {
    "Q4_0": (4, 32, 18),
    "Q4_1": (4, 32, 20),
    "Q5_0": (5, 32, 22),
    "Q5_1": (5, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (2, 256, 84),
    "Q3_K": (3, 256, 110),
    "Q4_K": (4, 256, 144),
    "Q5_K": (5, 256, 176),
    "Q6_K": (6, 256, 210),
    "IQ4_NL": (4, 32, 18),
    "IQ4_XS": (4, 256, 136),
    "MXFP4": (4, 32, 17),
}
GGML_FORMATS = {
    **{name: plain(name) for name in _FLOATS},
    **{
        name: StoredFormat(
            name=name, kind=GGML, bits=bits, codes="U8", names=(".weight",), block=block, block_bytes=size
        )
        for name, (bits, block, size) in _GGML.items()
    },
}


def ggml_format(name: str) -> StoredFormat:
    """The format of the ggml type ``name``; raises ConfigError for one that is not read."""
    if name not in GGML_FORMATS:
        known = ", ".join(GGML_FORMATS)
        raise ConfigError(f"numbers of the ggml type {name} are not read; use a file of the types {known}")
    return GGML_FORMATS[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """The stored bytes of a quantised model.

    Attributes:
        name: the formats, for people; experts first.
        pages: bytes of the largest expert of each layer, 0 without experts.
        mean_page_bytes: bytes of an expert on average, rounded up.
        total_bytes: of all experts.
        dtype: the experts as a number format for prices: `DType.bytes_for` all numbers of an expert is the largest
            page.
        dense: quantised tensors outside the experts: name, layer and bytes; the others have the model's dtype.
        kept: those that our own decoder multiplies on a CPU as they are stored: name, layer and bytes in memory.
        repacked_bytes: of an expert on average, those of matrices that are turned on a CPU, to lie by rows.
        mixed: experts of some layer are stored in several formats, so that on a GPU torch computes them.
        without_integers: the reason why activations rounded to int8 multiply no matrix of the experts, or None.
        exact: where they multiply some, the formats of those that meet activations as they are.
    """

    name: str
    pages: tuple[int, ...]
    dtype: DType
    total_bytes: int
    mean_page_bytes: int
    dense: tuple[tuple[str, int, int], ...] = ()
    kept: tuple[tuple[str, int, int], ...] = ()
    repacked_bytes: int = 0
    mixed: bool = False
    without_integers: str | None = None
    exact: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        experts: str,
        pages: Sequence[Sequence[int]],
        elements: int,
        dense: Sequence[tuple[str, int, int]],
        kept: Sequence[tuple[str, int, int]] = (),
        reasons: Mapping[str, str | None] | None = None,
    ) -> StoredWeights:
        """``pages``: bytes of each expert of each layer. They hold ``elements`` numbers at most; their format is called
        ``experts``. ``reasons``: why each format of theirs is without integers, or None."""
        exact = {name: why for name, why in (reasons or {}).items() if why is not None}
        without = next(iter(exact.values()), None) if len(exact) == len(reasons or {}) else None
        sizes = [max(layer, default=0) for layer in pages]
        largest, total, count = max(sizes), sum(map(sum, pages)), sum(map(len, pages))
        bits = max(1, 8 * largest // elements)
        scales = max(0, largest - -(-elements * bits // 8))
        dtype = DType(name=experts, bits=bits, group=elements, scale_bytes=scales)
        return cls(
            name=name,
            pages=tuple(sizes),
            dtype=dtype,
            total_bytes=total,
            mean_page_bytes=-(-total // max(count, 1)),
            dense=tuple(dense),
            kept=tuple(kept),
            without_integers=without,
            exact=() if without else tuple(exact),
            mixed=any(len(set(layer)) > 1 for layer in pages),
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of the largest expert."""
        return max(self.pages)
