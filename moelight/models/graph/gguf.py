"""GGUF files of families that run as module graphs: the tensors of a file under the names that transformers' rules lead
to parameters of the graph.

The names are gguf-py's own map from tensors to the spellings of checkpoints, of which the one is taken that the graph
has; experts are found by their place in the graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from moelight.core.dtypes import FLOAT32, dtype_named
from moelight.core.errors import CheckpointError, ConfigError, quoted
from moelight.formats.format import ITEM_BYTES
from moelight.formats.ggml import ggml_format
from moelight.models.graph.model import GraphModel, config_of, decoder_of, on_meta
from moelight.models.graph.profile import profile_of
from moelight.models.graph.stored import with_stored_weights
from moelight.models.graph.weights import not_read, paged, renamer, weights_in
from moelight.profiles.gguf import GGMLTensor, GGUFFile, metadata_numbers, read_gguf
from moelight.profiles.gguf_config import Metadata
from moelight.profiles.gguf_families import GraphArchitecture, architecture_of, family_of, graph_values
from moelight.profiles.model import ModelProfile
from moelight.weights.boxes import Tiled
from moelight.weights.gguf_checkpoint import assembled_info, expert_infos, matrix_info
from moelight.weights.gguf_orders import JOINS, ORDERS, rounds_of
from moelight.weights.ignored import PREDICTION
from moelight.weights.loose_experts import layer_of
from moelight.weights.source import Checkpoint, IgnoredTensor, TensorInfo
from moelight.weights.tensor_info import TRANSPOSED

GGUF_KIND = "GGUF"
_BLOCK = re.compile(r"blk\.(?P<layer>\d{1,5})\.(?P<part>.+)")
_EXPERTS = re.compile(r"ffn_(?P<matrix>gate|up|down|gate_up)_exps\.(?P<kind>weight|bias)")
# Of a layer that predicts further tokens: what takes the place of the model's, and the parameters of its input.
_INSTEAD = MappingProxyType(
    {
        "nextn.embed_tokens.weight": "token_embd.weight",
        "nextn.shared_head_norm.weight": "output_norm.weight",
        "nextn.shared_head_head.weight": "output.weight",
    }
)
_INPUT = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.embedding.weight",
        "nextn.enorm.weight": "model.embed_tokens.enorm.weight",
        "nextn.hnorm.weight": "model.embed_tokens.hnorm.weight",
        "nextn.eh_proj.weight": "model.embed_tokens.eh_proj.weight",
    }
)
_OF_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SHARE = "partial_rotary_factor"
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def config_values_of(file: GGUFFile, name: str, row: GraphArchitecture) -> dict[str, Any]:
    """Return the values that ``config.json`` would have; raises ConfigError as `graph_values` does."""
    config = config_of({"model_type": family_of(file, name, row)}, where=str(file.path))
    default: Any = config.get_text_config()
    fields, spelled = default.to_dict().keys(), type(default).attribute_map
    values = graph_values(file, name, row, (fields | spelled.keys()).__contains__)
    if "rope_parameters" in values and not _rotates_a_share(default.to_dict().get("rope_parameters") or {}):
        values["rope_parameters"] = _rotary_without(values["rope_parameters"])
    values = {spelled.get(key, key): value for key, value in values.items()}
    within = next((name for name in config.sub_configs if getattr(config, name) is default), None)
    if within is None:
        return values
    outer = {key: values.pop(key) for key in ("model_type", "dtype", "tie_word_embeddings") if key in values}
    return {**outer, within: values}


def _rotates_a_share(rope: Mapping[str, Any]) -> bool:
    """Whether heads rotate a share of their numbers by ``rope``, of all layers or of one kind."""
    return _SHARE in rope or any(isinstance(value, dict) and _rotates_a_share(value) for value in rope.values())


def _rotary_without(rope: Mapping[str, Any]) -> dict[str, Any]:
    """``rope`` without shares of 1, which families that have no other do not state."""
    return {
        key: _rotary_without(value) if isinstance(value, dict) else value
        for key, value in rope.items()
        if (key, value) != (_SHARE, 1.0)
    }


def graph_checkpoint(file: GGUFFile, name: str, row: GraphArchitecture, model: GraphModel) -> Checkpoint:
    """The tensors of ``file`` as a checkpoint of plain matrices under the names of the family.

    Raises:
        CheckpointError: a tensor is of a type that is not read.
    """
    names = _Names(file, name, row, model)
    infos, ignored = dict[str, TensorInfo](), list[IgnoredTensor]()
    for tensor in file.tensors.values():
        if (indices := names.indices(tensor)) is not None:
            infos[indices.name] = indices
            continue
        try:
            ggml_format(tensor.type)
        except ConfigError as error:
            raise CheckpointError(f"{tensor.file}: tensor {quoted(tensor.name)}: {error}") from None
        if tensor.name in _OF_CONFIG:
            continue
        if names.predicts(tensor):
            ignored.append(IgnoredTensor(info=names.as_stored(tensor), reason=PREDICTION))
            continue
        if (reason := names.not_read(tensor)) is not None:
            ignored.append(IgnoredTensor(info=names.as_stored(tensor), reason=reason))
            continue
        for info in names.infos(tensor):
            if info.name in infos:
                raise CheckpointError(
                    f"{tensor.file}: tensor {quoted(tensor.name)} is the second that becomes {quoted(info.name)}; "
                    "convert the model again"
                )
            infos[info.name] = info
    infos |= {info.name: info for info in names.of_metadata()}
    return Checkpoint(directory=file.path, listing=file.path, tensors=MappingProxyType(infos), ignored=tuple(ignored))


def prediction_file(
    file: GGUFFile, name: str, row: GraphArchitecture, layer: int
) -> tuple[GGUFFile, GraphArchitecture]:
    """Block ``layer`` of ``file``, which predicts further tokens, as the file of a model of one layer with a
    `prediction.PredictionInput`, and how its tensors are named. Raises ConfigError if there is no such block."""
    block = f"blk.{layer}."
    within = {part.removeprefix(block): tensor for part, tensor in file.tensors.items() if part.startswith(block)}
    if "nextn.eh_proj.weight" not in within:
        raise ConfigError(
            f"{file.path}: no tensor {block}nextn.eh_proj.weight, so there is no multi-token prediction that is "
            "served; use --speculate ngram, or a --draft-model"
        )
    tensors = {part: tensor for part, tensor in file.tensors.items() if not part.startswith("blk.")}
    tensors |= {_INSTEAD.get(part, f"blk.0.{part}"): tensor for part, tensor in within.items()}
    metadata = {**file.metadata, f"{name}.block_count": 1, f"{name}.nextn_predict_layers": 0}
    named = {part: replace(tensor, name=part) for part, tensor in tensors.items()}
    return replace(file, metadata=metadata, tensors=named), replace(row, renamed={**row.renamed, **_INPUT})


def profile_of_file(path: Path) -> ModelProfile:
    """The profile of the GGUF file ``path``, of which only the header is read; raises ConfigError."""
    file = read_gguf(path)
    name, row = architecture_of(file)
    assert isinstance(row, GraphArchitecture), "others are read without their graph"
    model = GraphModel(on_meta(config_of(config_values_of(file, name, row), where=str(path))))
    profile = profile_of(model, name=path.stem, where=str(path))
    return with_stored_weights(profile, weights_in(graph_checkpoint(file, name, row, model), model), GGUF_KIND)


def names_in_file(name: str, row: GraphArchitecture, model: GraphModel) -> dict[str, str]:
    """By parameter of ``model`` outside experts, the name of the tensor that holds it in files of the architecture
    ``name``: the inverse of `graph_checkpoint`."""
    metadata = {f"{name}.block_count": model.config.num_hidden_layers}
    names = _Names(GGUFFile(path=Path(name), metadata=metadata, tensors={}), name, row, model)
    return names.by_parameter()


class _Names:
    """Finds the parameters of one file's tensors."""

    def __init__(self, file: GGUFFile, name: str, row: GraphArchitecture, model: GraphModel) -> None:
        self._file, self._row = file, row
        self._blocks = Metadata(file, name).integer("block_count", least=1)
        self._dtype = dtype_named(str(model.module.dtype).removeprefix("torch.")).safetensors
        self._state: Mapping[str, Any] = model.module.state_dict(keep_vars=True)
        self._rename, _ = renamer(model.module, dict(self._state))
        body = decoder_of(model.module)
        self._body = next(path for path, part in model.module.named_modules() if part is body)
        self._not_read = [(re.compile(pattern), reason) for pattern, reason in not_read(model.module)]
        self._spellings = _spellings(name, self._blocks)
        self._config = config = model.config
        self._layers = config.num_hidden_layers
        if row.heads_in_pairs:
            self._heads = {"q": config.num_attention_heads, "k": getattr(config, "num_key_value_heads", 0)}
        # The block of experts of each layer, by the number in the names of its parameters.
        paths = (next(iter(parameters.values())) for _, _, parameters in paged(model))
        self._experts = {int(layer_of(path).rpartition(".")[2]): layer_of(path) for path in paths}

    def predicts(self, tensor: GGMLTensor) -> bool:
        """Whether ``tensor`` is of a layer that predicts further tokens."""
        match = _BLOCK.fullmatch(tensor.name)
        return match is not None and self._layers <= int(match["layer"]) < self._blocks

    def not_read(self, tensor: GGMLTensor) -> str | None:
        """The reason for which the family ignores ``tensor``, if it does."""
        if not self._not_read:
            return None
        base, _, _ = tensor.name.rpartition(".")
        for pattern, reason in self._not_read:
            if any(pattern.search(spelling) for spelling in self._spellings.get(base, ())):
                return reason
        return None

    def indices(self, tensor: GGMLTensor) -> TensorInfo | None:
        """``tensor`` of whole numbers, if the graph has such a one of its name and size."""
        if tensor.type not in ITEM_BYTES or tensor.type[0] != "I":
            return None
        block = _BLOCK.fullmatch(tensor.name)
        layer, part = (int(block["layer"]), block["part"]) if block else (-1, tensor.name)
        name = self._find(tensor.name, part, layer)
        target = None if name is None else self._state.get(self._rename(name)[0])
        if name is None or target is None or target.is_floating_point() or tuple(target.shape) != tensor.shape:
            return None
        return TensorInfo(
            name=name,
            file=tensor.file,
            dtype=tensor.type,
            shape=tensor.shape,
            offset=tensor.offset,
            nbytes=tensor.nbytes,
        )

    def as_stored(self, tensor: GGMLTensor) -> TensorInfo:
        """``tensor`` under its own name, for which the graph has no parameter."""
        return matrix_info(tensor.name, tensor, tensor.shape, self._dtype)

    def infos(self, tensor: GGMLTensor) -> Iterator[TensorInfo]:
        """``tensor`` under the names of the family: experts one by one, others as they are."""
        block = _BLOCK.fullmatch(tensor.name)
        layer, part = (int(block["layer"]), block["part"]) if block else (-1, tensor.name)
        experts = _EXPERTS.fullmatch(part)
        if experts is not None and layer in self._experts:
            halves = ("gate", "up") if experts["matrix"] == "gate_up" else (experts["matrix"],)
            for number, half in enumerate(halves):
                name = f"{self._experts[layer]}.mlp.experts.{{}}.{_PROJECTIONS[half]}.{experts['kind']}"
                yield from expert_infos(tensor, name, self._dtype, half=number, halves=len(halves))
            return
        for joined, parts in self._row.joined.items():
            name = self._within(joined.format(layer=layer))
            if part in parts and self._rename(name)[0] in self._state:
                if part == parts[0]:
                    yield self._joined(name, [f"blk.{layer}.{half}" for half in parts])
                return
        if (spelling := self._find(tensor.name, part, layer)) is not None:
            yield self._info(spelling, tensor, part)
            return
        rows = list(self._fused(tensor, part, layer))
        yield from rows or [self.as_stored(tensor)]

    def of_metadata(self) -> Iterator[TensorInfo]:
        """The parameters that are numbers of the metadata."""
        listed = metadata_numbers(self._file.path) if self._row.by_layer else {}
        for key, name in self._row.by_layer.items():
            stored = listed.get(key)
            count = 0 if stored is None else stored.shape[0]
            if stored is None or count not in (1, self._blocks):
                raise CheckpointError(
                    f"{self._file.path}: the metadata key {key} must have one number, or one for each of "
                    f"{self._blocks} layers; convert the model again"
                )
            for layer in range(self._layers):
                offset = stored.offset + 4 * (layer if count > 1 else 0)
                number = replace(stored, name=f"{key} of layer {layer}", shape=(1,), offset=offset, nbytes=4)
                yield self._info(name.format(layer=layer), number, key)

    def by_parameter(self) -> dict[str, str]:
        """The name in the file of each parameter that has one of its own."""
        result: dict[str, str] = {}
        for part, name in self._row.renamed.items():
            for layer in range(self._layers) if "{layer}" in name else (-1,):
                parameter = self._rename(self._within(name.format(layer=layer)))[0]
                if parameter in self._state:
                    result[parameter] = part if layer < 0 else f"blk.{layer}.{part}"
        for base in self._spellings:
            block = _BLOCK.fullmatch(base)
            layer, part = (int(block["layer"]), block["part"]) if block else (-1, base)
            for kind in ("weight", "bias"):
                spelling = self._find(f"{base}.{kind}", f"{part}.{kind}", layer)
                if spelling is not None:
                    result.setdefault(self._rename(spelling)[0], f"{base}.{kind}")
        return result

    def _joined(self, name: str, parts: list[str]) -> TensorInfo:
        """The matrix ``name`` that is stored as the tensors ``parts``."""
        tensors = self._file.tensors
        if (missing := next((part for part in parts if part not in tensors), None)) is not None:
            raise CheckpointError(f"{self._file.path}: tensor {quoted(missing)} is missing; fetch the whole file")
        tiles, first = [], tensors[parts[0]]
        for part in parts:
            tensor = tensors[part]
            shape = tensor.shape if len(tensor.shape) < 4 else tuple(size for size in tensor.shape if size != 1)
            tiles.append(Tiled.of(matrix_info(f"{name} of {part}", tensor, shape, self._dtype)))
        part, target = parts[0].split(".", 2)[2], self._state[self._rename(name)[0]]
        try:
            stored = JOINS.get(self._row.orders.get(part.removesuffix(".weight"), ""), JOINS[""])(tiles)
            stored = stored.view(tuple(target.shape)) if _alike(target.shape, stored.shape) else stored
        except ValueError:
            raise self._mis_shaped(first) from None
        return self._ordered(name, first, stored, part, self._dtype)

    def _mis_shaped(self, tensor: GGMLTensor) -> CheckpointError:
        return CheckpointError(
            f"{tensor.file}: tensor {quoted(tensor.name)} {list(tensor.shape)} has no rows of the heads that "
            "the metadata state; convert the model again"
        )

    def _ordered(self, name: str, tensor: GGMLTensor, stored: Tiled, part: str, dtype: str) -> TensorInfo:
        """The matrix ``name`` of ``stored``, whose rows are put in the order of the family."""
        order = ORDERS.get(self._row.orders.get(part.removesuffix(".weight"), ""))
        if order is not None:
            try:
                stored = order(stored, self._config)
            except (AttributeError, ValueError):
                raise self._mis_shaped(tensor) from None
        return assembled_info(name, tensor.file, stored, dtype)

    def _find(self, full: str, part: str, layer: int) -> str | None:
        """The spelling of tensor ``full`` that leads to a parameter, or None."""
        kind = full.rpartition(".")[2]
        base, kind = (full.removesuffix(f".{kind}"), kind) if kind in ("weight", "bias") else (full, "weight")
        renamed = self._row.renamed.get(part)
        if renamed is not None:
            return self._within(renamed.format(layer=layer))
        for spelling in self._spellings.get(base, ()):
            for candidate in (f"{spelling}.{kind}", f"{spelling}_{kind}", spelling):
                if self._rename(name := self._within(candidate))[0] in self._state:
                    return name
        return None

    def _within(self, name: str) -> str:
        """``name``, which begins as in models of text alone, as the graph has it."""
        if self._rename(name)[0] in self._state or not name.startswith("model."):
            return name
        return f"{self._body}.{name.removeprefix('model.')}"

    def _fused(self, tensor: GGMLTensor, part: str, layer: int) -> Iterator[TensorInfo]:
        """q, k and v of ``attn_qkv``, of a family that keeps them apart."""
        stem, _, kind = part.rpartition(".")
        if stem != "attn_qkv" or tensor.nbytes % tensor.shape[0]:
            return
        row, begin = tensor.nbytes // tensor.shape[0], 0
        for single in ("attn_q", "attn_k", "attn_v"):
            part = f"{single}.{kind}"
            name = self._find(f"blk.{layer}.{part}", part, layer)
            if name is None:
                return
            count = self._state[self._rename(name)[0]].shape[0]
            offset, nbytes = tensor.offset + begin * row, count * row
            if begin + count > tensor.shape[0]:
                raise CheckpointError(
                    f"{tensor.file}: tensor {quoted(tensor.name)} has {tensor.shape[0]} rows, too few for queries, "
                    "keys and values; fetch the file again"
                )
            rows = replace(tensor, shape=(count, *tensor.shape[1:]), offset=offset, nbytes=nbytes)
            yield self._info(name, rows, part)
            begin += count

    def _info(self, name: str, tensor: GGMLTensor, part: str) -> TensorInfo:
        target = self._state.get(self._rename(name)[0])
        shape = tensor.shape
        if target is not None and math.prod(target.shape) == math.prod(shape) and _alike(target.shape, shape):
            shape = tuple(target.shape)
        buffer = target is not None and not isinstance(target, torch.nn.Parameter)
        dtype = tensor.type if buffer and tensor.type == FLOAT32.safetensors else self._dtype
        heads = 0
        if self._row.heads_in_pairs and part.partition(".")[0] in ("attn_q", "attn_k"):
            heads = self._heads[part[len("attn_")]]
        stored_as = self._row.stored_as(part.removesuffix(".weight"))
        shape = shape[::-1] if stored_as == TRANSPOSED else shape
        rounds = rounds_of(self._config) if stored_as == "heads_in_rounds" else (1, 1)
        info = matrix_info(name, tensor, shape, dtype, heads=heads, stored_as=stored_as, rounds=rounds)
        if part.removesuffix(".weight") in self._row.orders:
            return self._ordered(name, tensor, Tiled.of(info), part, dtype)
        return info


