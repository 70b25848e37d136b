"""Opens a checkpoint as a model of our own where we compute its family, else as transformers' module graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from moelight.core.errors import ConfigError
from moelight.kernels.products import Workspace
from moelight.models.graph.decoder import GraphDecoder
from moelight.models.graph.experts import PageViews
from moelight.models.graph.leaves import use_kernels
from moelight.models.graph.model import GraphModel
from moelight.models.graph.profile import profile_of
from moelight.models.graph.self_test import prove
from moelight.models.graph.support import refuse_unserved
from moelight.models.graph.weights import GraphWeightMap, fill_weights, locate_weights
from moelight.models.moe import Matrices
from moelight.models.quantized import QuantizedExperts
from moelight.profiles.families import FAMILIES, profile_from_dir
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile, not_computed
from moelight.profiles.quantization import read_quantization, with_stored
from moelight.weights.source import resolve_model
from moelight.weights.tensor_map import OpenCheckpoint, WeightMap, as_stored, open_checkpoint


def open_model(model: str) -> OpenCheckpoint:
    """Find ``model`` and audit it: every tensor present, of the right shape, none left over.

    Raises:
        CheckpointError: the model is missing, or its files are not as its config asks for them.
        ConfigError: nobody computes its family, or transformers is missing.
    """
    directory = resolve_model(model)
    config = HFConfig.from_file(directory / "config.json")
    model_type = config.find("model_type")
    ours = isinstance(model_type, str) and model_type in FAMILIES
    if ours and not not_computed(profile_from_dir(directory)):
        return open_checkpoint(model)
    return _open_graph(directory)


@dataclass(frozen=True, slots=True)
class GraphCheckpoint:
    """`OpenGraph` of one checkpoint; ``views`` find the matrices of its experts; None of a dense model."""

    model: GraphModel
    weights: GraphWeightMap
    views: PageViews | None

    @property
    def predicts(self) -> bool:
        return self.model.predicts

    def decoder(
        self, profile: ModelProfile, arena: Tensor, dtype: torch.dtype, quantized: QuantizedExperts | None
    ) -> Callable[[Workspace], GraphDecoder]:
        """Read all weights outside pages into ``arena`` (uint8, any device) as ``dtype``."""
        fill_weights(self.model, self.weights, arena, dtype)
        activations = self.views.activations if self.views is not None else ()
        return partial(GraphDecoder, profile, self.model, activations, self.weights.matrices, quantized)

    def expert(self, slot: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | Matrices | Tensor:
        """The expert whose page is in ``slot`` (uint8); of a dense model the numbers of the page."""
        if self.views is None:
            return slot.view(dtype)
        return self.views.of(slot[: self.views.numbers * dtype.itemsize].view(dtype))


def _open_graph(directory: Path) -> OpenCheckpoint:
    """Open the checkpoint in ``directory`` as its module graph; nothing is read but headers.

    Raises:
        ConfigError: transformers is missing, does not know the family, or the graph is not served or fails its
            self-test.
        CheckpointError: a tensor is missing, left over, or not as the config asks for it.
    """
    where = str(directory / "config.json")
    model = GraphModel.from_config(directory)
    profile = profile_of(model, name=directory.resolve().name, where=where)
    refuse_unserved(profile, where=where)
    weights = locate_weights(directory, model)
    prove(directory)
    use_kernels(model.module)
    layouts = list(weights.layouts.values())
    if len(set(layouts)) > 1:
        raise ConfigError(f"{where}: the experts of its layers lie in {len(set(layouts))} ways; pages have one")
    found = WeightMap(dtype=weights.dtype, parts=MappingProxyType({}), pages=weights.pages, spare_head=None)
    views = PageViews(layouts[0], model.forms) if layouts else None
    graph = GraphCheckpoint(model, weights, views)
    quantization = read_quantization(HFConfig.from_file(directory / "config.json"))
    if quantization is None:
        return OpenCheckpoint(directory=directory, profile=profile, weight_map=found, graph=graph)
    profile = with_stored(profile, quantization.format_of, where)
    return as_stored(directory, profile, found, graph, weights.layouts)
