"""Tiny random checkpoints of the families that are written as GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moelight.convert.gguf_metadata import WRITTEN
from moelight.models.graph import self_test
from tests.engine import gguf_architectures as architectures
from tests.models.graph.measured import config_of, sized

# Values of configs that files state by the architecture alone.
_FIXED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "glm4_moe": {"head_dim": 24},  # not the share of a head in the embedding, as in GLM-4.5
    "mistral": {"sliding_window": None},
    "olmoe": {"norm_topk_prob": False},
    "qwen2_moe": {"norm_topk_prob": False},
    "qwen3_moe": {"norm_topk_prob": True},
}
_NATIVE = ("deepseek_v3", "gpt_oss", "mixtral")
NAMES = (
    *(
        name
        for name, (family, _) in architectures.FAMILIES.items()
        if family in WRITTEN
        and family not in (*_FIXED, *_NATIVE)
        and WRITTEN[family].architecture == architectures.architecture(name)
    ),
    *_FIXED,
    *_NATIVE,
)


def save_family(name: str, directory: Path, **values: Any) -> None:
    """A random checkpoint of a family, or of an entry of `gguf_architectures.FAMILIES`, with a tokenizer; ``values``
    replace those of its config."""
    if name in architectures.FAMILIES and name not in _FIXED:
        config = architectures.config_for(name)
    else:
        config = sized(self_test.tiny(config_of(name)))
    for key, value in {**_FIXED.get(name, {}), **values}.items():
        setattr(config, key, value)
    self_test.random_model(config, 0).save_pretrained(directory)
    architectures.save_tokenizer(directory, config.get_text_config().vocab_size)
