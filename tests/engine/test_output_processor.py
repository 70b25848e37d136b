"""From chosen tokens to completions: who ends when, what is counted, and whether another pass is sure to come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from moelight.core.policy import Policy
from moelight.core.request import Completion, Request, SamplingParams
from moelight.engine.batcher import Batcher
from moelight.engine.call_constraints import CallConstraints
from moelight.engine.constraints import Constraints
from moelight.engine.output_processor import OutputProcessor
from moelight.paging.kv import BlockPool

EOS, STOPPER = 9, 5


class Words:
    """A tokenizer of ten letters; 9 ends a sequence."""

    eos_token_ids = special_ids = frozenset({EOS})

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join("abcdefghij"[token] for token in token_ids if token != EOS or not skip_special_tokens)

    def context(self, token_ids: Sequence[int]) -> list[int]:
        return []

    def decode_after(self, context: Sequence[int], token_ids: Sequence[int], **how: bool) -> str:
        return self.decode(token_ids, **how)

    def token_text(self, token: int) -> str:
        return self.decode([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        return self.token_text(token).encode()


def start(*requests: tuple[int, SamplingParams], n: int = 8, context: int = 1000) -> tuple[OutputProcessor, Batcher]:
    """Answers and a batcher of micro-batches of 4 tokens; each request is a prompt length and how to go on."""
    policy = Policy(model="m", batch_size=n, micro_batch_size=4, micro_batch_tokens=4)
    batcher = Batcher(policy, BlockPool(100), discrete=False)
    made = [Request(index=i, token_ids=(1,) * length, sampling=how) for i, (length, how) in enumerate(requests)]
    words: Any = Words()
    answers = OutputProcessor(made, words, CallConstraints(Constraints(words, 10)), context)
    batcher.add(answers.sequences)
    return answers, batcher


def one_pass(answers: OutputProcessor, batcher: Batcher, token: int = 0) -> tuple[bool, list[Completion]]:
    """Every completing piece gets ``token``; whether another pass was announced, and what finished."""
    loads = batcher.next_pass()
    batcher.launched(loads)
    follows = batcher.busy
    tokens = [[token for chunk in load.chunks if chunk.completes] for load in loads]
    return follows, answers.collect(batcher, loads, tokens)


@pytest.mark.parametrize(
    ("requests", "n", "announced"),
    [
        ([(3, 1)], 8, [False]),
        ([(3, 3)], 8, [True, True, False]),
        ([(3, 1), (2, 2)], 8, [True, False]),
        ([(3, 1), (2, 1)], 1, [True, False]),
        ([(70, 1)], 1, [True, True, False]),
        ([(33, 1)], 1, [False]),
    ],
    ids=str,
)
def test_another_pass_is_announced_exactly_when_it_comes(
    requests: list[tuple[int, int]], n: int, announced: list[bool]
) -> None:
    """A pass carries n + 32 tokens here: a prompt of 70 takes three, one of 33 takes one."""
    answers, batcher = start(*((length, SamplingParams(max_tokens=request)) for length, request in requests), n=n)
    result = []
    while batcher.busy:
        result.append(one_pass(answers, batcher)[0])
    assert result == announced


def test_tokens_are_counted_without_the_closing_eos() -> None:
    answers, batcher = start((2, SamplingParams(max_tokens=5)), (2, SamplingParams(max_tokens=5, ignore_eos=True)))
    one_pass(answers, batcher, 0)
    _, (stopped,) = one_pass(answers, batcher, EOS)
    assert (stopped.token_ids, stopped.text, stopped.finish_reason) == ((0,), "a", "stop")
    assert answers.tokens == 3
    while batcher.busy:
        _, finished = one_pass(answers, batcher, EOS)
    (other,) = finished
    assert (other.token_ids, other.finish_reason) == ((0, EOS, EOS, EOS, EOS), "length")
    assert answers.tokens == stopped.completion_tokens + other.completion_tokens == 6


def test_a_stop_string_may_be_spelled_by_several_tokens() -> None:
    answers, batcher = start((2, SamplingParams(max_tokens=9, stop=("bc", "zz"))))
    for token in (0, 1, 1):
        assert one_pass(answers, batcher, token)[1] == []
    _, (result,) = one_pass(answers, batcher, 2)
    assert (result.text, result.token_ids, result.finish_reason) == ("ab", (0, 1, 1, 2), "stop")


def test_the_last_token_allowed_may_also_stop() -> None:
    answers, batcher = start((2, SamplingParams(max_tokens=1, stop=("f",))), (2, SamplingParams(max_tokens=1)))
    _, result = one_pass(answers, batcher, STOPPER)
    assert sorted((c.index, c.finish_reason, c.text) for c in result) == [(0, "stop", ""), (1, "length", "f")]


def test_no_answer_outgrows_the_context() -> None:
    request = Request(index=0, token_ids=(1,) * 30, sampling=SamplingParams(max_tokens=50))
    assert request.sampling.most_tokens(30, 32) == 2
    assert request.sampling.most_tokens(30, 100) == 50
    assert SamplingParams(max_tokens=None).most_tokens(30, 100) == 70
    assert SamplingParams(max_tokens=None).most_tokens(130, 100) == 0
    answers, batcher = start((30, SamplingParams(max_tokens=50)), context=32)
    one_pass(answers, batcher)
    _, (result,) = one_pass(answers, batcher)
    assert (result.completion_tokens, result.finish_reason) == (2, "length")


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    answers, _ = start(*[(1, SamplingParams(temperature=1.0))] * 5, (1, SamplingParams(temperature=1.0, seed=7)))
    seeds = [generation.seed for generation in answers.sequences]
    assert len(set(seeds)) == 6
    assert seeds[-1] == 7
