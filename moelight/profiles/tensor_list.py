"""The tensors of a model outside its experts, and the layout of an expert page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from moelight.core.schedule import Page
from moelight.profiles.model import AttentionSpec, LatentSpec, ModelProfile, StoredTensor

_Shape = tuple[int, ...]
_Tensors = Iterator[tuple[str, _Shape | dict[str, _Shape]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedTensor:
    """One tensor in memory: ``parts`` stacked along their first dimension, in order."""

    name: str
    layer: int
    parts: tuple[StoredTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.parts[0].shape:
            return ()
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int | None:
        """Bytes of a number, if not those of the model's dtype."""
        return self.parts[0].itemsize


def dense_tensors(model: ModelProfile) -> Iterator[StackedTensor]:
    """Every tensor outside the experts, in the order of its arena.

    Stacked into one matrix are q, k and v, their biases, and the gate and up of a dense layer or of shared experts.
    A model with `ModelProfile.tensors` has these, each for itself.
    """
    if model.tensors:
        yield from (StackedTensor(name=tensor.name, layer=tensor.layer, parts=(tensor,)) for tensor in model.tensors)
        return
    embedding = (model.vocab_size, model.hidden_size)
    yield _stacked("embed", -1, embedding)
    for layer in range(model.num_layers):
        yield from (_stacked(name, layer, shape) for name, shape in _layer_tensors(model, layer))
    yield from (_stacked(name, -1, shape) for name, shape in _norm(model, "final_norm"))
    if not model.tie_embeddings:
        yield _stacked("head", -1, embedding)
    if model.head_bias:
        yield _stacked("head_bias", -1, (model.vocab_size,))


def page_shapes(model: ModelProfile) -> dict[str, tuple[int, int]]:
    """The matrices of an expert page in order: gate, up ``[I, H]``, down ``[H, I]``; then biases, if any.

    Without a gate there is no such matrix; gate and up are one ``gate_up`` if interleaved or transposed, and transposed
    matrices are ``[H, I]``, ``[H, 2I]``, ``[I, H]``. Biases are ``[1, 2I]`` (gate and up; else ``up_bias`` ``[1, I]``)
    and ``[1, H]``. Of a dense model, the numbers ``[1, N]`` of the largest page.
    """
    if model.dense:
        return {"layer": (1, max(layer_numbers(model).values()))}
    spec = model.experts
    hidden, width, wide = model.expert_input, spec.intermediate_size, "gate_up" if spec.gated else "up"
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    if spec.interleaved or spec.transposed or not spec.gated:
        shapes = {wide: (width * (2 if spec.gated else 1), hidden), "down": (hidden, width)}
    if spec.transposed:
        shapes = {name: (columns, rows) for name, (rows, columns) in shapes.items()}
    if spec.bias:
        shapes |= {f"{wide}_bias": (1, width * (2 if spec.gated else 1)), "down_bias": (1, hidden)}
    return shapes


@lru_cache(maxsize=64)
def layer_numbers(model: ModelProfile) -> Counter[int]:
    """Numbers in the page of each layer of a dense model."""
    counts = Counter[int]()
    for tensor in model.page_tensors:
        counts[tensor.layer] += tensor.elements
    return counts


def pages(model: ModelProfile) -> tuple[Page, ...]:
    """Every expert page of the model, layer by layer."""
    layers = [layer for layer in range(model.num_layers) if model.moe_layers[layer]]
    return tuple(Page(layer=layer, expert=expert) for layer in layers for expert in range(model.experts.num_experts))


def _stacked(name: str, layer: int, shape: _Shape | dict[str, _Shape]) -> StackedTensor:
    """One tensor with a shape, or the stack of parts with these names and shapes."""
    parts = shape if isinstance(shape, dict) else {name: shape}
    stored = tuple(StoredTensor(name=part, layer=layer, shape=shape) for part, shape in parts.items())
    return StackedTensor(name=name, layer=layer, parts=stored)


