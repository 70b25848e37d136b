"""What one sequence carries beside its tokens while it is alive: stop texts, a grammar, counts, log-probabilities.

Knows one sequence. Refuses to know rows, batches and passes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, MutableSequence
from dataclasses import dataclass
from typing import TypeAlias

from moelight.core.request import Logprob, Request, SamplingParams
from moelight.engine.constraints import Constraint, Constraints, without
from moelight.engine.detokenizer import StopMatcher
from moelight.engine.sampling import Change, Scores
from moelight.engine.tokenizer import Tokenizer

Kept: TypeAlias = MutableSequence[tuple[Scores, int]]  # scores of several rows, and which of them is ours
UNCHANGED = Change()


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """How a sequence ends: the ``reason``, the token that closes it and is no part of it, what ``stop`` it was, and
    whether it was a stop text, which is then still to be found in the answer. Of an error, its ``code``."""

    reason: str
    closing: int | None = None
    stop: int | str | None = None
    by_text: bool = False
    code: str | None = None


def wants_state(how: SamplingParams) -> bool:
    """Whether more is to be kept of a sequence than its tokens."""
    return bool(how.stop or _changes(how) or how.logprobs is not None or how.prompt_logprobs is not None)


class SequenceState:
    """Of one sequence.

    Attributes:
        matcher: watches for its stop texts, if it has some.
        chooses: its tokens are chosen apart, for logits are changed or tokens scored.
        needs_history: all its tokens must be known before the next one is chosen.
        top: how many of the likeliest tokens are scored beside the chosen one; None where nothing is.
        chosen: scores of its tokens on their way; ``prompt``: of its prompt's, at ``positions``.
        logprobs: those of its tokens that have arrived.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, constraints: Constraints) -> None:
        self._how = how = request.sampling
        self._token_ids = request.token_ids
        self.matcher: StopMatcher | None = None
        if how.stop:
            self.matcher = StopMatcher(
                _decoder(tokenizer, how),
                how.stop,
                context=tokenizer.context(request.token_ids),
                unsearched=how.min_tokens,
            )
        self._constraint: Constraint | None = None
        if how.structured_outputs is not None:
            self._constraint = constraints.open(how.structured_outputs)
        self._penalties = (how.repetition_penalty, how.frequency_penalty, how.presence_penalty)
        self._counts = self._penalties != UNCHANGED.penalties
        self._seen = dict.fromkeys(request.token_ids, 0) if how.repetition_penalty != 1 else {}
        self._ends = {*how.stop_token_ids, *(() if how.ignore_eos else tokenizer.eos_token_ids)}
        self.needs_history = self._counts or self._constraint is not None
        self.top = how.logprobs
        self.chooses = self.top is not None or _changes(how)
        self.chosen: deque[tuple[Scores, int]] = deque()
        self.logprobs: list[Mapping[int, Logprob]] = []
        self.positions: list[int] = []
        self.prompt: list[tuple[Scores, int]] = []

    def change(self, place: int) -> Change:
        """What happens to the logits of its token number ``place``."""
        how = self._how
        forbidden = self._ends if place < how.min_tokens else ()
        allowed = None if self._constraint is None else self._constraint.allowed()
        if allowed is not None and forbidden:
            allowed, forbidden = without(allowed, forbidden), ()
        if not (how.logit_bias or forbidden or self._seen or allowed is not None):
            return UNCHANGED
        return Change(
            biases=how.logit_bias or {},
            forbidden=forbidden,
            seen=self._seen,
            penalties=self._penalties,
            allowed=allowed,
        )

    def arrived(self, token: int, *, closes: bool, text: Callable[[int], str]) -> SequenceEnd | None:
        """``token`` has arrived. ``closes``: it ends the sequence and is no part of it. The end of a sequence that
        could not go on."""
        if self.top is not None:
            scores, row = self.chosen.popleft()
            if not closes:
                self.logprobs.append(_logprobs(token, scores, row, text))
        if self._constraint is not None and self._constraint.stuck:
            del self.logprobs[-1:]
            return SequenceEnd("error", stop=f"structured_outputs: {self._constraint.why}", code="structured_outputs")
        if self._counts:
            self._seen[token] = self._seen.get(token, 0) + 1
        return None

    def ends(self, token: int) -> SequenceEnd | None:
        """How the sequence ends with ``token``, which is a part of it, if it does."""
        if self.matcher is not None and self.matcher.found(token):
            return SequenceEnd("stop", by_text=True)
        if self._constraint is not None:
            self._constraint.go_on(token)
            if self._constraint.complete:
                return SequenceEnd("stop")
        return None

    @property
    def scored_nan(self) -> bool:
        """Whether a token of its prompt was scored by logits that are not finite; asked once all have been."""
        return any(math.isnan(scores.logprobs[row]) for scores, row in self.prompt)

    def prompt_logprobs(self, text: Callable[[int], str]) -> tuple[Mapping[int, Logprob] | None, ...] | None:
        """One mapping a token of the prompt, None where it was not scored; None where nothing was asked for."""
        if self._how.prompt_logprobs is None:
            return None
        found: list[Mapping[int, Logprob] | None] = [None] * len(self._token_ids)
        for position, (scores, row) in zip(self.positions, self.prompt, strict=True):
            found[position] = _logprobs(self._token_ids[position], scores, row, text)
        return tuple(found)


def _changes(how: SamplingParams) -> bool:
    """Whether logits are changed before a token is taken."""
    penalties = (how.repetition_penalty, how.frequency_penalty, how.presence_penalty)
    return bool(
        how.logit_bias or how.min_tokens or penalties != UNCHANGED.penalties or how.structured_outputs is not None
    )


def _decoder(tokenizer: Tokenizer, how: SamplingParams) -> Callable[..., str]:
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=how.skip_special_tokens)


def _logprobs(token: int, scores: Scores, row: int, text: Callable[[int], str]) -> Mapping[int, Logprob]:
    """Of ``token`` and of the likeliest ones, in their order."""
    found = {
        token: Logprob(logprob=float(scores.logprobs[row]), rank=int(scores.ranks[row]), decoded_token=text(token))
    }
    ids, logprobs = scores.top_ids[row].tolist(), scores.top_logprobs[row].tolist()
    for rank, (each, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1):
        if each != token:
            found[each] = Logprob(logprob=logprob, rank=rank, decoded_token=text(each))
    return found
