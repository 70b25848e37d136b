"""Parser of GGUF headers: metadata and the places of tensors, in one file or in numbered parts. The input is untrusted:
the result is a list of tensors inside the file, or a CheckpointError that names file and tensor; no claim of the file
allocates more than its own bytes. Tensors' numbers are not read. (ggml/docs/gguf.md.)"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moelight.core.errors import CheckpointError, quoted
from moelight.core.small_files import open_regular, read_error_text

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_HEADER = 1 << 28  # bytes; vocabularies of 256,000 tokens take some 10 MB
_MOST_ELEMENTS = 1 << 24  # of an array
_MOST_TENSORS = 1 << 20
_MOST_PARTS = 1 << 12
_MOST_DIMENSIONS = 4
_MOST_SIZE = 1 << 48
_LONGEST_NAME = 1 << 10
_LONGEST_SHOWN = 80
_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 20
_LONGEST_LIST = 20
_TOTAL = "split.tensors.count"
# Values of general.type of files that hold no model (gguf.constants.GGUFType).
_NO_MODELS = {
    "adapter": "holds an adapter (LoRA), which is not read",
    "imatrix": "holds an importance matrix, which quantisers use",
    "mmproj": "holds an encoder of images, which is not read",
}
_AGAIN = "the file is damaged, fetch it again"
_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Types by number: name, numbers of a block, bytes of a block (ggml/include/ggml.h, ggml-common.h).
GGML_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GGMLTensor:
    """The place of a tensor: ``nbytes`` bytes at ``offset`` of ``file``, row-major, of the ggml type ``type``.
    ``shape`` has the outermost dimension first, as torch has it."""

    name: str
    file: Path
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFFile:
    """Metadata and tensors of a model in ``path``, all its parts together."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGMLTensor]


def read_gguf(path: Path) -> GGUFFile:
    """The model whose file, or any numbered part of it, is ``path``; raises CheckpointError for a part that is missing,
    truncated or malformed."""
    metadata, tensors = _read_part(path)
    kind = metadata.get("general.type")
    if isinstance(kind, str) and kind in _NO_MODELS:
        raise CheckpointError(f"{path}: {_NO_MODELS[kind]}; give the file of the model")
    if (parts := _parts_of(path, metadata)) != [path]:
        metadata, tensors = _joined(parts)
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensors; fetch it again")
    return GGUFFile(path=path, metadata=MappingProxyType(metadata), tensors=MappingProxyType(tensors))


def gguf_parts(path: Path) -> list[Path]:
    """The files of the model of which ``path`` is one; raises CheckpointError as `read_gguf`."""
    return _parts_of(path, _read_part(path)[0])


def metadata_numbers(path: Path) -> dict[str, GGMLTensor]:
    """The float32 numbers and lists of the metadata of the model of which ``path`` is a file, as tensors by their
    keys; raises CheckpointError as `read_gguf`."""
    first = gguf_parts(path)[0]
    with _opened(first) as header:
        header.read()
    return header.floats


