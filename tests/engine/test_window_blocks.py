"""Layers with a window hold what their tokens still see, and no more; tokens are those of a cache that is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import pytest

from moelight.core.dtypes import BFLOAT16
from moelight.core.policy import Policy
from moelight.core.request import Completion, SamplingParams
from moelight.engine.batcher import Batcher, MicroBatchPlan, SequenceChunk
from moelight.engine.engine import Engine
from moelight.engine.window_blocks import WindowBlocks
from moelight.hrm import costs
from moelight.hrm.footprint import footprint, kv_blocks, pass_tokens, window_blocks, window_sequence_blocks
from moelight.models.profiles import profile_of_checkpoint
from moelight.paging.kv import BlockPool
from tests.cases import thorough
from tests.engine.test_prefix_cache import BLOCK, Played, alike, generation, written

FAMILIES = ("gpt_oss", "llama4_text", "gemma3_text")
HOW: list[dict[str, Any]] = [{}, {"speculate": "ngram"}, {"ffn_device": "gpu"}]


@dataclass
class PlayedWindows(Played):
    """A batcher whose layers with a window have a cache of their own, which is played too."""

    window: int = 1
    window_slots: dict[int, object] = field(default_factory=dict)
    most_held: int = 0

    def compute(self, loads: list[MicroBatchPlan]) -> None:
        super().compute(loads)
        before, selected = dict(self.window_slots), dict[tuple[int, int], object]()
        for load in loads:
            for chunk in load.chunks:
                owner, end = chunk.sequence, chunk.start + chunk.count
                for position in range(max(0, chunk.start - self.window + 1), chunk.start):
                    slot = self.window_slot(chunk, position)
                    assert selected.get((id(owner), slot), before.get(slot)) == written(owner, position)
                for position in range(chunk.start, end):
                    slot = self.window_slot(chunk, position)
                    self.window_slots[slot] = selected[id(owner), slot] = written(owner, position)

    def window_slot(self, chunk: SequenceChunk, position: int) -> int:
        table = chunk.sequence.window
        assert table is not None and position // BLOCK >= table.first
        return table.blocks[position // BLOCK - table.first] * BLOCK + position % BLOCK

    def check_blocks(self) -> None:
        super().check_blocks()
        tables = [item.window for item in self.batcher.running if item.window is not None]
        windows = self.batcher.windows
        assert windows is not None
        assert all(len(table.blocks) <= table.reserved for table in tables)
        assert windows._reserved == sum(table.reserved for table in tables) <= windows.pool.blocks
        held = {block for table in tables for block in table.blocks}
        assert windows.pool.free == windows.pool.blocks - len(held)
        self.most_held = max(self.most_held, len(held))


def played(policy: Policy, *, blocks: int, window: int, window_pool: int, random: Random) -> PlayedWindows:
    pool, sizes = BlockPool(blocks), {"block_size": BLOCK, "pass_tokens": int(pass_tokens(policy))}
    windows = WindowBlocks(BlockPool(window_pool), window=window, **sizes)
    batcher = Batcher(policy, pool, discrete=False, prefix_caching=True, windows=windows)
    return PlayedWindows(batcher=batcher, pool=pool, random=random, late=random.random() < 0.5, window=window)


@pytest.mark.parametrize("seed", range(12))
def test_tokens_see_what_an_earlier_pass_has_written(seed: int) -> None:
    """Any policy, prompts that begin alike, answers that grow and are suspended, and as few blocks as may be."""
    random = Random(seed)
    policy = Policy(
        model="m",
        batch_size=random.randint(1, 9),
        micro_batch_size=random.randint(1, 6),
        micro_batch_tokens=random.randint(6, 24),
        prompt_micro_batches=random.randint(1, 4),
        kv_block_size=BLOCK,
        admission=random.choice(("refill", "static")),
    )
    window = random.choice((2, 15, 16, 17, 40))
    least = window_sequence_blocks(window, BLOCK) + -(-int(pass_tokens(policy)) // BLOCK)
    run = played(
        policy,
        blocks=random.randint(12, 50),
        window=window,
        window_pool=random.randint(least, 3 * least),
        random=random,
    )
    prompts = alike(random, 40)
    for _ in range(2):  # the second time what was computed is known
        sequences = [generation(n, prompt, random.randint(1, 60)) for n, prompt in enumerate(prompts)]
        for sequence in () if run.late else sequences[::3]:
            sequence.grows = True
        run.drive(sequences)
        assert all(sequence.finished for sequence in sequences)
    windows = run.batcher.windows
    assert windows is not None
    assert windows._reserved == 0
    assert windows.pool.free == windows.pool.blocks
    assert not windows._promised


def test_a_long_answer_holds_its_window_only() -> None:
    policy = Policy(model="m", batch_size=4, micro_batch_size=4, micro_batch_tokens=256, kv_block_size=BLOCK)
    run = played(policy, blocks=400, window=20, window_pool=400, random=Random(1))
    run.random.random = lambda: 1.0  # type: ignore[method-assign]
    run.drive([generation(n, (n,) * 30, 500) for n in range(4)])
    assert run.most_held <= 4 * window_sequence_blocks(20, BLOCK)


def test_samples_share_a_prompt_whose_window_was_computed() -> None:
    policy = Policy(model="m", batch_size=8, micro_batch_size=8, micro_batch_tokens=256, kv_block_size=BLOCK)
    run = played(policy, blocks=400, window=20, window_pool=100, random=Random(1))
    samples = [generation(0, tuple(range(100)), 40) for _ in range(8)]
    run.drive(samples)
    assert [sample.cached for sample in samples] == [0] + [96] * 7


def test_what_was_promised_and_not_computed_is_not_known() -> None:
    policy = Policy(model="m", batch_size=8, micro_batch_size=8, micro_batch_tokens=256, kv_block_size=BLOCK)
    run = played(policy, blocks=100, window=20, window_pool=100, random=Random(1))
    run.batcher.add([generation(n, (*range(100), n), 3) for n in range(3)])
    run.batcher.next_pass()
    run.batcher.clear()
    run.drive(again := [generation(9, (*range(100), 9), 3)])
    assert again[0].cached == 0


SIZES: dict[str, Any] = {"batch_size": 5, "micro_batch_size": 3, "micro_batch_tokens": 24, "kv_block_size": BLOCK}
RANDOM = Random(4)
PROMPTS = [list(prompt) for prompt in alike(RANDOM, 10)] + [[70 + n % 9 for n in range(130)]]
SAMPLING = [
    SamplingParams(max_tokens=24 + n, temperature=0.7 * (n % 2), seed=n, ignore_eos=True, n=1 + n % 3)
    for n in range(len(PROMPTS))
]


@pytest.mark.parametrize("family", thorough(FAMILIES, but=["gpt_oss"]))
@pytest.mark.parametrize("how", thorough(HOW, but=HOW[1:2]), ids=["cpu", "drafts", "gpu"])
def test_tokens_are_those_of_a_whole_cache(
    family: str, how: dict[str, Any], checkpoints: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = checkpoints(family)
    options = dict(how)
    devices = {"ffn_device": options.pop("ffn_device")} if "ffn_device" in options else {}
    policy = Policy(model=str(directory), kv_tokens=5 * 192, **SIZES, **devices)
    opened = partial(Engine, policy, device="twin" if policy.discrete else "cpu")

    def answers(engine: Engine) -> Sequence[Completion]:
        return [replace(one, cached_tokens=0, metrics=None) for one in engine.generate(PROMPTS, SAMPLING)]

    with opened(**options) as engine:
        windows = engine._batcher.windows
        assert windows is not None
        assert windows.pool.blocks <= engine._loaded.pool.blocks
        first, second = answers(engine), answers(engine)
        assert windows.pool.free == windows.pool.blocks
    monkeypatch.setattr(costs, "widest_window", lambda model: None)
    with opened() as engine:
        assert engine._batcher.windows is None
        assert answers(engine) == first == second


def test_a_cache_with_windows_takes_less_memory(checkpoints: Callable[..., Any]) -> None:
    directory, _ = checkpoints("gpt_oss")
    model = profile_of_checkpoint(directory)
    window = costs.widest_window(model)
    assert window is not None
    policy = Policy(model="m", batch_size=64, kv_tokens=64 * 1024, prompt_micro_batches=1, micro_batch_tokens=256)
    on_cpu = footprint(model, policy, dtype=BFLOAT16)
    per_token = costs.kv_token_bytes(model, BFLOAT16)
    windowed = costs.windowed_token_bytes(model, BFLOAT16)
    assert on_cpu.bytes_of("kv") == 64 * 1024 * (per_token - windowed)
    assert on_cpu.bytes_of("window_kv") == window_blocks(model, policy) * policy.kv_block_size * windowed
    assert 0 < window_blocks(model, policy) < kv_blocks(policy) / 4
    on_gpu = footprint(model, replace(policy, attention_device="gpu", ffn_device="gpu"), dtype=BFLOAT16)
    assert on_gpu.bytes_of("kv") == 64 * 1024 * per_token
    assert on_gpu.bytes_of("window_kv") == 0
