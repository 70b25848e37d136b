"""Speculative decoding: which drafts a pass verifies, and what became of them. Tokens never depend on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from moelight.core.policy import Policy
from moelight.engine.adaptation import passed
from moelight.engine.batcher import MicroBatchPlan, RunningSequence
from moelight.engine.draft_prices import DraftPrices
from moelight.engine.drafts import FORCED, JOB, LONGEST_MATCH, MODEL, NO_DRAFT, PREDICTED, SEQUENCE, Draft
from moelight.engine.loaded_model import LoadedModel
from moelight.profiles.model import ModelProfile

# What remains of a draft for a sequence where a token is impossible, or other tokens, at most so many, have to follow.
Possible = Callable[[RunningSequence, Sequence[int], int], Sequence[int]]
_KINDS = (SEQUENCE, JOB, FORCED, MODEL, PREDICTED)
_REPORTED = {SEQUENCE: "lookup", JOB: "lookup", FORCED: "grammar", MODEL: "model", PREDICTED: "mtp"}
_MATCHES = (1, 2, 3, 4, 6, 10, LONGEST_MATCH)  # least lengths of matches that are counted together
# Of tokens accepted after those before them, by kind and length of the match.
_PRIORS = (
    (0.3, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9),
    (0.3, 0.45, 0.55, 0.65, 0.75, 0.8, 0.85),
    (0.95,) * 7,
    (0.7,) * 7,
    (0.7,) * 7,
)
_PRIOR_WEIGHT = 8.0  # accepted or rejected drafts that an expectation counts as
_MOST_COUNTED = 512.0  # drafts, of which earlier ones are forgotten
_FIRST_PASSES, _LEAST_PAUSE, _MOST_PAUSE = 2, 4, 32  # passes without drafts before the next try
_LEAST_GAIN = 0.05  # of the tokens of a pass: less is lost in how much passes vary, and by waiting for their tokens


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


class ModelDrafts(Protocol):
    """A model whose drafts take time (`draft_model.DraftModel`)."""

    @property
    def kind(self) -> str: ...
    @property
    def seconds_spent(self) -> float: ...
    def landed(self, plans: Sequence[MicroBatchPlan], tokens: Sequence[Sequence[int]], model: LoadedModel) -> None:
        """A pass of ``model``, for which it drafts, chose ``tokens``; its hidden states are there until the next."""
        ...

    def seconds(self, sequences: Sequence[RunningSequence], num_tokens: int) -> np.ndarray:
        """Predicted seconds float64 [num_tokens + 1] of 0 to ``num_tokens`` tokens for each of ``sequences``."""
        ...

    def draft(self, asked: Sequence[tuple[RunningSequence, int]]) -> Mapping[RunningSequence, tuple[int, ...]]:
        """At most so many tokens that may follow each sequence."""
        ...

    def end(self, sequence: RunningSequence) -> None: ...
    def clear(self) -> None: ...


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


class Speculation:
    """The drafts of the decoding sequences of one engine: at most ``num_tokens`` for each in a pass. With ``prices``
    only those are made and verified that are expected to save more time than they take.

    Attributes:
        passes: number of passes with drafts so far.
        drafting_s: seconds that the model took for the drafts of the pass that was packed last.
    """

    def __init__(
        self,
        source: DraftSource | None,
        num_tokens: int,
        prices: DraftPrices | None = None,
        model: ModelDrafts | None = None,
    ) -> None:
        """Drafts of ``source`` are looked up; those of ``model`` take the place of shorter ones."""
        self.passes, self.drafting_s = 0, 0.0
        self._drafted, self._accepted = Counter[str](), Counter[str]()  # tokens by kind
        self._source, self._num_tokens, self._prices, self._model = source, num_tokens, prices, model
        self._acceptance = Acceptance(num_tokens)
        self._under_way: dict[RunningSequence, tuple[str, int]] = {}  # kind and match of each draft in the pass
        # With prices, a pass of prompts and one without drafts are measured first.
        self._pause, self._resting = _LEAST_PAUSE, 0 if prices is None else _FIRST_PASSES

    def begin(self) -> None:
        """Forget the sequences of an earlier run."""
        for source in (self._source, self._model):
            if source is not None:
                source.clear()
        self._under_way.clear()

    @property
    def accepted(self) -> int:
        """Number of draft tokens that were accepted so far."""
        return self._accepted.total()

    @property
    def counts(self) -> dict[str, int]:
        """Tokens and passes by name, tokens also by kind of draft."""
        counts = {
            "drafted_tokens": self._drafted.total(),
            "accepted_tokens": self.accepted,
            "drafted_passes": self.passes,
        }
        for kind, tokens in self._drafted.items():
            counts |= {f"{kind}_drafted_tokens": tokens, f"{kind}_accepted_tokens": self._accepted[kind]}
        return counts

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
        limits = {sequence: max(0, min(self._num_tokens, limit, room)) for sequence, limit in candidates}
        some = dict.fromkeys(limits, NO_DRAFT)
        if self._source is not None:
            some |= {one: self._source.draft(one, count) for one, count in limits.items() if count}
        if self._model is not None:
            some |= self._of_model(self._model, policy, some, limits, room, prompt_tokens)
        drafts: dict[RunningSequence, Sequence[int]] = {}
        for sequence, draft in some.items():
            if token_ids := tuple(possible(sequence, draft.token_ids, limits[sequence])):
                drafts[sequence] = token_ids
                same = token_ids == draft.token_ids[: len(token_ids)]
                self._under_way[sequence] = draft.kind if same else FORCED, max(1, draft.match)
        drafts = self._within(drafts, self._worth(policy, drafts, candidates, room, prompt_tokens))
        if candidates and not drafts and self._prices is not None:
            self._resting, self._pause = self._pause, min(2 * self._pause, _MOST_PAUSE)
            self._prices.forget()
        elif drafts:
            self._pause = _LEAST_PAUSE
        return drafts

    def _of_model(
        self,
        model: ModelDrafts,
        policy: Policy,
        drafts: Mapping[RunningSequence, Draft],
        limits: Mapping[RunningSequence, int],
        room: int,
        prompt_tokens: int,
    ) -> dict[RunningSequence, Draft]:
        """The drafts of ``model`` for sequences of which it is expected to guess more tokens than ``drafts`` do."""
        owners = [sequence for sequence, limit in limits.items() if limit]
        if not owners:
            return {}
        num_tokens = min(max(limits.values()), max(1, room // len(owners)))
        gains = np.concatenate(([0.0], np.cumsum(self._acceptance.expected(model.kind, 1, num_tokens))))
        lengths = np.array([len(drafts[owner].token_ids) for owner in owners])
        others = np.array([self._gain(drafts[owner]) for owner in owners])
        within = np.minimum(
            np.arange(num_tokens + 1)[:, None], [limits[owner] for owner in owners]
        )  # [num_tokens + 1, owners]
        longer = gains[within] > others
        count = num_tokens
        if self._prices is not None:
            tokens = len(limits) + np.where(longer, gains[within], others).sum(axis=1)
            rows = np.where(longer, within, lengths).sum(axis=1)
            users = [owner for owner, uses in zip(owners, longer[-1], strict=True) if uses]
            drafting = model.seconds(users, num_tokens)
            count = self._best(policy, tokens, rows, list(limits), prompt_tokens, self._prices, drafting)
        began_s = model.seconds_spent
        asked = [(owner, int(within[count, at])) for at, owner in enumerate(owners) if longer[count, at]]
        made = model.draft(asked) if asked else {}
        self.drafting_s = model.seconds_spent - began_s
        return {owner: Draft(token_ids, 1, model.kind) for owner, token_ids in made.items() if token_ids}

    def _gain(self, draft: Draft) -> float:
        """The tokens of ``draft`` that are expected to be accepted."""
        if not draft.token_ids:
            return 0.0
        return float(self._acceptance.expected(draft.kind, max(1, draft.match), len(draft.token_ids)).sum())

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
        """How many of the ``gains``, expected tokens in descending order, to take."""
        tokens = len(candidates) + np.concatenate(([0.0], np.cumsum(gains)))
        sequences = [sequence for sequence, _ in candidates]
        return self._best(policy, tokens, np.arange(len(gains) + 1), sequences, prompt_tokens, prices)

    def _best(
        self,
        policy: Policy,
        tokens: np.ndarray,
        rows: np.ndarray,
        sequences: Sequence[RunningSequence],
        prompt_tokens: int,
        prices: DraftPrices,
        drafting_s: np.ndarray | float = 0.0,
    ) -> int:
        """The best of several numbers of drafts, ``rows`` in all, by the expected ``tokens`` of the pass and the
        seconds that they take to make: a token is worth the seconds that it takes at the best rate of passes without
        prompts; none are worth it unless they gain `_LEAST_GAIN`."""
        count = len(sequences)
        context = sum(sequence.computed for sequence in sequences) / count
        rate = float(np.max(tokens / (prices.seconds(policy, count, context, 0, rows) + drafting_s)))
        worth = tokens - rate * (prices.seconds(policy, count, context, prompt_tokens, rows) + drafting_s)
        best = int(np.argmax(worth))
        return best if worth[best] - worth[0] >= _LEAST_GAIN * count else 0

    def landed(self, plans: Sequence[MicroBatchPlan], tokens: Sequence[Sequence[int]], model: LoadedModel) -> None:
        """A pass of ``model`` chose ``tokens``; none has been launched since."""
        if self._model is not None:
            self._model.landed(plans, tokens, model)

    def after(
        self,
        plans: Sequence[MicroBatchPlan],
        tokens: Sequence[Sequence[int]],
        seconds: float,
        busy_s: Mapping[str, float],
        policy: Policy,
    ) -> None:
        """Record the chosen ``tokens`` of a pass that was collected ``seconds`` after the one before, but for those of
        drafting; its lanes were at work for ``busy_s``."""
        self._resting, self.drafting_s = max(0, self._resting - 1), 0.0
        verified = 0
        for load, new in zip(plans, tokens, strict=True):
            first = 0
            for chunk in load.chunks:
                if chunk.drafts:
                    drafted, accepted = len(chunk.drafts), chunk.accepted(new[first : first + chunk.samples])
                    kind, match = self._under_way[chunk.sequence]
                    self._acceptance.note(kind, match, drafted, accepted)
                    self._drafted[_REPORTED[kind]] += drafted
                    self._accepted[_REPORTED[kind]] += accepted
                    verified += drafted
                first += chunk.samples
                if chunk.sequence.finished:
                    for source in (self._source, self._model):
                        if source is not None:
                            source.end(chunk.sequence)
        self.passes += verified > 0
        if self._prices is not None:
            self._prices.observe(passed(plans, seconds, busy_s), drafts=verified > 0, policy=policy)
