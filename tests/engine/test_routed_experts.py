"""The experts of every token, as transformers' routers choose them, wherever experts are and however passes are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moelight.core.errors import InputError
from moelight.core.policy import Policy
from moelight.core.request import PROMPT_ONLY, Completion, SamplingParams
from moelight.engine.engine import Engine
from moelight.engine.options import RunOptions
from tests.cases import thorough
from tests.engine.graphs import SIZES, STREAMED
from tests.engine.test_embed import PLACES
from tests.engines import Tiny
from tests.tiny import FAMILIES, hf_model

PROMPTS = [[3 + (5 * n + 7 * at) % 90 for at in range(1 + 11 * n % 37)] for n in range(6)]
HOW = SamplingParams(max_tokens=5, ignore_eos=True, return_routed_experts=True)


def opened(model: Path, position: str = "cpu", *, options: RunOptions | None = None, **values: Any) -> Engine:
    sizes = {"batch_size": 4, "micro_batch_size": 3, "micro_batch_tokens": 13, "weight_dtype": "float32"}
    policy = Policy(model=str(model), **{**sizes, **PLACES[position], **values})
    return Engine(policy, options=options, device="twin" if position.startswith("twin") else "cpu")


@torch.no_grad()
def wanted(model: torch.nn.Module, ids: list[int], k: int) -> np.ndarray:
    """int [tokens, layers, k], ascending."""
    logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(k, dim=-1).indices.sort(dim=-1).values for layer in logits], dim=1).numpy()


def check(directory: Path, k: int, prompts: list[list[int]], result: list[Completion]) -> None:
    model = hf_model(directory, dtype=torch.float32)
    for prompt, item in zip(prompts, result, strict=True):
        assert item.prompt_routed_experts is not None and item.routed_experts is not None
        assert item.prompt_routed_experts.dtype == item.routed_experts.dtype == np.int16
        assert len(item.prompt_routed_experts) == len(prompt)
        assert len(item.routed_experts) == len(item.token_ids) - (item.finish_reason == "length")
        experts = np.concatenate([item.prompt_routed_experts, item.routed_experts])
        assert np.array_equal(experts, wanted(model, [*prompt, *item.token_ids], k)[: len(experts)])


@pytest.mark.parametrize(
    ("family", "position"),
    thorough(
        [*((family, "cpu") for family in FAMILIES), *(("mixtral", position) for position in PLACES)],
        but=[("qwen3_moe", "cpu"), ("mixtral", "streamed"), ("mixtral", "twin"), ("mixtral", "twin, cache there")],
    ),
)
def test_experts_are_those_of_transformers(family: str, position: str, tiny: Tiny) -> None:
    """Also of prompts that begin alike, the first of which could be reused."""
    directory = tiny(family)
    prompts = [*PROMPTS, [*PROMPTS[3], 7], PROMPTS[3]]
    with opened(directory, position, kv_block_size=16) as engine:
        result = engine.generate(prompts, HOW)
    check(directory, 3, prompts, result)
    assert {item.cached_tokens for item in result} == {0}


@pytest.mark.parametrize("weights", thorough([STREAMED, None], but=[STREAMED]), ids=["streamed", "resident"])
def test_experts_of_a_module_graph(weights: Any, checkpoints: Any) -> None:
    directory, _ = checkpoints("qwen2_moe")
    sizes = SIZES if weights is None else {**SIZES, "weights": weights}
    with Engine(Policy(model=str(directory), **sizes), device="cpu") as engine:
        result, k = engine.generate(PROMPTS, HOW), engine.profile.router.top_k
    check(directory, k, PROMPTS, result)


def test_tokens_are_the_same_and_others_have_no_experts(tiny: Tiny) -> None:
    """Samples of one prompt, and rows beside them that do not ask."""
    model = tiny("mixtral")
    plain = SamplingParams(max_tokens=5, ignore_eos=True)
    asked = [SamplingParams(max_tokens=5, n=2, temperature=0.9, seed=3, return_routed_experts=True), plain] * 3
    with opened(model) as engine:
        expected = engine.generate(PROMPTS, plain)
        result = engine.generate(PROMPTS, asked)
        assert engine.generate(PROMPTS[:1], plain)[0].routed_experts is None
    samples = [item for item in result if item.index % 2 == 0]
    assert {item.sample for item in samples} == {0, 1}
    check(model, 3, [PROMPTS[item.index] for item in samples], samples)
    for item in result:
        if item.index % 2:
            assert item.token_ids == expected[item.index].token_ids
            assert item.routed_experts is None and item.prompt_routed_experts is None


@pytest.mark.thorough
def test_experts_of_suspended_answers(tiny: Tiny) -> None:
    """Their prompts and tokens are computed a second time."""
    model = tiny("mixtral", max_position_embeddings=96)
    how = SamplingParams(max_tokens=None, ignore_eos=True, return_routed_experts=True)
    prompts = [[5 + n, 6, 7, 8] for n in range(4)]
    with opened(model, kv_tokens=160, kv_block_size=16) as engine:
        result = engine.generate(prompts, how)
        assert engine.suspended > 0
    check(model, 3, prompts, result)


def test_experts_beside_drafts(tiny: Tiny) -> None:
    """Those of drafts that are not accepted are no token's."""
    model, how = tiny("mixtral"), SamplingParams(max_tokens=40, ignore_eos=True, return_routed_experts=True)
    prompts = [[5, 6, 7, 8] * 5, [9, 10] * 7, [11, 12, 13]]
    with opened(model) as engine:
        expected = engine.generate(prompts, how)
    with opened(model, options=RunOptions(speculate="ngram", num_speculative_tokens=3)) as engine:
        result = engine.generate(prompts, how)
        counts = engine.stats.counts
    assert [item.token_ids for item in result] == [item.token_ids for item in expected]
    assert counts["drafted_tokens"] > counts["accepted_tokens"] > 0
    for item, other in zip(result, expected, strict=True):
        assert item.routed_experts is not None and other.routed_experts is not None
        assert len(item.routed_experts) in (39, 40)
        assert np.array_equal(item.routed_experts[:39], other.routed_experts)


