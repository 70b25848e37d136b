"""Opens a checkpoint as a model of our own where we compute its family, else as transformers' module graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from moelight.core.errors import ConfigError, quoted
from moelight.kernels.products import Workspace
from moelight.kernels.ranks import Ranks
from moelight.models.decoder import NativeDecoder
from moelight.models.graph.decoder import GraphDecoder
from moelight.models.graph.gguf import GGUF_KIND, config_values_of, graph_checkpoint, prediction_file
from moelight.models.graph.layers import use_kernels
from moelight.models.graph.model import GraphModel, config_of, on_meta, read_config
from moelight.models.graph.prediction import as_prediction, prediction_config, prediction_tensors
from moelight.models.graph.profile import profile_of
from moelight.models.graph.self_test import prove_config
from moelight.models.graph.stored import with_stored_weights
from moelight.models.graph.support import refuse_unserved
from moelight.models.graph.weights import GraphWeightMap, fill_weights, matrices_of, renamer, weights_in
from moelight.models.pages import PagedExperts
from moelight.profiles.families import FAMILIES, profile_from_dir
from moelight.profiles.gguf import GGUFFile, read_gguf
from moelight.profiles.gguf_families import GraphArchitecture, architecture_of
from moelight.profiles.gguf_models import GGUFModel, open_gguf
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile, StoredTensor, not_computed
from moelight.profiles.quantization import Kept, read_quantization, with_stored
from moelight.weights.gguf_checkpoint import gguf_checkpoint
from moelight.weights.load import load_dense
from moelight.weights.loose_experts import experts_one_by_one
from moelight.weights.source import GGUF, Checkpoint, resolve_model
from moelight.weights.tensor_map import (
    OpenCheckpoint,
    WeightMap,
    as_stored,
    locate,
    open_needed,
    plain_matrices,
)
from moelight.weights.torch_dtypes import from_torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PREDICTION = " (multi-token prediction)"  # behind the name of a model whose prediction layer is meant


def open_model(model: str) -> OpenCheckpoint:
    """Find ``model`` and audit it: every tensor present, of the right shape, none left over.

    Raises:
        CheckpointError: the model is missing, or its files are not as its config asks for them.
        ConfigError: the model type is not supported, or transformers is missing.
    """
    directory = resolve_model(model)
    if directory.suffix == GGUF:
        return _open_gguf(directory)
    config = HFConfig.from_file(directory / "config.json")
    model_type = config.find("model_type")
    ours = isinstance(model_type, str) and model_type in FAMILIES
    if ours and not not_computed(profile := profile_from_dir(directory)):
        return _open_native(directory, profile)
    return _open_graph(directory)


def _open_native(path: Path, profile: ModelProfile, checkpoint: Checkpoint | None = None) -> OpenCheckpoint:
    """Open ``checkpoint``, of plain matrices, else that in the directory ``path``; nothing is read but headers."""
    if checkpoint is None:
        checkpoint = plain_matrices(open_needed(path), profile.dtype)
    weight_map = locate(checkpoint, profile)
    profile = replace(profile, dtype=weight_map.dtype.name)
    opened = OpenCheckpoint(directory=path, profile=profile, weight_map=weight_map, source=NativeSource(weight_map))
    return opened if profile.stored is None else as_stored(opened)


@dataclass(frozen=True, slots=True)
class NativeSource:
    """`DecoderSource` of a family of `profiles.families`."""

    weight_map: WeightMap
    ranks: Ranks | None = None
    road: ClassVar[str] = "native"
    predicts: ClassVar[bool] = True
    mixes: ClassVar[bool] = True

    def sharded(self, weight_map: WeightMap) -> NativeSource:
        return replace(self, weight_map=weight_map)

    def joined(self, ranks: Ranks) -> NativeSource:
        return replace(self, ranks=ranks)

    def kept_as(self, part: StoredTensor) -> Kept | None:
        info = self.weight_map.parts.get(part)
        return next(((matrix.stored, matrix.kept_bytes) for matrix in info.matrices), None) if info else None

    def decoder(
        self, profile: ModelProfile, arena: Tensor, dtype: torch.dtype, paged: PagedExperts, *, as_stored: bool
    ) -> Callable[[Workspace], NativeDecoder]:
        weights = load_dense(self.weight_map, profile, arena, dtype, as_stored=as_stored)
        return partial(NativeDecoder, profile, weights, paged=paged, activations=paged.activations, ranks=self.ranks)


def graph_source(path: Path) -> tuple[GraphModel, Checkpoint]:
    """The checkpoint in the directory, or the GGUF file, ``path`` as one of plain matrices, and the module graph whose
    parameters it holds, whether or not moelight computes the family itself. Raises as `_graph_of`."""
    if path.suffix != GGUF:
        model = GraphModel(on_meta(read_config(path)))
        return model, matrices_of(path, model)
    contents = read_gguf(path)
    name, row = architecture_of(contents)
    if isinstance(row, GraphArchitecture):
        model = GraphModel(on_meta(config_of(config_values_of(contents, name, row), where=str(path))))
        return model, graph_checkpoint(contents, name, row, model)
    return _graph_of_native(open_gguf(path), str(path))


def _graph_of_native(file: GGUFModel, where: str) -> tuple[GraphModel, Checkpoint]:
    model = GraphModel(on_meta(config_of(dict(file.config.values), where=where)))
    state = model.module.state_dict()
    rename, _ = renamer(model.module, state)
    return model, gguf_checkpoint(file, lambda name: rename(name)[0] in state)


@dataclass(frozen=True, slots=True)
class GraphSource:
    """`DecoderSource` of a family that transformers computes."""

    model: GraphModel
    weights: GraphWeightMap
    ranks: Ranks | None = None
    road: ClassVar[str] = "graph"
    mixes: ClassVar[bool] = False

    def sharded(self, weight_map: WeightMap) -> GraphSource:  # noqa: ARG002 - the graph is whole on every rank
        return self

    def joined(self, ranks: Ranks) -> GraphSource:
        return replace(self, ranks=ranks)

    @property
    def predicts(self) -> bool:
        return self.model.predicts

    def kept_as(self, part: StoredTensor) -> Kept | None:
        return self.weights.kept_as(part.name)

    def decoder(
        self, profile: ModelProfile, arena: Tensor, dtype: torch.dtype, paged: PagedExperts, *, as_stored: bool
    ) -> Callable[[Workspace], GraphDecoder]:
        fill_weights(self.model, self.weights, arena, dtype, as_stored=as_stored, activations=paged.activations)
        return partial(GraphDecoder, profile, self.model, paged, ranks=self.ranks)


def _open_graph(directory: Path) -> OpenCheckpoint:
    """Open the checkpoint in ``directory`` as its module graph; nothing is read but headers. Raises as `_graph_of`."""
    path, config = directory / "config.json", read_config(directory)
    model = GraphModel(on_meta(config))
    text, checkpoint = path.read_text(encoding="utf-8"), matrices_of(directory, model)
    opened, _ = _graph_of(config, model, checkpoint, text, directory.resolve().name, path)
    return _as_quantised(opened, model, path)


def open_prediction(directory: Path) -> OpenCheckpoint:
    """The layer of multi-token prediction in the checkpoint ``directory``, or GGUF file, as a model of one layer; in
    the place of its embedding is a `PredictionInput`. Raises as `_graph_of`, and ConfigError if there is none that is
    served."""
    if directory.suffix == GGUF:
        return _open_gguf_prediction(directory)
    path, config = directory / "config.json", read_config(directory)
    stored = prediction_tensors(Checkpoint.open(directory), config.get_text_config().num_hidden_layers)
    model = _prediction_graph(config)
    checkpoint = plain_matrices(experts_one_by_one(stored), from_torch(model.module.dtype).name)
    text, name = path.read_text(encoding="utf-8"), f"{directory.resolve().name}{_PREDICTION}"
    opened, _ = _graph_of(config, model, checkpoint, text, name, path)
    return _as_quantised(opened, model, path)


def _prediction_graph(config: PretrainedConfig) -> GraphModel:
    module = on_meta(prediction_config(config))
    as_prediction(module)
    return GraphModel(module)


def _open_gguf_prediction(path: Path) -> OpenCheckpoint:
    contents = read_gguf(path)
    name, row = architecture_of(contents)
    if not isinstance(row, GraphArchitecture):
        raise ConfigError(
            f"{path}: multi-token prediction of general.architecture {quoted(name)} is not served; use --speculate "
            "ngram, or a --draft-model"
        )
    values = config_values_of(contents, name, row)
    config = config_of(values, where=str(path))
    model = _prediction_graph(config)
    file, row = prediction_file(contents, name, row, config.get_text_config().num_hidden_layers)
    checkpoint = graph_checkpoint(file, name, row, model)
    opened, weights = _graph_of(config, model, checkpoint, json.dumps(values), f"{path.stem}{_PREDICTION}", path)
    return replace(opened, profile=with_stored_weights(opened.profile, weights, GGUF_KIND))


def _as_quantised(opened: OpenCheckpoint, model: GraphModel, path: Path) -> OpenCheckpoint:
    """``opened`` with the stored formats that the config in the file ``path`` names, if it names any."""
    quantization = read_quantization(HFConfig.from_file(path))
    if quantization is None:
        return opened
    multiplied = model.multiplied
    profile = with_stored(opened.profile, quantization.format_of, str(path), multiplied=multiplied)
    return as_stored(replace(opened, profile=profile))


def _open_gguf(path: Path) -> OpenCheckpoint:
    """Open the GGUF file ``path``; nothing is read but its header. Raises as `_graph_of`."""
    contents = read_gguf(path)
    name, row = architecture_of(contents)
    if isinstance(row, GraphArchitecture):
        return _open_gguf_graph(contents, name, row)
    file = open_gguf(path)
    if not not_computed(file.profile):
        return _open_native(path, file.profile, gguf_checkpoint(file))
    model, checkpoint = _graph_of_native(file, str(path))
    opened, _ = _graph_of(model.config, model, checkpoint, json.dumps(dict(file.config.values)), path.stem, path)
    return as_stored(replace(opened, profile=replace(opened.profile, stored=file.profile.stored)))


def _open_gguf_graph(file: GGUFFile, name: str, row: GraphArchitecture) -> OpenCheckpoint:
    """Open ``file``, whose family has no other way than its module graph. Raises as `_graph_of`."""
    values = config_values_of(file, name, row)
    config = config_of(values, where=str(file.path))
    model = GraphModel(on_meta(config))
    checkpoint = graph_checkpoint(file, name, row, model)
    opened, weights = _graph_of(config, model, checkpoint, json.dumps(values), file.path.stem, file.path)
    return replace(opened, profile=with_stored_weights(opened.profile, weights, GGUF_KIND))


def _graph_of(
    config: PretrainedConfig, model: GraphModel, checkpoint: Checkpoint, text: str, name: str, path: Path
) -> tuple[OpenCheckpoint, GraphWeightMap]:
    """``checkpoint``, of plain matrices, as the module graph ``model`` of ``config``, which was read from ``text`` in
    the file ``path``; and the places of its weights.

    Raises:
        ConfigError: transformers is missing, does not know the family, or the graph is not served or fails its
            self-test.
        CheckpointError: a tensor is missing, left over, or not as the config asks for it.
    """
    where = str(path)
    profile = profile_of(model, name=name, where=where)
    refuse_unserved(profile, where=where)
    weights = weights_in(checkpoint, model)
    prove_config(config, text, where=where)
    use_kernels(model.module)
    weight_map = WeightMap(
        dtype=weights.dtype, parts=MappingProxyType({}), experts=weights.experts, ignored=weights.ignored
    )
    source = GraphSource(model, weights)
    opened = OpenCheckpoint(directory=checkpoint.directory, profile=profile, weight_map=weight_map, source=source)
    return opened, weights
