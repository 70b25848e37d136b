"""Sequences without max_tokens: they grow block by block, the youngest are suspended where the cache is full and
computed again later, every one ends, and the tokens are those of a cache in which nothing is suspended."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import InputError
from moelight.core.policy import ADMISSIONS, Policy, Shares
from moelight.core.request import Completion, ReasoningStart, Request, SamplingParams, StructuredOutputs
from moelight.engine.batcher import AnswerLengths, Batcher, MicroBatchPlan, RunningSequence
from moelight.engine.engine import Engine
from moelight.hrm.footprint import pass_tokens
from moelight.paging.kv import BlockPool
from moelight.profiles.rope import ByLength
from moelight.profiles.workload import Workload
from tests.cases import thorough
from tests.engine.graphs import prompts as graph_prompts
from tests.engines import Tiny
from tests.shapes import examples

BLOCK = 16
POLICY = Policy(
    model="m", batch_size=8, micro_batch_size=8, micro_batch_tokens=64, kv_tokens=BLOCK, kv_block_size=BLOCK
)


def sequence(index: int, prompt: int, maximum: int, *, grows: bool = True) -> RunningSequence:
    sampling = SamplingParams(max_tokens=None if grows else maximum)
    request = Request(index=index, token_ids=tuple(range(prompt)), sampling=sampling)
    return RunningSequence(request=request, seed=0, max_tokens=maximum, grows=grows)


class Driver:
    """Drives a batcher to the end; an answer ends after ``ends`` tokens. With ``late``, the tokens of a pass arrive
    after the next one is launched. A token is its place in the sequence, to check what is computed again."""

    def __init__(self, batcher: Batcher, pool: BlockPool, ends: Mapping[RunningSequence, int], *, late: bool) -> None:
        self.batcher, self.pool, self.ends, self.late = batcher, pool, ends, late
        self.finished: list[RunningSequence] = []
        self.passes = 0

    def drive(self) -> None:
        self.batcher.add(self.ends)
        flying: list[MicroBatchPlan] = []
        while self.batcher.busy or flying:
            before = {end: end.computed for end in self.ends}
            plans = self.batcher.next_pass() if self.batcher.busy else []
            assert plans or flying, "no pass, and no token to wait for"
            self.check(plans, before)
            self.batcher.launched(plans)
            self.passes += 1
            if self.late:
                self.arrive(flying)
                flying = plans
            else:
                self.arrive(plans)

    def check(self, plans: list[MicroBatchPlan], before: Mapping[RunningSequence, int]) -> None:
        running = set(self.batcher.running)
        held = [block for item in running for block in item.blocks]
        assert len(held) == len(set(held))
        assert len(held) + self.pool.free == self.pool.blocks
        assert sum(plan.tokens for plan in plans) <= pass_tokens(self.batcher.policy)
        reached: dict[RunningSequence, int] = {}
        for plan in plans:
            for chunk in plan.chunks:
                owner = chunk.sequence
                assert owner in running
                start = reached.get(owner, min(before[owner], owner.computed))  # 0 if it is computed again
                assert chunk.start == start, "tokens come in order and without gaps"
                reached[owner] = start + chunk.count
                assert len(owner.blocks) * BLOCK >= start + chunk.count, "every token has a block"
                if not chunk.decodes:
                    assert list(chunk.token_ids) == list(range(start, start + chunk.count))

    def arrive(self, plans: list[MicroBatchPlan]) -> None:
        for plan in plans:
            for chunk in plan.chunks:
                owner = chunk.sequence
                if not chunk.completes or owner.finished:
                    continue
                assert chunk.earlier == len(owner.generated), "every token is chosen once"
                owner.generated.append(len(owner.request.token_ids) + len(owner.generated))
                if len(owner.generated) == min(self.ends[owner], owner.max_tokens):
                    owner.finished = True
                    self.batcher.retire(owner)
                    self.finished.append(owner)


def driver(
    ends: Mapping[RunningSequence, int], *, blocks: int, expected: int, late: bool = False, **policy: Any
) -> Driver:
    pool = BlockPool(blocks)
    batcher = Batcher(replace(POLICY, **policy), pool, discrete=False, expected_len=expected)
    return Driver(batcher, pool, ends, late=late)


@st.composite
def drivers(draw: st.DrawFn) -> Driver:
    """Sequences with and without a limit, of any length, in a cache that just holds the longest, or more."""
    random = Random(draw(st.integers(0, 1 << 20)))
    ends, longest = {}, 0
    for index in range(draw(st.integers(1, 12))):
        prompt, maximum = random.randint(1, 60), random.randint(1, 90)
        one = sequence(index, prompt, maximum, grows=random.random() < 0.8)
        ends[one] = random.choice([random.randint(1, 90), 1 << 20])
        longest = max(longest, -(-(prompt + maximum) // BLOCK))
    mu = draw(st.integers(1, 8))
    policy = {
        "batch_size": draw(st.integers(1, 10)),
        "micro_batch_size": mu,
        "micro_batch_tokens": draw(st.integers(mu, 40)),
        "admission": draw(st.sampled_from(ADMISSIONS)),
    }
    blocks, expected = longest + draw(st.integers(0, 8)), draw(st.integers(1, 40))
    return driver(ends, blocks=blocks, expected=expected, late=draw(st.booleans()), **policy)


@examples(200)
@given(run=drivers())
def test_every_sequence_ends_whatever_is_suspended(run: Driver) -> None:
    run.drive()
    assert set(run.finished) == set(run.ends)
    assert run.pool.free == run.pool.blocks
    assert not run.batcher.running
    # Twice the passes of one token each in which only the oldest sequence goes on.
    work = sum(len(end.request.token_ids) + end.max_tokens + 2 for end in run.ends)
    assert run.passes <= 2 * work


def test_a_block_is_added_when_a_token_has_none() -> None:
    one = sequence(0, 20, 60)
    run = driver({one: 60}, blocks=5, expected=4)
    run.batcher.add([one])
    held = []
    while run.batcher.busy:
        plans = run.batcher.next_pass()
        assert run.batcher.next_pass() == plans, "a plan may be dropped"
        held.append((one.computed, len(one.blocks)))
        run.batcher.launched(plans)
        run.arrive(plans)
    assert held[0] == (0, 2)  # 20 tokens and 4 more
    assert all(blocks == max(2, computed // BLOCK + 1) for computed, blocks in held)
    assert run.pool.free == 5


def test_the_youngest_are_suspended_and_go_on_in_their_order() -> None:
    """Four blocks, three sequences of 10 tokens with a block each; the fourth sequence has to wait for all of them."""
    old, middle, young, waits = (sequence(index, 10, 40) for index in range(4))
    run = driver({old: 40, middle: 12, young: 8, waits: 3}, blocks=4, expected=2, batch_size=3, micro_batch_size=3)
    run.batcher.add(run.ends)
    seen = []
    while run.batcher.busy:
        plans = run.batcher.next_pass()
        seen.append([item.request.index for item in run.batcher.running])
        run.batcher.launched(plans)
        run.arrive(plans)
    order = [row for at, row in enumerate(seen) if not at or row != seen[at - 1]]
    assert order == [[0, 1, 2], [0, 1], [0, 2], [0, 3], [0]]
    assert run.batcher.admitted.suspended == 1
    assert [len(end.generated) for end in run.ends] == [40, 12, 8, 3]
    assert run.batcher.admitted.sequences == 4


def test_one_sequence_may_fill_the_cache_to_the_last_slot() -> None:
    one, two = sequence(0, 3, 45), sequence(1, 3, 45)
    run = driver({one: 45, two: 45}, blocks=3, expected=1)
    run.drive()
    assert [len(end.generated) for end in run.ends] == [45, 45]
    assert run.batcher.admitted.suspended == 1


def test_a_limit_reserves_everything_and_is_never_suspended() -> None:
    limited, growing = sequence(0, 3, 45, grows=False), sequence(1, 3, 45)
    run = driver({growing: 45, limited: 45}, blocks=4, expected=4, batch_size=2, micro_batch_size=2)
    run.batcher.add([growing, limited])
    blocks = set()
    while run.batcher.busy:
        plans = run.batcher.next_pass()
        if limited in run.batcher.running:
            blocks.add(len(limited.blocks))
        run.batcher.launched(plans)
        run.arrive(plans)
    assert blocks == {3}
    assert run.batcher.admitted.suspended == 1  # the older one, which had no younger one to suspend
    assert len(growing.generated) == 45


def test_a_sequence_that_ends_while_suspended_does_not_go_on() -> None:
    """Its last token was on the way when its blocks were taken."""
    old, young = sequence(0, 15, 30), sequence(1, 15, 30)
    run = driver({old: 30, young: 2}, blocks=3, expected=1, late=True, batch_size=2, micro_batch_size=2)
    run.drive()
    assert run.batcher.admitted.suspended == 1
    assert len(young.generated) == 2
    assert not run.batcher.requeued


def test_the_expected_length_is_learned_from_answers_that_have_ended() -> None:
    lengths = AnswerLengths(100)
    lengths.tokens = 5000
    assert lengths.expected == 100
    lengths.ended = 92
    assert lengths.expected == 58  # (8 x 100 + 5000) / 100


def test_sequences_that_are_dropped_have_not_ended() -> None:
    batcher = Batcher(POLICY, BlockPool(9), discrete=False, expected_len=100)
    ended, dropped = sequence(0, 4, 40), sequence(1, 4, 40)
    batcher.add([ended, dropped])
    batcher.launched(batcher.next_pass())
    batcher.retire(ended)
    batcher.clear()
    assert batcher.lengths.ended == 1


def test_a_sequence_whose_positions_follow_its_length_reserves_everything() -> None:
    """Under dynamic scaling the keys of tokens that are computed at once are other ones."""
    rule = ByLength(border=30, anew=False)
    for maximum, blocks in ((20, 1), (30, 3)):
        one = sequence(0, 10, maximum)
        batcher = Batcher(POLICY, BlockPool(9), discrete=False, by_length=rule, expected_len=1)
        batcher.add([one])
        batcher.next_pass()
        assert len(one.blocks) == blocks


CONTEXT = 48
CACHE = CONTEXT + 32  # of a run in which sequences are suspended
PROMPTS = [list(f"prompt {n} ".encode()) for n in range(8)]
FREE = SamplingParams(max_tokens=None, ignore_eos=True)
WORDS = StructuredOutputs(regex="[a-z]{14,20}")
THINKS = ReasoningStart(format="think", state="open")
THINKING = replace(FREE, thinking_token_budget=10, structured_outputs=WORDS, ignore_eos=False)
HOWS = [
    FREE,
    replace(FREE, temperature=1.0, seed=5, n=2, top_k=20),
    replace(FREE, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={65: 2}),
    replace(FREE, logprobs=2, prompt_logprobs=1),
    replace(FREE, structured_outputs=WORDS, ignore_eos=False),
    THINKING,
    replace(FREE, max_tokens=20),
    FREE,
]


def answers(
    model: Path,
    how: SamplingParams | Sequence[SamplingParams],
    *,
    cache: int,
    device: str = "cpu",
    prompts: Any = PROMPTS,
    **arguments: Any,
) -> tuple[list[Completion], int]:
    """The answers, and how often a sequence was suspended."""
    values: dict[str, Any] = {"batch_size": 6, "micro_batch_size": 6, "micro_batch_tokens": 24, "kv_block_size": 16}
    values |= {"ffn_device": "cpu" if device == "cpu" else "gpu", **arguments}
    with Engine(Policy(model=str(model), kv_tokens=cache, **values), device=device) as engine:
        hows = [how] * len(prompts) if isinstance(how, SamplingParams) else how
        requests = [
            Request(
                index=index, token_ids=tuple(prompt), sampling=params, reasoning=THINKS if params is THINKING else None
            )
            for index, (prompt, params) in enumerate(zip(prompts, hows, strict=True))
        ]
        for request in requests:
            engine.check(request)
        result = sorted(engine.run(requests), key=lambda item: (item.index, item.sample))
        return result, engine.suspended


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("mixtral", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[Completion]:
    """Answers with room for every sequence."""
    result, times = answers(model, HOWS, cache=12 * CONTEXT)
    assert times == 0
    assert result[0].completion_tokens == CONTEXT - len(PROMPTS[0])
    assert any(item.reasoning and 14 <= len(item.text) <= 20 for item in result)
    return result


SCORES: dict[str, Any] = {"logprobs": None, "prompt_logprobs": None, "cumulative_logprob": None}
WAYS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "static": {"admission": "static"},
    "twin": {"device": "twin", "attention_device": "gpu", "kv": Shares(device=0.5, host=0.5)},
}


@pytest.mark.parametrize("way", thorough(WAYS, but=["twin"]))
def test_answers_are_those_of_a_cache_in_which_nothing_is_suspended(
    model: Path, wanted: list[Completion], way: str
) -> None:
    """Greedy and sampled ones, under penalties and grammars, with log-probabilities; beside a device, tokens are on the
    way when a sequence is suspended."""
    result, times = answers(model, HOWS, cache=CACHE, **WAYS[way])
    assert times >= 4
    for one, other in zip(result, wanted, strict=True):
        assert replace(one, **SCORES) == replace(other, **SCORES)
        for scored, expected in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert [item and set(item) for item in scored or ()] == [item and set(item) for item in expected or ()]
        if one.cumulative_logprob is not None:
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, rel=1e-4)


def test_shared_prompts_are_found_again(model: Path) -> None:
    """What is computed again begins with the blocks of the prompt that are still known."""
    prompts = [[*b"a common beginning, ", 65 + n] for n in range(6)]
    free, never = answers(model, FREE, cache=8 * CONTEXT, prompts=prompts)
    result, times = answers(model, FREE, cache=CACHE, prompts=prompts)
    assert (never, times > 0) == (0, True)
    assert [item.token_ids for item in result] == [item.token_ids for item in free]


def test_a_sequence_that_no_cache_could_hold_is_refused_with_what_it_takes(model: Path) -> None:
    with pytest.raises(
        InputError, match=r"may reach 48 tokens, the context, which take .*B of KV memory; .*set max_tok"
    ):
        answers(model, FREE, cache=CONTEXT - 16)


def test_the_plan_has_room_for_the_longest_answer(model: Path) -> None:
    work = Workload(num_requests=8, prompt_len=9, max_prompt_len=24, gen_len=12, max_gen_len=1 << 20)
    with Engine.from_pretrained(str(model), device="cpu", hw="cpu-amx", workload=work) as engine:
        result = engine.generate(PROMPTS, FREE)
        assert engine.learned_len is not None
    assert [item.completion_tokens for item in result] == [CONTEXT - len(prompt) for prompt in PROMPTS]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_next"])
def test_the_state_of_a_recurrence_is_computed_again(checkpoints: Any, tmp_path: Path, family: str) -> None:
    source, expected = checkpoints(family)
    directory = shutil.copytree(source, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    prompts = graph_prompts()
    free, never = answers(directory, FREE, cache=5 * CONTEXT, prompts=prompts)
    result, times = answers(directory, FREE, cache=CACHE, prompts=prompts)
    assert never == 0
    assert times
    assert [item.token_ids for item in result] == [item.token_ids for item in free]
    assert [list(item.token_ids[: len(part)]) for item, part in zip(result, expected, strict=True)] == expected
