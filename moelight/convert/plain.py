"""A GGUF file, or a quantised checkpoint, as plain safetensors under the names of transformers' modules: the numbers
that its stored codes stand for, a shard at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moelight.convert.checkpoint import (
    SHARD_BYTES,
    check_space,
    claimed_directory,
    copy_small_files,
    is_complete,
    write_small,
)
from moelight.convert.contents import safetensors_header
from moelight.core.dtypes import BY_SAFETENSORS, FLOAT32
from moelight.core.errors import ConfigError, did_you_mean
from moelight.engine.chat import DEFAULT, TEMPLATE_DIRECTORY, TEMPLATE_FILE
from moelight.engine.tokenizer import TOKENIZER, Tokenizer
from moelight.formats.format import ITEM_BYTES
from moelight.models.checkpoints import graph_source
from moelight.models.graph.weights import StoredValues, stored_numbers, stored_values
from moelight.weights.boxes import Tiled
from moelight.weights.load import TensorReader
from moelight.weights.source import INDEX, resolve_model
from moelight.weights.torch_dtypes import to_torch

_CHUNK = 1 << 22  # numbers at a time
_LINES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainOptions:
    """The options of a conversion; ``dtype``: safetensors name of that of the parameters."""

    model: str
    output: Path
    dtype: str = "BF16"
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPlain:
    """The result: bytes of all files of tensors, their number, and that of those which were there before."""

    nbytes: int
    files: int
    files_before: int


@dataclass(frozen=True)  # no slots: the header is made once
class PlainShard:
    """A file of tensors: name in the module, dtype and numbers of each."""

    name: str
    tensors: tuple[tuple[str, str, Tiled], ...]

    @cached_property
    def header(self) -> bytes:
        return safetensors_header([(name, dtype, tensor.shape) for name, dtype, tensor in self.tensors])

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(_bytes(dtype, tensor) for _, dtype, tensor in self.tensors)


def plain_dtype(name: str | None) -> str:
    """The dtype that ``--type`` names; raises ConfigError for another one."""
    upper = (name or "BF16").upper()
    if upper not in BY_SAFETENSORS:
        listed = ", ".join(BY_SAFETENSORS)
        raise ConfigError(
            f"--type {name!r} is no dtype of safetensors{did_you_mean(upper, BY_SAFETENSORS)}; known: {listed}"
        )
    return upper


def convert_to_plain(
    options: PlainOptions, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> WrittenPlain:
    """Write ``options.output``, or what is missing of it.

    Raises:
        UserError: of one line; a StorageError if the disk is full, after which the command goes on where it ended.
    """
    out, path = options.output, resolve_model(options.model)
    model, checkpoint = graph_source(path)
    values = stored_values(checkpoint, model)
    buffers = {name for name, _ in model.module.named_buffers()}
    config: Any = model.config
    if values.experts and not values.stacks:
        raise ConfigError(
            f"{path}: experts of {config.model_type} are stored one by one, and its module has stacks of another form; "
            "they are not written as safetensors"
        )
    shards = _shards(values, buffers, options)
    sources = sorted(values.files)
    record = {
        "to": "safetensors",
        "dtype": options.dtype,
        "shard_bytes": options.shard_bytes,
        "source": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in sources},
    }
    with claimed_directory(out, record):
        missing = [shard for shard in shards if not is_complete(out / shard.name, shard)]
        check_space(out, missing)
        total, done = sum(shard.nbytes for shard in missing), 0
        progress(0, total)
        with TensorReader(sources, FLOAT32) as reader:
            for shard in missing:
                with (out / f".{shard.name}").open("wb") as file:
                    file.write(shard.header)
                    done += len(shard.header)
                    for block in _blocks(reader, shard):
                        file.write(block.numpy().data)
                        done += block.numel()
                        progress(done, total)
                (out / f".{shard.name}").replace(out / shard.name)
        _write_texts(path, out)
        weight_map = {name: shard.name for shard in shards for name, *_ in shard.tensors}
        index = {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": weight_map}
        write_small(out / INDEX, json.dumps(index, indent=2).encode())
        stated = {**config.to_dict(), "architectures": [type(model.module).__name__]}
        stated.pop("quantization_config", None)
        if path.is_file():  # whose config states none
            stated["eos_token_id"] = sorted(Tokenizer.of(path).eos_token_ids)
        stated["dtype"] = str(to_torch(BY_SAFETENSORS[options.dtype])).removeprefix("torch.")
        write_small(out / "config.json", (json.dumps(stated, indent=2, default=str) + "\n").encode())
    return WrittenPlain(
        nbytes=sum(shard.nbytes for shard in shards), files=len(shards), files_before=len(shards) - len(missing)
    )


def _bytes(dtype: str, tensor: Tiled) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[dtype]


def _shards(values: StoredValues, buffers: set[str], options: PlainOptions) -> list[PlainShard]:
    groups: list[list[tuple[str, str, Tiled]]] = [[]]
    filled = 0
    for name, tensor in sorted({**values.parameters, **values.stacks}.items()):
        dtype = "F32" if name in buffers else options.dtype
        size = _bytes(dtype, tensor)
        if groups[-1] and filled + size > options.shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, dtype, tensor))
        filled += size
    for group in groups:
        group.sort(key=lambda entry: -ITEM_BYTES[entry[1]])  # each begins at a multiple of its numbers' bytes
    count = len(groups)
    return [
        PlainShard(f"model-{number:05}-of-{count:05}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def _blocks(reader: TensorReader, shard: PlainShard) -> Iterator[torch.Tensor]:
    """The bytes of the tensors in order, uint8 each."""
    for _, dtype, tensor in shard.tensors:
        rows, line = (tensor.shape[0], math.prod(tensor.shape[1:])) if tensor.shape else (1, 1)
        step = max(1, _CHUNK // line // _LINES) * _LINES if len(tensor.shape) == 2 else max(1, _CHUNK // line)
        for begin in range(0, rows, step) if tensor.shape else ():
            block = _numbers_of(reader, tensor.slice(0, begin, min(begin + step, rows)))
            yield block.to(to_torch(BY_SAFETENSORS[dtype])).flatten().view(torch.uint8)


def _numbers_of(reader: TensorReader, tensor: Tiled) -> torch.Tensor:
    """The numbers of ``tensor``; those of two matrices whose rows alternate one matrix at a time."""
    if all(len(box.info.matrices) < 2 for box in tensor.boxes):
        return stored_numbers(reader, tensor)
    experts = []
    for expert in tensor.unbind(0):
        turned = tensor.boxes[0].info.turned
        upright = expert.permute((1, 0)) if turned else expert
        halves = upright.view((upright.shape[0] // 2, 2, *upright.shape[1:])).unbind(1)
        rows = torch.stack([stored_numbers(reader, half.apart()) for half in halves], 1).flatten(0, 1)
        experts.append(rows.t() if turned else rows)
    return torch.stack(experts)


def _write_texts(path: Path, out: Path) -> None:
    """The tokenizer and templates: copied from a directory, made of the vocabulary of a GGUF file."""
    if path.is_dir():
        copy_small_files(path, out)
        return
    tokenizer = Tokenizer.of(path)
    ends = sorted(tokenizer.eos_token_ids)
    write_small(out / TOKENIZER, json.dumps(tokenizer.description(), ensure_ascii=False).encode())
    roles = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.roles}
    write_small(out / "tokenizer_config.json", json.dumps(roles, indent=2, ensure_ascii=False).encode())
    write_small(out / "generation_config.json", json.dumps({"eos_token_id": ends}).encode())
    for name, text in (tokenizer.template.sources if tokenizer.template is not None else {}).items():
        template = TEMPLATE_FILE if name == DEFAULT else f"{TEMPLATE_DIRECTORY}/{name}.jinja"
        write_small(out / template, text.encode())
