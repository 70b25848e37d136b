"""The config of a model in a GGUF file, under transformers' names.

Architectures are data, whose keys are those of llama.cpp. A key that a file lacks has the value that llama.cpp takes
for it (`src/llama-model.cpp`, `src/models/`), or is refused by name where llama.cpp needs it; never transformers'
default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from moelight.core.errors import ConfigError, quoted
from moelight.profiles.gguf import GGUFFile

DTYPE = "bfloat16"  # of computation
_LOG_MULTIPLIER = 0.1  # llama.cpp stores mscale_all_dim times this
_MOST = 1 << 48  # of a whole number
_NOT_SCALED = (0, 1, 0.0, 1.0)
_SIGMOID, _SOFTMAX = 2, 1
# Files of GLM-4.7-Flash from before its gating function was written: layers and tokens, by which llama.cpp knows them.
_GLM_LAYERS, _GLM_TOKENS = (47, 48), 154880


class Metadata:
    """The keys of one architecture in a file, without its prefix."""

    def __init__(self, file: GGUFFile, name: str) -> None:
        self.file, self.name, self.where = file, name, str(file.path)
        prefix = f"{name}."
        self._values = {
            key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
        }
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if "vocab_size" not in self._values and isinstance(tokens, list):
            self._values["vocab_size"] = len(tokens)

    def names(self) -> Iterable[str]:
        """The keys that the file has."""
        return self._values

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.where}: {text}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``; of one value for each layer that which all have."""
        value = self._values.get(key)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise self.error(f"{self.name}.{key} differs from layer to layer, which is not computed")
            value = value[0]
        return default if value is None else _plain(value)

    def need(self, key: str) -> Any:
        """The value of ``key``, without which llama.cpp does not load the file either."""
        value = self.get(key)
        if value is None:
            raise self.error(
                f"the metadata key {self.name}.{key} is missing, and it has no default; convert the model again"
            )
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or not least <= value < _MOST:
            raise self.error(f"{self.name}.{key} is {quoted(value)}, not a whole number of at least {least}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(f"{self.name}.{key} is {quoted(value)}, not a finite number")
        return float(value)

    def only(self, key: str, allowed: tuple[Any, ...], meaning: str) -> None:
        """Refuse a value of ``key`` that is none of ``allowed``."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise self.error(f"{self.name}.{key} is {quoted(value)}, {meaning}; use the checkpoint in safetensors")


def _plain(value: Any) -> Any:
    """A number as JSON would have it: float32 values have at most 7 digits that mean something."""
    return float(f"{value:.7g}") if isinstance(value, float) and math.isfinite(value) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One ``general.architecture``.

    Attributes:
        model_type: of the family.
        experts: the field with the number of experts.
        more: the fields that not all architectures have.
        rope: of scaled rotary embeddings, what files do not say.
        heads_in_pairs: rows of q and k are stored with the two halves of each head interleaved.
    """

    model_type: str
    experts: str
    more: Callable[[Metadata], dict[str, Any]]
    rope: Mapping[str, Any] = field(default_factory=dict)
    heads_in_pairs: bool = False


def hf_rows(rows: int, heads: int) -> list[int]:
    """For each row of transformers' q or k its row in the file: there, halves of a head take turns (llama.cpp's
    ``permute``)."""
    half = rows // heads // 2
    return [2 * (head * half + row) + part for head in range(heads) for part in range(2) for row in range(half)]


def _mixtral(keys: Metadata) -> dict[str, Any]:
    return {"intermediate_size": keys.integer("feed_forward_length"), "sliding_window": None}


def _qwen3(keys: Metadata) -> dict[str, Any]:
    return {"norm_topk_prob": True, **_widths(keys)}


def _qwen2(keys: Metadata) -> dict[str, Any]:
    shared = keys.integer("expert_shared_feed_forward_length", 0) or keys.integer("feed_forward_length")
    return {"norm_topk_prob": False, "shared_expert_intermediate_size": shared, **_widths(keys)}


def _widths(keys: Metadata) -> dict[str, Any]:
    """Return the widths of experts, a share of ``feed_forward_length`` if the file does not state one."""
    width, dense = keys.integer("expert_feed_forward_length", 0), keys.integer("feed_forward_length", 0)
    used = keys.integer("expert_used_count", least=1)
    widths = {"moe_intermediate_size": width or keys.integer("feed_forward_length") // used}
    return widths | ({"intermediate_size": dense} if dense else {})


def _olmoe(keys: Metadata) -> dict[str, Any]:
    return {
        "norm_topk_prob": False,
        "intermediate_size": keys.integer("feed_forward_length"),
        "clip_qkv": keys.get("attention.clamp_kqv"),
    }


def _gpt_oss(keys: Metadata) -> dict[str, Any]:
    keys.only("rope.freq_base_swa", (keys.get("rope.freq_base", 10000.0),), "another base in windowed layers")
    pattern = keys.file.metadata.get(f"{keys.name}.attention.sliding_window_pattern", 2)
    if pattern != 2 and pattern != [layer % 2 == 0 for layer in range(keys.integer("block_count"))]:
        raise keys.error("its windows are not those of every other layer; use the checkpoint in safetensors")
    return {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "sliding_window": keys.integer("attention.sliding_window"),
    }


def _deepseek(keys: Metadata) -> dict[str, Any]:
    """Return the keys of the config that depend on several keys of the file: `conversion/deepseek.py`,
    `src/models/deepseek2.cpp`."""
    keys.only("attention.temperature_scale", (0, 0.0), "which scales queries by position")
    sigmoid, groups = _by_sigmoid(keys), keys.integer("expert_group_count", 0)
    latent = keys.get("attention.key_length_mla") is not None
    key_width, value_width = (
        keys.integer(f"attention.{part}_length_mla" if latent else f"attention.{part}_length")
        for part in ("key", "value")
    )
    rope = keys.integer("rope.dimension_count")
    dense = _dense_layers(keys)
    return {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "topk_method": "noaux_tc" if sigmoid else "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": max(1, groups),
        "topk_group": keys.integer("expert_group_used_count", least=1) if groups > 1 else 1,
        "n_shared_experts": keys.integer("expert_shared_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": keys.get("expert_weights_norm", False),
        "first_k_dense_replace": dense,
        **({"intermediate_size": keys.integer("feed_forward_length")} if dense else {}),
        "q_lora_rank": keys.integer("attention.q_lora_rank") if _compresses_queries(keys) else None,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key_width - rope,
        "v_head_dim": value_width,
        "num_key_value_heads": keys.integer("attention.head_count"),
    }


def _by_sigmoid(keys: Metadata) -> bool:
    function = keys.integer("expert_gating_func", 0)
    if function not in (0, _SOFTMAX, _SIGMOID):
        raise keys.error(f"{keys.name}.expert_gating_func {function} is not computed; known: 1 (softmax), 2 (sigmoid)")
    glm = layers_of(keys) in _GLM_LAYERS and keys.get("vocab_size") == _GLM_TOKENS
    if function == _SIGMOID or (not function and glm):
        return True
    biased = next((name for name in keys.file.tensors if name.endswith(".exp_probs_b.bias")), None)
    if biased is None:
        return False
    says = "says softmax" if function else "is missing, for which llama.cpp takes softmax"
    raise keys.error(
        f"{keys.name}.expert_gating_func {says}, and the bias {quoted(biased)} is computed with sigmoid scores alone; "
        'if the model has those (DeepSeek-V3, Kimi-K2, GLM), write "scoring_func": "sigmoid" into its config.json and '
        "convert it again, or use the checkpoint in safetensors"
    )


def _dense_layers(keys: Metadata) -> int:
    """Return the number of leading dense layers, counted by their tensors, because converters wrote 0 for configs that
    name those layers by ``mlp_layer_types``."""
    tensors, stated = keys.file.tensors, keys.integer("leading_dense_block_count", 0)
    layer = 0
    while f"blk.{layer}.ffn_gate.weight" in tensors and f"blk.{layer}.ffn_gate_inp.weight" not in tensors:
        layer += 1
    return max(layer, stated)


def _compresses_queries(keys: Metadata) -> bool:
    compressed = "blk.0.attn_q_a.weight" in keys.file.tensors
    return compressed or (
        keys.get("attention.q_lora_rank") is not None and "blk.0.attn_q.weight" not in keys.file.tensors
    )


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(model_type="mixtral", experts="num_local_experts", more=_mixtral, heads_in_pairs=True),
        "qwen3moe": Architecture(model_type="qwen3_moe", experts="num_experts", more=_qwen3),
        "qwen2moe": Architecture(model_type="qwen2_moe", experts="num_experts", more=_qwen2),
        "olmoe": Architecture(model_type="olmoe", experts="num_experts", more=_olmoe),
        "deepseek2": Architecture(model_type="deepseek_v2", experts="n_routed_experts", more=_deepseek),
        "gpt-oss": Architecture(
            model_type="gpt_oss", experts="num_local_experts", more=_gpt_oss, rope={"truncate": False}
        ),
    }
)


def layers_of(keys: Metadata) -> int:
    """Layers without those that predict further tokens, which lie behind the others."""
    layers, more = keys.integer("block_count", least=1), keys.integer("nextn_predict_layers", 0)
    if more >= layers:
        raise keys.error(f"{keys.name}.nextn_predict_layers is {more} of {layers} layers; fetch the file again")
    return layers - more


def config_values(file: GGUFFile, name: str, architecture: Architecture) -> dict[str, Any]:
    """Return the values that ``config.json`` would have; families validate them further."""
    keys = Metadata(file, name)
    heads, hidden = keys.integer("attention.head_count", least=1), keys.integer("embedding_length", least=1)
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "dtype": DTYPE,
        "num_hidden_layers": layers_of(keys),
        "max_position_embeddings": keys.need("context_length"),
        "hidden_size": hidden,
        "vocab_size": keys.need("vocab_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": keys.integer("attention.key_length", max(1, hidden // heads), least=1),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        architecture.experts: keys.integer("expert_count", least=1),
        "num_experts_per_tok": keys.integer("expert_used_count", least=1),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": rotary(keys, architecture.rope),
    }
    config |= architecture.more(keys)
    width = config["head_dim"]
    if "kv_lora_rank" in config:  # heads are of other parts
        del config["head_dim"]
        return config
    keys.only("attention.value_length", (width,), f"and keys have {width} numbers")
    keys.only("rope.dimension_count", (width,), f"and heads have {width} numbers, all of which are rotated")
    return config


def rotary(keys: Metadata, unsaid: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters``; ``unsaid``: what files do not say of scaled ones. A factor without a type is linear, a type
    without a factor changes nothing."""
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise keys.error(f"{keys.name}.rope.scaling.type {quoted(kind)} is not read; known: none, linear, yarn")
    keys.only("rope.scaling.attn_factor", _NOT_SCALED, "which scales rotary embeddings further")
    theta = keys.number("rope.freq_base", 10000.0)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    if kind == "none" or factor in _NOT_SCALED:
        return {"rope_type": "default", "rope_theta": theta}
    rotary: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "linear":
        return rotary
    rotary |= {
        **unsaid,
        "original_max_position_embeddings": keys.get(
            "rope.scaling.original_context_length", keys.need("context_length")
        ),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if (attention := keys.get("rope.scaling.yarn_attn_factor")) is not None:
        rotary["attention_factor"] = attention
    if (scale := keys.number("rope.scaling.yarn_log_multiplier", 0.0)) != 0:
        rotary |= dict.fromkeys(("mscale", "mscale_all_dim"), _plain(scale / _LOG_MULTIPLIER))
    return rotary
