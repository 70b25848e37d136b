"""The list of tensors a model stores outside its experts, and the shape of one expert's page.

One list serves the footprint (bytes), the loader (what to read where) and the audit (nothing missing, nothing over).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from moelight.core.schedule import Page
from moelight.profiles.model import ModelProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One tensor as it lies on disk. ``name`` is a field of `TensorNames`; ``layer`` is -1 outside the layers."""

    name: str
    layer: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor as it lies in memory: ``parts`` stacked along their first dimension, in order."""

    name: str
    layer: int
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows of all parts over the shared trailing shape."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def elements(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)


def dense_tensors(model: ModelProfile) -> Iterator[Stored]:
    """Every tensor outside the experts, in the order it is laid into its arena.

    q, k and v (and their biases, and the gate and up of a dense layer) are stacked into one matrix.
    """
    hidden = model.hidden_size
    yield _one("embed", -1, (model.vocab_size, hidden))
    for layer in range(model.num_layers):
        yield from _attention_tensors(model, layer)
        if model.moe_layers[layer]:
            yield _one("router", layer, (model.experts.num_experts, hidden))
        else:
            width = model.dense_intermediate_size
            yield _stack("dense_gate_up", layer, {"dense_gate": (width, hidden), "dense_up": (width, hidden)})
            yield _one("dense_down", layer, (hidden, width))
    yield _one("final_norm", -1, (hidden,))
    if not model.tie_embeddings:
        yield _one("head", -1, (model.vocab_size, hidden))


def page_shapes(model: ModelProfile) -> dict[str, tuple[int, int]]:
    """The matrices of one expert in the order they lie in its page: gate, up ``[I, H]``, down ``[H, I]``."""
    hidden, width = model.hidden_size, model.experts.intermediate_size
    return {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}


def pages(model: ModelProfile) -> tuple[Page, ...]:
    """Every expert page of the model, layer by layer."""
    return tuple(
        Page(layer=layer, expert=expert)
        for layer in range(model.num_layers)
        if model.moe_layers[layer]
        for expert in range(model.experts.num_experts)
    )


def _attention_tensors(model: ModelProfile, layer: int) -> Iterator[Stored]:
    spec, hidden = model.attention, model.hidden_size
    yield _one("input_norm", layer, (hidden,))
    yield _stack("qkv", layer, {"q": (spec.q_dim, hidden), "k": (spec.kv_dim, hidden), "v": (spec.kv_dim, hidden)})
    if spec.bias:
        yield _stack("qkv_bias", layer, {"q_bias": (spec.q_dim,), "k_bias": (spec.kv_dim,), "v_bias": (spec.kv_dim,)})
    if spec.qk_norm != "none":
        whole = spec.qk_norm == "projection"
        yield _one("q_norm", layer, (spec.q_dim if whole else spec.head_dim,))
        yield _one("k_norm", layer, (spec.kv_dim if whole else spec.head_dim,))
    yield _one("o", layer, (hidden, spec.q_dim))
    if spec.bias:
        yield _one("o_bias", layer, (hidden,))
    yield _one("post_norm", layer, (hidden,))


def _one(name: str, layer: int, shape: tuple[int, ...]) -> Stored:
    return Stored(name=name, layer=layer, parts=(Part(name=name, layer=layer, shape=shape),))


def _stack(name: str, layer: int, parts: dict[str, tuple[int, ...]]) -> Stored:
    return Stored(
        name=name,
        layer=layer,
        parts=tuple(Part(name=part, layer=layer, shape=shape) for part, shape in parts.items()),
    )
