"""Configs of other shapes and switches than a released one, drawn from the name of the family and a number: odd counts
of heads, widths that are no powers of two, tied or untied embeddings, windows, stretched positions, counts of experts.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from moelight.models.graph import self_test
from moelight.models.graph.model import decoder_of

SHAPES = 3  # of each family
VOCABULARY = 320  # of the tokenizer of the test models
_TRIES = 24  # configs that transformers itself cannot run are drawn again
_WHOLE_TRIES = 4  # from here on, with some of the changes only
_ROPE = "rope_parameters"
_ORIGINAL = 16
_STRETCHED: tuple[Mapping[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": _ORIGINAL},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _ORIGINAL,
    },
)
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor")
_PLAIN = {"rope_type", "rope_theta", "partial_rotary_factor", "factor", *_STRETCHED[2], *_STRETCHED[3], *_YARN}
# Choices for fields of a config, under all their names; a field that a family lacks is left out.
_CHOICES: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (3, 5, 6, 12)),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), (1, 2, 3)),
    **dict.fromkeys(("top_k_experts", "moe_top_k"), (1, 2, 3)),
    **dict.fromkeys(("moe_intermediate_size", "ffn_hidden_size"), (24, 40, 56)),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), (24, 40, 72)),
    **dict.fromkeys(("intermediate_size", "dense_intermediate_size"), (40, 72, 104)),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), (1, 2, 3)),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), (0, 1, 2)),
    **dict.fromkeys(("attention_bias", "qkv_bias", "norm_topk_prob", "use_qk_norm"), (False, True)),
    **dict.fromkeys(("sliding_window",), (5, 24)),
    "routed_scaling_factor": (1.0, 1.7),
    "q_lora_rank": (None, 20, 36),
    "kv_lora_rank": (24, 40),
    "qk_nope_head_dim": (12, 16, 20),
    "qk_rope_head_dim": (8, 12),
    "v_head_dim": (12, 20, 28),
    "rms_norm_eps": (1e-6, 1e-5),
    "linear_num_key_heads": (1, 3),
    "decoder_sparse_step": (1, 2),
}
_HEADS = {2: (1, 2), 3: (1, 3), 5: (1, 5), 6: (1, 2, 3), 8: (2, 4)}  # of queries, and those of keys
_HEAD_SIZES = (12, 20, 24, 40)
_SWITCHES = ("sliding_window", "q_lora_rank", "decoder_sparse_step", "routed_scaling_factor")


def shapes(config: Any, name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """`SHAPES` tiny configs like ``config`` (fewer if transformers runs none), and what was drawn of each."""
    for number in range(SHAPES):
        for attempt in range(_TRIES):
            draw = random.Random(f"{name} {number} {attempt}")
            try:
                drawn, fields = _drawn(self_test.tiny(config), draw, some=attempt >= _WHOLE_TRIES)
            except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError, StrictDataclassError):
                continue
            if _runs(drawn):
                yield drawn, fields
                break


def _drawn(config: Any, draw: random.Random, *, some: bool) -> tuple[Any, dict[str, Any]]:
    """``config``, a tiny one, with fields of its text model drawn anew, or ``some`` of them."""
    text, full = config.get_text_config(), config.to_dict()
    inner = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
    fields = full if inner is None else full[inner]
    changes = _changes(fields, getattr(type(text), "attribute_map", {}), draw)
    if some:
        changes = {name: value for name, value in changes.items() if draw.random() < 0.5}
    fields.update(changes)
    for encoder in (full[name] for name in config.sub_configs if inner is not None and name != inner):
        if isinstance(encoder, dict):
            encoder.update({name: fields["hidden_size"] for name in self_test.ENCODER_OUTPUTS if name in encoder})
    for name in ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"):
        if fields.get(name):
            fields[name] = VOCABULARY
    if "tie_word_embeddings" in full:
        full["tie_word_embeddings"] = fields["tie_word_embeddings"] = changes["tie_word_embeddings"] = (
            draw.random() < 0.5
        )
    self_test.short_rotations(fields)
    return type(config)(**full), changes


def _changes(fields: Mapping[str, Any], named: Mapping[str, str], draw: random.Random) -> dict[str, Any]:
    heads, size = draw.choice(list(_HEADS)), draw.choice(_HEAD_SIZES)
    latent = bool(fields.get("kv_lora_rank"))
    keys = heads if latent else draw.choice(_HEADS[heads])
    changes: dict[str, Any] = {}

    def put(name: str, value: Any) -> None:
        field = named.get(name, name)
        if fields.get(field) is not None or (field in fields and name in _SWITCHES):
            changes[field] = value

    if not isinstance(fields.get(named.get("num_attention_heads", "num_attention_heads")), list):
        put("num_attention_heads", heads)
        put("num_key_value_heads", keys)
        put("kv_n_heads", keys)
        if not latent:
            put("head_dim", size)
        separate = latent or fields.get("head_dim") is not None
        put("hidden_size", heads * (draw.choice((12, 20, 36)) if separate else size))
    for name, choices in _CHOICES.items():
        value = draw.choice(choices)
        switched = name in _SWITCHES and draw.random() < 0.5
        old = fields.get(named.get(name, name))
        if name.endswith("head_dim") and not old:
            continue
        if switched or isinstance(old, list) or (isinstance(old, bool) != isinstance(value, bool)):
            if name in _SWITCHES and old is None and not switched:
                put(name, value)
            continue
        put(name, value)
    if latent and fields.get("qk_rope_head_dim"):
        rotated = changes.get("qk_rope_head_dim", fields["qk_rope_head_dim"])
        together = rotated + changes.get("qk_nope_head_dim", fields.get("qk_nope_head_dim", 0))
        if fields.get("qk_head_dim"):
            changes["qk_head_dim"] = together
        if fields.get("head_dim"):
            changes["head_dim"] = rotated if fields["head_dim"] == fields["qk_rope_head_dim"] else together
    if isinstance(types := fields.get("layer_types"), list) and len(set(types)) > 1:
        changes["layer_types"] = draw.sample(types, len(types))
    rope = fields.get(_ROPE)
    if isinstance(rope, dict) and "rope_type" in rope and _PLAIN.issuperset(rope):
        fixed = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        changes[_ROPE] = {**draw.choice(_STRETCHED), **fixed}
    return changes


def _runs(config: Any) -> bool:
    """Whether transformers itself computes the model of ``config``."""
    try:
        module = self_test.random_model(copy.deepcopy(config), 0)
        with torch.inference_mode():
            logits = module(input_ids=torch.arange(3, 33)[None], use_cache=False).logits
            later = module(input_ids=torch.arange(3, 14)[None], use_cache=False).logits
    except Exception:  # noqa: BLE001 - whatever transformers raises for sizes that do not fit
        return False
    return bool(logits.isfinite().all() and later.isfinite().all()) and decoder_of(module) is not None
