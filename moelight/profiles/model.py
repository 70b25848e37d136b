"""Model profiles: the sizes and operations of a model per layer, independent of files and costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from moelight.core.errors import ConfigError
from moelight.profiles.names import TensorNames
from moelight.profiles.rope import BY_LENGTH, ByLength, RopeScaling
from moelight.profiles.stored import StoredWeights

HEAD_DIM_MULTIPLE = 8
# Limits on sizes; published models have up to 126 layers, and up to 512 experts per layer.
MOST_LAYERS, MOST_EXPERTS, MOST_PARAMETERS = 1024, 4096, 10**15


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSpec:
    """Latent attention (DeepSeek-V2): keys and values of all heads are projected from one cached latent.

    ``q_lora_rank`` None: queries are projected directly. Widths are per head.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Grouped-query attention over the paged cache, or latent attention if ``latent`` is given; none without heads.

    Attributes:
        head_dim: with ``latent``, the width of an expanded key (both parts); ``num_kv_heads`` is then ``num_heads``.
        value_head_dim: the width of a value, if not that of a key.
        scale: of the products of queries and keys; None: head_dim^-0.5.
        softcap: scores become softcap * tanh(score / softcap).
        chunk: a token at position p attends to none before p // chunk * chunk.
        qk_norm: ``none``, ``head`` (RMSNorm over each head) or ``projection`` (over all heads before the split).
        clip_qkv: bound of q, k and v in absolute value.
        qkv_bias: with ``latent``, biases of the projections into the latents.
        sinks: one learned logit per head joins each softmax.
        window: the last W positions only, in the layers that ``window_layers`` marks (empty: in all).
        rope_type: the name; ``rope_scaling``: its constants, if they do not depend on the length of a sequence.
        rotary_share: the fraction of a head that is rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: str = "none"
    clip_qkv: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    window: int | None = None
    window_layers: tuple[bool, ...] = ()
    latent: LatentSpec | None = None
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_type: str = "default"
    rotary_share: float = 1.0
    value_head_dim: int | None = None
    scale: float | None = None
    softcap: float | None = None
    chunk: int | None = None

    @property
    def product_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def cached_head_dim(self) -> int:
        """Width of a key, and of a value, in the cache and in the kernels, which take one multiple of 8 for both: the
        narrower ones are padded with zeros."""
        widest, values = self.head_dim, self.value_head_dim
        if values is not None and values > widest:
            widest = values
        return -(-widest // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE

    @property
    def cache_width(self) -> int:
        """Numbers per token in the KV cache of one layer."""
        if self.latent is not None:
            return self.latent.kv_lora_rank + self.latent.rope_head_dim
        return 2 * self.num_kv_heads * self.cached_head_dim

    @property
    def query_width(self) -> int:
        """Numbers in the queries of one token, as kernels take them; an absorbed query has the width of the latent and
        the rotary part."""
        return self.num_heads * (self.cached_head_dim if self.latent is None else self.cache_width)

    @property
    def output_width(self) -> int:
        """Numbers in the attention output of one token, as kernels give them."""
        return self.num_heads * (self.cached_head_dim if self.latent is None else self.latent.kv_lora_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """The ``top_k`` experts of a token and their weights, divided by their sum if ``normalize``, times ``scale``.

    Attributes:
        weights_in_model_dtype: weights are rounded to the model's dtype (Qwen, OLMoE), else float32 (Mixtral).
        scoring: ``softmax`` over all experts in float32, then the largest; ``softmax_of_top`` over the largest alone
            (gpt-oss); ``sigmoid`` (DeepSeek-V3); ``sparsemixer`` (Phi-3.5-MoE).
        groups: above 1, only experts of the best ``top_groups`` groups can be chosen.
        bias: the logits have a bias.
        selection_bias: the scores have a bias for the selection, but not for the weights.
    """

    top_k: int
    normalize: bool
    weights_in_model_dtype: bool
    scoring: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    bias: bool = False
    selection_bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSpec:
    """Feed-forward experts: ``down(act(gate x) * up x)``, or ``down(act(up x))`` if not ``gated``.

    Attributes:
        shared_intermediate_size: width of all shared experts together, which compute every token; 0: none.
        shared_gate: the shared experts' output is multiplied by a sigmoid of one logit per token.
        bias: every matrix of an expert has one.
        clamp: bound of gate and up, with ``(up + 1) * gate * sigmoid(1.702 gate)`` for the product (gpt-oss).
        input_size: width of what experts read and write, if not the hidden size.
        transposed: matrices lie as ``[in, out]``; ``interleaved``: gate and up are one matrix whose outputs alternate.
        by_torch: no kernel of ours computes their activation.
    """

    num_experts: int
    intermediate_size: int
    activation: str = "silu"
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    clamp: float | None = None
    gated: bool = True
    input_size: int | None = None
    transposed: bool = False
    interleaved: bool = False
    by_torch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor as stored on disk: ``name`` is a field of `TensorNames`, or a parameter's in `ModelProfile.tensors`.

    ``layer`` is -1 outside the layers; ``itemsize``: bytes of a number, if not those of the model's dtype; ``kind``:
    what it belongs to (`hrm.inventory`), where the name does not say it.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    itemsize: int | None = None
    kind: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer of a model whose layers differ: a mixer, and what follows up to the next one.

    Attributes:
        attention: over the paged cache; without heads for a mixer that keeps a state of its own instead.
        before: numbers in the matrices that multiply every token up to the attention, a recurrent mixer included;
            ``after``: from there on; routed experts excluded.
        state_bytes: of a sequence's state, as the family keeps it; ``state_token_bytes``: more for each of its tokens
            (a cache of the family's own).
    """

    attention: AttentionSpec
    before: int
    after: int
    state_bytes: int = 0
    state_token_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """One model, without multi-token-prediction layers (DeepSeek-V3, GLM-4.5).

    ``moe_layers[l]`` is False if layer l has one dense feed-forward of ``dense_intermediate_size``. ``norm`` is ``rms``
    or ``layer`` (LayerNorm), which may have a ``norm_bias``; ``head_bias``: the logits have a bias.

    Where layers differ (graph models) ``layers`` holds each of them and ``tensors`` all that is stored outside the
    pages; ``attention`` is then that of the widest cache. Empty: all follow from the other fields. These and the
    names are left out of the hash, which is asked for often. ``stored``: the bytes of quantised weights; None: all
    weights have ``dtype``. ``by_length``: how positions depend on the length of a sequence, if they do.

    A layer of a dense model is one expert, which every token is routed to: ``page_tensors`` are the matrices of its
    page, each from the mixer of the layer to the next one; `LayerSpec` counts what remains. Empty with experts.

    Of one rank of several (`weights.shard`) ``experts.num_experts`` counts those that it has, one in ``ranks`` of those
    that tokens are routed to; ``attention`` is that of its heads, one in ``head_ranks``.
    """

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    dtype: str
    attention: AttentionSpec
    router: RouterSpec
    experts: ExpertSpec
    moe_layers: tuple[bool, ...]
    names: TensorNames = field(hash=False)
    dense_intermediate_size: int = 0
    norm: str = "rms"
    norm_bias: bool = False
    head_bias: bool = False
    layers: tuple[LayerSpec, ...] = field(default=(), hash=False)
    tensors: tuple[StoredTensor, ...] = field(default=(), hash=False)
    page_tensors: tuple[StoredTensor, ...] = field(default=(), hash=False)
    stored: StoredWeights | None = field(default=None, hash=False)
    by_length: ByLength | None = None
    ranks: int = 1
    head_ranks: int = 1

    @property
    def routed_experts(self) -> int:
        """The number of experts of a layer that tokens are routed to, those of all ranks."""
        return self.experts.num_experts * self.ranks

    def on_ranks(self, count: int) -> ModelProfile:
        """The model as one of ``count`` ranks has it: whole experts, and heads where they are independent of one
        another and divided by ``count``; of ``stored`` the experts alone. Raises ConfigError if these cannot be divided
        so."""
        experts, spec = self.experts.num_experts, self.attention
        if self.dense:
            raise ConfigError(f"--tp {count}: {self.name} has no experts to divide among ranks; leave --tp out")
        if experts % count:
            allowed = ", ".join(str(n) for n in range(2, min(experts, 64) + 1) if experts % n == 0)
            raise ConfigError(f"--tp {count} does not divide the {experts} experts of {self.name}; choose of {allowed}")
        stored = None if self.stored is None else replace(self.stored, total_bytes=self.stored.total_bytes // count)
        part = replace(self.experts, num_experts=experts // count)
        model = replace(self, ranks=count, experts=part, stored=stored)
        divides = not (spec.num_heads % count or spec.num_kv_heads % count or self.hidden_size % count)
        if self.tensors or spec.latent is not None or spec.qk_norm == "projection" or not divides:
            return model
        heads = replace(spec, num_heads=spec.num_heads // count, num_kv_heads=spec.num_kv_heads // count)
        return replace(model, attention=heads, head_ranks=count)

    @property
    def dense(self) -> bool:
        """True if a layer's page is the layer, and no experts are chosen."""
        return bool(self.page_tensors)

    @property
    def stateful(self) -> bool:
        """True if a sequence has state beyond the KV cache, which a shared prefix does not provide."""
        return any(layer.state_bytes or layer.state_token_bytes for layer in self.layers)

    @property
    def num_moe_layers(self) -> int:
        return sum(self.moe_layers)

    @property
    def window(self) -> int | None:
        """The most positions that a token attends to in any layer; None: all."""
        windows = [layer.attention.window for layer in self.layers if layer.attention.num_heads] or [
            self.attention.window
        ]
        return None if None in windows else max(window for window in windows if window is not None)

    @property
    def expert_input(self) -> int:
        """Width of what experts read and write."""
        return self.experts.input_size or self.hidden_size

    def attention_of(self, layer: int) -> AttentionSpec:
        """The attention of one layer."""
        return self.layers[layer].attention if self.layers else self.attention


# Features that the native decoder does not compute: a model with one of them runs as its module graph.
NOT_COMPUTED: dict[str, Callable[[ModelProfile], bool]] = {
    "latent attention": lambda model: model.attention.latent is not None,
    "values of another width than keys": lambda model: model.attention.value_head_dim is not None,
    "attention sinks": lambda model: model.attention.sinks,
    "heads of a width that is no multiple of 8": lambda model: model.attention.head_dim % HEAD_DIM_MULTIPLE != 0,
    "a window in some layers only": lambda model: not all(model.attention.window_layers),
    "positions stretched by the length of each sequence": lambda model: model.attention.rope_type in BY_LENGTH,
    "positions in a part of each head": lambda model: model.attention.rotary_share != 1,
    "router scores other than softmax": lambda model: model.router.scoring != "softmax",
    "groups of experts": lambda model: model.router.groups > 1,
    "scaled router weights": lambda model: model.router.scale != 1,
    "a router bias": lambda model: model.router.bias or model.router.selection_bias,
    "shared experts": lambda model: model.experts.shared_intermediate_size > 0,
    "expert biases": lambda model: model.experts.bias,
    "experts without a gate": lambda model: not model.experts.gated,
    "experts of another width than the hidden states": lambda model: model.experts.input_size is not None,
    "transposed or interleaved experts": lambda model: model.experts.transposed or model.experts.interleaved,
    "clamped experts": lambda model: model.experts.clamp is not None,
    "experts that torch computes": lambda model: model.experts.by_torch,
    "LayerNorm": lambda model: model.norm != "rms",
    "norm biases": lambda model: model.norm_bias,
    "a bias of the output matrix": lambda model: model.head_bias,
}


def not_computed(model: ModelProfile) -> tuple[str, ...]:
    """The features of ``model`` that the native decoder does not compute; such a model runs as its module graph."""
    return tuple(feature for feature, asked in NOT_COMPUTED.items() if asked(model))
