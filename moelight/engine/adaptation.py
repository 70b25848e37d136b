"""Adaptation at run time: reports passes to the adapter and applies its decisions between passes."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from moelight.core.policy import Adaptation, Policy
from moelight.core.schedule import Lane
from moelight.engine.batcher import Admitted, Batcher, MicroBatchPlan
from moelight.engine.output_processor import OutputProcessor
from moelight.engine.pass_runner import PassRunner
from moelight.hrm.machine_model import Speeds
from moelight.optimizer.adapter import LEAST_PASSES, Adapter, Rest
from moelight.optimizer.pass_prices import Passed
from moelight.profiles.model import ModelProfile

SHARE = 1 / 2000  # of the time of all passes that observing and replanning may take
LEAST_S = 1.0
_FIRST_LOOK_S = 3e-3  # assumed cost of a replanning step before the first one

_log = logging.getLogger(__name__)


class PassAdaptation:
    """Runs after each pass of an engine. ``changes`` are the policy changes made so far."""

    def __init__(
        self,
        model: ModelProfile,
        policy: Policy,
        speeds: Speeds,
        fixed: Collection[str],
        batcher: Batcher,
        passes: PassRunner,
    ) -> None:
        """``policy``: as the engine was loaded; values that the user ``fixed`` in the plan are kept."""
        if "num_micro_batches" in fixed:
            fixed = {*fixed, "batch_size", "micro_batch_size"}
        self._adapter = Adapter(model, policy, speeds, passes.dtype, fixed=fixed)
        self._batcher, self._passes = batcher, passes
        self.changes: list[Adaptation] = []
        self._busy_s: Mapping[Lane, float] = {}
        self._passed, self._all_s, self._since_look_s = 0, 0.0, 0.0
        self._spent_s, self._look_s = 0.0, _FIRST_LOOK_S
        self._most_running = policy.batch_size
        self._outputs: OutputProcessor | None = None
        self._before = Admitted()

    def begin(self, output_processor: OutputProcessor, busy_s: Mapping[Lane, float]) -> None:
        """Start a run; the lanes have been busy for ``busy_s`` so far."""
        self._outputs, self._before, self._busy_s = output_processor, replace(self._batcher.admitted), dict(busy_s)

    def after(self, plans: Sequence[MicroBatchPlan], seconds: float, busy_s: Mapping[Lane, float]) -> None:
        """Record that a pass of ``plans`` took ``seconds``; all passes together kept the lanes busy for ``busy_s``."""
        before, self._busy_s = self._busy_s, dict(busy_s)
        self._passed += 1
        self._all_s += seconds
        self._since_look_s += seconds
        if self._adapter.exhausted or self._spent_s > SHARE * self._all_s:
            return
        began_s = time.perf_counter()
        lanes = {str(lane): total - before.get(lane, 0.0) for lane, total in self._busy_s.items()}
        self._adapter.observe(passed(plans, seconds, lanes))
        pool, running = self._passes.pool, len(self._batcher.running)
        if running and pool.blocks > pool.free:  # nothing runs if a whole batch finishes at once
            self._most_running = int(pool.blocks / ((pool.blocks - pool.free) / running))
            if (windows := self._batcher.windows) is not None:
                self._most_running = min(self._most_running, windows.most_running(running))
        watched_s = time.perf_counter()
        self._spent_s += watched_s - began_s
        enough = self._adapter.watched >= LEAST_PASSES and self._since_look_s >= LEAST_S
        if enough and self._spent_s + self._look_s <= SHARE * self._all_s:
            self._look()
            self._look_s = time.perf_counter() - watched_s
            self._spent_s += self._look_s
            self._since_look_s = 0.0

    def _look(self) -> None:
        """Replan for the averages of this run's sequences; maximum answers are scaled by the finished sequences."""
        now, before, outputs = self._batcher.admitted, self._before, self._outputs
        count = max(1, now.sequences - before.sequences)
        prompt, answer = now.prompt_tokens - before.prompt_tokens, now.answer_tokens - before.answer_tokens
        ended = outputs.ended_tokens / outputs.ended_most if outputs is not None and outputs.ended_tokens else 1.0
        lengths = {"prompt_len": prompt / count, "gen_len": answer / count * ended}
        rest = Rest(waiting=self._batcher.waiting, **lengths, most_running=self._most_running)
        if (change := self._adapter.look(rest, after_pass=self._passed)) is not None:
            self._passes.policy = self._batcher.policy = self._adapter.policy
            self.changes.append(change)
            _log.info("after pass %d: %s", change.after_pass, change.reason)


def passed(plans: Sequence[MicroBatchPlan], seconds: float, busy_s: Mapping[str, float]) -> Passed:
    """The pass of ``plans`` in the adapter's form."""
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    starts = [chunk.start for chunk in chunks if chunk.decodes]
    rows = sum(chunk.count for chunk in chunks if chunk.decodes)
    prompts = [chunk.count for chunk in chunks if not chunk.decodes]
    return Passed(
        decode_tokens=rows,
        context=sum(starts) / max(1, len(starts)),
        prompt_tokens=sum(prompts),
        prompt_len=sum(prompts) / len(prompts) if prompts else 1.0,
        seconds=seconds,
        busy_s=busy_s,
        sequences=len(starts),
    )
