"""Simulate a policy's passes on a virtual clock, built by a schedule and priced by the ledger. The first pass has
prompts, as in a job whose slots refill; in the following passes every slot decodes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.core.schedule import Lane, Schedule, TaskKind
from moelight.core.timeline import Timeline
from moelight.hrm import costs
from moelight.hrm.estimate import Estimate, Phase, cost_model_of, estimate, least_missed
from moelight.hrm.footprint import pass_tokens
from moelight.hrm.machine_model import speeds_of
from moelight.hrm.placement import place_pages
from moelight.hrm.task_cost import MicroBatchLoad, PassCosts
from moelight.hrm.workload_model import Passes
from moelight.optimizer.optimize import compute_dtype
from moelight.optimizer.pass_prices import PassPrices
from moelight.profiles.hardware import HardwareProfile, with_gpus
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload
from moelight.scheduler import SCHEDULES, on_demand
from moelight.scheduler.layout import EXPERT_PLACES, MicroBatchShape, PassShape, layout_of
from moelight.scheduler.requirements import misfit
from moelight.scheduler.simulate import Price, simulate_passes

STEADY_PASSES = 3
MOST_DRAFTS = 16  # of a sequence in a pass
MOST_TASKS = 2_000_000  # of the passes that are simulated together: about a minute, and 1.5 GiB of spans


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRun:
    """One simulated pass. ``seconds`` count from the end of the previous pass; ``lane_bytes`` are the schedule's."""

    timeline: Timeline
    seconds: float
    decode_tokens: int
    prompt_tokens: int
    lane_bytes: Mapping[Lane, int]

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second; prompt tokens are not counted."""
        return self.decode_tokens / self.seconds

    @property
    def busy_s(self) -> dict[Lane, float]:
        """Busy seconds by lane, in the order of the enumeration, without idle lanes."""
        busy = self.timeline.busy_s()
        return {lane: busy[lane] for lane in Lane if busy.get(lane, 0.0) > 0}

    @property
    def binding(self) -> Lane:
        busy = self.busy_s
        return max(busy, key=busy.__getitem__)

    @property
    def idle_share(self) -> float:
        """The share of the pass in which the binding lane is idle."""
        return max(0.0, 1.0 - self.busy_s[self.binding] / self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """The simulated passes of one schedule, on one clock; ``with_prompts`` is None if the job has no such pass.
    ``tokens_per_s`` is the rate of the whole job: estimated seconds of passes with and without prompts, scaled by the
    ratio of simulated to estimated seconds of each kind."""

    schedule: str
    estimate: Estimate
    with_prompts: PassRun | None
    decode: tuple[PassRun, ...]
    tokens_per_s: float

    @property
    def steady(self) -> PassRun:
        """The last decode pass, which a long run of decode passes repeats."""
        return self.decode[-1]

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        first = () if self.with_prompts is None else (self.with_prompts.timeline,)
        return (*first, *(run.timeline for run in self.decode))


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftGain:
    """Decode passes with the best ``num_speculative_tokens`` drafts of each sequence, of which each is accepted with
    probability ``acceptance`` after those before it; ``gain``: tokens per second over those without drafts."""

    acceptance: float
    num_speculative_tokens: int
    tokens_per_pass: float
    decode_tokens_per_s: float
    gain: float


class SimulationSetup:
    """One policy, resolved or not, of one model on one machine for one workload; ``estimate``: the ledger's."""

    def __init__(self, policy: Policy, model: ModelProfile, hardware: HardwareProfile, workload: Workload) -> None:
        hardware = with_gpus(hardware, policy.gpus)
        self.policy, self.model, self.hardware, self.workload = policy, model, hardware, workload
        self._dtype, self._speeds = compute_dtype(model, hardware), speeds_of(hardware)
        self.estimate = self.estimate_of(policy.schedule)
        self._layout, self._placement = layout_of(model, policy, self._dtype), place_pages(model, policy)
        self._cost_model = cost_model_of(model, policy, self._speeds, self._dtype)

    def estimate_of(self, schedule: str) -> Estimate:
        policy = replace(self.policy, schedule=schedule)
        return estimate(self.model, policy, self.workload, self._speeds, dtype=self._dtype)

    def schedules(self) -> tuple[str, ...]:
        policy = self.policy
        placed = {"attention": policy.attention_device, "experts": EXPERT_PLACES[policy.ffn_device]}
        where: dict[str, Any] = {**placed, "discrete": policy.discrete, "small_ring": self._placement.small_ring}
        return tuple(name for name in SCHEDULES if misfit(name, **where) is None)

    def roofs(self) -> dict[str, float]:
        """The most bytes per second of each lane; links that the machine lacks are left out."""
        lanes = ("disk", "stage", "h2d", "d2h") if self.policy.discrete else ("disk",)
        return {lane: rate for lane in lanes if 0 < (rate := getattr(self._speeds, lane)) < math.inf}

    def simulated_run(self, schedule: str, *, passes: int = STEADY_PASSES) -> SimulatedRun:
        """One pass with prompts, if the job has one, and ``passes`` decode passes; ConfigError above `MOST_TASKS`."""
        self._check_size(passes + 1)
        loads = [pass_loads for pass_loads in (self._prompt_loads(), *[self._decode_loads()] * passes) if pass_loads]
        steps = list(self._steps(schedule, loads))
        timelines = simulate_passes(steps, dram_bytes_per_s=self._speeds.dram, inline=not self.policy.discrete)
        runs: list[PassRun] = []
        for timeline, pass_loads, (built, _) in zip(timelines, loads, steps, strict=True):
            run = PassRun(
                timeline=timeline,
                seconds=timeline.end_s - (runs[-1].timeline.end_s if runs else 0.0),
                decode_tokens=round(sum(load.decode_tokens for load in pass_loads)),
                prompt_tokens=round(sum(load.prompt_tokens for load in pass_loads)),
                lane_bytes=built.lane_bytes(),
            )
            runs.append(run)
        first = runs[0] if len(runs) > passes else None
        priced = self.estimate_of(schedule)
        return SimulatedRun(
            schedule=schedule,
            estimate=priced,
            with_prompts=first,
            decode=tuple(runs[-passes:]),
            tokens_per_s=self._job_tokens_per_s(priced, first, runs[-1]),
        )

    def drafts(self, acceptance: float) -> DraftGain:
        """The best number of drafts for each sequence in decode passes, if each is accepted with probability
        ``acceptance`` after those before it."""
        policy, work = self.policy, self.workload
        running = min(policy.batch_size, work.num_requests)
        limit = min(MOST_DRAFTS, (int(pass_tokens(policy)) - running) // running)
        counts = np.arange(limit + 1)
        passes = Passes(
            count=np.ones(limit + 1),
            decode_tokens=running * (counts + 1.0),
            prompt_tokens=np.zeros(limit + 1),
            context=work.prompt_len + work.gen_len / 2,
            prompt_len=1.0,
        )
        prices = PassPrices(self.model, policy, self._speeds, self._dtype)
        seconds = prices.seconds(policy, passes, {}, np.full(limit + 1, float(running)))
        rates = running * np.cumsum(acceptance**counts) / seconds
        best = int(np.argmax(rates))
        return DraftGain(
            acceptance=acceptance,
            num_speculative_tokens=best,
            tokens_per_pass=float(rates[best] * seconds[best]),
            decode_tokens_per_s=float(rates[best]),
            gain=float(rates[best] / rates[0]),
        )

    def lane_bytes(self, schedule: str) -> dict[Lane, int]:
        """Bytes that cross each lane in a steady decode pass."""
        return self._built(schedule, self._decode_loads(), self._prefetched(schedule)).lane_bytes()

    def _check_size(self, passes: int) -> None:
        """Refuse too many passes before any schedule is built, by a rough count of tasks."""
        policy, running = self.policy, min(self.policy.batch_size, self.workload.num_requests)
        count = -(-running // policy.micro_batch_size) + policy.prompt_micro_batches
        tasks = passes * (5 * count * self.model.num_layers + 2 * len(self._layout.streamed))
        if tasks > MOST_TASKS:
            raise ConfigError(
                f"simulate: {passes:,} passes of up to {count:,} micro-batches in {self.model.num_layers:,} layers are "
                f"some {tasks:,} tasks, and {MOST_TASKS:,} can be simulated; ask for fewer passes, or for a larger "
                "micro_batch_size"
            )

    def _steps(self, schedule: str, loads: Sequence[Sequence[MicroBatchLoad]]) -> Iterator[tuple[Schedule, Price]]:
        prefetched = self._prefetched(schedule)
        before: tuple[Sequence[MicroBatchLoad], int] | None = None
        for pass_loads in loads:
            if before != (pass_loads, prefetched):
                built, routed_only = (
                    self._built(schedule, pass_loads, prefetched),
                    self._routed_only(schedule, pass_loads),
                )
                priced = PassCosts(
                    self._cost_model, self._placement, pass_loads, host_kv=self._layout.kv_host, routed_only=routed_only
                )
            before, prefetched = (pass_loads, prefetched), len(built.prefetched_next)
            yield built, priced

    def _prefetched(self, schedule: str) -> int:
        """Pages that a decode pass prefetches for the next pass."""
        return len(self._built(schedule, self._decode_loads(), 0).prefetched_next)

    def _built(self, schedule: str, loads: Sequence[MicroBatchLoad], prefetched: int) -> Schedule:
        tokens, routed_only = sum(load.tokens for load in loads), self._routed_only(schedule, loads)
        alone = self.model.ranks == 1  # else phases exchange
        in_place = alone and not (self._layout.discrete or routed_only or self.model.layers)  # a graph's is not known
        shape = PassShape(
            micro_batches=tuple(map(self._shape, loads)),
            prefetched=prefetched,
            wraps=True,
            routed_only=routed_only,
            whole_layers=in_place and tokens <= costs.WHOLE_LAYERS_TOKENS,
        )
        return SCHEDULES.get(schedule)(self._layout, shape)

    def _routed_only(self, schedule: str, loads: Sequence[MicroBatchLoad]) -> bool:
        tokens = round(sum(load.tokens for load in loads))
        max_tokens, least = self.policy.micro_batch_tokens, least_missed(self.policy)
        return on_demand.pays(self._layout, schedule, tokens, max_tokens, least=least)

    def _shape(self, load: MicroBatchLoad) -> MicroBatchShape:
        context = round(load.decode_tokens * load.context) if self._layout.context_crosses else 0
        return MicroBatchShape(
            tokens=round(load.tokens),
            prefill_only=self._layout.discrete and not load.decode_tokens,
            samples=load.rows > 0,
            context=context,
            device_tokens=self._layout.device_tokens(round(load.tokens)),
            device_context=self._layout.device_tokens(context),
        )

    def _decode_loads(self) -> list[MicroBatchLoad]:
        running = min(self.policy.batch_size, self.workload.num_requests)
        context = self.workload.prompt_len + self.workload.gen_len / 2
        sizes = _cut(running, -(-running // self.policy.micro_batch_size))
        return [MicroBatchLoad(decode_tokens=size, context=context, rows=size) for size in sizes]

    def _prompt_loads(self) -> list[MicroBatchLoad]:
        """Micro-batches of a pass with prompts; empty if the job has no such pass."""
        phase = _prompts(self.estimate)
        if phase is None:
            return []
        work, policy = self.workload, self.policy
        context, length = work.prompt_len + work.gen_len / 2, float(work.prompt_len)
        decode, prompt = round(phase.decode_tokens), round(phase.prompt_tokens)
        prompts = max(1, round(prompt / length))
        mu, max_tokens = policy.micro_batch_size, policy.micro_batch_tokens
        decoding = [MicroBatchLoad(decode_tokens=d, context=context, rows=d) for d in _cut(decode, -(-decode // mu))]
        rows, tokens = (prompts, prompt) if policy.discrete else (decode + prompts, decode + prompt)
        count = max(-(-rows // mu), -(-tokens // max_tokens))
        beside = [0] * count if policy.discrete else _cut(decode, count)
        with_prompts = [
            MicroBatchLoad(decode_tokens=d, context=context, prompt_tokens=p, prompt_len=length, rows=d + rows)
            for d, p, rows in zip(beside, _cut(prompt, count), _cut(prompts, count), strict=True)
        ]
        return [*with_prompts, *decoding] if policy.discrete else with_prompts

    def _job_tokens_per_s(self, priced: Estimate, first: PassRun | None, steady: PassRun) -> float:
        plain, prompts = steady.seconds / priced.pass_s, _prompts(priced)
        mixed = plain if first is None or prompts is None else first.seconds / prompts.seconds
        phases = ((phase, mixed if phase.prompt_tokens >= 1 else plain) for phase in priced.phases)
        seconds = sum(phase.passes * phase.seconds * longer for phase, longer in phases)
        return self.workload.num_requests * self.workload.gen_len / seconds


def _prompts(priced: Estimate) -> Phase | None:
    """The passes that refill slots, or the first ones if no slot is ever refilled."""
    phases = {phase.name: phase for phase in priced.phases if phase.prompt_tokens >= 1}
    return phases.get("prompts") or phases.get("first prompts")


def layer_starts(timeline: Timeline) -> dict[int, float]:
    """The start of the first output projection of each layer, or of several whole layers, in seconds, by layer."""
    starts: dict[int, float] = {}
    for span in timeline.spans:
        if span.task.kind in (TaskKind.LAYERS, TaskKind.POST_ATTENTION, TaskKind.ROUTE):
            layer = span.task.layer
            starts[layer] = min(span.start_s, starts.get(layer, span.start_s))
    return starts


def _cut(total: int, parts: int) -> list[int]:
    """Split ``total`` into ``parts`` whole numbers that differ by at most one, larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]
