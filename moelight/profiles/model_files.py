"""Models by name: ``model_profiles/NAME.yaml`` holds the model's ``config.json`` and its source.

`families` interprets the config's keys.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moelight.core.errors import ConfigError
from moelight.profiles.families import FAMILIES, profile_from_config, profile_from_dir
from moelight.profiles.files import YamlNode, find_profile, profile_names, read_yaml
from moelight.profiles.gguf import read_gguf
from moelight.profiles.gguf_choice import GGUF, gguf_in, split_tag
from moelight.profiles.gguf_families import GraphArchitecture, architecture_of
from moelight.profiles.gguf_models import open_gguf
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile

ALIASES = {"mixtral": "mixtral-8x7b"}

CONFIG_KEYS = (
    "architectures",
    "attention_bias",
    "attn_config",
    "bos_token_id",
    "clip_qkv",
    "d_model",
    "decoder_sparse_step",
    "dtype",
    "eos_token_id",
    "ffn_config",
    "first_k_dense_replace",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "kv_lora_rank",
    "layer_types",
    "lm_head_bias",
    "max_position_embeddings",
    "max_seq_len",
    "max_window_layers",
    "mlp_only_layers",
    "model_type",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_heads",
    "n_layers",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "num_nextn_predict_layers",
    "original_max_position_embeddings",
    "pad_token_id",
    "partial_rotary_factor",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qkv_bias",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "routed_scaling_factor",
    "router_jitter_noise",
    "scoring_func",
    "shared_expert_intermediate_size",
    "sliding_window",
    "swiglu_limit",
    "tie_word_embeddings",
    "topk_group",
    "topk_method",
    "torch_dtype",
    "use_qk_norm",
    "use_sliding_window",
    "v_head_dim",
    "vocab_size",
)

_ROPE_KEYS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "long_factor",
    "long_mscale",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "short_mscale",
    "truncate",
    "type",
)
NESTED_KEYS = {
    "attn_config": ("clip_qkv", "kv_n_heads", "rope_theta"),
    "ffn_config": ("ffn_act_fn", "ffn_hidden_size", "moe_normalize_expert_weights", "moe_num_experts", "moe_top_k"),
    "ffn_config.ffn_act_fn": ("name",),
    "rope_parameters": _ROPE_KEYS,
    "rope_scaling": _ROPE_KEYS,
}


def load_model_profile(name_or_path: str, others: Callable[[Path], ModelProfile] = profile_from_dir) -> ModelProfile:
    """The profile of a named model, of a YAML file, of a GGUF file, or of the checkpoint in a directory (also of its
    config.json); ``others`` reads directories and files whose family is none of `FAMILIES`.

    Names take precedence over directories. Raises CheckpointError if a directory has no readable ``config.json``.
    """
    path = _place(name_or_path)
    if path.suffix == GGUF:
        architecture = architecture_of(read_gguf(path))[1]
        return others(path) if isinstance(architecture, GraphArchitecture) else open_gguf(path).profile
    if path.is_dir():
        family = HFConfig.from_file(path / "config.json").find("model_type")
        return others(path) if isinstance(family, str) and family not in FAMILIES else profile_from_dir(path)
    name, config = _read(path)
    return profile_from_config(HFConfig(config, where=str(path)), name=name)


def model_config(name_or_path: str) -> dict[str, Any]:
    """The raw ``config.json`` values of the model that `load_model_profile` finds; raises the same errors."""
    path = _place(name_or_path)
    if path.suffix == GGUF:
        return dict(open_gguf(path).config.values)
    if path.is_dir():
        return dict(HFConfig.from_file(path / "config.json").values)
    return _read(path)[1]


def _place(name_or_path: str) -> Path:
    """The directory, YAML file or GGUF file of ``name_or_path``."""
    path = Path(name_or_path)
    directory, tag = split_tag(name_or_path)
    if tag and not path.exists() and Path(directory).is_dir():
        path = gguf_in(Path(directory), tag) or path
        name_or_path = str(path)
    elif path.is_dir() and not (path / "config.json").exists():
        path = gguf_in(path, "") or path
        name_or_path = name_or_path if path.is_dir() else str(path)
    if path.name == "config.json" and path.is_file():
        return path.parent
    if path.name != name_or_path or path.suffix in (".yaml", ".yml", GGUF):
        if not path.exists():
            raise ConfigError(f"no model at {name_or_path!r}: no such directory or file")
        return path
    name = ALIASES.get(name_or_path, name_or_path)
    if name and name not in profile_names("model") and path.is_dir():
        return path
    return find_profile("model", name)


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    fields = read_yaml(path).fields("source", required=("name", "config"))
    if "source" in fields:
        fields["source"].text()
    config = {key: _plain(node, key) for key, node in fields["config"].fields(*CONFIG_KEYS).items()}
    return fields["name"].text(), config


def _plain(node: YamlNode, key: str) -> Any:
    """The value of ``key``; the keys of a mapping are restricted to `NESTED_KEYS` if listed there."""
    if key not in NESTED_KEYS or not node.is_mapping():
        return node.plain()
    return {name: _plain(inner, f"{key}.{name}") for name, inner in node.fields(*NESTED_KEYS[key]).items()}
