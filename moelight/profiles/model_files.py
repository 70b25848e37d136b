"""Models by name: ``model_profiles/NAME.yaml`` holds the ``config.json`` of the real one, and where it was read.

Knows the YAML around the config and the short names. What the config's keys mean is the families' business.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moelight.core.errors import ConfigError
from moelight.profiles.families import profile_from_config, profile_from_dir
from moelight.profiles.files import find_profile, profile_names, read_yaml
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile

ALIASES = {"mixtral": "mixtral-8x7b"}

CONFIG_KEYS = (
    "architectures",
    "attention_bias",
    "bos_token_id",
    "clip_qkv",
    "decoder_sparse_step",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_only_layers",
    "model_type",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "use_sliding_window",
    "vocab_size",
)


def load_model_profile(name_or_path: str) -> ModelProfile:
    """The profile of a named model, of a YAML file, or of the checkpoint in a directory (its ``config.json``).

    A bare name is looked up among the named models before it is taken for a directory.

    Raises:
        ConfigError: no such model (the nearest is named), or a file breaks a rule.
        CheckpointError: the directory has no readable ``config.json``.
    """
    path = _place(name_or_path)
    if path.is_dir():
        return profile_from_dir(path)
    name, config = _read(path)
    return profile_from_config(HFConfig(config, where=str(path)), name=name)


def model_config(name_or_path: str) -> dict[str, Any]:
    """The raw ``config.json`` values of the same models as `load_model_profile`.

    Raises:
        ConfigError, CheckpointError: as there.
    """
    path = _place(name_or_path)
    if path.is_dir():
        return dict(HFConfig.from_file(path / "config.json").values)
    return _read(path)[1]


def _place(name_or_path: str) -> Path:
    """The directory or YAML file that is meant."""
    path = Path(name_or_path)
    if path.name != name_or_path or path.suffix in (".yaml", ".yml"):
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
    config = {key: node.plain() for key, node in fields["config"].fields(*CONFIG_KEYS).items()}
    return fields["name"].text(), config
