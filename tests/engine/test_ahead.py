"""Tokens one pass late: across a link the next pass is on its way before the host has seen the tokens of this one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moelight.core.policy import Policy, Shares
from moelight.core.request import Completion, Request, SamplingParams, StructuredOutputs
from moelight.engine.batcher import SampledRow, SequenceChunk
from moelight.engine.call_constraints import CallConstraints
from moelight.engine.constraints import Constraints
from moelight.engine.engine import Engine
from moelight.engine.output_processor import OutputProcessor
from moelight.engine.pass_runner import PassRunner
from moelight.engine.sampling import next_tokens
from moelight.engine.tokenizer import Tokenizer
from moelight.runtime.lanes import HostTicket, StreamTicket
from tests.cases import thorough
from tests.engines import Tiny

PROMPTS = [[65 + n] * (1 + 5 * n % 23) for n in range(9)]
THERE: dict[str, Any] = {"ffn_device": "gpu", "attention_device": "gpu", "kv": Shares(device=1.0)}


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("mixtral")


def policy(model: Path, **changes: Any) -> Policy:
    chosen: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 2, "weights": Shares(device=1.0), **THERE, **changes}
    return Policy(model=str(model), **chosen)


def tokens(completions: Sequence[Completion]) -> list[tuple[int, tuple[int, ...], str]]:
    return sorted((completion.index, completion.token_ids, completion.finish_reason) for completion in completions)


def test_no_pass_waits_for_the_host(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two launches nothing waits but for the tokens of the pass before; a launch itself waits for nothing."""
    log: list[str] = []
    for kind in (HostTicket, StreamTicket):
        wait = kind.wait

        def noted(self: Any, wait: Any = wait) -> None:
            log.append("wait")
            wait(self)

        monkeypatch.setattr(kind, "wait", noted)
    launch, land = PassRunner.launch, PassRunner.land

    def launching(self: PassRunner, *args: Any, **kwargs: Any) -> Any:
        log.append("launch")
        launched = launch(self, *args, **kwargs)
        log.append("launched")
        return launched

    def collecting(self: PassRunner, *args: Any) -> Any:
        log.append("land")
        return land(self, *args)

    monkeypatch.setattr(PassRunner, "launch", launching)
    monkeypatch.setattr(PassRunner, "land", collecting)
    with Engine(policy(model), device="twin") as engine:
        engine.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True))
        passes = engine.stats.passes
    marks = [mark for mark, before in zip(log, ["", *log], strict=False) if mark != "wait" or before != "wait"]
    steady = ["launch", "launched", "land", "wait"] * (passes - 1)
    assert marks == ["launch", "launched", *steady, "land", "wait"]


