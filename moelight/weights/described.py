"""Quantised matrices whose size and scales further tensors describe (`Format.described`): codes and scales as they are
in memory, found and checked. Every fault is a CheckpointError that names tensor and file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from moelight.core.errors import CheckpointError
from moelight.formats.format import DerivedScales, DescriptionError, Format
from moelight.weights.stored_matrix import read_tensor
from moelight.weights.tensor_info import Derivation, TensorInfo

_MAX_BYTES = 1 << 12  # of a tensor that describes
_TABLE = 256  # numbers that codes of scales are indices of


def described_tensors(
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
    numbers = -(-how.count // how.repeats)
    stored = _sized(tensors, module, how.suffix, "U8" if how.table else "F32", numbers)
    derivation = Derivation(
        stored=stored,
        factor=how.factor,
        table=_sized(tensors, module, how.table, "F32", _TABLE) if how.table else None,
        scales=_sized(tensors, module, how.scales, "F32", -(-numbers // how.block)) if how.table else None,
        block=how.block,
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
