"""Prompts that begin alike: what they share is computed once, read only when it is there, and changes no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from moelight.core.policy import Policy, Shares
from moelight.core.request import Completion, Request, SamplingParams
from moelight.engine.batcher import MOST_WAITS, Batcher, MicroBatchPlan, RunningSequence, SequenceChunk, keys_of
from moelight.engine.engine import Engine
from moelight.paging.kv import BlockPool
from tests.cases import thorough
from tests.engine.test_invariance import DEVICES, MODELS
from tests.engines import Tiny

BLOCK = 16
Prompts = list[tuple[int, ...]]


def alike(random: Random, many: int, *, longest: int = 120) -> Prompts:
    """Prompts that share beginnings with earlier ones: whole, cut anywhere, and gone on with."""
    prompts: Prompts = []
    while len(prompts) < many:
        earlier = random.choice(prompts) if prompts and random.random() < 0.8 else ()
        retained = random.choice((len(earlier), random.randint(0, len(earlier)), len(earlier) // BLOCK * BLOCK))
        new = tuple(random.randrange(65, 70) for _ in range(random.choice((0, 1, 5, BLOCK, 40))))
        if prompt := (earlier[:retained] + new)[:longest]:
            prompts.append(prompt)
    return prompts


def generation(index: int, prompt: tuple[int, ...], answer: int, *, scored_from: int | None = None) -> RunningSequence:
    scored = None if scored_from is None else 0
    request = Request(
        index=index,
        token_ids=prompt,
        sampling=SamplingParams(max_tokens=answer, prompt_logprobs=scored),
        scored_from=scored_from or 1,
    )
    return RunningSequence(request=request, seed=0, max_tokens=answer)


@dataclass
class Played:
    """A batcher driven to the end over a cache that knows what was written to each of its slots, and when."""

    batcher: Batcher
    pool: BlockPool
    random: Random
    late: bool
    slots: dict[int, object] = field(default_factory=dict)
    passes: list[list[MicroBatchPlan]] = field(default_factory=list)

    def drive(self, generations: Sequence[RunningSequence], *, maximum: int = 1 << 30) -> None:
        self.batcher.add(generations)
        in_flight: list[MicroBatchPlan] = []
        while (self.batcher.busy or in_flight) and len(self.passes) < maximum:
            loads: list[MicroBatchPlan] = []
            if self.batcher.busy:
                loads = self.batcher.next_pass()
                assert loads, "somebody always rides"
                if self.random.random() < 0.3:  # a plan may be dropped
                    loads = self.batcher.next_pass()
                self.compute(loads)
                self.batcher.launched(loads)
                self.passes.append(loads)
                self.check_blocks()
            self.arrive(in_flight if self.late else loads)
            in_flight = loads if self.late else []

    def compute(self, loads: list[MicroBatchPlan]) -> None:
        """Each piece reads all before it: of its own sequence, or written by an earlier pass."""
        before, selected = dict(self.slots), dict[tuple[int, int], object]()
        for load in loads:
            for chunk in load.chunks:
                owner = chunk.sequence
                for position in range(chunk.start):
                    slot = self.slot(chunk, position)
                    assert selected.get((id(owner), slot), before.get(slot)) == written(owner, position)
                for position in range(chunk.start, chunk.start + chunk.count):
                    slot = self.slot(chunk, position)
                    self.slots[slot] = selected[id(owner), slot] = written(owner, position)

    def slot(self, chunk: SequenceChunk, position: int) -> int:
        return chunk.sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK

    def arrive(self, loads: list[MicroBatchPlan]) -> None:
        for load in loads:
            for chunk in load.chunks:
                owner = chunk.sequence
                if not chunk.completes or owner.finished:
                    continue
                owner.generated.append(7)
                if len(owner.generated) == owner.max_tokens or self.random.random() < 0.1:
                    owner.finished = True
                    self.batcher.retire(owner)

    def check_blocks(self) -> None:
        held = {block for item in self.batcher.running for block in item.blocks}
        assert self.pool.free == self.pool.blocks - len(held), "a block is free when the last one gave it back"

    @property
    def rows(self) -> int:
        """Tokens of prompts that were computed."""
        return sum(p.count for loads in self.passes for load in loads for p in load.chunks if not p.decodes)


def written(owner: RunningSequence, position: int) -> object:
    """What the cache holds of a token: it depends on all before it."""
    prompt = owner.request.token_ids
    return prompt[: position + 1] if position < len(prompt) else (owner.request.index, position)


def played(policy: Policy, *, blocks: int, random: Random, device_blocks: int = 0, discrete: bool = False) -> Played:
    pool = BlockPool(blocks, device_blocks)
    batcher = Batcher(policy, pool, discrete=discrete, prefix_caching=True)
    return Played(batcher=batcher, pool=pool, random=random, late=random.random() < 0.5)


@pytest.mark.parametrize("seed", range(10))
def test_nobody_reads_what_no_earlier_pass_has_written(seed: int) -> None:
    """Any policy; few blocks, so that what is known is lost and computed again; and none is lost for good."""
    random = Random(seed)
    policy = Policy(
        model="m",
        batch_size=random.randint(1, 9),
        micro_batch_size=random.randint(1, 6),
        micro_batch_tokens=random.randint(6, 24),
        kv_block_size=BLOCK,
        admission=random.choice(("refill", "static")),
    )
    blocks = random.randint(9, 50)
    run = played(
        policy,
        blocks=blocks,
        random=random,
        device_blocks=random.choice((0, 0, blocks // 3)),
        discrete=random.random() < 0.3,
    )
    prompts = alike(random, 40)
    generations = [
        generation(n, prompt, random.randint(1, 20), scored_from=random.choice((None, None, 1, 40)))
        for n, prompt in enumerate(prompts)
    ]
    run.drive(generations)
    assert all(generation.finished for generation in generations)
    assert all(generation.cached < len(generation.request.token_ids) for generation in generations)
    for item in generations:
        if item.request.sampling.prompt_logprobs is not None:
            assert item.cached < item.request.scored_from
    assert run.rows + sum(generation.cached for generation in generations) == sum(map(len, prompts))
    assert sorted(run.pool.take(blocks)) == list(range(blocks))


def small(n: int = 64, *, blocks: int = 400, **how: Any) -> Played:
    policy = Policy(model="m", batch_size=n, micro_batch_size=n, micro_batch_tokens=256, kv_block_size=BLOCK)
    return played(policy, blocks=blocks, random=Random(1), **how)


def test_rows_with_one_system_prompt_wait_until_the_first_has_computed_it() -> None:
    run = small()
    system = tuple(range(100))
    generations = [generation(n, (*system, 200 + n), 5) for n in range(64)]
    run.drive(generations)
    first, second = ({id(p.sequence) for load in loads for p in load.chunks} for loads in run.passes[:2])
    assert first == {id(generations[0])}
    assert len(second) == 64
    assert [generation.cached for generation in generations] == [0] + [96] * 63
    assert run.rows == 101 + 63 * 5
    assert run.batcher.admitted.cached_tokens == 63 * 96
    assert run.pool.free == run.pool.blocks


def test_eight_samples_hold_the_full_blocks_of_a_prompt_once() -> None:
    """All samples of 64 prompts run at the same time, in as many blocks as that takes."""
    random = Random(5)
    prompts = [tuple(random.randrange(256) for _ in range(random.randint(17, 120))) for _ in range(64)]
    samples = [generation(n, prompt, 20) for n, prompt in enumerate(prompts) for _ in range(8)]
    full = [(len(prompt) - 1) // BLOCK for prompt in prompts]
    rest = [-(-(len(prompt) + 20) // BLOCK) - blocks for prompt, blocks in zip(prompts, full, strict=True)]
    policy = Policy(model="m", batch_size=512, micro_batch_size=64, micro_batch_tokens=256, kv_block_size=BLOCK)
    run = played(policy, blocks=sum(full) + 8 * sum(rest), random=random)
    run.batcher.add(samples)
    while run.batcher.waiting:
        loads = run.batcher.next_pass()
        run.compute(loads)
        run.batcher.launched(loads)
    assert len(run.batcher.running) == 512
    assert run.pool.free == 0
    assert sum(sample.cached for sample in samples) == 7 * BLOCK * sum(full)


def test_others_are_not_held_up_by_those_who_wait() -> None:
    """Two rows of each of ten prompts: the first of each rides at once."""
    run = small(20)
    run.drive([generation(n, (n // 2,) * 50, 3) for n in range(20)], maximum=2)
    first, second = ({p.sequence.request.index for load in loads for p in load.chunks} for loads in run.passes)
    assert first == set(range(0, 20, 2))
    assert second == set(range(20))


def test_who_waited_leaves_room_for_those_who_decode() -> None:
    """The third is admitted behind the second, which waits, and decodes when the second has more to compute than a pass
    holds."""
    policy = Policy(
        model="m", batch_size=3, micro_batch_size=3, micro_batch_tokens=64, prompt_micro_batches=1, kv_block_size=BLOCK
    )
    batcher = Batcher(policy, BlockPool(20), discrete=False, prefix_caching=True)
    first = tuple(range(33))
    prompts = (first, (*first[:32], *range(100, 180)), (1, 2, 3, 4))
    batcher.add([generation(index, prompt, 5) for index, prompt in enumerate(prompts)])
    passes = []
    while batcher.busy:
        loads = batcher.next_pass()
        chunks = [chunk for load in loads for chunk in load.chunks]
        batcher.launched(loads)
        passes.append([sum(p.count for p in chunks if p.sequence.request.index == index) for index in range(3)])
    assert passes[:3] == [[33, 0, 4], [1, 65, 1], [1, 15, 1]]


def test_rows_of_which_each_goes_on_where_the_last_one_ends_do_not_queue() -> None:
    run = small()
    turns = tuple(range(20 * BLOCK + 1))
    generations = [generation(n, turns[: n * BLOCK + 1], 1) for n in range(1, 13)]
    run.drive(generations)
    assert len(run.passes) == 1 + MOST_WAITS
    assert max(generation.cached for generation in generations) == MOST_WAITS * BLOCK


def test_nobody_waits_for_the_head_of_a_template() -> None:
    """A block of six is not worth a pass; those who come later have it for nothing."""
    run = small(8)
    generations = [generation(n, tuple(range(BLOCK)) + (100 + n,) * 80, 1) for n in range(20)]
    run.drive(generations)
    assert [generation.cached for generation in generations] == [0] * 8 + [BLOCK] * 12
    assert len(run.passes) == 3


def test_what_was_computed_is_found_in_a_later_run_until_its_blocks_are_needed() -> None:
    run = small(4, blocks=10)
    prompt = tuple(range(70))
    for cached in (0, 64):
        (again,) = selected = [generation(0, prompt, 3)]
        run.drive(selected)
        assert again.cached == cached
    other = [generation(1, tuple(range(200, 240)), 60)]
    run.drive(other)
    (again,) = selected = [generation(2, prompt, 3)]
    run.drive(selected)
    assert 0 < again.cached < 64, "seven blocks were taken of the last of ten"


def test_a_run_that_is_closed_leaves_what_was_computed_and_promises_nothing() -> None:
    run = small(8, blocks=60)
    generations = [generation(n, (*range(300), n), 3) for n in range(5)]
    run.drive(generations, maximum=1)
    run.batcher.next_pass()
    run.batcher.clear()
    assert run.pool.free == 60
    run.passes.clear()
    run.drive(again := [generation(9, (*range(300), 9), 3)])
    assert again[0].cached == 288
    run.batcher.clear(failed=True)
    run.drive(again := [generation(9, (*range(300), 9), 3)])
    assert again[0].cached == 0


def test_what_was_promised_and_not_computed_is_not_known() -> None:
    run = small(8, blocks=60)
    run.batcher.add([generation(n, (*range(100), n), 3) for n in range(3)])
    run.batcher.next_pass()
    run.batcher.clear()
    assert run.pool.free == 60
    run.drive(again := [generation(9, (*range(100), 9), 3)])
    assert again[0].cached == 0


def test_across_a_link_a_short_beginning_is_not_worth_it() -> None:
    """The rest of such a prompt would attend on the host, and the whole attends on the device."""
    for prompt, discrete, cached in ((60, True, 0), (30, True, 16), (60, False, 16)):
        run = small(4, discrete=discrete)
        run.drive([generation(0, tuple(range(17)), 1)])
        run.drive(selected := [generation(1, tuple(range(17)) + (99,) * (prompt - 17), 1)])
        assert selected[0].cached == cached


def test_keys_depend_on_every_token_before() -> None:
    keys = keys_of(tuple(range(50)), BLOCK)
    assert len(keys) == len(set(keys)) == 3
    assert keys_of(tuple(range(47)), BLOCK) == keys[:2]
    assert keys_of((1, *range(1, 50)), BLOCK)[2] != keys[2]
    assert keys_of(tuple(range(15)), BLOCK) == ()


def answers(completions: Sequence[Completion]) -> list[tuple[int, tuple[int, ...], str]]:
    return sorted((completion.index, completion.token_ids, completion.finish_reason) for completion in completions)


HOW = {"batch_size": 6, "micro_batch_size": 4, "micro_batch_tokens": 48, "kv_tokens": 8 * 160, "kv_block_size": BLOCK}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu": ("mixtral", {**DEVICES["cpu"], "schedule": "serial"}),
    "static": ("olmoe", {**DEVICES["cpu"], "admission": "static"}),
    "gpu": ("olmoe", DEVICES["gpu"]),
    "gpu-attention": ("mixtral", DEVICES["gpu-attention"]),
    "gpu-cache": ("olmoe", DEVICES["gpu-cache"]),
    "gpu-cache-both": ("olmoe", {**DEVICES["gpu-cache-both"], "kv": Shares(device=0.5, host=0.5)}),
    "split": ("mixtral", {**DEVICES["split"], "kv_block_size": 32}),
}
RANDOM = Random(11)
PROMPTS = alike(RANDOM, 22)
SAMPLING = [
    SamplingParams(max_tokens=RANDOM.randint(1, 5), temperature=0.8 * (n % 3 == 0), seed=n % 5)
    for n in range(len(PROMPTS))
]
Wanted = Callable[[str], tuple[Path, list[Any]]]


@pytest.fixture(scope="module")
def wanted(tiny: Tiny) -> Wanted:
    """A model, and what it answers where nothing is shared; attention of mixtral has a window of 20 positions."""

    @cache
    def find(family: str) -> tuple[Path, list[Any]]:
        model = tiny(family, **MODELS[family])
        with Engine(Policy(model=str(model), **HOW), device="cpu", prefix_caching=False) as engine:
            result = engine.generate(PROMPTS, SAMPLING)
            assert {item.cached_tokens for item in result} == {0}
            assert engine.stats.counts["prefix_cache_hits"] == 0
        return model, answers(result)

    return find


def opened(model: Path, devices: str) -> Engine:
    policy = replace(Policy(model=str(model), **HOW), **POLICIES[devices][1])
    return Engine(policy, device="twin" if policy.discrete else "cpu")


@pytest.mark.parametrize("devices", thorough(POLICIES, but=["cpu", "gpu-cache-both"]))
def test_tokens_are_those_of_whole_prompts(wanted: Wanted, devices: str) -> None:
    """Twice: the second time much is known from the first."""
    model, expected = wanted(POLICIES[devices][0])
    with opened(model, devices) as engine:
        hits = []
        for _ in range(2):
            result = engine.generate(PROMPTS, SAMPLING)
            assert answers(result) == expected
            hits.append(sum(item.cached_tokens for item in result))
            check_free(engine)
        counts = engine.stats.counts
    assert hits[0] > sum(map(len, PROMPTS)) / 8
    assert counts["prefix_cache_hits"] == sum(hits)
    assert counts["prefix_cache_queries"] == 2 * sum(map(len, PROMPTS)) == engine.stats.prompt_tokens


def check_free(engine: Engine) -> None:
    pool = engine._loaded.pool
    assert pool.free == pool.blocks
    assert not any(pool._holders)
    assert not engine._batcher._prefix_cache._promised


@pytest.mark.parametrize("devices", thorough(["cpu", "gpu-cache-both"], but=["gpu-cache-both"]))
def test_a_closed_run_leaves_the_cache_exact(wanted: Wanted, devices: str) -> None:
    """Closed after some answers, or ended by its source: the next run is right, and every block is free after it."""
    model, expected = wanted(POLICIES[devices][0])
    requests = [
        Request(index=n, token_ids=prompt, sampling=how)
        for n, (prompt, how) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
    ]

    def failing(after: int) -> Iterator[Request]:
        yield from requests[:after]
        raise OSError("gone")

    with opened(model, devices) as engine:
        run = engine.run(requests)
        assert len(list(islice(run, 5))) == 5
        run.close()  # type: ignore[attr-defined]
        check_free(engine)
        with pytest.raises(OSError, match="gone"):
            list(engine.run(failing(12)))
        check_free(engine)
        assert answers(list(engine.run(requests))) == expected


@pytest.mark.thorough
def test_eight_samples_are_those_of_eight_requests(wanted: Wanted) -> None:
    """Eight equal requests without a seed of their own draw the same where they are greedy; sampled ones as without
    sharing."""
    model, prompts = wanted("olmoe")[0], [tuple(range(65 + n, 115 + 2 * n)) for n in range(8)]
    sampled = SamplingParams(max_tokens=4, n=8, temperature=0.9, seed=3, ignore_eos=True)
    greedy = replace(sampled, temperature=0.0)
    result: dict[bool, list[Any]] = {}
    for caching in (False, True):
        with Engine(Policy(model=str(model), **HOW), device="cpu", prefix_caching=caching) as engine:
            result[caching] = [[item.token_ids for item in engine.generate(prompts, how)] for how in (greedy, sampled)]
            if not caching:
                repeated = [prompt for prompt in prompts for _ in range(8)]
                result[caching][0] = [item.token_ids for item in engine.generate(repeated, replace(greedy, n=1))]
    assert result[True] == result[False]


def test_samples_of_one_prompt_share_its_blocks(wanted: Wanted) -> None:
    """And what is scored is computed, however much of it is known."""
    model, prompt = wanted("olmoe")[0], tuple(range(65, 115))
    how = SamplingParams(max_tokens=3, n=3, temperature=0.9, seed=1, ignore_eos=True)
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    requests = [
        Request(index=0, token_ids=prompt, sampling=how),
        *(Request(index=n, token_ids=prompt, sampling=scored, scored_from=first) for n, first in enumerate((1, 20), 1)),
    ]
    result = []
    for caching in (False, True):
        with Engine(Policy(model=str(model), **HOW), device="cpu", prefix_caching=caching) as engine:
            result.append(sorted(engine.run(requests), key=lambda item: (item.index, item.sample)))
    full, shared = result
    assert [(item.token_ids, item.prompt_logprobs) for item in shared] == [
        (item.token_ids, item.prompt_logprobs) for item in full
    ]
    assert [item.cached_tokens for item in shared] == [0, 48, 48, 0, 16]
