"""A KV cache of int8 codes: the same tokens in every order, size and device; twice the blocks in the same memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.request import Completion, SamplingParams
from moelight.engine.engine import Engine
from tests.engines import Tiny, forced, relative

SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
# Prompts of one token, of parts of blocks and of several, two of which share three blocks of 16 tokens.
SHARED = [65 + (5 * at) % 60 for at in range(50)]
SEQUENCES = [[70], SHARED, SHARED[:49] + [99], *([66 + (7 * row + at) % 60 for at in range(9 + 13 * row)] for row in range(3))]
STREAMED = Shares(host=0.5, disk=0.5)
ON_CPU: dict[str, dict[str, Any]] = {
    "resident": {"weights": Shares(host=1.0)},
    "streamed, prompts in parts": {"weights": STREAMED, "micro_batch_tokens": 7, "micro_batch_size": 2},
    "sequences one by one": {"weights": STREAMED, "batch_size": 1, "micro_batch_size": 1, "kv_block_size": 16},
    "serial": {"weights": STREAMED, "schedule": "serial", "micro_batch_size": 3},
}
BESIDE: dict[str, dict[str, Any]] = {
    "cgopipe": {"weights": STREAMED},
    "cgopipe, prompts in parts": {"weights": STREAMED, "micro_batch_tokens": 7, "micro_batch_size": 2},
    "flexgen": {"schedule": "flexgen", "attention_device": "gpu", "weights": STREAMED},
    "flexgen, prompts in parts": {
        "schedule": "flexgen",
        "attention_device": "gpu",
        "weights": STREAMED,
        "micro_batch_tokens": 7,
        "micro_batch_size": 2,
        "kv": Shares(device=0.4, host=0.6),
    },
    "cache on the device": {"attention_device": "gpu", "kv": Shares(device=1.0), "weights": Shares(device=1.0)},
}


def answers(model: Path, device: str = "cpu", **options: Any) -> list[Completion]:
    sizes = {"batch_size": 6, "micro_batch_size": 6, "kv_tokens": 1024, "weight_dtype": "float32", "kv_dtype": "int8"}
    sizes["ffn_device"] = "cpu" if device == "cpu" else "gpu"
    with Engine(Policy(model=str(model), **{**sizes, **options}), device=device) as engine:
        return engine.generate(SEQUENCES, SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=0))


@pytest.fixture(scope="module")
def mixtral(tiny: Tiny) -> Path:
    return tiny("mixtral", **SHAPE)


def test_every_order_and_cut_gives_the_same_tokens_and_scores(mixtral: Path) -> None:
    """What a prompt's rows see of each other is what the cache keeps, so its parts do not matter."""
    first, *others = (answers(mixtral, **order) for order in ON_CPU.values())
    others += [answers(mixtral, "twin", **order) for order in BESIDE.values()]
    scores = torch.tensor([each.cumulative_prompt_logprob or 0.0 for each in first])
    for found in others:
        assert [each.token_ids for each in found] == [each.token_ids for each in first]
        mine = torch.tensor([each.cumulative_prompt_logprob or 0.0 for each in found])
        torch.testing.assert_close(mine, scores, rtol=1e-5, atol=1e-4)
    assert len({each.token_ids for each in first}) > 2
