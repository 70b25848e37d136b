"""Requests on their way to completions: seeds, the choice of each next token, and when a sequence ends.

Knows sampling, eos ids and stop strings. Refuses to know batches and passes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from moelight.core.request import Completion, Request
from moelight.engine.batcher import Batcher, Generation, Load, Piece
from moelight.engine.sampling import next_tokens
from moelight.engine.tokenizer import StopMatcher, Tokenizer, cut_at_stop


class Answers:
    """The generations of one run, and the rules by which they end. Nothing is kept of those that have.

    Attributes:
        generations: made one by one, as they are asked for.
        tokens: what was generated so far.
        ended_tokens, ended_most: what those that have ended generated, and the most that they might have.
    """

    def __init__(self, requests: Iterable[Request], tokenizer: Tokenizer, max_positions: int) -> None:
        self._tokenizer, self._max_positions = tokenizer, max_positions
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._matchers: dict[Generation, StopMatcher] = {}
        self.tokens = self.ended_tokens = self.ended_most = 0
        self.generations: Iterator[Generation] = (self._begun(request) for request in requests)

    def _begun(self, request: Request) -> Generation:
        most = most_tokens(request, self._max_positions)
        generation = Generation(request=request, seed=_seed(request), max_tokens=most)
        if request.sampling.stop:
            self._matchers[generation] = StopMatcher(self._tokenizer.decode, request.sampling.stop)
        return generation

    def choose(self, pieces: Sequence[Piece], logits: Tensor) -> Tensor:
        """The next token of each completing piece, int64 [S]; logits float32 [S, V]."""
        owners = [piece.generation for piece in pieces]
        return next_tokens(
            logits,
            [owner.request.sampling for owner in owners],
            [owner.seed for owner in owners],
            [piece.earlier for piece in pieces],
        )

    def may_end(self, tokens: Sequence[Sequence[int]]) -> bool:
        """Whether some sequence may have ended before its time with ``tokens``."""
        return bool(self._matchers) or any(not self._eos.isdisjoint(new) for new in tokens)

    def collect(self, batcher: Batcher, loads: Sequence[Load], tokens: Sequence[Sequence[int]]) -> list[Completion]:
        """Hand each new token to its generation; the completions of those that end with it."""
        finished = []
        for load, new in zip(loads, tokens, strict=True):
            arriving = iter(new)
            for piece in load.pieces:
                if not piece.completes:
                    continue
                generation, token = piece.generation, next(arriving)
                if generation.finished:
                    continue  # it had ended when this pass was launched ahead of its tokens
                generation.generated.append(token)
                self.tokens += 1
                if reason := self._ends(generation, token):
                    generation.finished = True
                    batcher.retire(generation)
                    self._matchers.pop(generation, None)
                    self.ended_tokens += len(generation.generated)
                    self.ended_most += generation.max_tokens
                    finished.append(self._completion(generation, reason))
        return finished

    def _ends(self, generation: Generation, token: int) -> str | None:
        if token in self._eos and not generation.request.sampling.ignore_eos:
            generation.generated.pop()
            self.tokens -= 1
            return "stop"
        matcher = self._matchers.get(generation) if self._matchers else None
        if matcher is not None and matcher.found(generation.generated):
            return "stop"
        return "length" if len(generation.generated) >= generation.max_tokens else None

    def _completion(self, generation: Generation, reason: str) -> Completion:
        request = generation.request
        text, _ = cut_at_stop(self._tokenizer.decode(generation.generated), request.sampling.stop)
        return Completion(
            index=request.index,
            text=text,
            token_ids=tuple(generation.generated),
            finish_reason=reason,
            prompt_tokens=len(request.token_ids),
            cached_tokens=generation.cached,
        )


def most_tokens(request: Request, max_positions: int) -> int:
    """How many tokens may follow the prompt: as many as asked for, within the model's context."""
    return min(request.sampling.max_tokens, max_positions - len(request.token_ids))


def _seed(request: Request) -> int:
    """The request's own seed, or a fresh one."""
    return secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
