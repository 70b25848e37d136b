"""Matches the tensors of a checkpoint with those a model requires: each is found exactly once and none is left over, or
a CheckpointError names file and tensor. Only names, shapes and dtypes are compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from moelight.core.dtypes import BY_SAFETENSORS, FLOAT32, DType, dtype_named
from moelight.core.errors import CheckpointError
from moelight.core.schedule import Page
from moelight.kernels.ranks import Ranks
from moelight.profiles.families import FAMILIES
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile, StoredTensor
from moelight.profiles.quantization import Kept, kept_matrices, read_quantization, with_pages
from moelight.profiles.tensor_list import dense_tensors, page_shapes
from moelight.weights.expert_pages import ExpertPages, lay_out_pages
from moelight.weights.faults import Faults
from moelight.weights.ignored import COMPUTED, IgnoreRule, ignore_rules, set_aside
from moelight.weights.loose_experts import experts_one_by_one
from moelight.weights.page_layout import in_a_row
from moelight.weights.quantized_checkpoint import as_matrices
from moelight.weights.source import Checkpoint, IgnoredTensor
from moelight.weights.tensor_info import TensorInfo


def _axes(width: str) -> dict[str, tuple[str, ...]]:
    """The config keys that determine each dimension of each part."""
    hidden, experts = "hidden_size", "num_experts or num_local_experts"
    heads, kv_heads = "num_attention_heads or head_dim", "num_key_value_heads or head_dim"
    return {
        **dict.fromkeys(("embed", "head"), ("vocab_size", hidden)),
        **dict.fromkeys(("final_norm", "input_norm", "post_norm", "o_bias"), (hidden,)),
        **dict.fromkeys(("q_norm", "k_norm"), ("head_dim",)),
        **dict.fromkeys(("k", "v"), (kv_heads, hidden)),
        **dict.fromkeys(("k_bias", "v_bias"), (kv_heads,)),
        "q": (heads, hidden),
        "q_bias": (heads,),
        "o": (hidden, heads),
        "router": (experts, hidden),
        **dict.fromkeys(("gate", "up"), (width, hidden)),
        "down": (hidden, width),
        "fused_gate_up": (experts, width, hidden),
        "fused_down": (experts, hidden, width),
        **dict.fromkeys(("dense_gate", "dense_up"), ("intermediate_size", hidden)),
        "dense_down": (hidden, "intermediate_size"),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMap:
    """The location of every tensor a model requires. ``dtype``: of pages of floats, to which others are cast; the one
    to compute in if they are quantised. ``spare_head``: an output matrix that is stored although the config ties it to
    the embeddings. ``ignored``: the tensors that are not read."""

    dtype: DType
    parts: Mapping[StoredTensor, TensorInfo]
    experts: ExpertPages
    spare_head: TensorInfo | None = None
    ignored: tuple[IgnoredTensor, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenCheckpoint:
    """An audited checkpoint: its directory or GGUF file, its profile, and the location of each tensor; no weights are
    loaded yet."""

    directory: Path
    profile: ModelProfile
    weight_map: WeightMap
    source: DecoderSource

    @property
    def ignored(self) -> tuple[IgnoredTensor, ...]:
        """The tensors that are not read, with reasons."""
        return self.weight_map.ignored


class DecoderSource(Protocol):
    """The code that computes the model of a checkpoint, and what it reads outside pages (`models.checkpoints`).

    Attributes:
        road: ``native``: moelight's own decoder; ``graph``: transformers' module graph.
        predicts: whether its routers can be asked for experts of a later layer.
        mixes: whether it computes a bfloat16 checkpoint in float16.
    """

    @property
    def road(self) -> str: ...
    @property
    def predicts(self) -> bool: ...
    @property
    def mixes(self) -> bool: ...

    def sharded(self, weight_map: WeightMap) -> DecoderSource:
        """The same of one rank, whose weights are in ``weight_map`` (`weights.shard`)."""
        ...

    def joined(self, ranks: Ranks) -> DecoderSource:
        """The same, whose decoders exchange what they compute with the other ``ranks``."""
        ...

    def kept_as(self, part: StoredTensor) -> Kept | None:
        """The format and bytes of what a CPU keeps as it is stored in place of ``part`` outside pages."""
        ...

    def decoder(
        self, profile: ModelProfile, arena: Any, dtype: Any, paged: Any, *, as_stored: bool
    ) -> Callable[[Any], Any]:
        """Read all weights outside pages into ``arena`` (uint8, any device) as ``dtype``; returns what makes the
        decoder with a workspace. ``paged``: the experts in pages; ``as_stored``: what `kept_as` names stays so."""
        ...


def open_needed(directory: Path, is_needed: Callable[[str], bool] | None = None) -> Checkpoint:
    """The checkpoint in ``directory`` without tensors that nothing reads (`ignored`); ``is_needed``: whether the model
    has a parameter of that name all the same."""
    checkpoint = experts_one_by_one(Checkpoint.open(directory))
    config = HFConfig.from_file(directory / "config.json")
    return set_aside(checkpoint, ignore_rules(config, checkpoint.tensors), is_needed)


def plain_matrices(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """``checkpoint`` as one of plain matrices, if its config.json says that it is quantised: in the dtype of the
    tensors that are not, or in ``dtype``, which config.json says, where these differ."""
    quantization = read_quantization(HFConfig.from_file(checkpoint.directory / "config.json"))
    if quantization is None:
        return checkpoint
    return as_matrices(checkpoint, quantization.format_of, dtype_named(dtype).safetensors)


def as_stored(opened: OpenCheckpoint) -> OpenCheckpoint:
    """``opened``, whose profile is quantised, with the profile of what its pages hold."""
    profile, experts = opened.profile, opened.weight_map.experts
    if experts.dtype is not None:
        return replace(opened, profile=replace(profile, stored=None))  # other matrices are not quantised in memory
    sizes, matrices = experts.page_bytes(profile.num_layers), kept_matrices(profile, opened.source.kept_as)
    return replace(opened, profile=with_pages(profile, sizes, matrices, experts.turned_bytes))


def locate(checkpoint: Checkpoint, model: ModelProfile) -> WeightMap:
    """Find every tensor of ``model`` in ``checkpoint``; a CheckpointError describes the first fault (missing, stored
    twice, left over, mis-shaped, unsupported dtype) and counts the others."""
    computed = (IgnoreRule(re.compile(pattern), COMPUTED) for pattern in model.names.ignored)
    checkpoint = set_aside(checkpoint, computed)
    _refuse_absurd(checkpoint, model)
    search = _TensorSearch(checkpoint, model)
    parts = {part: search.part(part) for stored in dense_tensors(model) for part in stored.parts}
    pages = {
        page: pieces for layer, moe in enumerate(model.moe_layers) if moe for page, pieces in search.experts(layer)
    }
    spare, dtype = search.spare_head(), search.audit()
    return WeightMap(
        dtype=dtype,
        parts=MappingProxyType({part: info for part, info in parts.items() if info}),
        experts=lay_out_pages(pages, dict.fromkeys(range(model.num_layers), in_a_row(page_shapes(model)))),
        spare_head=spare,
        ignored=checkpoint.ignored,
    )


def _refuse_absurd(checkpoint: Checkpoint, model: ModelProfile) -> None:
    """Reject counts in the config that the checkpoint cannot satisfy: they bound the work of the search."""
    tensors = checkpoint.tensors
    most_experts = max(len(tensors), *(max(info.shape, default=0) for info in tensors.values()))
    for key, count, maximum in (
        ("num_hidden_layers", model.num_layers, len(tensors)),
        ("num_experts", model.experts.num_experts, most_experts),
    ):
        if count > maximum:
            raise CheckpointError(
                f"{checkpoint.listing}: holds {len(tensors)} tensors, too few for {key} {count} of config.json; "
                "correct config.json, or use the weights that belong to it"
            )


class _TensorSearch:
    """One search for all tensors of a model; records the tensors used and the faults found, in the order found."""

    def __init__(self, checkpoint: Checkpoint, model: ModelProfile) -> None:
        self._tensors, self._model = checkpoint.tensors, model
        self._axes = _axes(FAMILIES[model.model_type].expert_width_key)
        self._used: dict[str, TensorInfo] = {}
        self._of_pages: dict[str, TensorInfo] = {}
        described = f"{model.model_type}, num_hidden_layers {model.num_layers}, num_experts {model.experts.num_experts}"
        self._faults = Faults(checkpoint, described, layers=model.num_layers, experts=model.experts.num_experts)

    def part(self, part: StoredTensor) -> TensorInfo | None:
        """The one tensor that is ``part``; None, and a fault, if it is missing, stored twice or of another shape."""
        names = self._spell(part.name, part.layer)
        if part.name == "embed" and self._model.tie_embeddings and not self._stored(names):
            names = self._stored(self._spell("head")) or names
        return self._one(part.name, names, part.shape)

    def experts(self, layer: int) -> Iterator[tuple[Page, tuple[TensorInfo, ...]]]:
        """The tensors or slices that form the page of each expert of ``layer``: gate and up, then down."""
        gate_up = self._expert_pieces(layer, "fused_gate_up", ("gate", "up"))
        down = self._expert_pieces(layer, "fused_down", ("down",))
        for expert, (first, last) in enumerate(zip(gate_up, down, strict=True)):
            self._of_pages.update({info.name: info for info in (*first, *last)})
            yield Page(layer=layer, expert=expert), (*first, *last)

    def spare_head(self) -> TensorInfo | None:
        """The stored output matrix, if any, that is redundant because embeddings are tied."""
        model = self._model
        spare = [name for name in self._stored(self._spell("head")) if name not in self._used]
        if not model.tie_embeddings or not spare:
            return None
        return self._one("head", spare, (model.vocab_size, model.hidden_size))

    def audit(self) -> DType:
        """The dtype of pages, to which other tensors are cast; raises CheckpointError for any fault, leftover tensors
        or pages of two dtypes."""
        common = Counter(info.dtype for info in (self._of_pages or self._used).values()).most_common(1)
        name = common[0][0] if common and common[0][0] in BY_SAFETENSORS else FLOAT32.safetensors
        for info in self._used.values():
            stored = f"{info.file}: tensor {info.name!r} has dtype {info.dtype}"
            if info.dtype not in BY_SAFETENSORS:
                self._faults.add(f"{stored}; supported: {', '.join(BY_SAFETENSORS)}")
            elif info.dtype != name and info.name in self._of_pages:
                self._faults.add(f"{stored}, other experts {name}; save the model again with experts in one dtype")
        for info in self._tensors.values():
            if info.name not in self._used:
                self._faults.left_over(info)
        self._faults.raise_first()
        return BY_SAFETENSORS[name]

    def _expert_pieces(self, layer: int, fused: str, singles: tuple[str, ...]) -> list[list[TensorInfo]]:
        """For each expert a slice of the layer's fused tensor, or one tensor per matrix."""
        count, shapes = self._model.experts.num_experts, page_shapes(self._model)
        fused_names = self._spell(fused, layer)
        names = [{single: self._spell(single, layer, expert) for single in singles} for expert in range(count)]
        stacked = self._stored(fused_names)
        loose = [name for expert in names for spellings in expert.values() for name in self._stored(spellings)]
        if stacked and loose:
            self._use([*stacked, *loose])
            self._faults.twice(self._tensors[stacked[0]], self._tensors[loose[0]])
            return [[]] * count
        if stacked:
            shape = (count, sum(shapes[single][0] for single in singles), shapes[singles[0]][1])
            info = self._one(fused, fused_names, shape)
            return [[info.part(expert, count)] if info else [] for expert in range(count)]
        by_expert = [[self._one(single, expert[single], shapes[single]) for single in singles] for expert in names]
        return [[info for info in infos if info] for infos in by_expert]

    def _one(self, part: str, names: list[str], shape: tuple[int, ...]) -> TensorInfo | None:
        stored = self._stored(names)
        self._use(stored)
        if not stored:
            reason = {
                "head": "tie_word_embeddings is false",
                **dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), "attention_bias is true"),
                **dict.fromkeys(("dense_gate", "dense_up", "dense_down"), "mlp_only_layers, decoder_sparse_step"),
            }.get(part, "")
            self._faults.missing(names[0], shape, reason)
            return None
        if len(stored) > 1:
            self._faults.twice(*(self._tensors[name] for name in stored[:2]))
            return None
        info = self._tensors[stored[0]]
        if info.shape == shape:
            return info
        axes = self._axes.get(part, ())
        keys = [key for key, has, wants in zip(axes, info.shape, shape, strict=False) if has != wants]
        hint = f"; check {', '.join(keys)} there" if keys and len(info.shape) == len(shape) else ""
        self._faults.add(
            f"{info.file}: tensor {info.name!r} has shape {list(info.shape)}, "
            f"but config.json asks for {list(shape)}{hint}"
        )
        return None

    def _spell(self, part: str, layer: int = -1, expert: int = -1) -> list[str]:
        return [spelling.format(layer=layer, expert=expert) for spelling in getattr(self._model.names, part)]

    def _stored(self, names: list[str]) -> list[str]:
        return [name for name in names if name in self._tensors]

    def _use(self, names: list[str]) -> None:
        self._used.update({name: self._tensors[name] for name in names})
