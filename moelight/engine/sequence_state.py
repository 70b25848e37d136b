"""State of one running sequence besides its tokens: stop strings, a grammar, counts, log-probabilities.

Does not depend on rows, batches and passes.
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

Kept: TypeAlias = MutableSequence[tuple[Scores, int]]  # scores of several rows, and the row of this sequence
UNCHANGED = Change()


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """The end of a sequence: its ``reason``; the ``closing`` token, which is not part of the answer; and the ``stop``
    string or token id. ``by_text``: a stop string matched, and the answer is still to be cut there. ``code`` is the
    code of an error."""

    reason: str
    closing: int | None = None
    stop: int | str | None = None
    by_text: bool = False
    code: str | None = None


def needs_state(how: SamplingParams) -> bool:
    """True if a sequence needs a `SequenceState`."""
    return bool(how.stop or _changes(how) or how.logprobs is not None or how.prompt_logprobs is not None)


class SequenceState:
    """State of one sequence.

    Attributes:
        matcher: matches stop strings, if there are any.
        chooses: tokens are chosen separately, since logits are changed or tokens scored.
        needs_history: all tokens must be known before the next one is chosen.
        top: number of likeliest tokens scored besides the chosen one; None if none is scored.
        chosen: scores of generated tokens that have not been collected yet.
        prompt: scores of prompt tokens, at ``positions``.
        logprobs: log-probabilities of the collected tokens.
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
        """The change to the logits of generated token number ``place``."""
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
        """Record ``token``. ``closes``: the token ends the sequence and is not part of it. Returns the end of a
        sequence whose constraint allows no token, else None."""
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
        """The end of the sequence if ``token``, which is part of it, completes it; else None."""
        if self.matcher is not None and self.matcher.found(token):
            return SequenceEnd("stop", by_text=True)
        if self._constraint is not None:
            self._constraint.go_on(token)
            if self._constraint.complete:
                return SequenceEnd("stop")
        return None

    @property
    def scored_nan(self) -> bool:
        """True if a prompt token was scored by logits that are not finite; valid once all are scored."""
        return any(math.isnan(scores.logprobs[row]) for scores, row in self.prompt)

    def prompt_logprobs(self, text: Callable[[int], str]) -> tuple[Mapping[int, Logprob] | None, ...] | None:
        """One mapping per prompt token, None where it was not scored; None if no prompt log-probabilities were
        requested."""
        if self._how.prompt_logprobs is None:
            return None
        found: list[Mapping[int, Logprob] | None] = [None] * len(self._token_ids)
        for position, (scores, row) in zip(self.positions, self.prompt, strict=True):
            found[position] = _logprobs(self._token_ids[position], scores, row, text)
        return tuple(found)


def _changes(how: SamplingParams) -> bool:
    """True if logits are changed before a token is chosen."""
    penalties = (how.repetition_penalty, how.frequency_penalty, how.presence_penalty)
    return bool(
        how.logit_bias or how.min_tokens or penalties != UNCHANGED.penalties or how.structured_outputs is not None
    )


def _decoder(tokenizer: Tokenizer, how: SamplingParams) -> Callable[..., str]:
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=how.skip_special_tokens)


def _logprobs(token: int, scores: Scores, row: int, text: Callable[[int], str]) -> Mapping[int, Logprob]:
    """Log-probabilities of ``token``, then of the likeliest tokens in order."""
    found = {
        token: Logprob(logprob=float(scores.logprobs[row]), rank=int(scores.ranks[row]), decoded_token=text(token))
    }
    ids, logprobs = scores.top_ids[row].tolist(), scores.top_logprobs[row].tolist()
    for rank, (each, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1):
        if each != token:
            found[each] = Logprob(logprob=logprob, rank=rank, decoded_token=text(each))
    return found