def test_a_scored_prompt_has_experts_but_for_its_last_token(tiny: Tiny) -> None:
    how = SamplingParams(max_tokens=0, prompt_logprobs=0, return_routed_experts=True)
    model, prompts = tiny("mixtral"), PROMPTS[1:]
    with opened(model) as engine:
        result = engine.generate(prompts, how)
        assert engine.generate(prompts, PROMPT_ONLY)[0].prompt_routed_experts is None
    module = hf_model(model, dtype=torch.float32)
    for prompt, item in zip(prompts, result, strict=True):
        assert item.prompt_routed_experts is not None
        assert np.array_equal(item.prompt_routed_experts, wanted(module, prompt, 3)[:-1])


def test_a_dense_model_refuses(checkpoints: Any) -> None:
    directory, _ = checkpoints("llama")
    refused = pytest.raises(InputError, match="return_routed_experts: the model has no experts")
    with Engine(Policy(model=str(directory), **SIZES), device="cpu") as engine, refused:
        engine.generate(PROMPTS, HOW)


def test_times_of_answers(tiny: Tiny) -> None:
    with opened(tiny("mixtral")) as engine:
        result = engine.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True))
        (short,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=1))
        (scored,) = engine.generate(PROMPTS[1:2], PROMPT_ONLY)
    for item in result:
        assert item.metrics is not None and item.metrics.first_token_s is not None
        assert item.metrics.queue_s >= 0 and item.metrics.generation_s is not None
        assert item.time_to_first_token_s == item.metrics.queue_s + item.metrics.first_token_s > 0
        assert item.time_per_output_token_s == item.metrics.generation_s / 3 > 0
    later = [item.metrics.queue_s for item in result[4:] if item.metrics is not None]
    assert min(later) > 0  # four are admitted at a time
    assert short.time_per_output_token_s is None and short.time_to_first_token_s is not None
    assert scored.metrics is not None and scored.time_to_first_token_s is None
