"""How a family names its tensors on disk: templates, with every spelling a save may use."""

from __future__ import annotations

from dataclasses import dataclass

Spellings = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """Templates over ``{layer}`` and ``{expert}``. Exactly one spelling of each must be present in a checkpoint.

    ``gate``, ``up``, ``down`` are per expert; ``fused_gate_up`` ``[E, 2I, H]`` (gate rows first) and ``fused_down``
    ``[E, H, I]`` hold all experts of a layer. ``ignored`` are regular expressions of names that carry no weights.
    """

    router: Spellings
    gate: Spellings
    up: Spellings
    down: Spellings
    fused_gate_up: Spellings
    fused_down: Spellings
    embed: Spellings = ("model.embed_tokens.weight",)
    head: Spellings = ("lm_head.weight",)
    final_norm: Spellings = ("model.norm.weight",)
    input_norm: Spellings = ("model.layers.{layer}.input_layernorm.weight",)
    post_norm: Spellings = ("model.layers.{layer}.post_attention_layernorm.weight",)
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
    dense_gate: Spellings = ("model.layers.{layer}.mlp.gate_proj.weight",)
    dense_up: Spellings = ("model.layers.{layer}.mlp.up_proj.weight",)
    dense_down: Spellings = ("model.layers.{layer}.mlp.down_proj.weight",)
    ignored: Spellings = (r".*\.rotary_emb\.inv_freq",)


QWEN_STYLE = TensorNames(
    router=("model.layers.{layer}.mlp.gate.weight",),
    gate=("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",),
    up=("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",),
    down=("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",),
    fused_gate_up=("model.layers.{layer}.mlp.experts.gate_up_proj",),
    fused_down=("model.layers.{layer}.mlp.experts.down_proj",),
)

MIXTRAL_STYLE = TensorNames(
    router=("model.layers.{layer}.block_sparse_moe.gate.weight", "model.layers.{layer}.mlp.gate.weight"),
    gate=("model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",),
    up=("model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",),
    down=("model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",),
    fused_gate_up=(
        "model.layers.{layer}.mlp.experts.gate_up_proj",
        "model.layers.{layer}.block_sparse_moe.experts.gate_up_proj",
    ),
    fused_down=(
        "model.layers.{layer}.mlp.experts.down_proj",
        "model.layers.{layer}.block_sparse_moe.experts.down_proj",
    ),
)