class Reads(TorchDispatchMode):
    """Refuses what reads a tensor's number: on a device it would wait for everything launched so far."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default
        assert function is not torch.ops.aten.nonzero.default
        return function(*args, **(kwargs or {}))


def test_choosing_tokens_reads_nothing_back() -> None:
    logits = torch.randn(40, 60, generator=torch.Generator().manual_seed(1))
    hows = [SamplingParams(temperature=row % 3, top_k=row % 5, top_p=0.5 + row % 2 / 2) for row in range(40)]
    with Reads():
        chosen = next_tokens(logits, hows, list(range(40)), [0] * 40)
    assert chosen.shape == (40,)


def test_choosing_apart_and_scoring_read_nothing_back(model: Path) -> None:
    tokenizer = Tokenizer.from_dir(model)
    special: list[dict[str, Any]] = [
        {"logprobs": 3},
        {"logprobs": -1, "temperature": 1.0},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5, "logprobs": 0},
        {"logit_bias": {4: 2.0}, "min_tokens": 2},
        {"structured_outputs": StructuredOutputs(regex="[a-z]+"), "temperature": 0.7},
        {},
    ]
    hows = [SamplingParams(prompt_logprobs=2, **special[row % len(special)]) for row in range(40)]
    requests = [Request(index=row, token_ids=(65, 66, 65), sampling=how) for row, how in enumerate(hows)]
    answers = OutputProcessor(requests, tokenizer, CallConstraints(Constraints(tokenizer, 307)), 99)
    chunks = [SequenceChunk(sequence=sequence, start=0, count=3) for sequence in answers.sequences]
    logits = torch.randn(40, 307, generator=torch.Generator().manual_seed(1))
    with Reads():
        chosen = answers.choose([SampledRow(chunk, 0) for chunk in chunks], logits)
        answers.score(chunks, 40, logits, torch.tensor([66, 65] * 20))
    assert chosen.shape == (40,)
    assert all(tokenizer.decode([int(chosen[row])]).islower() for row in range(5, 40, 7)), "each row has its own change"
    assert [int(chosen[row]) for row in range(6, 40, 7)] == logits.argmax(1)[6::7].tolist()


@pytest.mark.parametrize(
    ("lanes", "temperature"),
    thorough([("auto", 0.0), ("threads", 0.9), ("inline", 0.9)], but=[("auto", 0.0)]),
)
def test_who_ends_early_rides_once_more_for_nothing(model: Path, lanes: str, temperature: float) -> None:
    """By the end-of-sequence token or by a stop text: the same answers as where tokens are seen at once."""
    how = SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=3)
    with Engine(
        policy(
            model,
            **dict.fromkeys(("ffn_device", "attention_device"), "cpu"),
            kv=Shares(host=1.0),
            weights=Shares(host=1.0),
        ),
        device="cpu",
    ) as engine:
        full = engine.generate(PROMPTS, how)
        ends = frozenset(item.token_ids[2 + item.index % 5] for item in full)
        text = next(item.text[3:5] for item in full if len(item.text) > 8)
        stopping = SamplingParams(max_tokens=12, temperature=temperature, seed=3, stop=text)
        engine.tokenizer.eos_token_ids = ends
        wanted = tokens(engine.generate(PROMPTS, stopping))
    assert any(reason == "stop" for _, _, reason in wanted)
    with Engine(policy(model), device="twin", lanes=lanes) as engine:
        engine.tokenizer.eos_token_ids = ends
        assert tokens(engine.generate(PROMPTS, stopping)) == wanted
        again = tokens(engine.generate(PROMPTS, stopping))
        assert engine.stats.completion_tokens == 2 * sum(len(ids) for _, ids, _ in wanted)
    assert again == wanted


def test_one_wasted_pass_at_the_end_where_all_stop_at_once(model: Path) -> None:
    how = SamplingParams(max_tokens=9)
    with Engine(policy(model), device="twin") as engine:
        (one,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=9, ignore_eos=True))
        before = engine.stats.passes
        engine.tokenizer.eos_token_ids = frozenset({one.token_ids[4]})
        (result,) = engine.generate([PROMPTS[0]], how)
        ended = one.token_ids.index(one.token_ids[4])
        assert result.token_ids == one.token_ids[:ended]
        assert engine.stats.passes - before == ended + 1 + 1


@pytest.mark.parametrize(
    ("device", "lanes"),
    thorough(product(["cpu", "twin"], ["auto", "threads"]), but=[("twin", "auto")]),
)
def test_leaving_in_the_middle_leaves_an_engine_that_works(model: Path, device: str, lanes: str) -> None:
    """The pass that was launched ahead is waited for; its pages, blocks and places are nobody's."""
    here = policy(
        model,
        ffn_device="gpu" if device == "twin" else "cpu",
        attention_device="cpu",
        kv=Shares(host=1.0),
        weights=Shares(disk=1.0),
    )
    how = SamplingParams(max_tokens=4, ignore_eos=True)
    requests = [Request(index=index, token_ids=tuple(ids), sampling=how) for index, ids in enumerate(PROMPTS)]
    with Engine(here, device=device, lanes=lanes) as engine:
        wanted = tokens(list(engine.run(requests)))
        for stop_after in (0, 1, 3):
            running = engine.run(requests)
            assert set(tokens([next(running) for _ in range(stop_after)])) <= set(wanted)
            running.close()  # type: ignore[attr-defined]
        assert tokens(list(engine.run(requests))) == wanted
