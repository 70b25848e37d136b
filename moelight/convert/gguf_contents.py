"""The contents of a GGUF file that a checkpoint is written to: its tensors, their types, and the stored numbers that
each is made of. Names, shapes and places only; `convert.gguf_file` reads, rounds and writes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelight.convert.gguf_metadata import WrittenFamily, check_read_back, metadata_of, written_family
from moelight.convert.gguf_types import Mixture, tensor_bytes
from moelight.core.errors import ConfigError
from moelight.models.checkpoints import graph_source
from moelight.models.graph.gguf import names_in_file
from moelight.models.graph.model import GraphModel
from moelight.models.graph.weights import StoredValues, stored_values
from moelight.weights.boxes import Tiled

_ROPE_FACTORS = "rope_freqs.weight"
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_HEAD = ("token_embd.weight", "output_norm.weight", "output.weight", _ROPE_FACTORS)
_LARGE_LAYERS = 80  # by which llama.cpp knows models of 70 billion parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """One tensor of the file.

    Attributes:
        name: in the file.
        kind: its ggml type.
        shape: the outermost dimension first.
        parts: matrices, or rows, that make it one behind the other.
        constant: all of its numbers, instead of ``parts``.
        heads: of queries or keys whose halves are to be interleaved; 0: rows stay as they are.
        stored_as: the function of the numbers that is stored, as of `weights.tensor_info.StoredMatrix`.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parts: tuple[Tiled, ...] = ()
    constant: Tensor | None = None
    heads: int = 0
    stored_as: str = ""

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.kind, self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFContents:
    """A file before it is written: its architecture, the keys of that without prefix, and its tensors in order.
    ``files`` hold the numbers."""

    architecture: str
    keys: Mapping[str, Any]
    tensors: tuple[GGUFTensor, ...]
    files: frozenset[Path]
    vocab_size: int


def contents_of(path: Path, file_type: str) -> GGUFContents:
    """What a file of ``file_type`` holds of the checkpoint in directory, or of the GGUF file, ``path``.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: its family is not written, or a file could not state all of its config.
    """
    model, checkpoint = graph_source(path)
    config: Any = model.config
    where = str(path / "config.json" if path.is_dir() else path)
    family = written_family(config, where=where)
    values = stored_values(checkpoint, model)
    keys = metadata_of(config, family)
    entries = _TensorsInFile(model, family, values, where).tensors()
    shapes = {entry.name: entry for entry in entries}
    check_read_back(config, family, keys, shapes, where=where)
    mixture = Mixture(
        file_type=file_type,
        layers=config.num_hidden_layers,
        experts=keys.get("expert_count", 0),
        queries_per_key=config.num_attention_heads // max(1, keys["attention.head_count_kv"]),
        tied="output.weight" not in shapes,
        large=family.architecture in ("llama", "qwen2")
        and config.num_hidden_layers == _LARGE_LAYERS
        and keys["attention.head_count_kv"] < config.num_attention_heads,
    )
    tensors = []
    for entry in sorted(shapes.values(), key=_order):
        kind = mixture.type_of(entry.name, entry.shape)
        tensors.append(replace(entry, kind=kind))
    return GGUFContents(
        architecture=family.architecture,
        keys=keys,
        tensors=tuple(tensors),
        files=frozenset(values.files),
        vocab_size=config.vocab_size,
    )


def _order(tensor: GGUFTensor) -> tuple[int, int, str]:
    match = _BLOCK.fullmatch(tensor.name)
    if match is None:
        return (-1, _HEAD.index(tensor.name) if tensor.name in _HEAD else len(_HEAD), tensor.name)
    return int(match[1]), 0, match[2]


class _TensorsInFile:
    """The tensors of a file, without types, of the parameters of a model."""

    def __init__(self, model: GraphModel, family: WrittenFamily, values: StoredValues, where: str) -> None:
        self._model, self._config, self._row = model, model.config, family.row
        self._family, self._values, self._where = family, values, where
        self._names = names_in_file(family.architecture, family.row, model)

    def tensors(self) -> Iterator[GGUFTensor]:
        for parameter, tensor in self._values.parameters.items():
            name = self._names.get(parameter)
            if name is None:
                raise ConfigError(
                    f"{self._where}: parameter {parameter} has no name in GGUF files of {self._family.architecture}; "
                    "the model is not written as GGUF"
                )
            yield from self._dense(name, tensor)
        for layer, rows in self._values.experts.items():
            for matrix in rows[0]:
                kind = "bias" if matrix.endswith("_bias") else "weight"
                parts = tuple(row[matrix] for row in rows)
                name = f"blk.{layer}.ffn_{matrix.removesuffix('_bias')}_exps.{kind}"
                yield self._tensor(name, (len(parts), *parts[0].shape), parts)
        rope = getattr(self._config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "llama3":
            factors = _rotary_factors(self._model, rope["rope_theta"])
            yield GGUFTensor(name=_ROPE_FACTORS, kind="F32", shape=tuple(factors.shape), constant=factors)

    def _dense(self, name: str, tensor: Tiled) -> Iterator[GGUFTensor]:
        if name.endswith(".attn_kv_b.weight"):
            yield from self._keys_and_values(name, tensor)
            return
        shape = tensor.shape
        part = name.rpartition(".")[0].rpartition(".")[2]
        heads = 0
        if self._row.heads_in_pairs and part in ("attn_q", "attn_k"):
            count = self._config.num_key_value_heads if part == "attn_k" else self._config.num_attention_heads
            heads = count
        yield self._tensor(name, shape, (tensor,), heads=heads, stored_as=self._row.stored_as(part))

    def _keys_and_values(self, name: str, tensor: Tiled) -> Iterator[GGUFTensor]:
        """``kv_b`` as absorbed attention has it: for each head the keys' part transposed, and the values'."""
        keys, values = self._config.qk_nope_head_dim, self._config.v_head_dim
        heads, rank = self._config.num_attention_heads, tensor.shape[1]
        both = tensor.view((heads, keys + values, rank))
        for half, part in (("k", both.slice(1, 0, keys).permute((0, 2, 1))), ("v", both.slice(1, keys, keys + values))):
            yield self._tensor(name.replace("attn_kv_b", f"attn_{half}_b"), part.shape, tuple(part.unbind(0)))

    def _tensor(
        self, name: str, shape: tuple[int, ...], parts: tuple[Tiled, ...], *, heads: int = 0, stored_as: str = ""
    ) -> GGUFTensor:
        assert math.prod(shape) == sum(math.prod(part.shape) for part in parts)
        return GGUFTensor(name=name, kind="F32", shape=shape, parts=parts, heads=heads, stored_as=stored_as)


def _rotary_factors(model: GraphModel, theta: float) -> Tensor:
    """Divisors of the rotary frequencies of Llama 3."""
    buffers = dict(model.module.named_buffers())
    frequencies = next(buffer for name, buffer in buffers.items() if name.endswith("rotary_emb.inv_freq"))
    exponents = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    return (theta**-exponents / frequencies.double()).float()
