"""A stored format of a matrix: its tensors, their exact bytes, and how readers and kernels treat them.

A matrix has one row for each output and one column for each input, whatever the order on disk. `kernels.quantized`
gives the values, `profiles.quantization` says which matrix of a checkpoint has which format.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from moelight.core.errors import ConfigError
from moelight.core.units import align_up

# Bytes of a number by its safetensors name.
ITEM_BYTES = {
    **dict.fromkeys(("F8_E4M3", "F8_E8M0", "I8", "U8"), 1),
    **dict.fromkeys(("BF16", "F16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    "I64": 8,
}
FLOATS, EXPONENTS = ("F16", "BF16", "F32"), ("U8", "F8_E8M0")  # of scales; exponents of two, biased by 127
SHAPE = ".weight_shape"  # suffix of a tensor that repeats the size of the matrix
PAGE_ALIGNMENT = 16  # bytes; of each tensor of a matrix in an expert's page
MIN_INT8_GROUP, MAX_INT8_GROUP = 32, 128  # columns of an activation in int8 that share a scale
_WORD_BITS = 32

# How the lines of a tensor are reordered on arrival: the type of the cells, lines, cells of a line; for words of codes
# whether they are in the order of AWQ, their bits (0: the words stay) and what is added to each code.
RepackTable = tuple[str, int, int, bool, int, int]
CELLS = {1: "bytes", 2: "halves", 4: "words"}


class TensorSpec(NamedTuple):
    """A tensor of a stored matrix. Its name is that of the module and ``suffix``; ``dtypes`` are the safetensors names
    that it may have, the first of which is counted."""

    suffix: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtypes[0]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DerivedScales:
    """Scales that are computed in float32 when a matrix is read: the numbers of the tensor ``suffix``, or, where it
    holds codes, those numbers of the tensor ``table`` times that of ``scales`` for each ``block`` of them, plus
    ``offset``; times ``factor``; each ``repeats`` times, ``count`` of them in all. Tensors by their suffixes."""

    suffix: str
    count: int
    factor: float = 1.0
    table: str = ""
    scales: str = ""
    block: int = 1
    offset: float = 0.0
    repeats: int = 1


class Description(NamedTuple):
    """What tensors beside the codes say of a matrix: its format, its ``shape`` (rows, columns), and how its scales are
    computed, None if they are stored."""

    stored: Format
    shape: tuple[int, int]
    scales: DerivedScales | None


class DescriptionError(Exception):
    """The tensor ``suffix`` of a matrix does not say what it should; ``complaint`` and ``cure`` end a sentence."""

    def __init__(self, suffix: str, complaint: str, cure: str = "fetch the checkpoint again") -> None:
        super().__init__(suffix, complaint, cure)
        self.suffix, self.complaint, self.cure = suffix, complaint, cure


@dataclass(frozen=True, kw_only=True, slots=True)
class Format(ABC):
    """How the values of a matrix [rows, columns] are stored; a subclass for each row of `registry.FORMATS`.

    Attributes:
        key: the row's name, under which kernels list their functions.
        transposed: a stored row holds one input of all outputs.
        stores_shape: a tensor of its own repeats the size of the matrix.
        scattered: neighbouring inputs are in different words, so that a GPU loads codes one by one.
        beside: suffixes of tensors that describe a matrix (`described`), and are not kept.
        plain_if_unfit: tools leave a matrix plain whose size does not fit the format, of experts too.
        name: for people, with the parameters.
        bits: of a code.
        codes: safetensors name of the stored codes.
        scale: that of the scales, where a config says it; a checkpoint may have any of `TensorSpec.dtypes`.
        group, group_rows: columns and rows that share a scale; 0: all of them.
        zero_points: each scale has a zero point, of ``bits`` bits; else codes are signed, or biased by half their range
            where they are packed.
        zero_bias: added to stored zero points, modulo 2^bits (1: the first version of GPTQ's format).
        order: ``g_idx`` says the group of each column, as columns may be quantised in another order.
        in_order: the config says that columns are in the order of their groups.
        names: suffixes of codes, scales, zero points (or what is in their place, `has_offsets`), order.
        block, block_bytes: values and bytes of a block with scales inside; 1 and 0 without blocks.
        codebook: the row of `formats.codebook.CODEBOOKS` that codes are indices of; empty where codes are values.
        minima: values that share a scale, or each part of them, have a minimum, which an integer product takes off.
    """

    key: ClassVar[str]
    transposed: ClassVar[bool] = False
    stores_shape: ClassVar[bool] = False
    scattered: ClassVar[bool] = False
    plain_if_unfit: ClassVar[bool] = False
    beside: ClassVar[tuple[str, ...]] = ()

    name: str
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
    codebook: str = ""
    minima: bool = False

    @abstractmethod
    def _tensors(self, rows: int, columns: int) -> Sequence[TensorSpec]:
        """The tensors of a matrix whose size `_steps` divide."""

    @property
    def native_name(self) -> str:
        """The name of the format's traits in the extension."""
        return self.key

    @property
    def unpacker(self) -> str | None:
        """The name of the format's functions in the Triton programs (`kernels.gpu.unpackers`); None if there are none,
        and experts in this format run on the CPU alone."""
        return self.key

    @property
    def cpu_reason(self) -> str | None:
        """The reason why experts in this format run on the CPU alone, or None."""
        return f"{self.name}, which no program of a GPU unpacks" if self.unpacker is None else None

    @property
    def has_offsets(self) -> bool:
        """True if the third tensor is there: zero points, or what the format has in their place."""
        return self.zero_points

    @property
    def of_one_dtype(self) -> tuple[str, ...]:
        """Suffixes of tensors that must have the same dtype."""
        return ()

    @property
    def is_quantised(self) -> bool:
        """False if the stored values are floats, without scales."""
        return True

    @property
    def int8_reason(self) -> str | None:
        """The reason why values are not integers that int8 activations could be multiplied by, or None."""
        if self.bits not in (4, 8):
            return f"{self.name}; int8 activations are served for codes of 4 and 8 bits"
        if self.group % MIN_INT8_GROUP:
            return f"{self.name}; int8 activations need groups of a multiple of {MIN_INT8_GROUP} columns"
        return None

    @property
    def gpu_int8_reason(self) -> str | None:
        """The same of the programs of a GPU."""
        return self.int8_reason

    def integer_groups(self, columns: int) -> tuple[int, int]:
        """Columns of an int8 activation that share a scale where they meet the integers of this format, and columns of
        a row that do."""
        group = self.group if 0 < self.group < columns else MAX_INT8_GROUP
        size = next(size for size in (MAX_INT8_GROUP, 64, MIN_INT8_GROUP) if group % size == 0)
        return size, size

    @property
    def token_sums(self) -> str:
        """Which sums of the int8 numbers of an activation a product with this format takes: of each of its ``groups``,
        of the ``parts`` of each group that have a minimum, or none."""
        return "groups" if self.zero_points and self.bits == 8 else ""

    def shared_columns(self, depth: int) -> int:
        """Columns of a tile of ``depth`` columns, a power of two, that share a scale wherever they begin."""
        return 1 if self.order else min(self.group & -self.group or depth, depth)

    @property
    def per_word(self) -> int:
        """Codes of a 32-bit word."""
        return _WORD_BITS // self.bits

    def groups(self, columns: int) -> int:
        """Groups of columns."""
        return -(-columns // self.group) if self.group else 1

    def row_groups(self, rows: int) -> int:
        return -(-rows // self.group_rows) if self.group_rows else 1

    def tensors(self, rows: int, columns: int) -> tuple[TensorSpec, ...]:
        """The tensors of a matrix, all of them required; raises ConfigError if a matrix of this size has no such
        format."""
        steps = self._steps()
        for axis, size, step in (("rows", rows, steps[0]), ("columns", columns, steps[1])):
            if size % step:
                raise ConfigError(f"{self.name} needs a multiple of {step} {axis}, and a matrix has {size}")
        return tuple(self._tensors(rows, columns))

    def _steps(self) -> tuple[int, int]:
        """Return the multiples that rows and columns must be of."""
        return 1, 1

    def repacked_format(self, rows: int, columns: int) -> Format | None:
        """The format of a matrix once its tensors are reordered in their own memory to lie by rows (`kernels.repack`):
        the same values in the same bytes, without an order. None where it cannot be, or already does."""
        return None

    def repack_table(self, suffix: str, shape: Sequence[int], itemsize: int) -> RepackTable | None:
        """How the tensor ``suffix`` [``shape``], of numbers of ``itemsize`` bytes, is reordered for
        `repacked_format`; None if it is left out there."""
        raise NotImplementedError(f"{self.name} lies by rows")

    def transposed_format(self) -> Format | None:
        """The format of the transpose of a matrix whose tensors are transposed one by one; None if that is not the
        transpose."""
        return None

    def bytes_for(self, rows: int, columns: int) -> int:
        """Bytes of a matrix, scales, zero points and order included; raises as `tensors` does."""
        return sum(tensor.nbytes for tensor in self.tensors(rows, columns))

    def paged_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix in an expert's page; raises as `tensors` does."""
        tensors = (tensor for tensor in self.tensors(rows, columns) if tensor.suffix != SHAPE)
        return sum(align_up(tensor.nbytes, PAGE_ALIGNMENT) for tensor in tensors)

    def bits_per_weight(self, rows: int, columns: int) -> float:
        return 8 * self.bytes_for(rows, columns) / (rows * columns)

    def rows_of_line(self, suffix: str) -> int:
        """Rows of the matrix in each index of the first dimension of the tensor ``suffix``: 0 if the tensor is of all
        rows, -1 if its first dimension is not of rows."""
        if suffix == SHAPE:
            return 0
        return -1 if self.transposed else 1

    def spelled(self, exists: Callable[[str], bool]) -> Format:
        """The format under the suffix that its scales have among the tensors whose suffixes ``exists`` knows: those of
        DeepSeek-V4 are ``.scale``."""
        usual = self.names[1:2]
        if not usual or exists(usual[0]) or not exists(".scale"):
            return self
        return replace(self, names=(self.names[0], ".scale", *self.names[2:]))

    def described(self, codes: Sequence[int], read: Callable[[str], bytes | None]) -> Description | None:
        """What the tensors `beside` the codes, which have the shape ``codes``, say of a matrix; None if the format has
        none. ``read``: the bytes of that with a suffix, None if it is not there. Raises DescriptionError."""
        return None

    def stack_format(self, exists: Callable[[str], bool]) -> Format | None:
        """The format of each matrix of a stack [E, rows, columns] in a tensor that is named as no module's, with other
        tensors named after it, of which ``exists`` knows the suffixes; None if there is none."""
        return None

    def stack_of(self, codes: Sequence[int]) -> int:
        """How many matrices the codes of shape ``codes`` hold, each transposed; 0 if they are one matrix by itself."""
        return 0

    def size_of(self, codes: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of a matrix, or of each of a stack, whose codes have the shape ``codes``."""
        return codes[-2], codes[-1]

    def accepts(self, shape: Sequence[int], expected: Sequence[int]) -> bool:
        """True if a tensor of ``shape`` holds ``expected`` in its order: a vector may leave out or add dimensions of
        size 1."""
        if math.prod(expected) == max(expected, default=1):
            return same_but_for_ones(shape, expected)
        return tuple(shape) == tuple(expected)


def same_but_for_ones(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """True if the shapes differ in dimensions of size 1 alone."""
    return [size for size in shape if size != 1] == [size for size in expected if size != 1]


def first_of(dtype: str, others: Sequence[str]) -> tuple[str, ...]:
    """``dtype``, which is counted, before the ``others`` that a tensor may have."""
    return (dtype, *(other for other in others if other != dtype))


def per_group(group: int) -> str:
    """The part of a name that says which columns share a scale."""
    return f" in groups of {group}" if group else " per channel"
