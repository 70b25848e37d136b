"""Adapt a policy, within its allocated memory, to the measured speed of the machine.

Measured passes correct the ledger's speeds, which price other policies. A policy changes when two looks in a row
predict a gain of more than 5 %, and changes back if the gain is not realised.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from moelight.core.dtypes import DType
from moelight.core.errors import ConfigError
from moelight.core.policy import MOST_LOOK_AHEAD, Adaptation, Policy
from moelight.hrm.footprint import fixed_bytes, pass_tokens, prefill_tokens
from moelight.hrm.machine_model import Speeds
from moelight.hrm.workload_model import steady_passes
from moelight.optimizer.pass_prices import Belief, Passed, PassPrices, passes_that_ran
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload

_WORDS = {
    "batch_size": "N goes from {} to {}",
    "micro_batch_size": "micro-batches go from up to {} sequences to {}",
    "micro_batch_tokens": "prompt micro-batches go from up to {} tokens to {}",
    "prompt_micro_batches": "a pass goes from up to {} prompt micro-batches to {}",
    "look_ahead": "attention goes from {} micro-batches ahead to {}",
}
FIELDS = tuple(_WORDS)
Values = tuple[int, ...]  # of `FIELDS`
WORTH_IT = 0.05
LEAST_PASSES = 8  # passes that a look needs
MOST_CHANGES = 8  # changes back included
_KEPT = 0.5  # the share of a predicted gain that must be realised, or WORTH_IT if that is less
_SETTLING = 2  # passes after a change that are packed under the previous policy, or fill the pipeline
_COOLDOWN = 3  # looks without a change after a change
_STEPS = 4  # changes in one respect each that may add up to one change
_REMEMBERED = 128  # passes that a look uses at most
_NAMED_FROM = 0.25  # the share of a pass from which on a lane is named in a reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """The rest of a job. ``waiting``: whether requests wait; average tokens of a prompt and of an answer;
    ``most_running``: the most such sequences that the cache holds."""

    waiting: bool
    prompt_len: float
    gen_len: float
    most_running: int


def values_of(policy: Policy) -> Values:
    """The values of `FIELDS` in ``policy``."""
    return tuple(getattr(policy, name) for name in FIELDS)


def with_values(policy: Policy, values: Values) -> Policy:
    """``policy`` with ``values`` of `FIELDS`."""
    changes: dict[str, Any] = dict(zip(FIELDS, values, strict=True))
    return replace(policy, **changes)


def _many(policy: Policy, rows: Sequence[Values]) -> Policy:
    """``policy`` with arrays in `FIELDS`, of one candidate per row; not checked."""
    many = copy(policy)
    for name, column in zip(FIELDS, np.array(rows, dtype=np.int64).T, strict=True):
        object.__setattr__(many, name, column)
    return many


class Allocation:
    """The memory regions allocated for ``policy``, which is resolved; `FIELDS` in ``fixed`` keep their values."""

    def __init__(self, model: ModelProfile, policy: Policy, dtype: DType, *, fixed: Collection[str] = ()) -> None:
        self.policy, self._fixed, self._most = policy, frozenset(fixed), int(pass_tokens(policy))
        self._needs = partial(fixed_bytes, model, dtype=dtype)
        self._bytes = self._needs(policy)

    def holds(self, sizes: Policy) -> Any:
        """True, for each candidate, if every region is large enough. The cache buffer is not compared, nor the cache of
        layers with a window: the batcher fills those that exist."""
        fits = pass_tokens(sizes) <= self._most
        fits = fits & (sizes.micro_batch_tokens <= self.policy.micro_batch_tokens)
        for key, size in self._needs(sizes).items():
            fits = fits & ((size <= self._bytes[key]) | (key[0] in ("kv_buffer", "window_kv")))
        return fits

    def check(self, policy: Policy) -> None:
        """Raise ConfigError if ``policy`` differs in more than `FIELDS`, or a region would have to be larger."""
        if with_values(policy, values_of(self.policy)) != self.policy or not self.holds(policy):
            raise ConfigError(f"not within what was allocated for {self.policy}: {policy}")

    def neighbours(self, values: Values, *, most_running: int) -> list[Values]:
        """The values of all fitting policies that differ in one respect from ``values``; ``values`` itself is first."""
        n, mu, tokens, prompts, ahead = values
        parts, rows = -(-n // mu), [values]
        sizes = {round(n * 2.0 ** (quarter / 4)) for quarter in range(-8, 9)} | {self.policy.batch_size, most_running}
        for size in sorted(size for size in sizes if size <= max(n, most_running)):
            widths = {mu, min(size if parts == 1 else mu, tokens), -(-size // parts)}
            rows += [(size, width, tokens, min(prompts, (self._most - size) // tokens), ahead) for width in widths]
        rows += [(n, -(-n // part), tokens, prompts, ahead) for part in (*range(1, 9), 10, 12, 16)]
        for cut, count in product((1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)):
            rows.append((n, mu, self.policy.micro_batch_tokens // cut, count, ahead))
        if self.policy.discrete and self.policy.schedule == "cgopipe":
            rows += [(n, mu, tokens, prompts, ahead) for ahead in range(1, MOST_LOOK_AHEAD + 1)]
        valid = [row for row in dict.fromkeys(rows) if 1 <= row[1] <= row[2] and min(row[0], row[3]) >= 1]
        valid = [row for row in valid if self._fixed.isdisjoint(_changes(values, row))]
        fits = self.holds(_many(self.policy, valid))
        return [row for row, fit in zip(valid, fits, strict=True) if fit or row == values]


class Adapter:
    """Observes the passes of one run, and prices others with speeds corrected by what it observed; ``policy`` is the
    best one at present. Its regions are allocated."""

    def __init__(
        self, model: ModelProfile, policy: Policy, speeds: Speeds, dtype: DType, *, fixed: Collection[str] = ()
    ) -> None:
        """``speeds`` are those of the policy's estimate; `FIELDS` in ``fixed`` never change."""
        self.policy, self.allocation = policy, Allocation(model, policy, dtype, fixed=fixed)
        self.prices = PassPrices(model, policy, speeds, dtype)
        self._belief: Belief = {}
        self._ran: deque[Passed] = deque(maxlen=_REMEMBERED)
        self._with_prompts, self._gen_len = 1.0, 1.0
        self._noted: Values | None = None  # what the last look would change to
        self._trial: tuple[Policy, Belief, float] | None = None  # the policy before, the belief, the predicted gain
        self._refused: set[tuple[str, bool]] = set()
        self._changes, self._settling, self._cooldown = 0, 0, 0

    def observe(self, passed: Passed) -> None:
        """Record one pass. The share of passes with prompts is averaged over about the lifetime of a sequence."""
        self._with_prompts += (float(passed.prompt_tokens > 0) - self._with_prompts) / max(self._gen_len, LEAST_PASSES)
        if self._settling:
            self._settling -= 1
        else:
            self._ran.append(passed)

    @property
    def watched(self) -> int:
        """Passes since the last look."""
        return len(self._ran)

    @property
    def exhausted(self) -> bool:
        """True if no further change is possible."""
        return self._changes + 2 > MOST_CHANGES and self._trial is None

    def look(self, rest: Rest, *, after_pass: int) -> Adaptation | None:
        """Learn from the passes since the last look; return the change of ``policy`` if the predicted gain suffices."""
        ran, self._gen_len = list(self._ran), rest.gen_len
        self._ran.clear()
        if not ran:
            return None
        new = self.prices.learn(self.policy, ran, self._belief)
        blended = {key: math.sqrt(self._belief.get(key, factor) * factor) for key, factor in new.items()}
        self._belief = {**self._belief, **blended}
        if self._trial is not None:
            return self._judge(*self._trial, ran, after_pass)
        if self._cooldown or self.exhausted or not rest.waiting:
            self._cooldown, self._noted = max(0, self._cooldown - 1), None
            return None
        now, noted = values_of(self.policy), self._noted
        best, gain = self._best(now, rest)
        self._noted = best if gain > WORTH_IT else None
        if self._noted is None or noted is None or self._gains(now, [noted], rest)[0] <= WORTH_IT:
            return None
        self._trial = self.policy, self._belief, gain
        reason = f"{self._evidence(ran, best, rest)}, so {{}}: {gain:.0%} more tokens per second expected"
        return self._change(best, reason, gain, after_pass)

    def _judge(
        self, before: Policy, belief: Belief, gain: float, ran: Sequence[Passed], after_pass: int
    ) -> Adaptation | None:
        """End the trial: keep the change if its passes realise enough of the predicted gain, else change back."""
        expected = float(np.sum(self.prices.seconds(self.policy, passes_that_ran(ran), belief)))
        longer = sum(run.seconds for run in ran) / expected
        realised = (1.0 + gain) / longer - 1.0
        self._trial, self._cooldown = None, _COOLDOWN
        if realised >= min(_KEPT * gain, WORTH_IT):
            return None
        back = values_of(before)
        self._refused.add(_direction(back, values_of(self.policy)))
        self._belief, self._cooldown = belief, _COOLDOWN << min(self._changes, 4)
        reason = f"passes take {longer:.2g}x what was expected: {realised:+.0%} came of the {gain:+.0%} expected"
        return self._change(back, f"{reason}, so {{}}", 0.0, after_pass)

    def _change(self, values: Values, reason: str, gain: float, after_pass: int) -> Adaptation:
        """Apply a change; ``{}`` in ``reason`` stands for its description."""
        changed = _changes(values_of(self.policy), values)
        self.policy = with_values(self.policy, values)
        self._changes, self._settling, self._noted = self._changes + 1, _SETTLING, None
        before, now = ({name: pair[at] for name, pair in changed.items()} for at in (0, 1))
        reason = reason.format(" and ".join(_WORDS[name].format(*pair) for name, pair in changed.items()))
        return Adaptation(after_pass=after_pass, before=before, now=now, reason=reason, predicted_gain=gain)

    def _best(self, now: Values, rest: Rest) -> tuple[Values, float]:
        """The best policy within a few changes in one respect each, and its gain."""
        best, gain = now, 0.0
        for _ in range(_STEPS):
            near = self.allocation.neighbours(best, most_running=rest.most_running)
            near = [row for row in near if row == now or _direction(now, row) not in self._refused]
            gains = self._gains(now, near, rest)
            at = int(np.argmax(gains))
            if gains[at] <= gain + WORTH_IT / 10:
                break
            best, gain = near[at], float(gains[at])
        return best, gain

    def _gains(self, now: Values, others: Sequence[Values], rest: Rest) -> Any:
        """The relative gain in tokens per second of each of ``others`` over ``now``, in the steady state."""
        sizes, prompt_len = _many(self.policy, [now, *others]), max(1, round(rest.prompt_len))
        gen_len = max(1, round(rest.gen_len))
        work = Workload(num_requests=1 << 30, prompt_len=prompt_len, max_prompt_len=prompt_len, gen_len=gen_len)
        running = np.minimum(sizes.batch_size, max(1, rest.most_running))
        room = prefill_tokens(sizes) + sizes.batch_size - running
        passes = steady_passes(work, running, room, spread=self._with_prompts * gen_len)
        seconds = np.sum(passes.count * self.prices.seconds(sizes, passes, self._belief), axis=0) / running
        return seconds[0] / seconds[1:] - 1.0

    def _evidence(self, ran: Sequence[Passed], best: Values, rest: Rest) -> str:
        """The reason for a change: the busiest lane's measured over planned time, or batch size, or prompt passes."""
        least = _NAMED_FROM * sum(run.seconds for run in ran)
        planned = self.prices.lanes(self.policy, passes_that_ran(ran), {})
        busy = {lane: sum(run.busy_s.get(lane, 0.0) for run in ran) for lane, s in planned.items() if s > 0}
        lane = max((name for name in busy if busy[name] > least), key=busy.__getitem__, default=None)
        if lane is not None and not 1 / 1.1 < busy[lane] / planned[lane] < 1.1:
            return f"{lane} takes {busy[lane] / planned[lane]:.1f}x what was planned"
        if best[0] > self.policy.batch_size:
            return f"the cache holds {rest.most_running} sequences"
        return f"passes with prompts are {self._with_prompts:.0%} of all"


def _changes(now: Values, then: Values) -> dict[str, tuple[int, int]]:
    return {name: (old, new) for name, old, new in zip(FIELDS, now, then, strict=True) if old != new}


def _direction(now: Values, then: Values) -> tuple[str, bool]:
    """The first of `FIELDS` that differs, and True if it grows."""
    return next(((name, new > old) for name, (old, new) in _changes(now, then).items()), ("", False))
