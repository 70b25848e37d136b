"""The decoder layer in phases; families differ in fields of the profile. Does not depend on the paging of experts, the
layout of the KV cache, or the schedule.

Legend: T tokens, H hidden, Hq query heads, Hkv key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from moelight.core.errors import MoelightError
from moelight.hrm.footprint import HEAD_CHUNK_BYTES
from moelight.kernels import native
from moelight.kernels.norm import finish_heads, rms_norm
from moelight.kernels.products import Workspace, feed_forward, linear, parts, rows_computed
from moelight.models.moe import Experts, Routed, moe_forward, route_tokens
from moelight.profiles.model import AttentionSpec, ModelProfile
from moelight.weights.load import ModelWeights

Rotation = tuple[Tensor, Tensor]  # cos and sin [T, D]
Watch = Callable[[int, Routed], None]  # called with a layer and its routing


def rotation(spec: AttentionSpec, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotary position embedding of ``positions [T]``, half-rotation as in HF: computed in float32, rounded to
    ``dtype``."""
    angle = positions.float().unsqueeze(1) * _frequencies(spec, positions.device)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@lru_cache(maxsize=16)
def _frequencies(spec: AttentionSpec, device: torch.device) -> Tensor:
    """Radians per position float32 [D / 2], computed on the host once."""
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    return (1.0 / (spec.rope_theta**exponent) / spec.rope_factor).to(device)


class Decoder:
    """The dense computation of a model; expert weights are arguments of each call."""

    def __init__(self, model: ModelProfile, weights: ModelWeights, space: Workspace) -> None:
        self.model = model
        self.weights = weights
        self.space = space

    def embed(self, token_ids: Tensor, out: Tensor) -> None:
        """token_ids int64 [T] -> out [T, H]."""
        torch.index_select(self.weights.embed, 0, token_ids, out=out)

    def pre_attention(self, layer: int, hidden: Tensor, rope: Rotation) -> Tensor:
        """hidden [T, H] -> queries, keys and values [T, Hq + 2 Hkv, D], after norms, clipping and rotary embedding."""
        spec, mine, eps = self.model.attention, self.weights.layers[layer], self.model.norm_eps
        qkv = linear(rms_norm(hidden, mine.input_norm, eps), mine.qkv, mine.qkv_bias)
        norms = None if mine.q_norm is None or mine.k_norm is None else (mine.q_norm, mine.k_norm)
        if norms is not None and spec.qk_norm == "projection":
            for part, weight in zip(qkv.split((spec.q_dim, spec.kv_dim, spec.kv_dim), dim=-1), norms, strict=False):
                rms_norm(part, weight, eps, out=part)
            norms = None
        heads, queries, keys = qkv.unflatten(-1, (-1, spec.head_dim)), spec.num_heads, spec.num_kv_heads
        finish_heads(heads, *rope, queries=queries, keys=keys, clip=spec.clip_qkv, norms=norms, eps=eps)
        return heads

    def split_heads(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The result of `pre_attention` as views: q [T, Hq, D], k and v [T, Hkv, D]."""
        spec = self.model.attention
        q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        return q, k, v

    def post_attention(
        self,
        layer: int,
        hidden: Tensor,
        attention: Tensor,
        experts: Experts,
        watch: Watch | None = None,
    ) -> None:
        """hidden [T, H] += o(attention [T, Hq, D]), then += experts(norm(hidden)); in place."""
        x = self._after_attention(layer, hidden, attention)
        mine = self.weights.layers[layer]
        if mine.router is None:
            if mine.dense_gate_up is not None and mine.dense_down is not None:
                self._add_dense(hidden, x, mine.dense_gate_up, mine.dense_down)
            return
        routed = self._routed(x, mine.router)
        if watch is not None:
            watch(layer, routed)
        moe_forward(routed, experts, self.space, into=hidden)

    def route(self, layer: int, hidden: Tensor, attention: Tensor) -> Routed:
        """hidden [T, H] += o(attention [T, Hq, D]), in place; returns the input and routing of the layer's experts."""
        return self._routed(self._after_attention(layer, hidden, attention), self._router(layer))

    def predict_experts(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Route hidden [T, H] of an earlier layer by the router of ``layer``, as a prediction: weights float32 [T, k]
        and ids int32 [T, k]. ``hidden`` is not modified."""
        x = rms_norm(hidden, self.weights.layers[layer].post_norm, self.model.norm_eps)
        return route_tokens(linear(x, self._router(layer)), self.model.router)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, H] -> float32 [S, V]; on a CPU in chunks of the head's rows, which bounds the size of repacked
        copies."""
        x = rms_norm(hidden, self.weights.final_norm, self.model.norm_eps)
        head = self.weights.head
        if not native.on_cpu(x):
            return linear(x, head).float()
        rows = max(1, HEAD_CHUNK_BYTES // (head.shape[1] * head.element_size()))
        out = torch.empty((x.shape[0], head.shape[0]), dtype=torch.float32, device=x.device)
        for first in range(0, head.shape[0], rows):
            out[:, first : first + rows] = linear(x, head[first : first + rows])
        return out

    def _after_attention(self, layer: int, hidden: Tensor, attention: Tensor) -> Tensor:
        mine = self.weights.layers[layer]
        projected = linear(attention.flatten(1), mine.o, mine.o_bias)
        return rms_norm(hidden, mine.post_norm, self.model.norm_eps, add=projected)

    def _router(self, layer: int) -> Tensor:
        router = self.weights.layers[layer].router
        if router is None:
            raise MoelightError(f"layer {layer} has no router")
        return router

    def _routed(self, x: Tensor, router: Tensor) -> Routed:
        weights, ids = route_tokens(linear(x, router), self.model.router)
        return Routed(x=x, weights=weights, ids=ids)

    def _add_dense(self, hidden: Tensor, x: Tensor, gate_up: Tensor, down: Tensor) -> None:
        """hidden [T, H] += the dense layer of x [T, H]."""
        for start, some in parts(0, x.shape[0]):
            rows = x[start : start + some]
            if (padded := rows_computed(rows)) != some:
                rows = self.space.rows[:padded]
                rows[:some] = x[start : start + some]
            hidden[start : start + some] += feed_forward(rows, gate_up, down, self.space)[:some]
