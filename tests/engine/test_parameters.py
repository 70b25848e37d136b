"""Sampling parameters in the engine beside a slow twin that is fed transformers' logits, at several batch sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moelight.core.policy import Policy
from moelight.core.request import Completion, SamplingParams, StructuredOutputs
from moelight.engine.engine import Engine
from tests.cases import thorough
from tests.engines import Tiny
from tests.tiny import EOS, hf_model

PROMPTS = [[3 + (5 * n + 7 * at) % 40 for at in range(2 + 5 * n % 23)] for n in range(7)]
LONG: dict[str, Any] = {"max_tokens": 12, "seed": 11}
HOWS = [
    SamplingParams(**LONG, repetition_penalty=1.8),
    SamplingParams(**LONG, frequency_penalty=1.5, presence_penalty=-0.5, temperature=1.3),
    SamplingParams(**LONG, repetition_penalty=0.7, presence_penalty=1.1, temperature=0.7, top_p=0.8),
    SamplingParams(**LONG, logit_bias={EOS: 9.0, 5: 4.0, "8": 3.5}, min_tokens=5),  # type: ignore[dict-item]
    SamplingParams(**LONG, temperature=2.0, min_p=0.2, top_k=9, n=3),
    SamplingParams(**LONG, temperature=1.0, stop_token_ids=[9, 8, 7], min_tokens=3, logit_bias={8: 6.0}, n=2),
    SamplingParams(**LONG, temperature=1.5, allowed_token_ids=[EOS, 5, 7, 11, 13, 40], min_tokens=2, n=2),
]


def slow_choice(logits: np.ndarray, how: SamplingParams, prompt: Sequence[int], output: Sequence[int], key: int) -> int:
    """The next token by logits float32 [V] in vLLM's order, written out."""
    logits = logits.astype(np.float64)
    for token, bias in (how.logit_bias or {}).items():
        logits[token] += bias
    if how.allowed_token_ids is not None:
        logits[[token for token in range(len(logits)) if token not in how.allowed_token_ids]] = -np.inf
    if len(output) < how.min_tokens:
        logits[[*how.stop_token_ids, *(() if how.ignore_eos else (EOS,))]] = -np.inf
    for token in {*prompt, *output}:
        logits[token] *= how.repetition_penalty if logits[token] < 0 else 1 / how.repetition_penalty
    for token, count in Counter(output).items():
        logits[token] -= how.frequency_penalty * count + how.presence_penalty
    if how.greedy:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / how.temperature)
    weights[weights < how.min_p] = 0
    order = np.argsort(-weights, kind="stable")[: how.top_k if how.top_k > 0 else None]
    shares = weights[order] / weights[order].sum()
    order = order[: int(np.searchsorted(shares.cumsum(), how.top_p)) + 1] if how.top_p < 1 else order
    shares = weights[order].cumsum() / weights[order].sum()
    number = np.random.Generator(np.random.Philox(key=key, counter=len(output))).random()
    return int(order[np.searchsorted(shares, number, side="right")])


@torch.no_grad()
def slow_answer(
    model: Any, how: SamplingParams, prompt: Sequence[int], sample: int
) -> tuple[tuple[int, ...], Any, str]:
    output: list[int] = []
    while len(output) < how.max_tokens:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].numpy()
        token = slow_choice(logits, how, prompt, output, (how.seed or 0) + (sample << 64))
        if token == EOS and not how.ignore_eos:
            return tuple(output), None, "stop"
        if token in how.stop_token_ids:
            return tuple(output), token, "stop"
        output.append(token)
    return tuple(output), None, "length"


def seen(result: Sequence[Completion]) -> list[tuple[int, int, tuple[int, ...], Any, str]]:
    return [(item.index, item.sample, item.token_ids, item.stop_reason, item.finish_reason) for item in result]


@pytest.fixture(scope="module")
def wanted(tiny: Tiny) -> list[tuple[int, int, tuple[int, ...], Any, str]]:
    model = hf_model(tiny("mixtral"), dtype=torch.float32)
    return [
        (index, sample, *slow_answer(model, how, prompt, sample))
        for index, (prompt, how) in enumerate(zip(PROMPTS, HOWS, strict=True))
        for sample in range(how.n)
    ]


