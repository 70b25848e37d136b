"""What drafts cost: seconds of passes with and without them, by the ledger, corrected by the passes of a job."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from moelight.core.policy import Policy
from moelight.hrm.workload_model import Passes
from moelight.optimizer.pass_prices import Belief, Passed, PassPrices, passes_that_ran

_LEAST_PASSES, _PASSES = 4, 64  # after which prices are corrected: the first time, and at most
_SHARE, _LEAST_S = 1 / 200, 0.02  # of the time of all passes that prices may take, and seconds
_KEPT_SHARE = 7 / 8  # of the weight of earlier passes in how long passes take
_GRID = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)  # drafts for each sequence


@dataclass(frozen=True, slots=True)
class _PassSeconds:
    """Predicted seconds of a pass by its drafts: linear between ``drafts`` float64 [n], at ``seconds`` float64 [n]."""

    drafts: np.ndarray
    seconds: np.ndarray


class DraftPrices:
    """What drafts cost: seconds of passes with and without them, by the ledger, corrected by the passes of this job."""

    def __init__(self, prices: PassPrices) -> None:
        self._prices = prices
        self._belief: Belief = {}
        self._with_drafts, self._without = _Stretch(), _Stretch()
        self._ran: deque[tuple[bool, Passed]] = deque(maxlen=_PASSES)
        self._new, self._due, self._spent_s, self._all_s = 0, _LEAST_PASSES, 0.0, 0.0
        self._curves: dict[tuple[int, ...], _PassSeconds] = {}

    @property
    def affordable(self) -> bool:
        """Whether the passes took so long that their prices are worth computing."""
        return self._spent_s <= _LEAST_S + _SHARE * self._all_s

    def seconds(
        self, policy: Policy, sequences: int, context: float, prompt_tokens: int, drafts: np.ndarray
    ) -> np.ndarray:
        """Seconds of passes with so many ``drafts`` int64 [n], in which about ``sequences`` decode at about ``context``
        tokens each, beside ``prompt_tokens``."""
        curve = self._curve(policy, sequences, context, prompt_tokens)
        without = self._without.factor(1.0)
        stretch = np.where(drafts > 0, self._with_drafts.factor(without), without)
        return np.interp(drafts, curve.drafts, curve.seconds) * stretch

    def forget(self) -> None:
        """Passes with drafts, which did not pay, may take less by now."""
        self._with_drafts.approach(self._without.factor(1.0))

    def observe(self, run: Passed, *, drafts: bool, policy: Policy) -> None:
        """Record a pass that ran under ``policy``."""
        self._ran.append((drafts, run))
        self._all_s += run.seconds
        self._new += 1
        if self._new >= self._due and self.affordable:
            began_s = time.perf_counter()
            self._learn(policy)
            self._new, self._due = 0, min(2 * self._due, _PASSES)
            self._spent_s += time.perf_counter() - began_s
        elif curve := self._curves.get(_key(policy, run.sequences, run.context, run.prompt_tokens)):
            predicted = float(np.interp(run.decode_tokens - run.sequences, curve.drafts, curve.seconds))
            self._stretch(drafts).add(run, predicted)

    def _learn(self, policy: Policy) -> None:
        """Correct the seconds of lanes, and from these how much longer passes take than their lanes explain."""
        runs = [run for _, run in self._ran]
        self._belief = {**self._prices.learn(policy, runs, self._belief), "pass": 1.0}
        self._curves.clear()
        sequences = np.array([run.sequences for run in runs], dtype=float)
        predicted = self._prices.seconds(policy, passes_that_ran(runs), self._belief, sequences)
        for drafts in (False, True):
            rows = [at for at, (had_drafts, _) in enumerate(self._ran) if had_drafts is drafts]
            if rows:
                self._stretch(drafts).clear()
            for at in rows:
                self._stretch(drafts).add(runs[at], float(predicted[at]))

    def _stretch(self, drafts: bool) -> _Stretch:
        return self._with_drafts if drafts else self._without

    def _curve(self, policy: Policy, sequences: int, context: float, prompt_tokens: int) -> _PassSeconds:
        key = _key(policy, sequences, context, prompt_tokens)
        if (curve := self._curves.get(key)) is None:
            began_s = time.perf_counter()
            drafts = np.unique(np.round(np.array(_GRID) * sequences))
            passes = Passes(
                count=np.ones(len(drafts)),
                decode_tokens=sequences + drafts,
                context=context,
                prompt_tokens=np.full(len(drafts), float(prompt_tokens)),
                prompt_len=float(max(1, prompt_tokens)),
            )
            owners = np.full(len(drafts), float(sequences))
            seconds = self._prices.seconds(policy, passes, self._belief, owners)
            curve = self._curves[key] = _PassSeconds(drafts, np.maximum.accumulate(seconds))
            self._spent_s += time.perf_counter() - began_s
        return curve


class _Stretch:
    """How much longer passes of one kind take than predicted: those without prompts, as soon as there are some."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._took_s = self._predicted_s = 0.0
        self._alone = False  # without prompts

    def add(self, run: Passed, predicted_s: float) -> None:
        alone = run.prompt_tokens == 0
        if alone and not self._alone:
            self.clear()
            self._alone = True
        if alone == self._alone:
            self._took_s = _KEPT_SHARE * self._took_s + run.seconds
            self._predicted_s = _KEPT_SHARE * self._predicted_s + predicted_s

    def approach(self, factor: float) -> None:
        """Move a tenth of the way to ``factor``."""
        self._took_s += 0.1 * (factor * self._predicted_s - self._took_s)

    def factor(self, otherwise: float) -> float:
        """Measured over predicted seconds; ``otherwise`` if no pass ran."""
        return self._took_s / self._predicted_s if self._predicted_s > 0 else otherwise


def _key(policy: Policy, sequences: int, context: float, prompt_tokens: int) -> tuple[int, ...]:
    """Passes of equal keys are priced alike."""
    sizes = policy.micro_batch_size, policy.micro_batch_tokens
    return *sizes, _octaves(max(1, sequences), 8), _octaves(1 + prompt_tokens, 2), _octaves(256 + context, 2)


def _octaves(number: float, parts: int) -> int:
    """The octave of ``number``, which is at least 1, in so many parts each."""
    return int(parts * math.log2(number))
