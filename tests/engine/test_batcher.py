"""The batcher under any load: nothing lost, no limit exceeded, every sequence's tokens in order, all of it finished."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import InputError
from moelight.core.policy import ADMISSIONS, Policy
from moelight.core.request import Request, SamplingParams
from moelight.engine.batcher import Batcher, MicroBatchPlan, RunningSequence, SequenceChunk, partition
from moelight.hrm.footprint import kv_buffer_tokens, pass_tokens
from moelight.paging.kv import BlockPool
from moelight.profiles.rope import ByLength
from tests.shapes import examples

BLOCK = 16
GPU = Policy(model="m", attention_device="gpu", ffn_device="gpu", micro_batch_tokens=100, kv_block_size=BLOCK)


def generation(index: int, prompt: int, answer: int) -> RunningSequence:
    request = Request(index=index, token_ids=tuple(range(prompt)), sampling=SamplingParams(max_tokens=answer))
    return RunningSequence(request=request, seed=0, max_tokens=answer)


@dataclass
class Run:
    """A batcher driven to the end, checked after every pass."""

    policy: Policy
    discrete: bool
    generations: list[RunningSequence]
    blocks: int
    random: Random
    window: int | None = None
    late: bool = False
    asks_twice: bool = False
    passes: list[list[MicroBatchPlan]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks)
        self.batcher = Batcher(self.policy, self.pool, discrete=self.discrete, window=self.window)
        self.finished: list[RunningSequence] = []
        self.batch: set[int] = set()

    def drive(self, *, early: bool = True) -> None:
        """Tokens arrive before the next pass is asked for, or (``late``) after it was launched."""
        in_flight: list[MicroBatchPlan] = []
        self.batcher.add(self.generations)
        while self.batcher.busy or in_flight:
            loads: list[MicroBatchPlan] = []
            if self.batcher.busy:
                before = {id(g): (g.computed, bool(g.chosen)) for g in self.generations}
                loads = self.batcher.next_pass()
                assert loads, "a pass without work would never end"
                if self.asks_twice:  # a plan may be dropped
                    assert shape(self.batcher.next_pass()) == shape(loads)
                self.passes.append(loads)
                self.check(loads, before)
                self.batcher.launched(loads)
            for arrived in [in_flight] if self.late else [loads]:
                self.arrive(arrived, early=early)
            in_flight = loads if self.late else []

    def arrive(self, loads: list[MicroBatchPlan], *, early: bool) -> None:
        for load in loads:
            for chunk in load.chunks:
                owner = chunk.sequence
                if not chunk.completes or owner.finished:
                    continue
                owner.generated.append(7)
                if len(owner.generated) == owner.max_tokens or (early and self.random.random() < 0.1):
                    owner.finished = True
                    self.batcher.retire(owner)
                    self.finished.append(owner)

    def check(self, loads: list[MicroBatchPlan], before: dict[int, tuple[int, bool]]) -> None:
        self.check_limits(loads)
        self.check_blocks()
        chunks = [chunk for load in loads for chunk in load.chunks]
        running = {id(g) for g in self.batcher.running}
        assert {id(chunk.sequence) for chunk in chunks} <= running
        places: dict[int, int] = {}
        for chunk in chunks:
            computed, decodes = before[id(chunk.sequence)]
            start = places.get(id(chunk.sequence), computed)
            assert chunk.start == start, "chunks of a prompt come in order and without gaps"
            places[id(chunk.sequence)] = start + chunk.count
            assert chunk.count == 1 or not decodes
        if self.policy.admission == "static":
            self.check_static(chunks, before)
            return
        for g in self.batcher.running:
            if before[id(g)][1]:
                assert places.get(id(g)) == len(g.request.token_ids) + g.chosen, "whoever decodes rides in every pass"

    def check_static(self, chunks: list[SequenceChunk], before: dict[int, tuple[int, bool]]) -> None:
        """Either prompts or decoding; all that decode do so together; nobody joins a batch that has begun."""
        if chunks[0].decodes:
            assert all(chunk.decodes for chunk in chunks)
            assert {id(chunk.sequence) for chunk in chunks} == {id(g) for g in self.batcher.running}
        else:
            assert not any(chunk.decodes for chunk in chunks)
        begun = [g for g in self.batcher.running if before[id(g)][0]]
        if begun or self.batch & {id(g) for g in self.batcher.running}:
            assert {id(g) for g in self.batcher.running} <= self.batch
        else:
            assert (
                len(self.batcher.running) == self.policy.batch_size
                or not self.batcher.waiting
                or self.pool.free < self.next_need()
            )
            self.batch = {id(g) for g in self.batcher.running}

    def next_need(self) -> int:
        """Blocks that whoever waits first asks for."""
        first = next(g for g in self.generations if g.slot < 0)
        return self.batcher.blocks_for(len(first.request.token_ids) + first.max_tokens)

    def check_limits(self, loads: list[MicroBatchPlan]) -> None:
        policy = self.policy
        assert len(self.batcher.running) <= policy.batch_size
        assert sum(load.tokens for load in loads) <= pass_tokens(policy)
        if policy.attention_device == "cpu" and all(chunk.decodes for load in loads for chunk in load.chunks):
            live = [len(load.chunks) for load in loads]
            assert len(live) == -(-sum(live) // policy.micro_batch_size), "a tail is as few micro-batches as hold it"
            assert max(live) - min(live) <= 1, "and they are equally full"
        for load in loads:
            assert 1 <= len(load.chunks) <= policy.micro_batch_size
            assert 1 <= load.tokens <= policy.micro_batch_tokens
            assert all(chunk.count >= 1 for chunk in load.chunks)
            generated = [chunk.decodes for chunk in load.chunks]
            assert generated == sorted(generated, reverse=True), "generated tokens come first"
            assert all(chunk.count == 1 for chunk in load.chunks if chunk.decodes)
            assert load.prefill_only == (self.discrete and all(chunk.start == 0 for chunk in load.chunks))
            if policy.attention_device == "gpu" and not load.prefill_only:
                assert sum(self.seen(chunk) for chunk in load.chunks) <= kv_buffer_tokens(policy)

    def seen(self, chunk: SequenceChunk) -> int:
        return chunk.count + (chunk.start if self.window is None else min(chunk.start, self.window - 1))

    def check_blocks(self) -> None:
        held = [block for g in self.batcher.running for block in g.blocks]
        assert len(held) == len(set(held)), "a block has one owner"
        assert len(held) + self.pool.free == self.blocks, "no block is lost"
        for g in self.batcher.running:
            assert len(g.blocks) * BLOCK >= len(g.request.token_ids) + g.max_tokens


def shape(loads: list[MicroBatchPlan]) -> list[list[tuple[int, int, int]]]:
    return [[(p.sequence.request.index, p.start, p.count) for p in load.chunks] for load in loads]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Any policy, any requests that can be served at all under it."""
    mu = draw(st.integers(1, 6))
    policy = Policy(
        model="m",
        batch_size=draw(st.integers(1, 9)),
        micro_batch_size=mu,
        micro_batch_tokens=draw(st.integers(mu, 24)),
        kv_tokens=BLOCK,
        kv_block_size=BLOCK,
        admission=draw(st.sampled_from(ADMISSIONS)),
    )
    sizes = draw(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=20))
    generations = [generation(index, prompt, answer) for index, (prompt, answer) in enumerate(sizes)]
    largest = max(-(-(prompt + answer) // BLOCK) for prompt, answer in sizes)
    blocks = largest + draw(st.integers(0, 40))
    random, window = draw(st.randoms(use_true_random=False)), draw(st.none() | st.integers(1, 40))
    how = {"late": draw(st.booleans()), "asks_twice": draw(st.booleans())}
    if draw(st.booleans()):
        return Run(policy, draw(st.booleans()), generations, blocks, random, window, **how)
    longest = max(prompt + answer for prompt, answer in sizes)
    least = -(-longest * policy.batch_size // mu)
    policy = replace(policy, attention_device="gpu", kv_tokens=max(longest, draw(st.integers(least, least + 500))))
    return Run(policy, True, generations, blocks, random, window, **how)


def test_blocks_and_places_are_free_when_the_last_pass_is_launched() -> None:
    """For the pass after it: its lanes work in order. Early ends free theirs when they are known, and once only."""
    batcher = small(n=2, blocks=2)
    one, two = generation(0, 7, 1), generation(1, 7, 9)
    batcher.add([one, two, generation(2, 7, 9)])
    launch(batcher)
    assert [g.request.index for g in batcher.running] == [1]
    chunks = [chunk for load in batcher.next_pass() for chunk in load.chunks]
    assert [chunk.sequence.request.index for chunk in chunks if not chunk.decodes] == [2]
    assert chunks[-1].sequence.slot == one.slot
    assert chunks[-1].sequence.blocks == one.blocks
    batcher.retire(one)
    batcher.retire(two)
    batcher.retire(two)
    assert [g.request.index for g in batcher.running] == [2]
    assert batcher.next_pass()


def test_contexts_that_the_device_attends_over_share_a_buffer() -> None:
    """Four sequences of 40, 30, 20 and 10 cached tokens; a buffer holds 63, so one micro-batch of four becomes two."""
    policy = replace(GPU, batch_size=4, micro_batch_size=2, kv_tokens=100)
    assert kv_buffer_tokens(policy) == 63
    batcher = Batcher(policy, BlockPool(50), discrete=True)
    batcher.add([generation(index, 10 * (4 - index), 5) for index in range(4)])
    launch(batcher)
    loads = batcher.next_pass()
    assert sorted(sorted(chunk.start for chunk in load.chunks) for load in loads) == [[10, 40], [20, 30]]
    wide = Batcher(replace(policy, micro_batch_size=3), BlockPool(50), discrete=True)
    wide.add([generation(index, 60, 5) for index in range(2)])
    launch(wide)
    assert [len(load.chunks) for load in wide.next_pass()] == [1, 1], "60 and 60 are more than 94"


def test_a_request_that_no_buffer_can_hold_is_refused_with_what_would_do() -> None:
    policy = replace(GPU, batch_size=8, micro_batch_size=2, kv_tokens=400)
    batcher = Batcher(policy, BlockPool(50), discrete=True)
    batcher.check_buffer(125)
    with pytest.raises(InputError, match=r"may reach 126 tokens, .* holds 125; .* a micro_batch_size of 3 or more"):
        batcher.check_buffer(126)
    Batcher(replace(policy, micro_batch_size=3), BlockPool(50), discrete=True).check_buffer(126)
    with pytest.raises(InputError, match=r"may reach 401 tokens, .* kv_tokens of 401 or more"):
        batcher.check_buffer(401)
    Batcher(policy, BlockPool(50), discrete=True, window=20).check_buffer(401)
    Batcher(replace(policy, attention_device="cpu"), BlockPool(50), discrete=True).check_buffer(401)


@examples(150)
@given(run=runs())
def test_every_request_is_served_once_within_all_limits(run: Run) -> None:
    run.drive()
    assert sorted(g.request.index for g in run.finished) == list(range(len(run.generations)))
    assert run.pool.free == run.blocks
    assert not run.batcher.running
    assert not run.batcher.waiting


@examples(80)
@given(run=runs())
def test_every_token_is_computed_exactly_once(run: Run) -> None:
    """Prompt and answer, but for the last token, whose keys nobody will need."""
    run.drive(early=False)
    seen: dict[int, list[int]] = {}
    for loads in run.passes:
        for load in loads:
            for chunk in load.chunks:
                at = seen.setdefault(chunk.sequence.request.index, [])
                at.extend(range(chunk.start, chunk.start + chunk.count))
    for g in run.generations:
        assert seen[g.request.index] == list(range(len(g.request.token_ids) + g.max_tokens - 1))


@examples(60)
@given(run=runs())
def test_requests_are_admitted_in_their_order(run: Run) -> None:
    run.drive()
    first_seen: dict[int, int] = {}
    for number, loads in enumerate(run.passes):
        for load in loads:
            for chunk in load.chunks:
                first_seen.setdefault(chunk.sequence.request.index, number)
    assert [first_seen[index] for index in sorted(first_seen)] == sorted(first_seen.values())


def launch(batcher: Batcher) -> list[MicroBatchPlan]:
    loads = batcher.next_pass()
    batcher.launched(loads)
    return loads


def small(n: int = 4, *, tokens: int = 8, mu: int = 4, blocks: int = 100, discrete: bool = False) -> Batcher:
    policy = Policy(model="m", batch_size=n, micro_batch_size=mu, micro_batch_tokens=tokens, kv_block_size=BLOCK)
    return Batcher(policy, BlockPool(blocks), discrete=discrete)


def test_a_long_prompt_is_cut_in_order_and_its_end_comes_last() -> None:
    batcher = small()
    batcher.add([generation(0, 21, 1), generation(1, 3, 1)])
    loads = batcher.next_pass()
    selected = [
        (chunk.start, chunk.count) for load in loads for chunk in load.chunks if chunk.sequence.request.index == 0
    ]
    assert selected == [(0, 8), (8, 8), (16, 5)]
    assert [load.tokens for load in loads] == [8, 8, 8]
    assert [chunk.completes for load in loads for chunk in load.chunks].count(True) == 2


def test_a_prompt_longer_than_a_pass_goes_on_in_the_next() -> None:
    batcher = small(n=2, tokens=4)
    first = generation(0, 50, 2)
    batcher.add([first, generation(1, 3, 2)])
    room = 2 + 8 * 4
    loads = batcher.next_pass()
    assert sum(load.tokens for load in loads) == room
    assert len(batcher.running) == 1, "there was no room for the second"
    assert not any(chunk.completes for load in loads for chunk in load.chunks)
    batcher.launched(loads)
    assert first.computed == room
    loads = batcher.next_pass()
    assert sum(load.tokens for load in loads) == 50 - room + 3
    assert len(batcher.running) == 2


def test_beside_a_link_fresh_prompts_have_micro_batches_of_their_own() -> None:
    """They attend on the device; whoever needs the cache attends on the host."""
    batcher = small(discrete=True)
    batcher.add([generation(0, 2, 5), generation(1, 3, 5)])
    assert all(load.prefill_only for load in launch(batcher))
    batcher.add([generation(2, 12, 5), generation(3, 1, 5)])
    kinds = [
        (load.prefill_only, sorted(chunk.sequence.request.index for chunk in load.chunks))
        for load in batcher.next_pass()
    ]
    assert kinds == [(True, [2]), (True, [3]), (False, [0, 1, 2])]


def test_a_static_batch_is_prefilled_alone_and_ends_together() -> None:
    """Three sequences, two at a time: the third waits for the longer of the first two."""
    policy = Policy(model="m", batch_size=2, micro_batch_size=2, micro_batch_tokens=8, admission="static")
    batcher, seen = Batcher(policy, BlockPool(100), discrete=False), []
    batcher.add([generation(0, 80, 3), generation(1, 5, 1), generation(2, 4, 2)])
    while batcher.busy:
        loads = batcher.next_pass()
        chunks = [chunk for load in loads for chunk in load.chunks]
        seen.append(sorted({(chunk.sequence.request.index, chunk.decodes) for chunk in chunks}))
        batcher.launched(loads)
    prefills, decodes = [[(0, False)], [(0, False), (1, False)]], [[(0, True)], [(0, True)]]
    assert seen == [*prefills, *decodes, [(2, False)], [(2, True)]]


def test_a_finished_sequence_is_replaced_in_the_next_pass() -> None:
    batcher = small(n=1)
    one, two = generation(0, 3, 1), generation(1, 4, 1)
    batcher.add([one, two])
    (load,) = launch(batcher)
    assert load.chunks[0].sequence is one
    (load,) = batcher.next_pass()
    assert load.chunks[0].sequence is two


def test_a_request_waits_until_its_longest_answer_fits_the_cache() -> None:
    """Blocks are reserved at admission, so nothing alive is ever pushed out; and nobody overtakes."""
    batcher = small(blocks=5)
    batcher.add([generation(0, 30, 18), generation(1, 30, 18), generation(2, 1, 1)])
    batcher.next_pass()
    assert [g.request.index for g in batcher.running] == [0]
    batcher.retire(next(iter(batcher.running)))
    batcher.next_pass()
    assert [g.request.index for g in batcher.running] == [1, 2]


def test_clearing_frees_everything() -> None:
    batcher = small(n=2, blocks=10)
    batcher.add([generation(index, 5, 5) for index in range(5)])
    batcher.next_pass()
    batcher.clear()
    assert not batcher.busy
    assert batcher.blocks_for(160) == 10
    batcher.add([generation(9, 150, 10)])
    assert batcher.next_pass()


chunks = st.lists(st.tuples(st.integers(1, 10), st.integers(0, 500)), min_size=1, max_size=40)


@examples(150)
@given(sizes=chunks, max_items=st.integers(1, 8), max_tokens=st.integers(10, 30))
def test_partition_puts_each_piece_in_exactly_one_part(
    sizes: list[tuple[int, int]], max_items: int, max_tokens: int
) -> None:
    given_pieces = [SequenceChunk(sequence=generation(i, 1, 1), start=s, count=c) for i, (c, s) in enumerate(sizes)]
    parts = partition(given_pieces, max_items=max_items, max_tokens=max_tokens)
    assert sorted(id(p) for part in parts for p in part) == sorted(id(p) for p in given_pieces)
    assert all(1 <= len(part) <= max_items and sum(p.count for p in part) <= max_tokens for part in parts)
    least = max(-(-len(sizes) // max_items), -(-sum(c for c, _ in sizes) // max_tokens))
    assert len(parts) <= 2 * least + 1


def test_partition_balances_tokens_then_context() -> None:
    """Equal token counts, as when all decode, are spread by what attention will cost."""
    decoding = [
        SequenceChunk(sequence=generation(i, 1, 1), start=s, count=1) for i, s in enumerate([900, 10, 20, 890, 30, 40])
    ]
    parts = partition(decoding, max_items=3, max_tokens=100)
    assert sorted(sum(p.start for p in part) for part in parts) == pytest.approx([945, 945], abs=10)
    mixed = [SequenceChunk(sequence=generation(i, 1, 1), start=0, count=c) for i, c in enumerate([9, 1, 8, 2, 7, 3])]
    parts = partition(mixed, max_items=3, max_tokens=20)
    assert sorted(sum(p.count for p in part) for part in parts) == [14, 16]


def test_a_sequence_is_computed_anew_where_its_positions_change() -> None:
    """Once its newest token is there, with all of its tokens, in chunks that never decode; the other goes on."""
    rule = ByLength(border=6, anew=True)
    policy = Policy(model="mixtral-8x7b", batch_size=4, micro_batch_size=4, micro_batch_tokens=4, kv_tokens=200)
    batcher = Batcher(policy, BlockPool(50), discrete=False, by_length=rule)
    grows, short = generation(0, 5, 4), generation(1, 1, 9)
    batcher.add([grows, short])

    def chunks_of(sequence: RunningSequence) -> list[tuple[int, int, bool, bool, int]]:
        plans = batcher.next_pass()
        assert batcher.next_pass() == plans
        parts = [chunk for plan in plans for chunk in plan.chunks if chunk.sequence is sequence]
        result = [(part.start, part.count, part.decodes, part.completes, part.reaches) for part in parts]
        batcher.launched(plans)
        return sorted(result)

    while not grows.chosen:
        chunks_of(grows)
    grows.generated.append(7)
    assert chunks_of(grows) == [(5, 1, True, True, 6)]
    assert chunks_of(grows) == []  # position 6 is next, and the token there has not arrived
    assert short.chosen > 1
    grows.generated.append(8)
    assert chunks_of(grows) == [(0, 4, False, False, 7), (4, 3, False, True, 7)]
    assert grows.chosen == 3
    assert chunks_of(grows) == [(7, 1, True, True, 8)]


def test_a_prefix_is_shared_by_prompts_whose_positions_are_stretched_alike() -> None:
    prompt = tuple(range(160))

    def cached(first: int, second: int, maximum: int, rule: ByLength) -> int:
        """Tokens that the second of two prompts, beginnings of one text, has from the first."""
        policy = Policy(model="mixtral-8x7b", batch_size=1, micro_batch_size=1, kv_tokens=800, kv_block_size=16)
        batcher = Batcher(policy, BlockPool(50), discrete=False, prefix_caching=True, by_length=rule)
        batcher.add([text(prompt[:first], 1), text(prompt[:second], maximum)])
        while batcher.busy:
            batcher.launched(batcher.next_pass())
        return batcher.admitted.cached_tokens

    def text(tokens: tuple[int, ...], maximum: int) -> RunningSequence:
        sampling = SamplingParams(max_tokens=maximum)
        return RunningSequence(
            request=Request(index=0, token_ids=tokens, sampling=sampling), seed=0, max_tokens=maximum
        )

    longrope, dynamic = ByLength(border=96, anew=True), ByLength(border=96, anew=False)
    assert cached(80, 88, 8, longrope) == 80
    assert cached(80, 88, 9, longrope) == 0  # may be computed anew, in its own blocks
    assert cached(80, 120, 3, longrope) == 0
    assert cached(112, 120, 3, longrope) == 112
    assert cached(80, 88, 9, dynamic) == 80
    assert cached(112, 120, 3, dynamic) == 0
    assert cached(120, 120, 3, dynamic) == 112
