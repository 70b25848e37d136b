"""What a family file may say, and the one reader that turns it and a ``config.json`` into a `ModelProfile`."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.errors import ConfigError
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import AttentionSpec, ExpertSpec, ModelProfile, RouterSpec
from moelight.profiles.names import TensorNames


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One ``model_type``: where its ``config.json`` keeps things, and what it means when a key is absent.

    ``kv_heads`` None means as many as query heads. ``normalize`` None reads ``norm_topk_prob``. ``window_flag`` names
    the key that switches ``sliding_window`` on (None: present means on). ``sparse_layers`` reads ``mlp_only_layers``
    and ``decoder_sparse_step``.
    """

    model_type: str
    names: TensorNames
    expert_width_key: str
    num_experts: int
    top_k: int
    kv_heads: int | None
    max_positions: int
    norm_eps: float
    rope_theta: float
    weights_in_model_dtype: bool
    normalize: bool | None = None
    qk_norm: str = "none"
    clip_qkv: bool = False
    bias: bool = False
    windowed: bool = False
    window_flag: str | None = None
    sparse_layers: bool = False


def read_profile(config: HFConfig, family: Family, *, name: str) -> ModelProfile:
    """`ModelProfile` of the checkpoint that ``config`` describes, read as ``family`` says.

    Raises:
        ConfigError: a key is missing, of the wrong type, or contradicts another.
    """
    layers = config.integer("num_hidden_layers")
    moe_layers = _moe_layers(config, layers) if family.sparse_layers else (True,) * layers
    profile = ModelProfile(
        name=name,
        model_type=family.model_type,
        num_layers=layers,
        hidden_size=config.integer("hidden_size"),
        vocab_size=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings", default=family.max_positions),
        norm_eps=config.number("rms_norm_eps", default=family.norm_eps),
        tie_embeddings=config.flag("tie_word_embeddings", default=False),
        dtype=config.dtype(),
        attention=_attention(config, family),
        router=_router(config, family),
        experts=ExpertSpec(
            num_experts=config.integer("num_local_experts", "num_experts", default=family.num_experts),
            intermediate_size=config.integer(family.expert_width_key),
            activation=config.activation(),
        ),
        moe_layers=moe_layers,
        dense_intermediate_size=0 if all(moe_layers) else config.integer("intermediate_size"),
        names=family.names,
    )
    _check(profile, config.where)
    return profile


def _attention(config: HFConfig, family: Family) -> AttentionSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    theta, factor = config.rope(default_theta=family.rope_theta)
    switched_on = family.window_flag is None or config.flag(family.window_flag, default=False)
    has_window = family.windowed and switched_on and config.find("sliding_window") is not None
    has_clip = family.clip_qkv and config.find("clip_qkv") is not None
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", default=family.kv_heads or heads),
        head_dim=config.integer("head_dim", default=hidden // heads),
        qk_norm=family.qk_norm,
        clip_qkv=config.number("clip_qkv") if has_clip else None,
        bias=family.bias and config.flag("attention_bias", default=False),
        window=config.integer("sliding_window") if has_window else None,
        rope_theta=theta,
        rope_factor=factor,
    )


def _router(config: HFConfig, family: Family) -> RouterSpec:
    normalize = family.normalize
    return RouterSpec(
        top_k=config.integer("num_experts_per_tok", default=family.top_k),
        normalize=config.flag("norm_topk_prob", default=False) if normalize is None else normalize,
        weights_in_model_dtype=family.weights_in_model_dtype,
    )


def _moe_layers(config: HFConfig, layers: int) -> tuple[bool, ...]:
    """A layer has experts unless it is listed in ``mlp_only_layers`` or falls between the sparse steps."""
    dense = config.integers("mlp_only_layers")
    step = config.integer("decoder_sparse_step", default=1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _check(profile: ModelProfile, where: str) -> None:
    attention = profile.attention
    if attention.num_heads % attention.num_kv_heads:
        raise ConfigError(
            f"{where}: num_attention_heads ({attention.num_heads}) must be a multiple of "
            f"num_key_value_heads ({attention.num_kv_heads})"
        )
    if attention.head_dim % 8 or attention.head_dim > 256:
        raise ConfigError(f"{where}: head_dim ({attention.head_dim}) must be a multiple of 8 and at most 256")
    if profile.router.top_k > profile.experts.num_experts:
        raise ConfigError(
            f"{where}: num_experts_per_tok ({profile.router.top_k}) exceeds the "
            f"{profile.experts.num_experts} experts there are"
        )
    if not profile.num_moe_layers:
        raise ConfigError(f"{where}: no layer has experts, so this is a dense model")
