"""`ModelFamily`, the description of a family, and the reader of a ``config.json`` by that description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import (
    MOST_EXPERTS,
    MOST_LAYERS,
    MOST_PARAMETERS,
    AttentionSpec,
    ExpertSpec,
    LatentSpec,
    ModelProfile,
    RouterSpec,
)
from moelight.profiles.names import QWEN_STYLE, TensorNames
from moelight.profiles.quantization import read_quantization, with_stored

# Keys that make transformers read the model from elsewhere than the file's top-level keys.
_ELSEWHERE = ("configuration_files", "decoder", "generator", "per_layer_config", "text_config")
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """One ``model_type``: its keys in ``config.json`` and their defaults.

    A numeric field is the default of its key; None means that the key is required, unless stated otherwise.
    """

    model_type: str
    max_positions: int
    names: TensorNames = QWEN_STYLE
    expert_width_key: str = "moe_intermediate_size"
    num_experts: int | None = None
    top_k: int | None = None
    kv_heads: int | None = None  # None: as many as query heads
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    weights_in_model_dtype: bool = True
    head_dim: int | None = None  # None: hidden size over heads, also if the key is not read
    head_dim_key: bool = True  # the key is read
    keys: Mapping[str, str] = field(default_factory=dict)  # usual keys and their names in this family, see `HFConfig`
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # the supported values; others are refused
    experts_keys: tuple[str, ...] = ("num_local_experts", "num_experts")  # all that transformers accepts
    rope: Mapping[str, Any] = field(default_factory=dict)  # ``rope_parameters`` of a config without
    rotary_share: float | None = None  # of ``partial_rotary_factor``; None: the key is not read
    dtype: str = "float32"  # of a checkpoint whose config names none
    bias_key: str = ""  # enables biases of q, k and v, and with ``output_bias`` of the output projection
    bias_default: bool = False
    output_bias: bool = True
    qk_norm: str = "none"
    qk_norm_flag: str = ""  # the key that enables the norm; empty: always enabled
    clip_qkv: bool = False
    windowed: bool = False  # ``sliding_window`` is read; its default is ``window`` (None: no window)
    window: int | None = None
    window_flag: str = ""  # the key that enables the window; empty: always enabled
    # Only the layers that ``layer_types`` marks as sliding have the window; without that key, every other layer from
    # the first, up to ``max_window_layers``, whose default is ``window_layers`` (None: the key is not read).
    alternating: bool = False
    window_layers: int | None = None
    sinks: bool = False
    latent: bool = False  # the keys of latent attention are read; their defaults are those of DeepSeek-V2 and V3
    scoring: str = "softmax"
    normalize: bool | None = None  # None: ``norm_topk_prob``, whose default is ``normalize_default``
    normalize_default: bool = False
    grouped: tuple[int, int] | None = None  # of ``n_group`` and ``topk_group``; None: the keys are not read
    scale: float | None = None  # of ``routed_scaling_factor``; None: the key is not read
    router_bias: bool = False
    selection_bias: bool = False
    sparse_layers: bool = False  # ``mlp_only_layers`` and ``decoder_sparse_step`` are read
    first_dense: int | None = None  # of ``first_k_dense_replace``, read with ``moe_layer_freq``; None: neither is read
    shared_width: int | None = None  # of ``shared_expert_intermediate_size``; None: the key is not read
    shared_experts: int | None = None  # of ``n_shared_experts``, each as wide as an expert; None: the key is not read
    shared_gate: bool = False
    expert_bias: bool = False
    clamp: float | None = None  # of ``swiglu_limit``; None: the key is not read
    norm: str = "rms"
    norm_bias: bool = False
    head_bias: bool = False  # ``lm_head_bias`` is read


def read_profile(config: HFConfig, family: ModelFamily, *, name: str) -> ModelProfile:
    """The `ModelProfile` that ``config`` describes, read by the rules of ``family``."""
    config = config.with_keys(family.keys)
    quantization = read_quantization(config)
    config.refuse(_ELSEWHERE, "the model is read from the keys beside it, which it would change")
    config.refuse_two_names()
    for key, allowed in family.only.items():
        config.refuse_other(key, allowed)
    layers = config.integer("num_hidden_layers", maximum=MOST_LAYERS)
    moe_layers = _moe_layers(config, family, layers)
    profile = ModelProfile(
        name=name,
        model_type=family.model_type,
        num_layers=layers,
        hidden_size=config.integer("hidden_size"),
        vocab_size=config.integer("vocab_size"),
        max_positions=config.context(_max_positions(config, family)),
        norm_eps=config.number("rms_norm_eps", default=family.norm_eps),
        tie_embeddings=config.flag("tie_word_embeddings", default=False),
        dtype=config.dtype(default=family.dtype),
        attention=_attention(config, family, layers),
        router=_router(config, family),
        experts=_experts(config, family),
        moe_layers=moe_layers,
        dense_intermediate_size=0 if all(moe_layers) else config.integer("intermediate_size"),
        names=family.names,
        norm=family.norm,
        norm_bias=family.norm_bias,
        head_bias=family.head_bias and config.flag("lm_head_bias", default=False),
    )
    _check(profile, config)
    if quantization is None:
        return profile
    return with_stored(profile, quantization.format_of, config.where)


def _max_positions(config: HFConfig, family: ModelFamily) -> int:
    return config.integer("max_position_embeddings", default=family.max_positions)


def _attention(config: HFConfig, family: ModelFamily, layers: int) -> AttentionSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    rope_type, theta, scaling = config.rope(
        default=family.rope, default_theta=family.rope_theta, max_positions=_max_positions(config, family)
    )
    bias = bool(family.bias_key) and config.flag(family.bias_key, default=family.bias_default)
    normed = not family.qk_norm_flag or config.flag(family.qk_norm_flag, default=False)
    has_clip = family.clip_qkv and config.find("clip_qkv") is not None
    window, window_layers = _window(config, family, layers)
    latent = None
    if family.latent:
        latent = LatentSpec(
            q_lora_rank=config.integer_or_none("q_lora_rank", default=1536),
            kv_lora_rank=config.integer("kv_lora_rank", default=512),
            nope_head_dim=config.integer("qk_nope_head_dim", default=128),
            rope_head_dim=config.integer("qk_rope_head_dim", default=64),
            value_head_dim=config.integer("v_head_dim", default=128),
        )
        kv_heads, head_dim = heads, latent.nope_head_dim + latent.rope_head_dim
    else:
        kv_heads = config.integer("num_key_value_heads", default=family.kv_heads or heads)
        head_dim = family.head_dim or hidden // heads
        if family.head_dim_key:
            head_dim = config.integer("head_dim", default=head_dim)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qk_norm=family.qk_norm if normed else "none",
        clip_qkv=config.number("clip_qkv") if has_clip else None,
        qkv_bias=bias,
        output_bias=bias and family.output_bias,
        sinks=family.sinks,
        window=window,
        window_layers=window_layers,
        latent=latent,
        rope_theta=theta,
        rope_scaling=scaling,
        rope_type=rope_type,
        rotary_share=1.0 if family.rotary_share is None else config.rotary_share(default=family.rotary_share),
    )


def _window(config: HFConfig, family: ModelFamily, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """``window`` and ``window_layers`` of the profile."""
    switched_on = not family.window_flag or config.flag(family.window_flag, default=False)
    reads = family.windowed and switched_on
    window = config.integer_or_none("sliding_window", default=family.window) if reads else None
    types = () if family.alternating and window is None else config.words("layer_types", _LAYER_TYPES, count=layers)
    if not family.alternating:
        alike = _LAYER_TYPES[window is not None]
        if any(kind != alike for kind in types):
            raise config.error(f"layer_types contradicts sliding_window ({window}), by which every layer is {alike}")
        return window, ()
    if window is None or types:
        return window, tuple(kind == "sliding_attention" for kind in types)
    last = layers
    if family.window_layers is not None:
        last = config.integer("max_window_layers", default=family.window_layers, least=0)
    return window, tuple(layer % 2 == 0 and layer < last for layer in range(layers))


def _router(config: HFConfig, family: ModelFamily) -> RouterSpec:
    normalize = family.normalize
    if normalize is None:
        normalize = config.flag("norm_topk_prob", default=family.normalize_default)
    groups, top_groups = family.grouped or (1, 1)
    if family.grouped is not None:
        groups = config.integer("n_group", default=groups)
        top_groups = config.integer("topk_group", default=top_groups)
    return RouterSpec(
        top_k=config.integer("num_experts_per_tok", default=family.top_k),
        normalize=normalize,
        weights_in_model_dtype=family.weights_in_model_dtype,
        scoring=family.scoring,
        groups=groups,
        top_groups=top_groups,
        scale=1.0 if family.scale is None else config.number("routed_scaling_factor", default=family.scale),
        bias=family.router_bias,
        selection_bias=family.selection_bias,
    )


def _experts(config: HFConfig, family: ModelFamily) -> ExpertSpec:
    width = config.integer(family.expert_width_key)
    shared = 0
    if family.shared_width is not None:
        shared = config.integer("shared_expert_intermediate_size", default=family.shared_width, least=0)
    elif family.shared_experts is not None:
        shared = width * (config.integer_or_none("n_shared_experts", default=family.shared_experts, least=0) or 0)
    return ExpertSpec(
        num_experts=config.integer(*family.experts_keys, default=family.num_experts, maximum=MOST_EXPERTS),
        intermediate_size=width,
        activation=config.activation(),
        shared_intermediate_size=shared,
        shared_gate=family.shared_gate and shared > 0,
        bias=family.expert_bias,
        clamp=None if family.clamp is None else config.number("swiglu_limit", default=family.clamp),
    )


def _moe_layers(config: HFConfig, family: ModelFamily, layers: int) -> tuple[bool, ...]:
    """True for each layer with experts.

    ``sparse_layers``: layers not in ``mlp_only_layers`` whose number, from 1, is a multiple of ``decoder_sparse_step``.
    ``first_dense``: layers from ``first_k_dense_replace`` on whose index is a multiple of ``moe_layer_freq``.
    """
    if family.sparse_layers:
        dense = frozenset(config.integers("mlp_only_layers"))
        step = config.integer("decoder_sparse_step", default=1)
        return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if family.first_dense is not None:
        first = config.integer("first_k_dense_replace", default=family.first_dense, least=0)
        step = config.integer("moe_layer_freq", default=1)
        return tuple(layer >= first and layer % step == 0 for layer in range(layers))
    return (True,) * layers


def _check(profile: ModelProfile, config: HFConfig) -> None:
    attention, router, experts = profile.attention, profile.router, profile.experts
    heads, kv_heads, count = attention.num_heads, attention.num_kv_heads, experts.num_experts
    if heads % kv_heads:
        raise config.error(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    if attention.latent is None and (attention.head_dim % 2 or attention.head_dim > 256):
        raise config.error(f"head_dim ({attention.head_dim}) must be even and at most 256")
    if router.top_k > count:
        raise config.error(f"num_experts_per_tok ({router.top_k}) exceeds the {count} experts there are")
    if count % router.groups or router.top_groups > router.groups:
        top = f"topk_group ({router.top_groups}) must be at most n_group"
        raise config.error(f"n_group ({router.groups}) must divide the {count} experts, and {top}")
    width = count * experts.intermediate_size + experts.shared_intermediate_size
    width = max(width, profile.dense_intermediate_size) + attention.q_dim + attention.cache_width
    parameters = profile.hidden_size * (3 * profile.num_layers * width + 2 * profile.vocab_size)
    if parameters > MOST_PARAMETERS:
        raise config.error(f"this would be a model of {parameters:.0e} parameters, above {MOST_PARAMETERS:.0e}")
    if not profile.num_moe_layers:
        raise config.error("no layer has experts, so this is a dense model")
