"""Drafts by the layer of multi-token prediction of the model itself (`models.graph.prediction`).

After every pass the layer computes the positions of that pass: each token with the final hidden state of the position
before it. Positions in its cache count from the first one that it has seen; where some are missing, as those of a
prompt that was cached, it begins anew behind them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar

import torch
from torch import Tensor

from moelight.engine.batcher import MicroBatchPlan, RunningSequence, SequenceChunk
from moelight.engine.draft_model import CachedSequence, DraftModel, DraftPiece, DraftTurn, final_hidden
from moelight.engine.draft_planning import PlannedDrafts
from moelight.engine.drafts import PREDICTED
from moelight.engine.loaded_model import LoadedModel
from moelight.models.checkpoints import GraphSource
from moelight.models.graph.model import decoder_of
from moelight.runtime.machine import Machine


@dataclass(kw_only=True, slots=True, eq=False)
class _Seen:
    """The positions of one sequence from ``first`` on that the layer has or is to compute: behind those in its cache,
    ``tokens`` with the ``hidden`` states [rows, H] of the positions before them, pass by pass."""

    first: int
    cached: CachedSequence = field(default_factory=CachedSequence)
    tokens: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + self.cached.accepted + len(self.tokens)


class PredictionDrafts(DraftModel):
    """The drafts of a loaded prediction layer: the first token by the hidden state of the model, each further one by
    that of the layer."""

    kind: ClassVar[str] = PREDICTED

    def __init__(self, drafts: PlannedDrafts, machine: Machine, *, lanes: str, vocab_size: int) -> None:
        super().__init__(drafts, machine, lanes=lanes, vocab_size=vocab_size)
        source = drafts.source.source
        assert isinstance(source, GraphSource), "prediction layers run as module graphs"
        self._input = decoder_of(source.model.module).embed_tokens
        self._seen: dict[RunningSequence, _Seen] = {}

    def end(self, sequence: RunningSequence) -> None:
        super().end(sequence)
        self._seen.pop(sequence, None)

    def clear(self) -> None:
        super().clear()
        self._seen.clear()

    def landed(self, plans: Sequence[MicroBatchPlan], tokens: Sequence[Sequence[int]], model: LoadedModel) -> None:
        """Keep what the pass tells of its sequences."""
        row = 0
        for load, chosen in zip(plans, tokens, strict=True):
            arriving = iter(chosen)
            for chunk in load.chunks:
                new = [next(arriving) for _ in range(chunk.samples)]
                following = _following(chunk, new)
                if chunk.sequence.max_tokens and not chunk.sequence.finished and min(following, default=0) >= 0:
                    self._note(chunk, following, final_hidden(model, row, row + len(following)))
                row += chunk.count

    def _note(self, chunk: SequenceChunk, following: Sequence[int], hidden: Tensor) -> None:
        seen = self._seen.get(chunk.sequence)
        if seen is None or seen.end != chunk.start:
            self.end(chunk.sequence)
            seen = self._seen[chunk.sequence] = _Seen(first=chunk.start)
        seen.tokens += following
        seen.hidden.append(hidden)

    def draft(self, asked: Iterable[tuple[RunningSequence, int]]) -> dict[RunningSequence, tuple[int, ...]]:
        """At most so many tokens that may follow each sequence; of none where the cache is full. Computes what was seen
        of all sequences."""
        began_s, counts = time.perf_counter(), dict(asked)
        turns = self._begin([turn for one, seen in self._seen.items() if (turn := self._next(one, seen, counts))])
        going = turns
        while going := [turn for turn in going if len(turn.drafted) < turn.count]:
            self._compute(going)
        for sequence in {one for one, seen in self._seen.items() if seen.tokens} - {turn.sequence for turn in turns}:
            self.end(sequence)  # the cache is full
        for turn in turns:
            seen = self._seen[turn.sequence]
            seen.cached.accepted, seen.tokens, seen.hidden = turn.length, [], []
        self.seconds_spent += time.perf_counter() - began_s
        return {turn.sequence: tuple(takewhile(self._shared, turn.drafted)) for turn in turns if turn.drafted}

    def _next(self, sequence: RunningSequence, seen: _Seen, counts: dict[RunningSequence, int]) -> DraftTurn | None:
        if not seen.tokens:
            return None
        start = seen.cached.accepted
        return DraftTurn(
            sequence=sequence,
            cached=seen.cached,
            count=counts.get(sequence, 0),
            length=start + len(seen.tokens),
            start=start,
            pending=seen.tokens,
            hidden=torch.cat(seen.hidden),
        )

    def _see(self, pieces: Sequence[DraftPiece]) -> None:
        self._input.hidden = torch.cat([piece.hidden for piece in pieces if piece.hidden is not None])


def _following(chunk: SequenceChunk, new: Sequence[int]) -> list[int]:
    """The token behind each row of ``chunk`` that is part of the sequence, whose last ones chose ``new``."""
    if chunk.decodes:
        return list(new[: chunk.accepted(new) + 1])
    tokens = chunk.sequence.request.token_ids
    if chunk.anew:
        tokens = (*tokens, *chunk.sequence.generated[: chunk.anew])
    return [*tokens[chunk.start + 1 : chunk.start + chunk.count + 1 - chunk.completes], *new]
