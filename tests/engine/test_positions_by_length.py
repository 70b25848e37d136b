"""Positions that are stretched by the length of each sequence: its tokens are those of transformers' greedy search for
it alone, whatever rides in its passes, in whatever parts its prompt is computed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine.engine import Engine
from moelight.models.graph.rotary import follow_length
from tests.cases import thorough
from tests.tiny import save_byte_tokenizer

pytestmark = pytest.mark.peer

BORDER, NEW = 64, 12
LENGTHS = (60, 64, 5, 100, 65, 30)  # across the border, at it, and on either side
SHORT, LONG = [1 + 0.2 * n for n in range(8)], [1.0 + 4 * n for n in range(8)]
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_scaling": LONGROPE, "original_max_position_embeddings": BORDER},
    "phimoe": {
        "rope_scaling": {
            **LONGROPE,
            "original_max_position_embeddings": BORDER,
            "short_mscale": 1.243,
            "long_mscale": 1.143,
        },
        "original_max_position_embeddings": BORDER,
        **EXPERTS,
    },
    "mixtral": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        **EXPERTS,
        "max_position_embeddings": BORDER,
    },
}


def model_of(family: str, directory: Path) -> Any:
    """A random model of ``family``, written into ``directory``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **MODELS[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(6)
    model.save_pretrained(directory)
    save_byte_tokenizer(directory)
    for part in model.modules():
        follow_length(part)  # transformers' phimoe has the short factors at any length
    return model


@pytest.mark.parametrize("family", thorough(MODELS, but=[*MODELS][:1]))
def test_tokens_are_those_of_the_sequence_alone(family: str, tmp_path: Path) -> None:
    model, draw = model_of(family, tmp_path), torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 250, (length,), generator=draw).tolist() for length in LENGTHS]
    how, expected = SamplingParams(max_tokens=NEW, ignore_eos=True), []
    for prompt in prompts:  # each by a model that has seen no other length, which dynamic NTK would remember
        ids = torch.tensor([prompt])
        made = copy.deepcopy(model).generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        expected.append(made[0, len(prompt) :].tolist())
    sizes = {"batch_size": 3, "micro_batch_size": 2, "micro_batch_tokens": 24}  # prompts in parts, decoding beside
    policy = Policy(model=str(tmp_path), weights=Shares(disk=1.0), kv_tokens=3 * 128, **sizes)
    with Engine(policy, device="cpu") as engine:
        together = [list(answer.token_ids) for answer in engine.generate(prompts, how)]
        alone = list(engine.generate(prompts[:1], how)[0].token_ids)
    assert together == expected
    assert alone == expected[0]


@pytest.mark.thorough
def test_a_suspended_sequence_is_computed_at_the_positions_that_it_had(tmp_path: Path) -> None:
    """Before the border, beyond it, and where its positions change while it is suspended."""
    model_of("phimoe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 96}))
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 250, (length,), generator=draw).tolist() for length in (5, 30, 62, 12, 40, 20)]
    free = SamplingParams(max_tokens=None, ignore_eos=True)
    sizes = {"batch_size": 6, "micro_batch_size": 6, "micro_batch_tokens": 40, "kv_block_size": 16}
    answers, suspended = [], []
    for cache in (6 * 96, 160):
        with Engine(Policy(model=str(tmp_path), kv_tokens=cache, **sizes), device="cpu") as engine:
            answers.append([answer.token_ids for answer in engine.generate(prompts, free)])
            suspended.append(engine.suspended)
    assert answers[0] == answers[1]
    assert [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers[0], strict=True)] == [96] * 6
    assert suspended[0] == 0
    assert suspended[1] >= 3
