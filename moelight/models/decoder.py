"""The interface between runtime and model, and the native decoder, whose families differ in fields of the profile. Does
not depend on the paging of experts, the layout of the KV cache, or the schedule.

Legend: T tokens, H hidden, Hq query heads, Hkv key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from moelight.core.errors import MoelightError
from moelight.hrm.footprint import HEAD_CHUNK_BYTES
from moelight.kernels import native
from moelight.kernels.activations import SILU, Activation
from moelight.kernels.gpu import serving
from moelight.kernels.layer import MOST_TOKENS, BoundExperts, DecoderLayer, LayerProduct, PagedCache, decode_layers
from moelight.kernels.matrices import Stack, floats_of
from moelight.kernels.norm import finish_heads, rms_norm, rms_norm_mixed
from moelight.kernels.products import (
    Workspace,
    feed_forward,
    feed_forward_stacked,
    linear,
    linear_stacked,
    parts,
    rows_computed,
)
from moelight.kernels.quantized import stacked_rows
from moelight.kernels.ranks import Ranks
from moelight.models.expert import GATED_SILU, LayerExperts
from moelight.models.moe import Experts, Routed, moe_forward, route_tokens
from moelight.models.pages import PagedExperts
from moelight.profiles.model import AttentionSpec, ModelProfile
from moelight.weights.load import ModelWeights

Running = Any  # of the model's own type; where CUDA graphs serve, tensors [T, ...]
Watch = Callable[[int, Routed], None]  # called with a layer and its routing


def rotation(spec: AttentionSpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rotary position embedding of ``positions [T]``, half-rotation as in HF: computed in float32, rounded to
    ``dtype``."""
    angle = positions.float().unsqueeze(1) * _frequencies(spec, positions.device)
    scale = 1.0 if spec.rope_scaling is None else spec.rope_scaling.attention_factor
    cos, sin = (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


@lru_cache(maxsize=16)
def _frequencies(spec: AttentionSpec, device: torch.device) -> Tensor:
    """Radians per position float32 [D / 2], computed on the host once."""
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    plain = 1.0 / (spec.rope_theta**exponent)
    return _stretched(spec, plain).to(device)


def _stretched(spec: AttentionSpec, plain: Tensor) -> Tensor:
    """The frequencies ``plain`` float32 [D / 2] as ``spec.rope_scaling`` has them: divided by its factor, where they
    are low."""
    scaling = spec.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":  # by the rotations within the original positions
        rotations = scaling.original_positions * plain / (2 * math.pi)
        share = (rotations - scaling.low) / (scaling.high - scaling.low)
        smooth = (1 - share) * plain / scaling.factor + share * plain
        divided = torch.where(rotations < scaling.low, plain / scaling.factor, smooth)
        return torch.where(rotations > scaling.high, plain, divided)

    def dimension(rotations: float) -> float:
        """Whose frequency makes so many rotations within the original positions."""
        length = scaling.original_positions / (2 * math.pi * rotations)
        return spec.head_dim * math.log(length) / (2 * math.log(spec.rope_theta))

    first, last = dimension(scaling.high), dimension(scaling.low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.head_dim - 1)
    width = last - first if last != first else 0.001
    share = ((torch.arange(len(plain), dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / scaling.factor * share + plain * (1 - share)


class Rows(Protocol):
    """Consecutive rows of a micro-batch: tokens ``start`` to ``start + count`` of the sequence at ``slot`` of the
    token pool, whose ``length`` is that of its prompt, or of what it has reached where that is more."""

    @property
    def slot(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def length(self) -> int: ...


class Decoder(Protocol):
    """The dense computation of a model in phases of a micro-batch; experts are arguments of each call.

    ``running`` is what `begin` returned: what the model keeps of the micro-batch from phase to phase. ``hidden`` [T, H]
    is the micro-batch's share of an arena. Phases of a micro-batch run in order, on one thread.

    Attributes:
        dtype: of activations.
        space: buffers of the experts.
        finite: float32 [layers + 1]: entry n is not finite once hidden states were not that entered layer n (the last:
            the head). None unless in mixed precision.
        predicts: whether `predict_experts` may be called.
        kinds: of the layers, by which their kernels differ; empty if launches are not to be recorded or warmed up.
        whole_layers: whether `decode_layers` may be.
        sinks: float [Hq] of the layers whose attention has them; complete once a layer has been computed.
        activations: of the experts of each layer; None if no kernel computes it, or there are none.
        paged: the experts in pages.
        ranks: with which the model is computed; None: alone. The hidden states that experts were added to are partial
            sums then, until `sum_experts`, which precedes the next phase.
    """

    ranks: Ranks | None
    model: ModelProfile
    dtype: torch.dtype
    space: Workspace
    finite: Tensor | None
    predicts: bool
    kinds: Sequence[tuple[object, ...]]
    whole_layers: bool
    sinks: Mapping[int, Tensor]
    activations: Sequence[Activation | None]
    paged: PagedExperts

    def begin(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, rows: Sequence[Rows]) -> Running:
        """Begin with ``token_ids`` int64 [T] at ``positions`` int64 [T], which are ``rows`` of sequences."""
        ...

    def pre_attention(self, layer: int, hidden: Tensor, running: Running) -> Sequence[Tensor]:
        """Everything up to the attention of ``layer``, whose inputs `split_heads` finds in the result."""
        ...

    def split_heads(self, projected: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        """The result of `pre_attention` as views: q [T, Hq, D], k and v [T, Hkv, D]; None if the mixer of the layer is
        no attention over the paged cache."""
        ...

    def post_attention(
        self,
        layer: int,
        hidden: Tensor,
        attention: Tensor | None,
        experts: Experts,
        running: Running,
        watch: Watch | None = None,
        *,
        wide: bool = False,
    ) -> None:
        """Everything after ``attention`` [T, Hq, D] of ``layer`` (None as by `split_heads`), with its experts, if any;
        ``wide`` as for `moe_forward`. ``watch`` is called with the routing."""
        ...

    def decode_layers(
        self,
        layers: range,
        hidden: Tensor,
        caches: Sequence[PagedCache],
        block_tables: Sequence[Tensor],
        seq_lens: Tensor,
        experts: Sequence[LayerExperts],
        running: Running,
    ) -> bool:
        """All phases of ``layers`` in one call, or one for consecutive layers of the same ``block_tables`` (of each
        layer), for the rows and by the arguments of `kernels.layer.decode_layers`; the bits are those of the phases.
        False if there is no such call for these ``experts``: nothing has been computed.
        Called if ``whole_layers``."""
        ...

    def bind_layers(self, layers: range, hidden: Tensor, experts: Sequence[LayerExperts], running: Running) -> None:
        """Let the phases of ``layers`` that follow before and after attention be a call each, where there are such
        calls for these ``experts``; the bits stay the same. Called if ``whole_layers``."""
        ...

    def route(self, layer: int, hidden: Tensor, attention: Tensor | None, running: Running) -> Routed:
        """Everything after ``attention`` [T, Hq, D] of ``layer`` up to its experts: their input and routing. Their
        weighted sum is to be added to ``hidden`` before the next phase."""
        ...

    def experts(self, layer: int, pages: Sequence[Tensor | None]) -> LayerExperts:
        """The experts of ``layer`` in ``pages``, which a `PageStore` has; None for those elsewhere."""
        ...

    def sum_experts(self, hidden: Tensor, running: Running) -> None:
        """Sum over ranks ``hidden``, to which the experts of the last layer were added. Called if there are several."""
        ...

    def predict_experts(self, layer: int, hidden: Tensor, running: Running) -> tuple[Tensor, Tensor]:
        """Route hidden [T, H] of the layer with experts before by the router of ``layer``, as a prediction: weights
        float32 [T, k] and ids int32 [T, k]. ``hidden`` is not modified."""
        ...

    def end(self, hidden: Tensor, running: Running) -> None:
        """Everything after the last layer but for the head, whose input is then ``hidden``."""
        ...

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """hidden [S, H], rows of what `end` left -> [S, H], the inputs of the head: transformers' last hidden state."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, H], rows of what `end` left -> float32 [S, V]."""
        ...


class NativeDecoder:
    """`Decoder` of the families of `profiles`, on our own kernels; ``running`` is the rotation.

    Hidden states are float32 in mixed precision, where norms round them to float16; an overflow there or later makes
    all that follows for the token NaN or infinite, up to its logits.
    """

    predicts = True
    sinks: Mapping[int, Tensor] = MappingProxyType({})

    def __init__(
        self,
        model: ModelProfile,
        weights: ModelWeights,
        space: Workspace,
        *,
        paged: PagedExperts,
        activations: str = "auto",
        ranks: Ranks | None = None,
    ) -> None:
        """``activations``: those that products with quantised matrices outside the experts take, as `Policy` says."""
        self.model, self.paged, self._activations, self.ranks = model, paged, activations, ranks
        self.weights = weights
        self.kinds = [(moe, *layer.types) for moe, layer in zip(model.moe_layers, weights.layers, strict=True)]
        self.space = space
        self.dtype = space.inputs.dtype
        self.activations: Sequence[Activation | None] = [SILU if moe else None for moe in model.moe_layers]
        self.finite: Tensor | None = None
        if space.rows.dtype != self.dtype:
            self.finite = torch.zeros(model.num_layers + 1, dtype=torch.float32, device=space.rows.device)
        self._small: Mapping[int, DecoderLayer] = {
            layer: native_layer for layer in range(model.num_layers) if (native_layer := self._whole(layer)) is not None
        }
        self.whole_layers = len(self._small) == model.num_layers

    def begin(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, rows: Sequence[Rows]) -> Running:  # noqa: ARG002
        """Embed ``token_ids`` int64 [T] into ``hidden`` [T, H]; returns the rotation at ``positions`` int64 [T]."""
        stacked_rows(self.weights.embed, token_ids, hidden)
        return rotation(self.model.attention, positions, self.dtype)

    def pre_attention(self, layer: int, hidden: Tensor, running: Running) -> Sequence[Tensor]:
        """hidden [T, H] -> queries, keys and values [T, Hq + 2 Hkv, D], after norms, clipping and rotary embedding."""
        spec, weights, eps = self.model.attention, self.weights.layers[layer], self.model.norm_eps
        if layer in self._small and len(hidden) <= MOST_TOKENS:
            return (self._small[layer].before_attention(hidden, *running),)
        x = self._norm(hidden, weights.input_norm, enters=layer)
        qkv = self._linear(x, weights.qkv, weights.qkv_bias).to(self.dtype)
        norms = None if weights.q_norm is None or weights.k_norm is None else (weights.q_norm, weights.k_norm)
        if norms is not None and spec.qk_norm == "projection":
            for part, weight in zip(qkv.split((spec.q_dim, spec.kv_dim, spec.kv_dim), dim=-1), norms, strict=False):
                self._norm(part, weight, out=part)
            norms = None
        heads, queries, keys = qkv.unflatten(-1, (-1, spec.head_dim)), spec.num_heads, spec.num_kv_heads
        mixed, clip = self.finite is not None, spec.clip_qkv
        cos, sin = running
        finish_heads(heads, cos, sin, queries=queries, keys=keys, clip=clip, norms=norms, eps=eps, mixed=mixed)
        return (heads,)

    def split_heads(self, projected: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        spec, (heads,) = self.model.attention, projected
        q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        return q, k, v

    def post_attention(
        self,
        layer: int,
        hidden: Tensor,
        attention: Tensor | None,
        experts: Experts,
        running: Running,  # noqa: ARG002
        watch: Watch | None = None,
        *,
        wide: bool = False,
    ) -> None:
        """hidden [T, H] += o(attention [T, Hq, D]), then += experts(norm(hidden)), ``wide`` as for `moe_forward`; in
        place."""
        if watch is None and attention is not None and (bound := self._bound(layer, hidden, experts)) is not None:
            rows = self.space.rows[: len(hidden) * self.model.router.top_k]
            self._small[layer].after_attention(hidden, attention.flatten(1), bound, rows=rows)
            return
        x = self._after_attention(layer, hidden, attention)
        weights = self.weights.layers[layer]
        if weights.router is None:
            if weights.dense_gate_up is not None and weights.dense_down is not None:
                self._add_dense(hidden, x, weights.dense_gate_up, weights.dense_down)
            return
        routed = self._routed(x, weights.router)
        if watch is not None:
            watch(layer, routed)
        self._leave_to_leader(hidden)
        moe_forward(self._on_rank(routed), experts, self.space, into=hidden, wide=wide)

    def decode_layers(
        self,
        layers: range,
        hidden: Tensor,
        caches: Sequence[PagedCache],
        block_tables: Sequence[Tensor],
        seq_lens: Tensor,
        experts: Sequence[LayerExperts],
        running: Running,
    ) -> bool:
        present = [bound for layer_experts in experts if (bound := layer_experts.bound) is not None]
        if len(present) < len(layers):
            return False
        native_layers, rows = (
            [self._small[layer] for layer in layers],
            self.space.rows[: len(hidden) * self.model.router.top_k],
        )
        decode_layers(native_layers, hidden, [running], caches, block_tables[0], seq_lens, present, rows=rows)
        return True

    def bind_layers(self, layers: range, hidden: Tensor, experts: Sequence[LayerExperts], running: Running) -> None:
        """Do nothing: the phases of few rows are such calls."""

    def route(self, layer: int, hidden: Tensor, attention: Tensor | None, running: Running) -> Routed:  # noqa: ARG002
        """hidden [T, H] += o(attention [T, Hq, D]), in place; returns the input and routing of the layer's experts."""
        routed = self._routed(self._after_attention(layer, hidden, attention), self._router(layer))
        self._leave_to_leader(hidden)
        return routed

    def experts(self, layer: int, pages: Sequence[Tensor | None]) -> LayerExperts:
        return LayerExperts.on_rank(self.paged.of_layer(layer, pages), GATED_SILU, self.ranks)

    def sum_experts(self, hidden: Tensor, running: Running) -> None:  # noqa: ARG002
        assert self.ranks is not None, "one process has all experts"
        self.ranks.sum_(hidden)

    def predict_experts(self, layer: int, hidden: Tensor, running: Running) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        x = self._norm(hidden, self.weights.layers[layer].post_norm)
        return route_tokens(linear(x, self._router(layer)), self.model.router)

    def end(self, hidden: Tensor, running: Running) -> None:
        """Do nothing: the final norm is a part of `final_hidden`."""

    def final_hidden(self, hidden: Tensor) -> Tensor:
        return self._norm(hidden, self.weights.final_norm, enters=self.model.num_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, H] -> float32 [S, V]; by torch on a CPU in chunks of the head's rows, which bounds the size of
        repacked copies. A rank computes its part of the vocabulary, if that is divided evenly."""
        x = self.final_hidden(hidden)
        head = floats_of(self.weights.head)
        if self.ranks is not None and head is not None and head.shape[0] % self.ranks.count == 0:
            part = self.ranks.part(head.shape[0])
            return self.ranks.join_columns(linear(x, head[part.start : part.stop]).float())
        if head is None or native.available() or not native.on_cpu(x):
            return self._linear(x, self.weights.head).float()
        rows = max(1, HEAD_CHUNK_BYTES // (head.shape[1] * head.element_size()))
        out = torch.empty((x.shape[0], head.shape[0]), dtype=torch.float32, device=x.device)
        for first in range(0, head.shape[0], rows):
            out[:, first : first + rows] = linear(x, head[first : first + rows])
        return out

    def _whole(self, layer: int) -> DecoderLayer | None:
        """``layer`` with its weights bound, if one call computes it."""
        layer_weights, spec, router = self.weights.layers[layer], self.model.attention, self.model.router
        exchanges = self.ranks is not None  # between the products of a layer
        if layer_weights.router is None or self.finite is not None or spec.clip_qkv is not None or exchanges:
            return None
        names = ("input_norm", "q_norm", "k_norm", "post_norm", "router")
        qkv, o = floats_of(layer_weights.qkv), floats_of(layer_weights.o)
        if qkv is None or o is None:
            return None
        weights: dict[str, Any] = {name: getattr(layer_weights, name) for name in names}
        biases = layer_weights.qkv_bias, layer_weights.o_bias
        tensors = [weight for weight in (*weights.values(), qkv, o, *biases) if weight is not None]
        plain = all(native.on_cpu(tensor) and tensor.dtype == self.dtype for tensor in tensors)
        if not plain or not native.available() or serving.serves(self.space.rows.device, self.dtype)[0]:
            return None
        return DecoderLayer(
            **weights,
            dtype=self.dtype,
            qkv=LayerProduct(weights=(qkv,), biases=(biases[0],)),
            o=LayerProduct(weights=(o,), biases=(biases[1],)),
            eps=self.model.norm_eps,
            head_dim=spec.head_dim,
            top_k=router.top_k,
            normalize=router.normalize,
            round_weights=router.weights_in_model_dtype,
        )

    def _bound(self, layer: int, hidden: Tensor, experts: Experts) -> BoundExperts | None:
        """``experts`` for one call with all else after attention; None if there is no such call."""
        small = layer in self._small and len(hidden) <= MOST_TOKENS
        return experts.bound if small and isinstance(experts, LayerExperts) else None

    def _after_attention(self, layer: int, hidden: Tensor, attention: Tensor | None) -> Tensor:
        weights = self.weights.layers[layer]
        assert attention is not None, "every layer attends"
        attended, ranks = attention.flatten(1), self.ranks if self.model.head_ranks > 1 else None
        if ranks is not None:  # of the heads of all ranks, times the rows of the output matrix that this one has
            attended = ranks.join_columns(attended)
        projected = self._linear(attended, weights.o, weights.o_bias)
        if ranks is not None:
            projected = ranks.join_columns(projected)
        return self._norm(hidden, weights.post_norm, add=projected)

    def _leave_to_leader(self, hidden: Tensor) -> None:
        """Have rank 0 alone add to ``hidden`` what its experts are added to."""
        if self.ranks is not None and not self.ranks.leads:
            hidden.zero_()

    def _on_rank(self, routed: Routed) -> Routed:
        return routed.on_rank(self.ranks, self.model.experts.num_experts)

    def _norm(
        self,
        hidden: Tensor,
        weight: Tensor,
        *,
        add: Tensor | None = None,
        out: Tensor | None = None,
        enters: int | None = None,
    ) -> Tensor:
        """The norm of hidden [T, H] (+= ``add``), which enter layer ``enters`` -> [T, H] in ``dtype``."""
        eps = self.model.norm_eps
        if self.finite is None:
            return rms_norm(hidden, weight, eps, add=add, out=out)
        finite = None if enters is None else self.finite[enters : enters + 1]
        return rms_norm_mixed(hidden, weight, eps, self.dtype, add=add, out=out, finite=finite)

    def _router(self, layer: int) -> Tensor:
        router = self.weights.layers[layer].router
        if router is None:
            raise MoelightError(f"layer {layer} has no router")
        return router

    def _routed(self, x: Tensor, router: Tensor) -> Routed:
        weights, ids = route_tokens(linear(x, router), self.model.router)
        return Routed(x=x, weights=weights, ids=ids)

    def _linear(self, x: Tensor, stack: Stack, bias: Tensor | None = None) -> Tensor:
        return linear_stacked(x, stack, bias, activations=self._activations)

    def _add_dense(self, hidden: Tensor, x: Tensor, gate_up: Stack, down: Stack) -> None:
        """hidden [T, H] += the dense layer of x [T, H]."""
        wide_floats, narrow_floats = floats_of(gate_up), floats_of(down)
        if wide_floats is None or narrow_floats is None:
            for start, some in parts(0, x.shape[0]):
                rows = x[start : start + some]
                hidden[start : start + some] += feed_forward_stacked(rows, gate_up, down, activations=self._activations)
            return
        wide = wide_floats.dtype != x.dtype or narrow_floats.dtype != x.dtype
        for start, some in parts(0, x.shape[0]):
            rows = x[start : start + some]
            if (padded := rows_computed(rows)) != some:
                rows = self.space.inputs[:padded]
                rows[:some] = x[start : start + some]
            hidden[start : start + some] += feed_forward(rows, wide_floats, narrow_floats, self.space, wide=wide)[:some]
