"""Adapt a policy within its allocation to the measured speed of the machine: change when two looks in a row predict a
gain of more than 5 %, and change back if the gain is not realised.

Depends only on measurements of passes, not on the engine. Time is counted in calls of `Adapter.look`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from moelight.core.adaptation import Adaptation
from moelight.core.dtypes import DType
from moelight.core.policy import Policy
from moelight.hrm.footprint import prefill_tokens
from moelight.hrm.machine_model import Speeds
from moelight.hrm.workload_model import steady_passes
from moelight.optimizer.allocation import FIELDS, Allocation, PolicyCandidates, Values, values_of, with_values
from moelight.optimizer.calibration import KINDS, LANES, Belief, Passed, Pricing, passes_that_ran
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload

WORTH_IT = 0.05
KEPT = 0.5  # the share of a predicted gain that must be realised, or WORTH_IT if that is less
LEAST_PASSES = 8  # passes that a look needs
MOST_CHANGES = 8  # changes back included
_SETTLING = 2  # passes after a change that are packed under the previous policy, or fill the pipeline
_AT_EASE = 3  # looks without a change after a change
_PATIENCE = 4  # looks that slots may take to fill
_STEPS = 4  # changes in one respect each that may add up to one change
_REMEMBERED = 64  # passes of each kind that a look uses at most
_MATTERS = 0.25  # the share of a pass from which on a lane is named in a reason
_AS_PLANNED = 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """The rest of a job: True in ``waiting`` if requests wait, ``prompt_len`` and ``gen_len`` are their average tokens,
    and ``most_running`` is the number of such sequences that the cache holds at a time."""

    waiting: bool
    prompt_len: float
    gen_len: float
    most_running: int

    def workload(self) -> Workload:
        """A practically endless workload of such requests."""
        prompt = max(1, round(self.prompt_len))
        return Workload(
            num_requests=1 << 30, prompt_len=prompt, max_prompt_len=prompt, gen_len=max(1, round(self.gen_len))
        )


@dataclass(kw_only=True, slots=True)
class _PolicyTrial:
    """A change under evaluation. ``before`` and ``beliefs`` are the policy and the beliefs before the change; ``rows``
    is the expected number of sequences in a pass."""

    before: Policy
    beliefs: dict[str, Belief]
    gain: float
    rows: float
    looks: int = 0


class Adapter:
    """Observes the passes of one run. ``policy`` is the best one at present."""

    def __init__(
        self, model: ModelProfile, policy: Policy, speeds: Speeds, dtype: DType, *, fixed: Collection[str] = ()
    ) -> None:
        """``policy`` is resolved and its regions are allocated; ``speeds`` are those of its estimate; those of `FIELDS`
        in ``fixed`` are never changed."""
        self.policy = policy
        self.allocation = Allocation(model, policy, dtype, fixed=fixed)
        self._pricing = Pricing(model, policy, speeds, dtype)
        self._beliefs: dict[str, Belief] = {}
        self._ran: dict[str, deque[Passed]] = {kind: deque(maxlen=_REMEMBERED) for kind in KINDS}
        self._with_prompts, self._gen_len = 1.0, 1.0
        self._noted: Values | None = None
        self._trial: _PolicyTrial | None = None
        self._refused: set[tuple[str, bool]] = set()
        self._changes, self._settling, self._at_ease = 0, 0, 0

    def observe(self, passed: Passed) -> None:
        """Record one pass. The share of passes with prompts is averaged over about the lifetime of a sequence."""
        self._with_prompts += (float(passed.prompts > 0) - self._with_prompts) / max(self._gen_len, LEAST_PASSES)
        if self._settling:
            self._settling -= 1
        else:
            self._ran[passed.kind].append(passed)

    @property
    def watched(self) -> int:
        """Passes since the last look."""
        return sum(map(len, self._ran.values()))

    @property
    def exhausted(self) -> bool:
        """True if no further change is possible."""
        return self._changes + 2 > MOST_CHANGES and self._trial is None

    def look(self, rest: Rest, *, after_pass: int) -> Adaptation | None:
        """Update the beliefs by the passes since the last look, and change ``policy`` if the predicted gain suffices.

        Returns the change made, or None.
        """
        ran = {kind: list(passed) for kind, passed in self._ran.items() if passed}
        self._forget_passes()
        if not ran:
            return None
        self._gen_len = rest.gen_len
        self._learn(ran)
        if self._trial is not None:
            return self._judge(self._trial, ran, rest, after_pass)
        if self._at_ease or self.exhausted or not rest.waiting:
            self._at_ease, self._noted = max(0, self._at_ease - 1), None
            return None
        return self._consider(ran, rest, after_pass)

    def _learn(self, ran: Mapping[str, list[Passed]]) -> None:
        for kind, passed in ran.items():
            old = self._beliefs.get(kind)
            new = self._pricing.learn(self.policy, passed, old or Belief())
            self._beliefs[kind] = new if old is None else old.blended(new)

    def _consider(self, ran: Mapping[str, list[Passed]], rest: Rest, after_pass: int) -> Adaptation | None:
        """Change to the best policy near the present one, if it was better at the last look too."""
        now = values_of(self.policy)
        best, gain = self._best(now, rest)
        noted, self._noted = self._noted, best if gain > WORTH_IT else None
        if self._noted is None or noted is None or self._gain(now, noted, rest) <= WORTH_IT:
            return None
        reason = f"{self._evidence(ran, best, rest)}, so {_changes(now, best)}"
        rows = [each.rows for passed in ran.values() for each in passed]
        more = self._running(best, rest) / self._running(now, rest)
        self._trial = _PolicyTrial(
            before=self.policy, beliefs=dict(self._beliefs), gain=gain, rows=sum(rows) / len(rows) * max(1.0, more)
        )
        return self._change(best, f"{reason}: {gain:.0%} more tokens per second expected", gain, after_pass)

    def _judge(
        self, trial: _PolicyTrial, ran: Mapping[str, list[Passed]], rest: Rest, after_pass: int
    ) -> Adaptation | None:
        """End the trial if enough of the predicted gain is realised; change back if not, by the duration of passes and
        their number of sequences."""
        passed = [each for kind in ran.values() for each in kind]
        took = sum(each.seconds for each in passed)
        expected = sum(self._expected_s(kind, each, trial.beliefs) for kind, each in ran.items())
        longer = took / expected
        fuller = min(1.0, sum(each.rows for each in passed) / len(passed) / trial.rows)
        came = (1.0 + trial.gain) / longer * fuller - 1.0
        trial.looks += 1
        enough = min(KEPT * trial.gain, WORTH_IT)
        if came >= enough:
            self._trial, self._at_ease = None, _AT_EASE
            return None
        filling = (1.0 + trial.gain) / longer - 1.0 >= enough and rest.waiting
        if filling and trial.looks < _PATIENCE:
            return None
        now, back = values_of(self.policy), values_of(trial.before)
        self._refused.add(_direction(back, now))
        self._trial, self._beliefs, self._at_ease = None, trial.beliefs, _AT_EASE << min(self._changes, 4)
        why = f"passes take {longer:.2g}x what was expected and are {fuller:.0%} as full"
        reason = f"{why}: {came:+.0%} came of the {trial.gain:+.0%} expected, so {_changes(now, back)}"
        return self._change(back, reason, 0.0, after_pass)

    def _change(self, values: Values, reason: str, gain: float, after_pass: int) -> Adaptation:
        """Change ``policy`` to ``values`` and return the record of the change."""
        now = values_of(self.policy)
        changed = [at for at, (old, new) in enumerate(zip(now, values, strict=True)) if old != new]
        self.policy = with_values(self.policy, values)
        self._changes, self._settling, self._noted = self._changes + 1, _SETTLING, None
        return Adaptation(
            after_pass=after_pass,
            before={FIELDS[at]: now[at] for at in changed},
            now={FIELDS[at]: values[at] for at in changed},
            reason=reason,
            predicted_gain=gain,
        )

    def _best(self, now: Values, rest: Rest) -> tuple[Values, float]:
        """The best policy within a few changes in one respect each, and its gain."""
        best, gain = now, 0.0
        for _ in range(_STEPS):
            near = self.allocation.neighbours(best, most_running=rest.most_running)
            near = [row for row in near if row == now or _direction(now, row) not in self._refused]
            seconds = self._token_s([now, *near], rest)
            at = int(np.argmin(seconds[1:]))
            found = float(seconds[0] / seconds[1 + at]) - 1.0
            if found <= gain + WORTH_IT / 10:
                break
            best, gain = near[at], found
        return best, gain

    def _gain(self, now: Values, other: Values, rest: Rest) -> float:
        seconds = self._token_s([now, other], rest)
        return float(seconds[0] / seconds[1]) - 1.0

    def _token_s(self, rows: Collection[Values], rest: Rest) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Seconds per generated token under each of ``rows``, in the steady state."""
        found, work = PolicyCandidates.made(self.policy, rows), rest.workload()
        running = np.minimum(found.batch_size, max(1, rest.most_running))
        riding = prefill_tokens(found) + found.batch_size - running
        passes = steady_passes(work, running, riding, spread=self._with_prompts * work.gen_len)
        seconds = 0.0
        for index, kind in enumerate(KINDS):
            each = self._pricing.seconds(found, passes.kind(index), kind, self._belief(kind))
            seconds = seconds + passes.count[index] * each
        return np.asarray(seconds / (running * work.gen_len))

    def _belief(self, kind: str) -> Belief:
        """The belief about passes of ``kind``, or about the other kind if none of ``kind`` ran."""
        return self._beliefs.get(kind) or next(iter(self._beliefs.values()), Belief())

    def _expected_s(self, kind: str, ran: list[Passed], beliefs: Mapping[str, Belief]) -> float:
        belief = beliefs.get(kind) or next(iter(beliefs.values()), Belief())
        seconds = self._pricing.seconds(self.policy, passes_that_ran(ran), kind, belief)
        return float(np.sum(np.broadcast_to(seconds, len(ran))))

    def _running(self, values: Values, rest: Rest) -> int:
        return max(1, min(values[0], rest.most_running))

    def _forget_passes(self) -> None:
        for kept in self._ran.values():
            kept.clear()

    def _evidence(self, ran: Mapping[str, list[Passed]], best: Values, rest: Rest) -> str:
        """The reason for a change: the busiest lane's measured over planned time, or else the batch size or the share
        of passes with prompts."""
        passed = [each for kind in ran.values() for each in kind]
        planned, took = self._pricing.lanes(self.policy, passed), sum(each.seconds for each in passed)
        measured = {lane: sum(each.busy_s.get(lane, 0.0) for each in passed) for lane in planned}
        off = {
            lane: measured[lane] / planned[lane]
            for lane in LANES
            if min(planned.get(lane, 0.0), measured.get(lane, 0.0)) > 0 and measured[lane] > _MATTERS * took
        }
        lane = max(off, key=lambda name: measured[name], default=None)
        if lane is not None and not 1 / _AS_PLANNED < off[lane] < _AS_PLANNED:
            return f"{lane} takes {off[lane]:.1f}x what was planned"
        if best[0] > self.policy.batch_size:
            return f"the cache holds {rest.most_running} sequences"
        return f"passes with prompts are {self._with_prompts:.0%} of all"


def _direction(now: Values, then: Values) -> tuple[str, bool]:
    """The first of `FIELDS` that differs, and True if it grows."""
    differing = zip(FIELDS, now, then, strict=True)
    return next(((name, new > old) for name, old, new in differing if old != new), ("", False))


def _changes(now: Values, then: Values) -> str:
    """A description of the differences."""
    (n, mu, tokens, prompts, ahead), (to_n, to_mu, to_tokens, to_prompts, to_ahead) = now, then
    said = []
    if n != to_n:
        said.append(f"N goes from {n} to {to_n}")
    if mu != to_mu:
        said.append(f"micro-batches have up to {to_mu} sequences, not {mu}")
    if (tokens, prompts) != (to_tokens, to_prompts):
        said.append(f"{to_prompts} x {to_tokens} tokens of prompts ride in a pass at most, not {prompts} x {tokens}")
    if ahead != to_ahead:
        said.append(f"attention runs {to_ahead} micro-batches ahead, not {ahead}")
    return " and ".join(said)
