"""Model families as data: one file each, and the table of all families."""

from __future__ import annotations

from pathlib import Path

from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.registry import Registry
from moelight.profiles.families.family import ModelFamily, read_profile
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile

FAMILIES: Registry[ModelFamily] = Registry(
    "model_type",
    {
        "mixtral": "moelight.profiles.families.known:MIXTRAL",
        "qwen3_moe": "moelight.profiles.families.known:QWEN3_MOE",
        "olmoe": "moelight.profiles.families.known:OLMOE",
        "qwen2_moe": "moelight.profiles.families.known:QWEN2_MOE",
        "deepseek": "moelight.profiles.families.known:DEEPSEEK",
        "deepseek_v2": "moelight.profiles.families.known:DEEPSEEK_V2",
        "deepseek_v3": "moelight.profiles.families.known:DEEPSEEK_V3",
        "dbrx": "moelight.profiles.families.known:DBRX",
        "gpt_oss": "moelight.profiles.families.known:GPT_OSS",
        "phimoe": "moelight.profiles.families.known:PHIMOE",
        "glm4_moe": "moelight.profiles.families.known:GLM4_MOE",
    },
)


def profile_from_config(config: HFConfig, *, name: str) -> ModelProfile:
    """The profile of the model that ``config`` describes.

    Raises:
        ConfigError: ``model_type`` is absent, dense or unknown (the message lists the known ones), or a field is
            impossible.
    """
    model_type = config.find("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"{config.where}: model_type {model_type!r} is not a Mixture-of-Experts family moelight knows"
            f"{did_you_mean(str(model_type), FAMILIES)}; known: {', '.join(FAMILIES)}"
        )
    return read_profile(config, FAMILIES.get(model_type), name=name)


def profile_from_dir(directory: Path) -> ModelProfile:
    """The profile of the checkpoint in ``directory``; reads its ``config.json`` only."""
    return profile_from_config(HFConfig.from_file(directory / "config.json"), name=directory.resolve().name)
