"""The decoder layer in phases; families differ in fields of the profile. Does not depend on the paging of experts, the
layout of the KV cache, or the schedule.

Legend: T tokens, H hidden, Hq query heads, Hkv key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moelight.core.errors import MoelightError
from moelight.hrm.footprint import HEAD_CHUNK_BYTES
from moelight.kernels.norm import cpu_rotate, rms_norm, rotate
from moelight.kernels.products import Workspace, feed_forward, linear, padded_rows, parts
from moelight.models.moe import Experts, Routed, moe_forward, route_tokens
from moelight.profiles.model import AttentionSpec, ModelProfile
from moelight.weights.load import LayerWeights, ModelWeights

Rotation = tuple[Tensor, Tensor]  # cos and sin [T, D]
Watch = Callable[[int, Routed], None]  # called with a layer and its routing


def rotation(spec: AttentionSpec, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotary position embedding of ``positions [T]``, half-rotation as in HF: computed in float32, rounded to
    ``dtype``."""
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=positions.device) / spec.head_dim
    frequency = 1.0 / (spec.rope_theta**exponent)
    angle = positions.float().unsqueeze(1) * (frequency / spec.rope_factor)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


class Decoder:
    """The dense computation of a model; expert weights are arguments of each call."""

    def __init__(self, model: ModelProfile, weights: ModelWeights, space: Workspace) -> None:
        self.model = model
        self.weights = weights
        self.space = space

    def embed(self, token_ids: Tensor, out: Tensor) -> None:
        """token_ids int64 [T] -> out [T, H]."""
        torch.index_select(self.weights.embed, 0, token_ids, out=out)

    def pre_attention(self, layer: int, hidden: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, H] -> q [T, Hq, D], k and v [T, Hkv, D], after norms, clipping and rotary embedding."""
        spec, mine = self.model.attention, self.weights.layers[layer]
        x = rms_norm(hidden, mine.input_norm, self.model.norm_eps)
        qkv = linear(x, mine.qkv, mine.qkv_bias)
        if spec.qk_norm == "none" and qkv.device.type == "cpu":
            return self._rotate_in_place(qkv, rope)
        q, k, v = qkv.split((spec.q_dim, spec.kv_dim, spec.kv_dim), dim=-1)
        if spec.qk_norm == "projection":
            q, k = self._norm_qk(mine, q, k)
        if spec.clip_qkv is not None:
            q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in (q, k, v))
        if spec.qk_norm == "head":
            q, k = self._norm_qk(mine, q, k)
        return rotate(q, *rope), rotate(k, *rope), v.contiguous()

    def _rotate_in_place(self, qkv: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as views of ``qkv``, clipped and rotated in place; for models without norms of q and k."""
        spec = self.model.attention
        if spec.clip_qkv is not None:
            qkv.clamp_(-spec.clip_qkv, spec.clip_qkv)
        heads = qkv.unflatten(-1, (-1, spec.head_dim))
        turned = heads[:, : spec.num_heads + spec.num_kv_heads]
        cpu_rotate(turned, *rope, out=turned)
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
                hidden += self._dense(x, mine.dense_gate_up, mine.dense_down)
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
        """hidden [S, H] -> float32 [S, V], in chunks of the head's rows, which bounds the size of repacked copies."""
        x = rms_norm(hidden, self.weights.final_norm, self.model.norm_eps)
        head = self.weights.head
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

    def _dense(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        tokens = x.shape[0]
        rows = self.space.rows[: padded_rows(tokens)]
        rows[:tokens] = x
        for start, some in parts(0, tokens):
            padded = rows[start : start + padded_rows(some)]
            rows[start : start + some] = feed_forward(padded, gate_up, down, self.space)[:some]
        return rows[:tokens]

    def _norm_qk(self, mine: LayerWeights, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if mine.q_norm is None or mine.k_norm is None:
            return q, k
        return rms_norm(q, mine.q_norm, self.model.norm_eps), rms_norm(k, mine.k_norm, self.model.norm_eps)
