"""Log-probabilities beside transformers': of generated tokens and of prompts, however passes cut them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moelight.core.policy import Policy, Shares
from moelight.core.request import Completion, Request, SamplingParams
from moelight.engine.engine import Engine
from tests.cases import thorough
from tests.engines import Tiny
from tests.tiny import FAMILIES, hf_model

DEMO = Path(__file__).resolve().parents[2] / "moelight" / "demo"
PROMPTS = [[3 + (5 * n + 7 * at) % 90 for at in range(2 + 9 * n % 41)] for n in range(7)]
HOW = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2)
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "twin": {"ffn_device": "gpu", "weights": Shares(device=0.5, host=0.5)},
    "twin, cache there": {"ffn_device": "gpu", "attention_device": "gpu", "kv": Shares(device=1.0)},
}


def served(
    model: Path, prompts: Sequence[Sequence[int]], how: SamplingParams, position: str = "cpu"
) -> list[Completion]:
    policy = Policy(
        model=str(model),
        batch_size=4,
        micro_batch_size=3,
        micro_batch_tokens=13,
        weight_dtype="float32",
        **PLACES[position],
    )
    with Engine(policy, device=position.partition(",")[0]) as engine:
        return engine.generate(prompts, how)


@torch.no_grad()
def wanted(directory: Path, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of each sequence float32 [T, V]: row t is what the model says of the token after t."""
    model = hf_model(directory, dtype=torch.float32)
    return [torch.log_softmax(model(torch.tensor([list(ids)])).logits[0], dim=-1) for ids in sequences]


def check(result: Any, logprobs: Tensor, token: int, top: int) -> None:
    order = logprobs.sort(descending=True)
    assert result[token].logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
    near = (logprobs - logprobs[token]).abs() < 2e-4
    assert abs(result[token].rank - 1 - int((logprobs > logprobs[token]).sum())) < int(near.sum())
    assert len(result) in (top, top + 1)
    likeliest = sorted((item.logprob for item in result.values()), reverse=True)[:top]
    assert likeliest == pytest.approx(order.values[:top].tolist(), abs=1e-4)
    assert all(item.logprob == pytest.approx(float(logprobs[i]), abs=1e-4) for i, item in result.items())


@pytest.mark.parametrize(
    ("name", "setting"),
    thorough(
        [*((name, "cpu") for name in (*FAMILIES, "demo")), ("demo", "twin"), ("mixtral", "twin, cache there")],
        but=[("qwen3_moe", "cpu"), ("demo", "twin"), ("mixtral", "twin, cache there")],
    ),
)
def test_log_probabilities_are_those_of_transformers(name: str, setting: str, tiny: Tiny) -> None:
    directory = DEMO if name == "demo" else tiny(name)
    result = served(directory, PROMPTS, HOW, setting)
    sequences = [[*prompt, *item.token_ids] for prompt, item in zip(PROMPTS, result, strict=True)]
    for prompt, item, logprobs in zip(PROMPTS, result, wanted(directory, sequences), strict=True):
        assert item.prompt_logprobs is not None
        assert item.logprobs is not None
        assert item.prompt_logprobs[0] is None
        for at, token in enumerate(prompt[1:], start=1):
            check(item.prompt_logprobs[at], logprobs[at - 1], token, 2)
        for at, token in enumerate(item.token_ids):
            check(item.logprobs[at], logprobs[len(prompt) - 1 + at], token, 3)
            assert item.logprobs[at][token].rank == 1
        total = sum(entry[token].logprob for entry, token in zip(item.logprobs, item.token_ids, strict=True))
        assert item.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("setting", thorough(PLACES, but=["twin, cache there"]))
def test_a_prompt_is_scored_without_generating(tiny: Tiny, setting: str) -> None:
    """Beside others that go on; from where it is asked for; as it is where everything is scored."""
    model = tiny("mixtral")
    full = [item.prompt_logprobs or () for item in served(model, PROMPTS, HOW)]
    policy = Policy(
        model=str(model),
        batch_size=3,
        micro_batch_size=2,
        micro_batch_tokens=7,
        weight_dtype="float32",
        **PLACES[setting],
    )
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with Engine(policy, device=setting.partition(",")[0]) as engine:
        requests = [
            Request(index=n, token_ids=tuple(ids), sampling=scoring, scored_from=1 + n) for n, ids in enumerate(PROMPTS)
        ]
        others = [Request(index=n + 50, token_ids=tuple(ids), sampling=HOW) for n, ids in enumerate(PROMPTS)]
        mixed = [item for pair in zip(requests, others, strict=True) for item in pair]
        result = {item.index: item for item in engine.run(mixed)}
        assert engine.stats.completion_tokens == 5 * len(PROMPTS)
        passes = engine.stats.passes
        alone = list(engine.run(requests[:3]))
        assert engine.stats.passes - passes <= 2
        assert len(alone) == 3
    for n, ids in enumerate(PROMPTS):
        item = result[n]
        assert (item.text, item.token_ids, item.finish_reason, item.logprobs) == ("", (), "length", None)
        assert item.prompt_logprobs is not None
        assert len(item.prompt_logprobs) == len(ids)
        assert [entry is None for entry in item.prompt_logprobs] == [at < 1 + n for at in range(len(ids))]
        for at in range(1 + n, len(ids)):
            (entry,) = (item.prompt_logprobs[at] or {}).values()
            assert entry.logprob == pytest.approx(full[n][at][ids[at]].logprob, abs=1e-4)  # type: ignore[index]


def test_the_whole_vocabulary_is_a_distribution(tiny: Tiny) -> None:
    how = SamplingParams(max_tokens=2, logprobs=-1, prompt_logprobs=-1, temperature=1.5, seed=3, n=2)
    for item in served(tiny("mixtral"), PROMPTS[:2], how):
        assert item.logprobs is not None
        assert item.prompt_logprobs is not None
        for entries in (*item.logprobs, *item.prompt_logprobs[1:]):
            assert entries is not None
            assert sorted(entries) == list(range(307))
            assert sum(torch.tensor([one.logprob for one in entries.values()]).exp()) == pytest.approx(1, abs=1e-4)


def test_log_probabilities_are_taken_before_anything_changes_logits(tiny: Tiny) -> None:
    """And what is drawn is the same whether they are asked for or not."""
    prompt = PROMPTS[3]
    changed: dict[str, Any] = {
        "max_tokens": 6,
        "temperature": 0.8,
        "seed": 4,
        "repetition_penalty": 1.9,
        "logit_bias": {7: -30.0},
    }
    plain = served(tiny("mixtral"), [prompt], SamplingParams(**changed))
    (result,) = served(tiny("mixtral"), [prompt], SamplingParams(**changed, logprobs=1))
    assert result.token_ids == plain[0].token_ids
    (logprobs,) = wanted(tiny("mixtral"), [[*prompt, *result.token_ids]])
    assert result.logprobs is not None
    for at, token in enumerate(result.token_ids):
        check(result.logprobs[at], logprobs[len(prompt) - 1 + at], token, 1)
