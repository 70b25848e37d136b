"""A checkpoint written as a GGUF file: header first, then one tensor after another, some megabytes at a time.

The file has its name once it is complete and has been opened as a model. Until then its bytes are in a hidden file
beside it, with a record of the tensors that are on the disk; killed at any moment and run again, the conversion goes on
behind the last of these.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelight.batch.output import refused_write
from moelight.convert.gguf_contents import GGUFContents, GGUFTensor, contents_of
from moelight.convert.gguf_types import FILE_TYPES
from moelight.convert.gguf_vocabulary import vocabulary_of
from moelight.convert.k_quants import K_TYPES, quantize_k
from moelight.core.dtypes import FLOAT32
from moelight.core.errors import CheckpointError, ConfigError, InputError, StorageError
from moelight.core.paths import write_whole
from moelight.core.small_files import read_object
from moelight.core.units import format_bytes
from moelight.engine.tokenizer import Tokenizer
from moelight.models.checkpoints import open_model
from moelight.models.graph.weights import stored_numbers
from moelight.profiles.gguf import read_gguf
from moelight.profiles.gguf_config import hf_rows
from moelight.weights.boxes import Tiled
from moelight.weights.load import TensorReader
from moelight.weights.source import GGUF, resolve_model

_CHUNK = 1 << 22  # numbers at a time
_LINES = 256  # rows of a chunk are a multiple of it, so that blocks of a quantised checkpoint stay together
_QUANTIZATION_VERSION = 2
_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": lambda values: values,
    "plus_one": lambda values: values + 1,
    "negated_exp": lambda values: -torch.exp(values),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFOptions:
    """The options of a conversion: ``file_type`` is a name of `FILE_TYPES`."""

    model: str
    output: Path
    file_type: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenGGUF:
    """The result of a conversion.

    Attributes:
        nbytes: of the file.
        written_bytes: that this run wrote.
        tensors: of the file.
        tensors_before: that an earlier run had written.
        types: bytes by ggml type.
    """

    nbytes: int
    written_bytes: int
    tensors: int
    tensors_before: int
    types: Mapping[str, int]


Progress = Callable[[int, int], None]  # bytes written, of bytes to write


def convert_to_gguf(options: GGUFOptions, progress: Progress = lambda _done, _total: None) -> WrittenGGUF:
    """Write ``options.output``, or what is missing of it.

    Raises:
        UserError: of one line; a StorageError if the disk is full, after which the command goes on where it ended.
    """
    out = options.output
    if out.suffix != GGUF:
        raise InputError(f"{out}: the name of a GGUF file ends in {GGUF}", code="output_path")
    if out.exists():
        raise InputError(f"{out}: exists; give another name, or remove it", code="output_path")
    path = resolve_model(options.model)
    contents = contents_of(path, options.file_type)
    vocabulary = _vocabulary(path, contents.vocab_size)
    partial = out.with_name(f".{out.stem}.partial{GGUF}")
    record = out.with_name(f".{out.stem}.partial.json")
    try:
        with _claimed(partial):
            done, offsets = _begin(partial, record, contents, _header_of(options, contents, vocabulary, path), path)
            sizes = [tensor.nbytes for tensor in contents.tensors]
            _write(partial, record, contents, offsets, done, lambda count: progress(count, sum(sizes[done:])))
            open_model(str(partial))
            partial.replace(out)
            record.unlink(missing_ok=True)
    except OSError as error:
        raise refused_write(error, str(out), note="; run the command again") from None
    types: dict[str, int] = {}
    for tensor in contents.tensors:
        types[tensor.kind] = types.get(tensor.kind, 0) + tensor.nbytes
    return WrittenGGUF(
        nbytes=out.stat().st_size,
        written_bytes=sum(sizes[done:]),
        tensors=len(sizes),
        tensors_before=done,
        types=types,
    )


def _vocabulary(path: Path, size: int) -> Mapping[str, Any]:
    """The keys of the tokenizer: those of a GGUF file as they are."""
    if path.is_file():
        return {key: value for key, value in read_gguf(path).metadata.items() if key.startswith("tokenizer.")}
    return vocabulary_of(Tokenizer.from_dir(path), size, where=str(path))


@contextlib.contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """Hold the file ``partial`` for this process; InputError if another conversion writes it."""
    lock = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{partial}: another conversion writes it; wait for it", code="output_path") from None
        yield
    finally:
        os.close(lock)


def _header_of(options: GGUFOptions, contents: GGUFContents, vocabulary: Mapping[str, Any], path: Path) -> bytes:
    """The beginning of the file, up to the numbers."""
    import gguf
    import numpy as np

    header = options.output.with_name(f".{options.output.stem}.header")
    writer = gguf.GGUFWriter(header, contents.architecture)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(path.stem if path.is_file() else path.resolve().name)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[options.file_type][0]])
    writer.add_quantization_version(_QUANTIZATION_VERSION)
    for key, value in contents.keys.items():
        _add(writer, f"{contents.architecture}.{key}", value)
    for key, value in vocabulary.items():
        _add(writer, key, value)
    for tensor in contents.tensors:
        line = tensor.nbytes // math.prod(tensor.shape[:-1])
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, (*tensor.shape[:-1], line), np.dtype(np.uint8), tensor.nbytes, kind)
    try:
        writer.write_header_to_file(header)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return header.read_bytes()
    finally:
        header.unlink(missing_ok=True)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _begin(partial: Path, record: Path, contents: GGUFContents, header: bytes, path: Path) -> tuple[int, list[int]]:
    """Make ``partial`` a file of its full size with ``header``; the number of tensors that are in it already, and the
    offsets of all."""
    alignment = 32
    start = -(-len(header) // alignment) * alignment
    offsets, end = [], start
    for tensor in contents.tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // alignment) * alignment
    source = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(contents.files)}
    with partial.open("r+b") as file:
        same = os.fstat(file.fileno()).st_size == end and file.read(len(header)) == header
        before = _recorded(record) if same else {}
        done = before["tensors"] if before.get("source") == source else 0
        if not done:
            free = shutil.disk_usage(partial.parent).free
            if end > free:
                raise StorageError(
                    f"{partial.parent}: the disk has {format_bytes(free)} free, and {format_bytes(end, round_up=True)} "
                    "are to be written; make room, or give a file on another disk",
                    code="output_path",
                )
            file.seek(0)
            file.truncate(0)
            file.write(header)
            file.truncate(end)
    placed = read_gguf(partial).tensors
    if [placed[tensor.name].offset for tensor in contents.tensors] != offsets:
        raise CheckpointError(f"{path}: the package gguf has placed tensors elsewhere; install another version of it")
    write_whole(record, json.dumps({"source": source, "tensors": done}))
    return done, offsets


def _recorded(record: Path) -> dict[str, Any]:
    try:
        return read_object(record)
    except (OSError, ValueError):
        return {}


def _write(
    partial: Path,
    record: Path,
    contents: GGUFContents,
    offsets: list[int],
    done: int,
    progress: Callable[[int], None],
) -> None:
    """Write the tensors from number ``done`` on."""
    state = _recorded(record)
    written = 0
    progress(0)
    with partial.open("r+b") as file, TensorReader(contents.files, FLOAT32) as reader:
        for number in range(done, len(contents.tensors)):
            file.seek(offsets[number])
            for block in _blocks(reader, contents.tensors[number]):
                file.write(block.numpy().data)
                written += block.numel()
                progress(written)
            file.flush()
            os.fsync(file.fileno())
            write_whole(record, json.dumps({**state, "tensors": number + 1}))


def _blocks(reader: TensorReader, tensor: GGUFTensor) -> Iterator[Tensor]:
    """The bytes of ``tensor`` in order, uint8 each."""
    if tensor.constant is not None:
        yield tensor.constant.float().contiguous().view(torch.uint8).flatten()
        return
    for part in tensor.parts:
        for values in _rows(reader, part, tensor.heads):
            stored = _FUNCTIONS[tensor.stored_as](values)
            if not bool(torch.isfinite(stored).all()):
                info = part.boxes[0].info
                raise CheckpointError(
                    f"{info.file}: tensor {info.name!r} holds numbers that are not finite; fetch the checkpoint again"
                )
            yield ggml_blocks(stored, tensor.kind).flatten()


def _rows(reader: TensorReader, part: Tiled, heads: int) -> Iterator[Tensor]:
    """The rows of ``part`` in float32 [rows, columns], some at a time; those of queries and keys all at once, their
    halves interleaved."""
    if heads:
        values = stored_numbers(reader, part)
        order = torch.tensor(hf_rows(len(values), heads)).argsort()
        yield values[order].view(1 if values.dim() == 1 else len(values), -1)
        return
    if len(part.shape) == 1:
        yield stored_numbers(reader, part).unsqueeze(0)
        return
    rows, columns = part.shape[0], math.prod(part.shape[1:])
    step = max(1, _CHUNK // columns // _LINES) * _LINES
    for begin in range(0, rows, step):
        yield stored_numbers(reader, part.slice(0, begin, min(begin + step, rows))).view(-1, columns)


def ggml_blocks(values: Tensor, kind: str) -> Tensor:
    """``values`` float32 [rows, columns] in the ggml type ``kind``, uint8 [rows, bytes]."""
    import gguf

    if kind in K_TYPES:
        return quantize_k(values, kind)
    blocks = gguf.quants.quantize(values.contiguous().numpy(), gguf.GGMLQuantizationType[kind])
    if kind == "F16" and not bool(torch.isfinite(torch.from_numpy(blocks)).all()):
        raise ConfigError("--type F16 does not hold numbers of this model that are beyond 65,504; give BF16")
    return torch.from_numpy(blocks).contiguous().view(torch.uint8)
