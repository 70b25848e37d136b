"""Tiny checkpoints of families that run as module graphs, and how tests run them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine.engine import Engine
from moelight.models.graph.self_test import tiny
from tests.models.graph.released import RELEASED
from tests.tiny import save_byte_tokenizer

VOCABULARY = 320
LENGTHS = (9, 30, 5, 17, 11)
NEW = 6
HOW = SamplingParams(max_tokens=NEW, ignore_eos=True)
SIZES: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 2, "micro_batch_tokens": 16, "kv_tokens": 512}
STREAMED = Shares(disk=1.0)
ORDERS = (  # schedule, attention, experts, homes
    ("cgopipe", "cpu", "gpu", STREAMED),
    ("cgopipe", "cpu", "split", Shares(device=0.3, host=0.7)),
    ("module", "cpu", "gpu", STREAMED),
    ("flexgen", "gpu", "gpu", STREAMED),
    ("flexgen-c", "cpu", "gpu", STREAMED),
    ("fastdecode", "cpu", "gpu", STREAMED),
    ("serial", "cpu", "gpu", Shares(device=1.0)),
)
ORDERS_BY_NAME = {f"{order[0]}-{order[2]}": order for order in ORDERS}


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 250, (count,), generator=draw).tolist() for count in LENGTHS]


def made(directory: Path, family: str, vocabulary: int = VOCABULARY) -> tuple[Path, list[list[int]]]:
    """The tiny checkpoint of ``family``, saved by transformers in ``directory``, and its greedy tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny(AutoConfig.for_model(family, **RELEASED.get(family, {})))
    config.vocab_size = vocabulary
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.15)
        module.save_pretrained(directory)
        expected = [greedy(module, prompt) for prompt in prompts()]
    save_byte_tokenizer(directory)
    return directory, expected


def greedy(module: torch.nn.Module, prompt: list[int]) -> list[int]:
    """By whole passes, without a cache."""
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def tokens(directory: Path, device: str = "cpu", **policy: Any) -> list[list[int]]:
    return answers(directory, device, prompts(), HOW, **policy)


def few_tokens(directory: Path, device: str = "cpu", **policy: Any) -> list[list[int]]:
    """Two each of the two shortest prompts: for kernels that are interpreted, where a row takes a second."""
    shortest = sorted(prompts(), key=len)[:2]
    return answers(directory, device, shortest, replace(HOW, max_tokens=2), **policy)


def answers(
    directory: Path, device: str, asked: list[list[int]], sampling: SamplingParams, **policy: Any
) -> list[list[int]]:
    with Engine(Policy(model=str(directory), **{**SIZES, **policy}), device=device) as engine:
        return [list(item.token_ids) for item in engine.generate(asked, sampling)]
