"""A quantised checkpoint as one of plain matrices: the tensors of each quantised matrix become one, of the shape and
under the name that the matrix has where it is not quantised, so that what finds weights knows no formats
(`TensorInfo.matrices`). Where further tensors describe a matrix (`Format.described`), its codes and scales are brought
into the form that they have in memory; every fault is a CheckpointError that names tensor and file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from moelight.core.dtypes import BY_SAFETENSORS
from moelight.core.errors import CheckpointError
from moelight.formats.format import SHAPE, DerivedScales, DescriptionError, Format
from moelight.formats.registry import STACK_SUFFIXES, SUFFIXES
from moelight.weights.source import Checkpoint
from moelight.weights.stored_matrix import find_matrix, read_tensor
from moelight.weights.tensor_info import Derivation, StoredMatrix, TensorInfo

_MOST_DIMENSIONS = 4
_STACK_DIMENSIONS = 3
_MAX_BYTES = 1 << 12  # of a tensor that describes
_TABLE = 256  # numbers that codes of scales are indices of


def as_matrices(checkpoint: Checkpoint, format_of: Callable[[str], Format | None], dtype: str) -> Checkpoint:
    """``checkpoint``, whose modules are stored as ``format_of`` says, with one tensor for each quantised matrix: of the
    dtype of the tensors that are not quantised, and of ``dtype`` (a safetensors name) where these differ. Raises
    CheckpointError for a matrix that lacks a tensor, or has one that does not fit."""
    tensors, listing = checkpoint.tensors, str(checkpoint.listing)
    located: list[tuple[TensorInfo, StoredMatrix, str]] = []
    taken: set[str] = set()
    for name, info in tensors.items():
        module, dot, last = name.rpartition(".")
        if matrix := _stack_of_blocks(tensors, info, format_of, listing):
            taken.update(name + suffix for suffix in matrix.tensors)
            located.append((info, matrix, name))
            continue
        for suffix, of in ((f".{last}", module), *_endings(name)):
            stored = format_of(of) if dot else None
            if stored is None or suffix != stored.names[0] or (dot and suffix == ".weight" and len(info.shape) != 2):
                continue  # norms and convolutions have no format
            if _is_plain(tensors, of, info, stored):
                break
            stored = stored.spelled(partial(_exists, tensors, of))
            stored, parts = _described(tensors, of, stored, listing)
            matrix = _matrix(parts, of, parts[name], stored, listing)
            taken.update(of + part.suffix for part in stored.tensors(matrix.rows, matrix.columns))
            taken.update(of + end for end in stored.beside)
            located.append((info, matrix, of))
            break
    plain = {name: info for name, info in tensors.items() if name not in taken}
    _check_codes(tensors, plain.values(), format_of, listing)
    dtypes = {info.dtype for info in plain.values() if info.dtype in BY_SAFETENSORS}
    common = dtypes.pop() if len(dtypes) == 1 else dtype
    matrices = {info.name: info for info in (_as_values(*one, common) for one in located)}
    if twice := next((name for name in matrices if name in plain), None):
        raise CheckpointError(
            f"{plain[twice].file}: tensor {twice!r} is stored quantised, too; save the model again, with one of them"
        )
    return replace(checkpoint, tensors=MappingProxyType({**plain, **matrices}))


def _check_codes(
    tensors: Mapping[str, TensorInfo],
    left: Iterable[TensorInfo],
    format_of: Callable[[str], Format | None],
    listing: str,
) -> None:
    """Raise CheckpointError if some of ``left``, the tensors that belong to no quantised matrix, are scales or zero
    points whose codes are missing."""
    missing: dict[str, str] = {}
    for info in left:
        for end in filter(info.name.endswith, SUFFIXES):
            module = info.name.removesuffix(end)
            stored = format_of(module)
            if stored is None or end not in stored.names[1:] or module + stored.names[0] in tensors:
                continue
            missing.setdefault(module + stored.names[0], info.name)
    if missing:
        codes, beside = next(iter(missing.items()))
        more = len(missing) - 1
        others = f", as are the codes of {more:,} more {'matrix' if more == 1 else 'matrices'}" if more else ""
        raise CheckpointError(
            f"{listing}: tensor {codes!r} is missing, though {beside!r} is there{others}; fetch the whole checkpoint"
        )


def _stack_of_blocks(
    tensors: Mapping[str, TensorInfo],
    codes: TensorInfo,
    format_of: Callable[[str], Format | None],
    listing: str,
) -> StoredMatrix | None:
    """The matrices of all experts [E, rows, columns] in the tensor ``codes``, with scales that are named after it; None
    if it is no such stack."""
    if len(codes.shape) != _STACK_DIMENSIONS or min(codes.shape) == 0:
        return None
    stored = format_of(codes.name)
    if stored is None or stored.codes != codes.dtype:
        return None
    stored = stored.stack_format(partial(_exists, tensors, codes.name))
    if stored is None:
        return None
    count, rows, columns = codes.shape
    find_matrix(tensors, codes.name, stored, rows, columns, listing=listing, expert=(0, count))
    places = {
        part.suffix: replace(tensors[codes.name + part.suffix], shape=(count * part.shape[0], *part.shape[1:]))
        for part in stored.tensors(rows, columns)
    }
    return StoredMatrix(
        module=codes.name, stored=stored, rows=count * rows, columns=columns, tensors=places, stack=count
    )


def _exists(tensors: Mapping[str, TensorInfo], module: str, suffix: str) -> bool:
    return module + suffix in tensors


def _is_plain(tensors: Mapping[str, TensorInfo], module: str, codes: TensorInfo, stored: Format) -> bool:
    """True if ``module``, which is to be ``stored`` so, holds plain numbers instead: floats without scales beside
    them."""
    return codes.dtype in BY_SAFETENSORS and not any(
        module + suffix in tensors for suffix in SUFFIXES if suffix != stored.names[0]
    )


def _endings(name: str) -> Iterable[tuple[str, str]]:
    """The suffixes of stacks (gpt-oss) that ``name`` may have, and the module before each."""
    return ((end, name.removesuffix(end)) for end in STACK_SUFFIXES if name.endswith(end))


def _matrix(
    tensors: Mapping[str, TensorInfo], module: str, codes: TensorInfo, stored: Format, listing: str
) -> StoredMatrix:
    """The matrix of ``module``, whose codes are given; of a stack all matrices below one another."""
    if not 2 <= len(codes.shape) <= _MOST_DIMENSIONS:
        raise CheckpointError(
            f"{codes.file}: tensor {codes.name!r} has shape {list(codes.shape)}, which is no matrix in {stored.name}; "
            "correct quantization_config"
        )
    rows, columns = _size(tensors, module, codes, stored)
    stack = stored.stack_of(codes.shape) or 1
    flattened: dict[str, TensorInfo] = {}
    for suffix in stored.names if stack > 1 else ():
        if info := tensors.get(module + suffix):
            flat = (math.prod(info.shape[:2]), math.prod(info.shape[2:])) if len(info.shape) > 2 else info.shape
            flattened[info.name] = replace(info, shape=flat)
    return find_matrix(flattened or tensors, module, stored, stack * rows, columns, listing=listing)


def _described(
    tensors: Mapping[str, TensorInfo], module: str, stored: Format, listing: str
) -> tuple[Format, Mapping[str, TensorInfo]]:
    """The format of the matrix of ``module``, which config.json says is ``stored`` so, and the tensors among which its
    codes and scales are: all ``tensors``, where nothing beside them describes a matrix."""
    if not stored.beside:
        return stored, tensors

    def read(suffix: str) -> bytes | None:
        if (info := tensors.get(module + suffix)) is None:
            return None
        if info.nbytes > _MAX_BYTES:
            raise DescriptionError(suffix, f"has {info.nbytes:,} bytes, more than any of its kind")
        return bytes(read_tensor(replace(info, dtype="U8", shape=(info.nbytes,))).numpy())

    codes = tensors[module + stored.names[0]]
    try:
        description = stored.described(codes.shape, read)
        if description is None:
            return stored, tensors
        parts = {module + suffix: tensors[module + suffix] for suffix in stored.names if module + suffix in tensors}
        parts[codes.name] = _shaped(codes, stored, description.shape)
        if description.scales is not None:
            parts |= _derived(tensors, module, description.scales)
    except DescriptionError as error:
        name = module + error.suffix
        file = tensors[name].file if name in tensors else listing
        raise CheckpointError(f"{file}: tensor {name!r} {error.complaint}; {error.cure}") from None
    return description.stored, parts


def _shaped(codes: TensorInfo, stored: Format, shape: tuple[int, int]) -> TensorInfo:
    """``codes`` in the shape of those of a matrix of ``shape``, whatever words the bytes were stored as; as it is, if
    it has not as many bytes."""
    rows, columns = shape
    row_bytes = columns * stored.bits // 8
    fits = codes.nbytes == rows * row_bytes
    return replace(codes, dtype=stored.codes, shape=(rows, row_bytes)) if fits else codes


def _derived(tensors: Mapping[str, TensorInfo], module: str, how: DerivedScales) -> dict[str, TensorInfo]:
    """The scales of ``module`` that are computed as ``how`` says, of tensors that have the sizes for it."""
    count = -(-how.count // how.repeats)
    stored = _sized(tensors, module, how.suffix, "U8" if how.table else "F32", count)
    derivation = Derivation(
        stored=stored,
        factor=how.factor,
        table=_sized(tensors, module, how.table, "F32", _TABLE) if how.table else None,
        scales=_sized(tensors, module, how.scales, "F32", -(-count // how.block)) if how.table else None,
        block=min(how.block, count),
        offset=how.offset,
        repeats=how.repeats,
    )
    scales = replace(stored, dtype="F32", shape=(how.count,), offset=0, nbytes=4 * how.count, derived=derivation)
    return {stored.name: scales}


def _sized(tensors: Mapping[str, TensorInfo], module: str, suffix: str, dtype: str, count: int) -> TensorInfo:
    """The tensor of ``count`` numbers of ``dtype``; raises DescriptionError without one."""
    if (info := tensors.get(module + suffix)) is None:
        raise DescriptionError(suffix, "is missing")
    if info.dtype != dtype or math.prod(info.shape) != count:
        shape = f"has dtype {info.dtype} and shape {list(info.shape)}"
        raise DescriptionError(suffix, f"{shape}, and the matrix needs {count:,} numbers {dtype} there")
    return info


def _size(tensors: Mapping[str, TensorInfo], module: str, codes: TensorInfo, stored: Format) -> tuple[int, int]:
    """Rows and columns of a matrix by the shape of its codes."""
    info = tensors.get(module + SHAPE) if stored.stores_shape else None
    if info is None or info.shape != (2,) or info.dtype not in ("I64", "I32"):
        return stored.size_of(codes.shape)
    rows, columns = read_tensor(info).tolist()
    return int(rows), int(columns)


def _as_values(info: TensorInfo, matrix: StoredMatrix, module: str, dtype: str) -> TensorInfo:
    turned = matrix.stored.stack_of(info.shape) > 0
    if not turned and len(info.shape) != _STACK_DIMENSIONS:
        return matrix.as_values(f"{module}.weight", dtype, matrix.shape)
    rows = matrix.rows // info.shape[0]
    one = (matrix.columns, rows) if turned else (rows, matrix.columns)
    return matrix.as_values(module, dtype, (info.shape[0], *one), turned=turned)
