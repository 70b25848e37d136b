"""The tensors of a model outside its experts, and the layout of an expert page.

The list is shared by the footprint (bytes), the cost model (products), the loader (reads) and the audit (nothing
missing, nothing left over). The biases of an expert are part of its page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from moelight.core.schedule import Page
from moelight.profiles.model import AttentionSpec, LatentSpec, ModelProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor as stored on disk. ``name`` is a field of `TensorNames`; ``layer`` is -1 outside the layers."""

    name: str
    layer: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedTensor:
    """One tensor in memory: ``parts`` stacked along their first dimension, in order."""

    name: str
    layer: int
    parts: tuple[StoredTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The summed rows of all parts, then the shared trailing shape."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def elements(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)


def dense_tensors(model: ModelProfile) -> Iterator[StackedTensor]:
    """Every tensor outside the experts, in the order of its arena.

    q, k and v (and their biases, and the gate and up of a dense layer or of the shared experts) are stacked into one
    matrix.
    """
    hidden = model.hidden_size
    yield _one("embed", -1, (model.vocab_size, hidden))
    for layer in range(model.num_layers):
        yield from _norm(model, "input_norm", layer)
        yield from _attention_tensors(model, layer)
        yield from _norm(model, "post_norm", layer)
        if model.moe_layers[layer]:
            yield from _sparse_tensors(model, layer)
        else:
            yield from _feed_forward("dense", layer, hidden, model.dense_intermediate_size)
    yield from _norm(model, "final_norm", -1)
    if not model.tie_embeddings:
        yield _one("head", -1, (model.vocab_size, hidden))
    if model.head_bias:
        yield _one("head_bias", -1, (model.vocab_size,))


def page_shapes(model: ModelProfile) -> dict[str, tuple[int, int]]:
    """The matrices of an expert page in order: gate, up ``[I, H]``, down ``[H, I]``.

    Where experts have biases, ``[1, 2I]`` and ``[1, H]`` of them follow.
    """
    hidden, width = model.hidden_size, model.experts.intermediate_size
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    if model.experts.bias:
        shapes |= {"gate_up_bias": (1, 2 * width), "down_bias": (1, hidden)}
    return shapes


def pages(model: ModelProfile) -> tuple[Page, ...]:
    """Every expert page of the model, layer by layer."""
    return tuple(
        Page(layer=layer, expert=expert)
        for layer in range(model.num_layers)
        if model.moe_layers[layer]
        for expert in range(model.experts.num_experts)
    )


def _norm(model: ModelProfile, name: str, layer: int) -> Iterator[StackedTensor]:
    yield _one(name, layer, (model.hidden_size,))
    if model.norm_bias:
        yield _one(f"{name}_bias", layer, (model.hidden_size,))


def _attention_tensors(model: ModelProfile, layer: int) -> Iterator[StackedTensor]:
    spec, hidden = model.attention, model.hidden_size
    if spec.latent is not None:
        yield from _latent_tensors(spec, spec.latent, layer, hidden)
        width = spec.num_heads * spec.latent.value_head_dim
    else:
        yield from _grouped_tensors(model, layer)
        width = spec.q_dim
    if spec.sinks:
        yield _one("sinks", layer, (spec.num_heads,))
    yield _one("o", layer, (hidden, width))
    if spec.output_bias:
        yield _one("o_bias", layer, (hidden,))


def _grouped_tensors(model: ModelProfile, layer: int) -> Iterator[StackedTensor]:
    spec, hidden = model.attention, model.hidden_size
    if model.names.qkv:
        yield _one("qkv", layer, (spec.q_dim + 2 * spec.kv_dim, hidden))
    else:
        yield _stack("qkv", layer, {"q": (spec.q_dim, hidden), "k": (spec.kv_dim, hidden), "v": (spec.kv_dim, hidden)})
    if spec.qkv_bias:
        yield _stack("qkv_bias", layer, {"q_bias": (spec.q_dim,), "k_bias": (spec.kv_dim,), "v_bias": (spec.kv_dim,)})
    if spec.qk_norm != "none":
        whole = spec.qk_norm == "projection"
        yield _one("q_norm", layer, (spec.q_dim if whole else spec.head_dim,))
        yield _one("k_norm", layer, (spec.kv_dim if whole else spec.head_dim,))


def _latent_tensors(spec: AttentionSpec, latent: LatentSpec, layer: int, hidden: int) -> Iterator[StackedTensor]:
    """DeepSeek-V2, section 2.1: ``kv_a`` gives the cached latent and rotary key, ``kv_b`` every head's keys and
    values (without the rotary part) from the latent; queries are projected directly, or in two steps if they have a
    latent of their own.
    """
    rank = latent.q_lora_rank
    if rank is None:
        yield _one("q", layer, (spec.q_dim, hidden))
    else:
        yield _one("q_a", layer, (rank, hidden))
        if spec.qkv_bias:
            yield _one("q_a_bias", layer, (rank,))
        yield _one("q_a_norm", layer, (rank,))
        yield _one("q_b", layer, (spec.q_dim, rank))
    yield _one("kv_a", layer, (spec.cache_width, hidden))
    if spec.qkv_bias:
        yield _one("kv_a_bias", layer, (spec.cache_width,))
    yield _one("kv_a_norm", layer, (latent.kv_lora_rank,))
    expanded = spec.num_heads * (latent.nope_head_dim + latent.value_head_dim)
    yield _one("kv_b", layer, (expanded, latent.kv_lora_rank))


def _sparse_tensors(model: ModelProfile, layer: int) -> Iterator[StackedTensor]:
    """The tensors of a sparse layer besides routed experts: router, shared experts and the gate on their output."""
    hidden, experts, router = model.hidden_size, model.experts, model.router
    yield _one("router", layer, (experts.num_experts, hidden))
    if router.bias:
        yield _one("router_bias", layer, (experts.num_experts,))
    if router.selection_bias:
        yield _one("router_selection_bias", layer, (experts.num_experts,))
    if experts.shared_intermediate_size:
        yield from _feed_forward("shared", layer, hidden, experts.shared_intermediate_size)
    if experts.shared_gate:
        yield _one("shared_router", layer, (1, hidden))


def _feed_forward(kind: str, layer: int, hidden: int, width: int) -> Iterator[StackedTensor]:
    yield _stack(f"{kind}_gate_up", layer, {f"{kind}_gate": (width, hidden), f"{kind}_up": (width, hidden)})
    yield _one(f"{kind}_down", layer, (hidden, width))


def _one(name: str, layer: int, shape: tuple[int, ...]) -> StackedTensor:
    return StackedTensor(name=name, layer=layer, parts=(StoredTensor(name=name, layer=layer, shape=shape),))


def _stack(name: str, layer: int, parts: dict[str, tuple[int, ...]]) -> StackedTensor:
    return StackedTensor(
        name=name,
        layer=layer,
        parts=tuple(StoredTensor(name=part, layer=layer, shape=shape) for part, shape in parts.items()),
    )