def _layer_tensors(model: ModelProfile, layer: int) -> _Tensors:
    hidden, spec = model.hidden_size, model.attention
    yield from _norm(model, "input_norm")
    if spec.latent is not None:
        yield from _latent_tensors(spec, spec.latent, hidden)
    else:
        yield from _grouped_tensors(model)
    if spec.sinks:
        yield "sinks", (spec.num_heads,)
    width = spec.q_dim if spec.latent is None else spec.num_heads * spec.latent.value_head_dim
    yield "o", (hidden // model.head_ranks, width * model.head_ranks)
    if spec.output_bias:
        yield "o_bias", (hidden // model.head_ranks,)
    yield from _norm(model, "post_norm")
    if model.moe_layers[layer]:
        yield from _sparse_tensors(model)
    else:
        yield from _feed_forward("dense", hidden, model.dense_intermediate_size)


def _norm(model: ModelProfile, name: str) -> _Tensors:
    yield name, (model.hidden_size,)
    if model.norm_bias:
        yield f"{name}_bias", (model.hidden_size,)


def _grouped_tensors(model: ModelProfile) -> _Tensors:
    spec, hidden = model.attention, model.hidden_size
    if model.names.qkv:
        yield "qkv", (spec.q_dim + 2 * spec.kv_dim, hidden)
    else:
        yield "qkv", {"q": (spec.q_dim, hidden), "k": (spec.kv_dim, hidden), "v": (spec.kv_dim, hidden)}
    if spec.qkv_bias:
        yield "qkv_bias", {"q_bias": (spec.q_dim,), "k_bias": (spec.kv_dim,), "v_bias": (spec.kv_dim,)}
    if spec.qk_norm != "none":
        per_projection = spec.qk_norm == "projection"
        yield "q_norm", (spec.q_dim if per_projection else spec.head_dim,)
        yield "k_norm", (spec.kv_dim if per_projection else spec.head_dim,)


def _latent_tensors(spec: AttentionSpec, latent: LatentSpec, hidden: int) -> _Tensors:
    """DeepSeek-V2, section 2.1: ``kv_a`` gives the cached latent and rotary key, ``kv_b`` every head's keys and values
    (without the rotary part) from the latent. Queries are projected directly, or through a latent of their own.
    """
    rank = latent.q_lora_rank
    if rank is None:
        yield "q", (spec.q_dim, hidden)
    else:
        yield "q_a", (rank, hidden)
        if spec.qkv_bias:
            yield "q_a_bias", (rank,)
        yield "q_a_norm", (rank,)
        yield "q_b", (spec.q_dim, rank)
    yield "kv_a", (spec.cache_width, hidden)
    if spec.qkv_bias:
        yield "kv_a_bias", (spec.cache_width,)
    yield "kv_a_norm", (latent.kv_lora_rank,)
    yield "kv_b", (spec.num_heads * (latent.nope_head_dim + latent.value_head_dim), latent.kv_lora_rank)


def _sparse_tensors(model: ModelProfile) -> _Tensors:
    """The tensors of a sparse layer besides routed experts: router, shared experts and their gate."""
    hidden, experts, router = model.hidden_size, model.experts, model.router
    yield "router", (model.routed_experts, hidden)
    if router.bias:
        yield "router_bias", (model.routed_experts,)
    if router.selection_bias:
        yield "router_selection_bias", (model.routed_experts,)
    if experts.shared_intermediate_size:
        yield from _feed_forward("shared", hidden, experts.shared_intermediate_size)
    if experts.shared_gate:
        yield "shared_router", (1, hidden)


def _feed_forward(kind: str, hidden: int, width: int) -> _Tensors:
    yield f"{kind}_gate_up", {f"{kind}_gate": (width, hidden), f"{kind}_up": (width, hidden)}
    yield f"{kind}_down", (hidden, width)
