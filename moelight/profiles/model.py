"""What a model stores and computes, per layer. Families fill these fields from a raw HF ``config.json``.

Refuses to know where weights lie on disk (``names``) and what anything costs (floor 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from moelight.profiles.names import TensorNames


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Grouped-query attention.

    ``qk_norm``: ``none``, ``head`` (RMSNorm over each head, after the split) or ``projection`` (over the whole
    projection, before it). ``clip_qkv`` bounds q, k and v in absolute value. ``window``: the last W positions only.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: str = "none"
    clip_qkv: float | None = None
    bias: bool = False
    window: int | None = None
    rope_theta: float = 10000.0
    rope_factor: float = 1.0

    @property
    def q_dim(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """Softmax over all experts in float32, then the ``top_k`` largest; divided by their sum if ``normalize``.

    ``weights_in_model_dtype``: the weights are rounded to the model's dtype before use (Qwen, OLMoE), or kept in
    float32 (Mixtral).
    """

    top_k: int
    normalize: bool
    weights_in_model_dtype: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSpec:
    """Gated feed-forward experts: ``down(act(gate x) * up x)``."""

    num_experts: int
    intermediate_size: int
    activation: str = "silu"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """One model. ``moe_layers[l]`` is False where layer l has one dense feed-forward of ``dense_intermediate_size``."""

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
    names: TensorNames
    dense_intermediate_size: int = 0

    @property
    def num_moe_layers(self) -> int:
        """Layers with a router and experts."""
        return sum(self.moe_layers)