def _parts_of(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The parts of the model of which ``path`` is one: by its name, else by what other files beside it say they are."""
    count = metadata.get("split.count", 1)
    if type(count) is not int or not 1 <= count <= _MOST_PARTS:
        raise CheckpointError(f"{path}: split.count is {quoted(count)}; {_AGAIN}")
    if count == 1:
        return [path]
    match = _PART.fullmatch(path.name)
    if match is not None and int(match["count"]) == count:
        return part_names(path)
    parts: dict[int, Path] = {}
    for other in sorted(path.parent.glob("*.gguf"))[:_MOST_PARTS]:
        theirs = _read_part(other)[0] if other != path else metadata
        if (theirs.get("split.count"), theirs.get(_TOTAL)) != (count, metadata.get(_TOTAL)):
            continue
        number = theirs.get("split.no")
        if type(number) is not int:
            continue
        if number in parts:
            raise CheckpointError(
                f"{path}: one of {count} parts, and {parts[number].name} and {other.name} both say that they are part "
                f"{number}; let the names end in -00001-of-{count:05}.gguf and so on, or keep one model in a directory"
            )
        parts[number] = other
    if lost := [number + 1 for number in range(count) if number not in parts]:
        raise CheckpointError(
            f"{path}: one of {count} parts, of which number {', '.join(map(str, lost[:_LONGEST_LIST]))} is not beside "
            "it; fetch the missing parts of the model"
        )
    return [parts[number] for number in range(count)]


def part_names(path: Path) -> list[Path]:
    """The files of the model of which ``path`` is one, by its name."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = min(int(match["count"]), _MOST_PARTS)
    return [path.with_name(f"{match['name']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def _joined(parts: list[Path]) -> tuple[dict[str, Any], dict[str, GGMLTensor]]:
    """The metadata of the first part, and the tensors of all."""
    first: dict[str, Any] = {}
    tensors: dict[str, GGMLTensor] = {}
    seen: set[int] = set()
    for part in parts:
        metadata, part_tensors = _read_part(part)
        number, count = metadata.get("split.no"), metadata.get("split.count")
        if type(number) is not int or not 0 <= number < len(parts) or number in seen or count != len(parts):
            raise CheckpointError(
                f"{part}: says that it is part {quoted(number)} of {quoted(count)}, counted from 0, which another one "
                "says too, or none can; fetch all parts again"
            )
        seen.add(number)
        first = metadata if number == 0 else first
        if twice := next(iter(part_tensors.keys() & tensors.keys()), None):
            raise CheckpointError(f"{part}: tensor {quoted(twice)} is in {tensors[twice].file.name} too; {_AGAIN}")
        tensors |= part_tensors
    total = first.get(_TOTAL, len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{parts[0]}: split.tensors.count is {quoted(total)}, and the parts hold {len(tensors)}; fetch them again"
        )
    return first, tensors


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, GGMLTensor]]:
    with _opened(path) as header:
        return header.read()


@contextmanager
def _opened(path: Path) -> Iterator[_Header]:
    """The header of ``path``; what is wrong with it is a CheckpointError."""
    try:
        with open(open_regular(path), "rb") as file:
            yield _Header(file, path, os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; fetch the missing part of the model") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({read_error_text(error)})") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; {_AGAIN}") from None


class _Header:
    """A reader of one file's header; ValueErrors say what is wrong."""

    def __init__(self, file: Any, path: Path, size: int) -> None:
        self._file, self._path, self._size = file, path, size
        self._position, self._most = 0, min(size, _MOST_HEADER)
        self.floats: dict[str, GGMLTensor] = {}

    def read(self) -> tuple[dict[str, Any], dict[str, GGMLTensor]]:
        if self._size < len(_MAGIC) or self._bytes(len(_MAGIC)) != _MAGIC:
            raise ValueError("does not begin as a GGUF file does")
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            order = ", with its bytes in big-endian order" if swapped else ""
            raise CheckpointError(
                f"{self._path}: GGUF version {version}{order} is not read; known: 2, 3 (little-endian)"
            )
        num_tensors, num_pairs = self._number("Q"), self._number("Q")
        if num_tensors > _MOST_TENSORS:
            raise ValueError(f"claims {num_tensors} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):  # each takes bytes of the header, whose end ends the loop
            key = self._name()
            if key in metadata:
                raise ValueError(f"the metadata names {quoted(key)} twice")
            metadata[key] = self._value(self._number("I"), key)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {quoted(alignment)}, not a power of 2 from 8 on")
        entries = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._position // alignment) * alignment
        return metadata, self._placed(entries, start, alignment)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._name(), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(
                f"tensor {_shown(name)} has {dimensions} dimensions, from 1 to {_MOST_DIMENSIONS} are known"
            )
        shape = tuple(self._number("Q") for _ in range(dimensions))
        if not all(1 <= size < _MOST_SIZE for size in shape) or math.prod(shape) >= _MOST_SIZE:
            raise ValueError(f"tensor {_shown(name)} has the sizes {list(shape)}")
        return name, self._number("I"), shape[::-1], self._number("Q")

    def _placed(self, entries: list[Any], start: int, alignment: int) -> dict[str, GGMLTensor]:
        """Tensors by name; checks that they lie in the file, aligned and apart."""
        tensors: dict[str, GGMLTensor] = {}
        for name, number, shape, offset in entries:
            if number not in GGML_TYPES:
                raise CheckpointError(
                    f"{self._path}: tensor {_shown(name)} has the ggml type {number}, which moelight does not know; "
                    "use a file of another quantisation, such as Q4_K_M or Q8_0"
                )
            kind, block, block_bytes = GGML_TYPES[number]
            if shape[-1] % block:
                raise ValueError(
                    f"tensor {_shown(name)}: rows of {shape[-1]} numbers are no blocks of {block} ({kind})"
                )
            if name in tensors:
                raise ValueError(f"tensor {_shown(name)} is listed twice")
            if offset % alignment:
                raise ValueError(f"tensor {_shown(name)} is at {offset}, no multiple of {alignment}")
            nbytes = math.prod(shape) // block * block_bytes
            tensors[name] = GGMLTensor(
                name=name, file=self._path, type=kind, shape=shape, offset=start + offset, nbytes=nbytes
            )
        end, previous = start, ""
        for placed in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if placed.offset < end:
                raise ValueError(f"tensor {_shown(placed.name)} overlaps tensor {_shown(previous)}")
            end, previous = placed.offset + placed.nbytes, placed.name
            if end > self._size:
                raise ValueError(
                    f"cut short: tensor {_shown(placed.name)} ends at byte {end}, the file at {self._size}"
                )
        return tensors

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(self._most)
        if kind == _BOOL:
            return bool(self._number("B"))
        if kind in _NUMBERS:
            self._note(key, kind, 1)
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ValueError(f"the value of {quoted(key)} has the type {kind}, from 0 to 12 are known")
        element, count = self._number("I"), self._number("Q")
        if count > _MOST_ELEMENTS:
            raise ValueError(f"{quoted(key)} claims {count} elements")
        if element == _STRING:
            return [self._string(self._most) for _ in range(count)]
        letter = "?" if element == _BOOL else _NUMBERS.get(element)
        if letter is None:
            raise ValueError(f"{quoted(key)} is an array of values of type {element}")
        self._note(key, element, count)
        return list(struct.unpack(f"<{count}{letter}", self._bytes(count * struct.calcsize(f"<{letter}"))))

    def _name(self) -> str:
        """Of a key or tensor: text that may be part of a message."""
        name = self._string(_LONGEST_NAME)
        if not name.isprintable():
            raise ValueError(f"names a key or tensor {_shown(name)}")
        return name

    def _note(self, key: str, kind: int, count: int) -> None:
        """Remember the place of float32 numbers that begin here."""
        if _NUMBERS.get(kind) == "f":
            self.floats[key] = GGMLTensor(
                name=key, file=self._path, type="F32", shape=(count,), offset=self._position, nbytes=4 * count
            )

    def _string(self, max_length: int) -> str:
        length = self._number("Q")
        if length > max_length:
            raise ValueError(f"at byte {self._position} claims a text of {length} bytes")
        return bytes(self._bytes(length)).decode("utf-8", errors="surrogateescape")

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._bytes(struct.calcsize(f"<{letter}")))[0]

    def _bytes(self, count: int) -> bytes:
        if self._position + count > self._most:
            if self._size > _MOST_HEADER:
                raise ValueError(f"has a header of more than {_MOST_HEADER >> 20} MiB")
            raise ValueError(f"cut short: its header goes on beyond its {self._size} bytes")
        data = self._file.read(count)
        if len(data) != count:
            raise ValueError("ended inside its header")
        self._position += count
        return bytes(data)


def _shown(name: str) -> str:
    return quoted(name[:_LONGEST_SHOWN])
