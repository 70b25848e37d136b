"""Parser of the safetensors header: eight bytes of length, JSON, then the tensors' bytes without gaps. The input is
untrusted: the result is a list of tensors inside the file, or a CheckpointError that names file and tensor."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

from moelight.core.errors import CheckpointError
from moelight.core.small_files import open_regular, parse_json, read_error_text
from moelight.weights.tensor_info import TensorInfo

MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 16
_MAX_DIMENSION = 1 << 62
_AGAIN = "the file is damaged, fetch it again"

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


def read_header(file: Path) -> dict[str, TensorInfo]:
    """All tensors of ``file`` by name; raises CheckpointError for a file that is missing, truncated or malformed."""
    try:
        with open(open_regular(file), "rb", buffering=0) as raw:
            size = os.fstat(raw.fileno()).st_size
            length = _header_length(file, _read(raw, _LENGTH_BYTES), size)
            text = _read(raw, length)
        if len(text) != length:
            raise ValueError("ended inside its header")
        start = _LENGTH_BYTES + length
        infos = [
            _tensor(file, name, entry, start) for name, entry in _parse(file, text).items() if name != "__metadata__"
        ]
        _check_cover(infos, start, size)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file; fetch the missing part of the checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({read_error_text(error)})") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}; {_AGAIN}") from None
    return {info.name: info for info in infos}


def _read(raw: Any, count: int) -> bytes:
    chunks = []
    while count and (chunk := raw.read(count)):
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def _header_length(file: Path, prefix: bytes, size: int) -> int:
    if len(prefix) != _LENGTH_BYTES:
        raise ValueError(f"only {size} bytes long, so not a safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: claims a header of {length} bytes, the format allows {MAX_HEADER_BYTES}; "
            "it is not a safetensors file or is damaged, fetch it again"
        )
    if _LENGTH_BYTES + length > size:
        raise ValueError(f"cut short: a header of {length} bytes in a file of {size} bytes")
    return length


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{file}: the header names {twice!r} twice; {_AGAIN}")
        return result

    try:
        header = parse_json(text.decode("utf-8"), pairs=unique)
    except ValueError as error:
        raise ValueError(f"the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError("the header must be a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ in the header must map strings to strings")
    return header


def _tensor(file: Path, name: str, entry: Any, start: int) -> TensorInfo:
    where = f"tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: must have dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{file}: {where}: unknown dtype {str(dtype)[:40]!r}; known: {', '.join(_BITS)}")
    if not _naturals(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{where}: shape must be a list of at most {_MAX_DIMENSIONS} sizes")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where}: data_offsets must be [begin, end]")
    begin, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits != (end - begin) * 8:
        need = -(-bits // 8)
        raise ValueError(f"{where}: {dtype} of shape {shape} takes {need} bytes, but data_offsets give {end - begin}")
    return TensorInfo(name=name, file=file, dtype=dtype, shape=tuple(shape), offset=start + begin, nbytes=end - begin)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _MAX_DIMENSION for value in values)


def _check_cover(infos: list[TensorInfo], start: int, size: int) -> None:
    """Check that the tensors tile ``[start, size)``: no overlap, no gap, nothing before, nothing after."""
    position, previous = start, ""
    for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
        if info.offset < position:
            raise ValueError(f"tensor {info.name!r} overlaps tensor {previous!r}")
        if info.offset > position:
            raise ValueError(f"{info.offset - position} bytes before tensor {info.name!r} belong to no tensor")
        position, previous = info.offset + info.nbytes, info.name
    if position > size:
        raise ValueError(f"cut short: tensor {previous!r} ends at byte {position}, the file at {size}")
    if position < size:
        raise ValueError(f"{size - position} bytes after the last tensor belong to no tensor")
