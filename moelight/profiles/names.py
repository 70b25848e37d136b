"""Tensor names of each family on disk: templates, with every spelling that checkpoints use."""

from __future__ import annotations

from dataclasses import dataclass, replace

Spellings = tuple[str, ...]


_SHARED_BLOCKS = ("shared_experts", "shared_expert")
_SHARED = {
    matrix: tuple(f"model.layers.{{layer}}.mlp.{block}.{matrix}.weight" for block in _SHARED_BLOCKS)
    for matrix in ("gate_proj", "up_proj", "down_proj")
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """Templates over ``{layer}`` and ``{expert}``; a checkpoint must have exactly one spelling of each.

    ``gate``, ``up``, ``down`` are per expert; ``fused_gate_up`` ``[E, 2I, H]`` (gate rows first) and ``fused_down``
    ``[E, H, I]`` hold all experts of a layer; all five are empty for other layouts. ``qkv``, if given, holds q, k and v
    in one tensor. ``ignored`` are regular expressions of names that hold no weights.
    """

    router: Spellings
    gate: Spellings = ()
    up: Spellings = ()
    down: Spellings = ()
    fused_gate_up: Spellings = ()
    fused_down: Spellings = ()
    embed: Spellings = ("model.embed_tokens.weight",)
    head: Spellings = ("lm_head.weight",)
    head_bias: Spellings = ("lm_head.bias",)
    final_norm: Spellings = ("model.norm.weight",)
    final_norm_bias: Spellings = ("model.norm.bias",)
    input_norm: Spellings = ("model.layers.{layer}.input_layernorm.weight",)
    input_norm_bias: Spellings = ("model.layers.{layer}.input_layernorm.bias",)
    post_norm: Spellings = ("model.layers.{layer}.post_attention_layernorm.weight",)
    post_norm_bias: Spellings = ("model.layers.{layer}.post_attention_layernorm.bias",)
    qkv: Spellings = ()
    q: Spellings = ("model.layers.{layer}.self_attn.q_proj.weight",)
    k: Spellings = ("model.layers.{layer}.self_attn.k_proj.weight",)
    v: Spellings = ("model.layers.{layer}.self_attn.v_proj.weight",)
    o: Spellings = ("model.layers.{layer}.self_attn.o_proj.weight",)
    q_bias: Spellings = ("model.layers.{layer}.self_attn.q_proj.bias",)
    k_bias: Spellings = ("model.layers.{layer}.self_attn.k_proj.bias",)
    v_bias: Spellings = ("model.layers.{layer}.self_attn.v_proj.bias",)
    o_bias: Spellings = ("model.layers.{layer}.self_attn.o_proj.bias",)
    q_norm: Spellings = ("model.layers.{layer}.self_attn.q_norm.weight",)
    k_norm: Spellings = ("model.layers.{layer}.self_attn.k_norm.weight",)
    sinks: Spellings = ("model.layers.{layer}.self_attn.sinks",)
    q_a: Spellings = ("model.layers.{layer}.self_attn.q_a_proj.weight",)
    q_a_bias: Spellings = ("model.layers.{layer}.self_attn.q_a_proj.bias",)
    q_a_norm: Spellings = ("model.layers.{layer}.self_attn.q_a_layernorm.weight",)
    q_b: Spellings = ("model.layers.{layer}.self_attn.q_b_proj.weight",)
    kv_a: Spellings = ("model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight",)
    kv_a_bias: Spellings = ("model.layers.{layer}.self_attn.kv_a_proj_with_mqa.bias",)
    kv_a_norm: Spellings = ("model.layers.{layer}.self_attn.kv_a_layernorm.weight",)
    kv_b: Spellings = ("model.layers.{layer}.self_attn.kv_b_proj.weight",)
    router_bias: Spellings = ("model.layers.{layer}.mlp.router.bias",)
    router_selection_bias: Spellings = ("model.layers.{layer}.mlp.gate.e_score_correction_bias",)
    dense_gate: Spellings = ("model.layers.{layer}.mlp.gate_proj.weight",)
    dense_up: Spellings = ("model.layers.{layer}.mlp.up_proj.weight",)
    dense_down: Spellings = ("model.layers.{layer}.mlp.down_proj.weight",)
    shared_gate: Spellings = _SHARED["gate_proj"]
    shared_up: Spellings = _SHARED["up_proj"]
    shared_down: Spellings = _SHARED["down_proj"]
    shared_router: Spellings = ("model.layers.{layer}.mlp.shared_expert_gate.weight",)
    ignored: Spellings = (r".*\.rotary_emb\.inv_freq",)


QWEN_STYLE = TensorNames(
    router=("model.layers.{layer}.mlp.gate.weight",),
    gate=("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",),
    up=("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",),
    down=("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",),
    fused_gate_up=("model.layers.{layer}.mlp.experts.gate_up_proj",),
    fused_down=("model.layers.{layer}.mlp.experts.down_proj",),
)


def _fused(matrix: str) -> Spellings:
    return tuple(f"model.layers.{{layer}}.{block}.experts.{matrix}" for block in ("mlp", "block_sparse_moe"))


def _loose(matrix: str, usual: str) -> Spellings:
    """The spelling of the hub, then those of tools that quantise a model which transformers 5 has renamed."""
    named = ((block, name) for name in (matrix, usual) for block in ("block_sparse_moe", "mlp"))
    return tuple(f"model.layers.{{layer}}.{block}.experts.{{expert}}.{name}.weight" for block, name in named)


MIXTRAL_STYLE = TensorNames(
    router=("model.layers.{layer}.block_sparse_moe.gate.weight", "model.layers.{layer}.mlp.gate.weight"),
    gate=_loose("w1", "gate_proj"),
    up=_loose("w3", "up_proj"),
    down=_loose("w2", "down_proj"),
    fused_gate_up=_fused("gate_up_proj"),
    fused_down=_fused("down_proj"),
)

PHIMOE_STYLE = replace(
    MIXTRAL_STYLE,
    router=("model.layers.{layer}.block_sparse_moe.gate.weight", "model.layers.{layer}.mlp.router.weight"),
)

GPT_OSS_STYLE = TensorNames(  # experts: [E, H, 2I] with gate and up interleaved and [E, I, H], or blocks of 4 bits
    router=("model.layers.{layer}.mlp.router.weight",),
)

DBRX_STYLE = TensorNames(  # experts: three tensors of all experts' rows [E * I, H], down transposed
    router=("transformer.blocks.{layer}.ffn.router.layer.weight",),
    embed=("transformer.wte.weight",),
    final_norm=("transformer.norm_f.weight",),
    input_norm=("transformer.blocks.{layer}.norm_attn_norm.norm_1.weight",),
    post_norm=("transformer.blocks.{layer}.norm_attn_norm.norm_2.weight",),
    qkv=("transformer.blocks.{layer}.norm_attn_norm.attn.Wqkv.weight",),
    o=("transformer.blocks.{layer}.norm_attn_norm.attn.out_proj.weight",),
)
