"""Frequencies and factors of the native decoder's rotary embedding, against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moelight.models.decoder import rotation
from moelight.profiles.families import profile_from_config
from moelight.profiles.hf_config import HFConfig
from tests.tiny import tiny_config

pytestmark = pytest.mark.peer

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    "llama3": {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64, "rope_theta": 5e5}},
    "llama3, original positions beside": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 128},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "yarn, original positions unsaid": {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e6},
    "yarn, by the ratio of positions": {
        "rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    },
    "yarn, mscale": {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "yarn, betas": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    },
    "yarn, attention factor": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_rotation_is_that_of_transformers(kind: str) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = tiny_config("qwen3_moe", max_position_embeddings=256, **KINDS[kind])
    spec = profile_from_config(HFConfig(values, where="here"), name="here").attention
    config = AutoConfig.for_model(**values)
    frequencies, factor = ROPE_INIT_FUNCTIONS[spec.rope_type](config)
    positions = torch.tensor([0, 1, 63, 64, 255])
    angles = positions[:, None].float() * torch.cat((frequencies, frequencies))
    cos, sin = rotation(spec, positions, torch.float32)
    assert torch.allclose(cos, angles.cos() * factor, atol=2e-5)
    assert torch.allclose(sin, angles.sin() * factor, atol=2e-5)


@pytest.mark.parametrize(
    ("values", "context"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}}, 800),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 1024),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}}, 256),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 256),
        ({}, 256),
    ],
)
def test_a_context_is_what_positions_are_stretched_to(values: dict[str, Any], context: int) -> None:
    """As vLLM counts it; Qwen3's cards give 131,072 so: 4 times 32,768, beside max_position_embeddings of 40,960."""
    config = HFConfig(tiny_config("qwen3_moe", max_position_embeddings=256, **values), where="here")
    assert profile_from_config(config, name="here").max_positions == context