def _alike(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Whether two shapes are the same but for dimensions of one, or ``first`` is a list."""
    return len(first) == 1 or [size for size in first if size != 1] == [size for size in second if size != 1]


def _spellings(architecture: str, blocks: int) -> dict[str, list[str]]:
    """By the name of a tensor without its ending those that checkpoints give it, as gguf-py maps them; tensors that the
    architecture has come first."""
    from gguf.constants import MODEL_ARCH_NAMES, TENSOR_NAMES
    from gguf.tensor_mapping import TensorNameMap, get_tensor_name_map

    listed, others = dict[str, list[str]](), dict[str, list[str]]()
    number = next((number for number, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if number is not None:
        for spelling, (_, name) in get_tensor_name_map(number, blocks).mapping.items():
            listed.setdefault(name, []).append(spelling)
    # Tensors that the architecture does not have, because it fuses them, or that gguf-py does not know yet.
    for tensor, spellings in TensorNameMap.mappings_cfg.items():
        others.setdefault(TENSOR_NAMES[tensor], []).extend(spellings)
    for block in range(blocks):
        for tensor, spellings in TensorNameMap.block_mappings_cfg.items():
            names = others.setdefault(TENSOR_NAMES[tensor].format(bid=block), [])
            names.extend(spelling.format(bid=block) for spelling in spellings)
    return listed | {name: spellings for name, spellings in others.items() if name not in listed}
