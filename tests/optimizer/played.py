"""A job played on the virtual clock: the real batcher, real schedules, and a machine that is as fast as one says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random

from moelight.core.dtypes import BFLOAT16
from moelight.core.policy import Adaptation, Policy
from moelight.core.request import Request, SamplingParams
from moelight.core.schedule import Schedule
from moelight.engine.adaptation import passed
from moelight.engine.batcher import Batcher, RunningSequence
from moelight.engine.batcher import MicroBatchPlan as Carried
from moelight.hrm.estimate import cost_model_of
from moelight.hrm.footprint import kv_blocks
from moelight.hrm.machine_model import Speeds
from moelight.hrm.placement import place_pages
from moelight.hrm.task_cost import MicroBatchLoad, PassCosts
from moelight.optimizer.adapter import LEAST_PASSES, Adapter, Rest
from moelight.paging.kv import BlockPool
from moelight.profiles.model import ModelProfile
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import MicroBatchShape, PassShape, layout_of
from moelight.scheduler.simulate import VirtualClock


@dataclass
class Played:
    """One job. ``noise``: every pass takes a random share of so much more or less, and every lane in it."""

    model: ModelProfile
    policy: Policy
    speeds: Speeds
    lengths: Sequence[tuple[int, int]]
    adapter: Adapter | None = None
    noise: float = 0.0
    changes: list[Adaptation] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @cached_property
    def layout(self):  # type: ignore[no-untyped-def]
        return layout_of(self.model, self.policy, BFLOAT16)

    @cached_property
    def built(self) -> dict[PassShape, Schedule]:
        """Schedules of the passes so far, most of which are alike."""
        return {}

    def play(self, *, passes: int = 1 << 30) -> Played:
        random, clock = Random(1), VirtualClock(dram_bytes_per_s=self.speeds.dram)
        pool = BlockPool(int(kv_blocks(self.policy)))
        batcher = Batcher(self.policy, pool, discrete=self.policy.discrete)
        batcher.add(_generations(self.lengths))
        cost_model, placement = (
            cost_model_of(self.model, self.policy, self.speeds, BFLOAT16),
            place_pages(self.model, self.policy),
        )
        prefetched, number = 0, 0
        while batcher.busy and number < passes:
            number += 1
            loads = batcher.next_pass()
            parts = [_priced(load) for load in loads]
            shape = PassShape(
                micro_batches=tuple(
                    MicroBatchShape(tokens=load.tokens, prefill_only=load.prefill_only, samples=True) for load in loads
                ),
                prefetched=prefetched,
                wraps=True,
                look_ahead=batcher.policy.look_ahead,
            )
            schedule = self.built.get(shape)
            if schedule is None:
                schedule = self.built[shape] = SCHEDULES.get(self.policy.schedule)(self.layout, shape)
            prefetched = len(schedule.prefetched_next)
            before_s = clock.now_s
            timeline = clock.run(schedule, PassCosts(cost_model, placement, parts))
            took = (clock.now_s - before_s) * self._noisy(random)
            self.seconds += took
            busy = {str(lane): seconds * self._noisy(random) for lane, seconds in timeline.busy_s().items()}
            batcher.launched(loads)
            prefill_only = sum(piece.completes for load in loads for piece in load.chunks)
            self.ends_s.append(self.seconds)
            self.tokens.append(prefill_only)
            if self.adapter is not None:
                self._adapt(self.adapter, batcher, pool, number, loads, took, busy)
        return self

    def _noisy(self, random: Random) -> float:
        return 1.0 + random.uniform(-self.noise, self.noise)

    def _adapt(self, adapter, batcher, pool, number, loads, took, busy) -> None:  # type: ignore[no-untyped-def]
        adapter.observe(passed(loads, took, busy))
        if adapter.watched < LEAST_PASSES:
            return
        prompts, answers = zip(*self.lengths, strict=True)
        held = pool.blocks - pool.free
        rest = Rest(
            waiting=batcher.waiting,
            prompt_len=sum(prompts) / len(prompts),
            gen_len=sum(answers) / len(answers),
            most_running=pool.blocks * len(batcher.running) // held if held else 1,
        )
        change = adapter.look(rest, after_pass=number)
        if change is not None:
            adapter.allocation.check(adapter.policy)
            batcher.policy = adapter.policy
            self.changes.append(change)

    def rate(self, *, first: float = 0.3, last: float = 0.8) -> float:
        """Generated tokens per second in the middle of the job, by shares of all tokens."""
        full, done, start = sum(self.tokens), 0, None
        for tokens, end_s in zip(self.tokens, self.ends_s, strict=True):
            done += tokens
            if start is None and done >= first * full:
                start = done, end_s
            if start is not None and done >= last * full:
                return (done - start[0]) / (end_s - start[1])
        raise AssertionError("the job is too short")


def adapted(played: Played, planned: Speeds, **options: object) -> Played:
    """The same job with an adapter that was told ``planned`` of the machine."""
    adapter = Adapter(played.model, played.policy, planned, BFLOAT16, **options)  # type: ignore[arg-type]
    return replace(played, adapter=adapter, changes=[], ends_s=[], tokens=[], seconds=0.0).play()


def _generations(lengths: Sequence[tuple[int, int]]) -> list[RunningSequence]:
    return [
        RunningSequence(
            request=Request(index=index, token_ids=tuple(range(prompt)), sampling=SamplingParams(max_tokens=answer)),
            seed=0,
            max_tokens=answer,
        )
        for index, (prompt, answer) in enumerate(lengths)
    ]


def _priced(load: Carried) -> MicroBatchLoad:
    decoding = [piece.start for piece in load.chunks if piece.decodes]
    prompts = [piece.count for piece in load.chunks if not piece.decodes]
    return MicroBatchLoad(
        decode_tokens=len(decoding),
        context=sum(decoding) / max(1, len(decoding)),
        prompt_tokens=sum(prompts),
        prompt_len=sum(prompts) / max(1, len(prompts)) or 1.0,
        rows=len(load.chunks),
    )
