"""Speculative decoding: which drafts a pass verifies, and what became of them. Tokens never depend on it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moelight.core.policy import Policy
from moelight.engine.adaptation import passed
from moelight.engine.batcher import MicroBatchPlan, RunningSequence
from moelight.engine.drafts import LONGEST_MATCH, NO_DRAFT, Draft
from moelight.hrm.workload_model import Passes
from moelight.optimizer.pass_prices import Belief, Passed, PassPrices, passes_that_ran
from moelight.profiles.model import ModelProfile

# What remains of a draft for a sequence where a token is impossible, or other tokens, at most so many, have to follow.
Possible = Callable[[RunningSequence, Sequence[int], int], Sequence[int]]
FORCED = "forced"  # the kind of drafts that a grammar makes
_KINDS = ("sequence", "job", FORCED)
_MATCHES = (1, 2, 3, 4, 6, 10, LONGEST_MATCH)  # least lengths of matches that are counted together
# Of tokens accepted after those before them, by kind and length of the match.
_PRIORS = ((0.3, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9), (0.3, 0.45, 0.55, 0.65, 0.75, 0.8, 0.85), (0.95,) * 7)
_PRIOR_WEIGHT = 8.0  # accepted or rejected drafts that an expectation counts as
_MOST_COUNTED = 512.0  # drafts, of which earlier ones are forgotten
_FIRST_PASSES, _LEAST_PAUSE, _MOST_PAUSE = 2, 4, 32  # passes without drafts before the next try
_LEAST_PASSES, _PASSES = 4, 64  # after which prices are corrected: the first time, and at most
_SHARE, _LEAST_S = 1 / 200, 0.02  # of the time of all passes that prices may take, and seconds
_KEPT_SHARE = 7 / 8  # of the weight of earlier passes in how long passes take
_LEAST_GAIN = 0.05  # of the tokens of a pass: less is lost in how much passes vary, and by waiting for their tokens
_GRID = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)  # drafts for each sequence


class DraftSource(Protocol):
    """Where drafts come from."""

    def draft(self, sequence: RunningSequence, count: int) -> Draft:
        """At most ``count`` tokens that may follow the last one of ``sequence``."""
        ...

    def end(self, sequence: RunningSequence) -> None:
        """``sequence`` is finished."""
        ...

    def clear(self) -> None:
        """All sequences are finished, or will not be."""
        ...


def drafts_refusal(model: ModelProfile) -> str | None:
    """Why sequences of ``model`` bring no drafts, if they do not."""
    if model.stateful:
        return f"{model.model_type} keeps recurrent state, which rejected tokens would have changed"
    if model.by_length is not None:
        return f"{model.model_type} stretches positions by the length of a sequence, which drafts would exceed"
    return None


class Acceptance:
    """The share of drafts that were accepted, by kind, length of the match and position, as observed in this job. Few
    observations of a position count beside those of all positions, and these beside what experience lets expect."""

    def __init__(self, positions: int) -> None:
        self._prior = np.array(_PRIORS)
        self._tried, self._accepted = np.zeros((2, *self._prior.shape, positions))

    def expected(self, kind: str, match: int, count: int) -> np.ndarray:
        """The probabilities float64 [``count``] that a draft is accepted up to each of its tokens."""
        at = _cell(kind, match)
        tried, accepted = self._tried[at], self._accepted[at]
        mean = (accepted.sum() + _PRIOR_WEIGHT * self._prior[at]) / (tried.sum() + _PRIOR_WEIGHT)
        shares = (accepted[:count] + _PRIOR_WEIGHT * mean) / (tried[:count] + _PRIOR_WEIGHT)
        return np.cumprod(shares)

    def note(self, kind: str, match: int, drafted: int, accepted: int) -> None:
        """Record that the first ``accepted`` of ``drafted`` tokens were."""
        at = _cell(kind, match)
        self._tried[at][: min(accepted + 1, drafted)] += 1.0
        self._accepted[at][:accepted] += 1.0
        if self._tried[at][0] > _MOST_COUNTED:
            self._tried[at] *= 0.5
            self._accepted[at] *= 0.5


def _cell(kind: str, match: int) -> tuple[int, int]:
    return _KINDS.index(kind), int(np.searchsorted(_MATCHES, match, side="right")) - 1


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


class Speculation:
    """The drafts of the decoding sequences of one engine: at most ``num_tokens`` for each in a pass. With ``prices``
    only those are verified that are expected to save more time than they take.

    Attributes:
        drafted, accepted: numbers of draft tokens so far; ``passes``: with drafts.
    """

    def __init__(self, source: DraftSource, num_tokens: int, prices: DraftPrices | None = None) -> None:
        self.drafted = self.accepted = self.passes = 0
        self._source, self._num_tokens, self._prices = source, num_tokens, prices
        self._acceptance = Acceptance(num_tokens)
        self._under_way: dict[RunningSequence, tuple[str, int]] = {}  # kind and match of each draft in the pass
        # With prices, a pass of prompts and one without drafts are measured first.
        self._pause, self._resting = _LEAST_PAUSE, 0 if prices is None else _FIRST_PASSES

    def begin(self) -> None:
        """Forget the sequences of an earlier run."""
        self._source.clear()
        self._under_way.clear()

    @property
    def counts(self) -> dict[str, int]:
        return {"drafted_tokens": self.drafted, "accepted_tokens": self.accepted, "drafted_passes": self.passes}

    @property
    def active(self) -> bool:
        """Whether the next pass may have drafts, so that it has to wait for the tokens of the one before."""
        return self._resting == 0 and (self._prices is None or self._prices.affordable)

    @property
    def under_way(self) -> bool:
        """Whether the pass that was packed last has drafts: the host alone has their sequences' newest tokens."""
        return bool(self._under_way)

    def propose(
        self,
        policy: Policy,
        possible: Possible,
        candidates: Sequence[tuple[RunningSequence, int]],
        room: int,
        prompt_tokens: int,
    ) -> Mapping[RunningSequence, Sequence[int]]:
        """Drafts of ``candidates``, pairs of a sequence and the most tokens that it may bring, ``room`` in all, beside
        ``prompt_tokens`` of prompts in a pass under ``policy``."""
        self._under_way.clear()
        if not self.active:
            return {}
        drafts: dict[RunningSequence, Sequence[int]] = {}
        for sequence, limit in candidates:
            count = min(self._num_tokens, limit, room)
            draft = self._source.draft(sequence, count) if count > 0 else NO_DRAFT
            if token_ids := tuple(possible(sequence, draft.token_ids, count)):
                drafts[sequence] = token_ids
                same = token_ids == draft.token_ids[: len(token_ids)]
                kind = FORCED if not same else _KINDS[draft.shared]
                self._under_way[sequence] = kind, max(1, draft.match)
        drafts = self._within(drafts, self._worth(policy, drafts, candidates, room, prompt_tokens))
        if candidates and not drafts and self._prices is not None:
            self._resting, self._pause = self._pause, min(2 * self._pause, _MOST_PAUSE)
            self._prices.forget()
        elif drafts:
            self._pause = _LEAST_PAUSE
        return drafts

    def _within(
        self, drafts: Mapping[RunningSequence, Sequence[int]], counts: Mapping[RunningSequence, int]
    ) -> dict[RunningSequence, Sequence[int]]:
        """The first ``counts`` tokens of ``drafts``."""
        self._under_way = {sequence: self._under_way[sequence] for sequence in counts}
        return {sequence: drafts[sequence][:count] for sequence, count in counts.items()}

    def _worth(
        self,
        policy: Policy,
        drafts: Mapping[RunningSequence, Sequence[int]],
        candidates: Sequence[tuple[RunningSequence, int]],
        room: int,
        prompt_tokens: int,
    ) -> Mapping[RunningSequence, int]:
        """How many tokens of each draft to verify: those most likely to be accepted, as long as tokens that they are
        expected to save would take longer than they do."""
        if not drafts:
            return {}
        owners = list(drafts)
        expected = [
            self._acceptance.expected(*self._under_way[owner], len(token_ids)) for owner, token_ids in drafts.items()
        ]
        gains, owner = np.concatenate(expected), np.repeat(np.arange(len(owners)), [len(some) for some in expected])
        order = np.argsort(-gains, kind="stable")[:room]
        if self._prices is not None:
            order = order[: self._most_worth(policy, gains[order], candidates, prompt_tokens, self._prices)]
        counts = np.bincount(owner[order], minlength=len(owners)).tolist()
        return {sequence: count for sequence, count in zip(owners, counts, strict=True) if count}

    def _most_worth(
        self,
        policy: Policy,
        gains: np.ndarray,
        candidates: Sequence[tuple[RunningSequence, int]],
        prompt_tokens: int,
        prices: DraftPrices,
    ) -> int:
        """How many of the ``gains``, expected tokens in descending order, to take: a token is worth the seconds that it
        takes at the best rate of passes without prompts; none are worth it unless they gain `_LEAST_GAIN`."""
        sequences, drafts = len(candidates), np.arange(len(gains) + 1)
        context = sum(sequence.computed for sequence, _ in candidates) / sequences
        tokens = sequences + np.concatenate(([0.0], np.cumsum(gains)))
        rate = float(np.max(tokens / prices.seconds(policy, sequences, context, 0, drafts)))
        seconds = prices.seconds(policy, sequences, context, prompt_tokens, drafts)
        worth = tokens - rate * seconds
        best = int(np.argmax(worth))
        return best if worth[best] - worth[0] >= _LEAST_GAIN * sequences else 0

    def after(
        self,
        plans: Sequence[MicroBatchPlan],
        tokens: Sequence[Sequence[int]],
        seconds: float,
        busy_s: Mapping[str, float],
        policy: Policy,
    ) -> None:
        """Record the chosen ``tokens`` of a pass that was collected ``seconds`` after the one before; its lanes were at
        work for ``busy_s``."""
        self._resting = max(0, self._resting - 1)
        verified = 0
        for load, new in zip(plans, tokens, strict=True):
            first = 0
            for chunk in load.chunks:
                if chunk.drafts:
                    drafted, accepted = len(chunk.drafts), chunk.accepted(new[first : first + chunk.samples])
                    self._acceptance.note(*self._under_way[chunk.sequence], drafted, accepted)
                    verified += drafted
                    self.accepted += accepted
                first += chunk.samples
                if chunk.sequence.finished:
                    self._source.end(chunk.sequence)
        self.drafted += verified
        self.passes += verified > 0
        if self._prices is not None:
            self._prices.observe(passed(plans, seconds, busy_s), drafts=verified > 0, policy=policy)