@pytest.mark.parametrize(
    ("device", "policy"),
    [
        ("cpu", {"batch_size": 16, "micro_batch_size": 16}),
        ("cpu", {"batch_size": 1, "micro_batch_size": 1, "micro_batch_tokens": 5}),
        ("twin", {"batch_size": 5, "micro_batch_size": 2, "micro_batch_tokens": 9, "ffn_device": "gpu"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("lanes", thorough(["inline", "threads"], but=["threads"]))
def test_tokens_are_those_of_a_slow_twin_at_any_batch_size(
    device: str, policy: dict[str, Any], lanes: str, tiny: Tiny, wanted: list[Any]
) -> None:
    model = Policy(model=str(tiny("mixtral")), weight_dtype="float32", **policy)
    with Engine(model, device=device, lanes=lanes) as engine:
        assert seen(engine.generate(PROMPTS, HOWS)) == wanted
    assert {item[4] for item in wanted} == {"stop", "length"}
    assert any(item[3] is not None for item in wanted)


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_only_who_needs_history_is_waited_for(device: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its last such sequence has ended, passes are launched ahead again, and nothing is kept of it."""
    answers: list[Any] = []
    policy = Policy(model=str(tiny("mixtral")), batch_size=4, ffn_device="gpu" if device == "twin" else "cpu")
    with Engine(policy, device=device) as engine:
        land = engine._loaded.land
        flights: list[bool] = []
        launch = engine._launch

        def launching(made: Any, packed: Any) -> Any:
            answers[:] = [made]
            return launch(made, packed)

        monkeypatch.setattr(engine, "_launch", launching)
        monkeypatch.setattr(
            engine._loaded, "land", lambda launched: (flights.append(answers[0].needs_history), land(launched))[1]
        )
        hows = [
            SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1),
            SamplingParams(max_tokens=3, ignore_eos=True, presence_penalty=1.0),
            SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(regex="[a-z]{9}")),
        ]
        engine.generate(PROMPTS[:3], hows)
        assert flights[:3] == [True] * 3
        assert flights[-4:] == [False] * 4
        assert not answers[0]._states
        running = engine.stream(PROMPTS[:3], hows)
        next(running)
        running.close()  # type: ignore[attr-defined]
        assert len(engine.generate(PROMPTS[:3], hows)) == 3


def test_n_answers_of_one_request(tiny: Tiny) -> None:
    """Each its own sample; the first is what a request for one gets."""
    how = SamplingParams(max_tokens=8, temperature=1.0, seed=5, n=4, ignore_eos=True)
    with Engine(Policy(model=str(tiny("mixtral")), batch_size=3), device="cpu") as engine:
        result = engine.generate(PROMPTS[:2], how)
        (one,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True))
        free = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=8, temperature=1.0, n=4, ignore_eos=True))
    assert [(item.index, item.sample) for item in result] == [(i, s) for i in range(2) for s in range(4)]
    assert len({item.token_ids for item in result[:4]}) == 4
    assert result[0].token_ids == one.token_ids
    assert len({item.token_ids for item in free}) == 4


def test_where_texts_end(tmp_path: Path, tiny: Tiny) -> None:
    """Special tokens, stop tokens and stop texts, left out or not."""
    with Engine(Policy(model=str(tiny("mixtral"))), device="cpu") as engine:
        tokenizer = engine.tokenizer
        a, b = (tokenizer.encode(letter)[0] for letter in "ab")
        special = next(iter(tokenizer.special_ids - tokenizer.eos_token_ids))

        def answer(bias: dict[int, float], **how: Any) -> Completion:
            return engine.generate([[a]], SamplingParams(max_tokens=3, logit_bias=bias, **how))[0]

        always: dict[str, Any] = {"bias": {special: 100.0}}
        assert (answer(**always).text, answer(**always).completion_tokens) == ("", 3)
        shown = answer(**always, skip_special_tokens=False).text
        assert shown == 3 * tokenizer.token_text(special) != ""
        named: dict[str, Any] = {**always, "stop": [tokenizer.token_text(special)]}
        assert answer(**named).finish_reason == "length", "as in vLLM: what is not in the text stops nothing"
        assert answer(**named, skip_special_tokens=False).token_ids == (special,)
        stopped = answer({b: 100.0}, stop_token_ids=[b], min_tokens=1)
        assert stopped.stop_reason in (b, None)
        ended = answer({b: 100.0}, stop_token_ids=[b], include_stop_str_in_output=True)
        assert (ended.text, ended.token_ids, ended.stop_reason, ended.finish_reason) == ("b", (), b, "stop")
        assert answer({b: 100.0}, stop_token_ids=[b]).text == ""
        text = answer({b: 100.0}, stop=["bb", "zz"])
        assert (text.text, text.token_ids, text.stop_reason, text.finish_reason) == ("", (b, b), "bb", "stop")
        assert answer({b: 100.0}, stop=["bb"], include_stop_str_in_output=True).text == "bb"
        assert answer({b: 100.0}, stop=["b"], min_tokens=2).token_ids == (b, b, b)
        eos = answer({EOS: 100.0}, logprobs=0)
        assert (eos.text, eos.token_ids, eos.stop_reason, eos.logprobs) == ("", (), None, ())
        assert answer({EOS: 100.0}, ignore_eos=True).token_ids == (EOS,) * 3
