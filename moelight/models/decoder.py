"""The decoder layer in phases; families differ in fields of the profile. Does not depend on the paging of experts, the
layout of the KV cache, or the schedule.

Legend: T tokens, H hidden, Hq query heads, Hkv key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moelight.core.errors import MoelightError
from moelight.hrm.footprint import HEAD_CHUNK_BYTES
from moelight.kernels.norm import cpu_rotate, rms_norm, rms_norm_mixed, rotate
from moelight.kernels.products import Workspace, feed_forward, linear, padded_rows, parts
from moelight.models.moe import ExpertWeights, Routed, moe_forward, route_tokens
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
    """The dense computation of a model; expert weights are arguments of each call.

    Hidden states are float32 in mixed precision, where norms round them to float16; an overflow there or later makes
    all that follows for the token NaN or infinite, up to its logits.

    Attributes:
        dtype: of activations.
        finite: float32 [layers + 1]: entry n is not finite once hidden states were not that entered layer n (the last:
            the head). None unless in mixed precision.
    """

    def __init__(self, model: ModelProfile, weights: ModelWeights, space: Workspace) -> None:
        self.model = model
        self.weights = weights
        self.space = space
        self.dtype = space.inputs.dtype
        self.finite: Tensor | None = None
        if space.rows.dtype != self.dtype:
            self.finite = torch.zeros(model.num_layers + 1, dtype=torch.float32, device=space.rows.device)

    def embed(self, token_ids: Tensor, out: Tensor) -> None:
        """token_ids int64 [T] -> out [T, H]."""
        if self.weights.embed.dtype == out.dtype:
            torch.index_select(self.weights.embed, 0, token_ids, out=out)
        else:
            out.copy_(self.weights.embed[token_ids])

    def pre_attention(self, layer: int, hidden: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, H] -> q [T, Hq, D], k and v [T, Hkv, D], after norms, clipping and rotary embedding."""
        spec, mine = self.model.attention, self.weights.layers[layer]
        x = self._norm(hidden, mine.input_norm, enters=layer)
        qkv = linear(x, mine.qkv, mine.qkv_bias).to(self.dtype)
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
        return self._spoiled(rotate(q, *rope), rotate(k, *rope), v.contiguous())

    def _spoiled(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In mixed precision an overflow in q or k becomes NaN in the token's v, to which the token itself attends:
        attention would lose it, because a score of -inf weighs nothing."""
        if self.finite is not None:
            for part in (q, k):
                v.add_(part.sum((1, 2), keepdim=True, dtype=torch.float32), alpha=0)
        return q, k, v

    def _rotate_in_place(self, qkv: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as views of ``qkv``, clipped and rotated in place; for models without norms of q and k."""
        spec = self.model.attention
        if spec.clip_qkv is not None:
            qkv.clamp_(-spec.clip_qkv, spec.clip_qkv)
        heads = qkv.unflatten(-1, (-1, spec.head_dim))
        turned = heads[:, : spec.num_heads + spec.num_kv_heads]
        cpu_rotate(turned, *rope, out=turned)
        q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        return self._spoiled(q, k, v)

    def post_attention(
        self,
        layer: int,
        hidden: Tensor,
        attention: Tensor,
        experts: Sequence[ExpertWeights | None],
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
        x = self._norm(hidden, self.weights.layers[layer].post_norm)
        return route_tokens(linear(x, self._router(layer)), self.model.router)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, H] -> float32 [S, V], in chunks of the head's rows, which bounds the size of repacked copies."""
        x = self._norm(hidden, self.weights.final_norm, enters=self.model.num_layers)
        head = self.weights.head
        rows = max(1, HEAD_CHUNK_BYTES // (head.shape[1] * head.element_size()))
        out = torch.empty((x.shape[0], head.shape[0]), dtype=torch.float32, device=x.device)
        for first in range(0, head.shape[0], rows):
            out[:, first : first + rows] = linear(x, head[first : first + rows])
        return out

    def _after_attention(self, layer: int, hidden: Tensor, attention: Tensor) -> Tensor:
        mine = self.weights.layers[layer]
        projected = linear(attention.flatten(1), mine.o, mine.o_bias)
        return self._norm(hidden, mine.post_norm, add=projected)

    def _norm(self, hidden: Tensor, weight: Tensor, *, add: Tensor | None = None, enters: int | None = None) -> Tensor:
        """The norm of hidden [T, H] (+= ``add``), which enter layer ``enters`` -> [T, H] in ``dtype``."""
        if self.finite is None:
            return rms_norm(hidden, weight, self.model.norm_eps, add=add)
        finite = None if enters is None else self.finite[enters : enters + 1]
        return rms_norm_mixed(hidden, weight, self.model.norm_eps, self.dtype, add=add, finite=finite)

    def _router(self, layer: int) -> Tensor:
        router = self.weights.layers[layer].router
        if router is None:
            raise MoelightError(f"layer {layer} has no router")
        return router

    def _routed(self, x: Tensor, router: Tensor) -> Routed:
        weights, ids = route_tokens(linear(x, router), self.model.router)
        return Routed(x=x, weights=weights, ids=ids)

    def _add_dense(self, hidden: Tensor, x: Tensor, gate_up: Tensor, down: Tensor) -> None:
        wide = gate_up.dtype != x.dtype or down.dtype != x.dtype
        for start, some in parts(0, x.shape[0]):
            rows = self.space.inputs[: padded_rows(some)]
            rows[:some] = x[start : start + some]
            hidden[start : start + some] += feed_forward(rows, gate_up, down, self.space, wide=wide)[:some]

    def _norm_qk(self, mine: LayerWeights, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if mine.q_norm is None or mine.k_norm is None:
            return q, k
        if self.finite is not None:
            q, k = q.float(), k.float()
        return self._norm(q, mine.q_norm), self._norm(k, mine.k_norm)
