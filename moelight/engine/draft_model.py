"""Drafts by a second, smaller model with the same tokens: resident, with a KV cache of its sequences that follows the
tokens that were accepted.

A draft is the model's likeliest continuation, one pass for each token; a pass is one micro-batch of `PassRunner`. Keys
and values behind the last accepted token are written over.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar

import numpy as np
from torch import Tensor

from moelight.engine.batcher import MicroBatchPlan, RunningSequence, keys_of
from moelight.engine.draft_planning import PlannedDrafts
from moelight.engine.draft_prices import DraftPrices
from moelight.engine.drafts import MODEL
from moelight.engine.loaded_model import LoadedModel
from moelight.engine.pass_runner import PassRunner
from moelight.engine.sampling import likeliest_tokens
from moelight.engine.window_blocks import WindowTable, blocks_of_windows
from moelight.optimizer.pass_prices import Passed
from moelight.runtime.context import Chunk
from moelight.runtime.machine import Machine

_LONG = 16  # so many tokens attend together, as a prompt does; fewer row by row


@dataclass(kw_only=True, slots=True, eq=False)
class CachedSequence:
    """What the draft model has of one sequence.

    Attributes:
        accepted: leading tokens of the sequence that are in the cache; ``ahead``: the drafts behind them.
        blocks: of its KV cache; ``window``: of layers that attend to the last positions only, if they have their own.
    """

    accepted: int = 0
    ahead: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    window: WindowTable | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class DraftTurn:
    """``count`` tokens are to be drafted behind the ``length`` tokens of a sequence, of which those from ``start`` on
    are not in the cache: ``pending``, and later the newest draft. ``hidden`` [pending, H]: of the positions
    before them, where the model sees these."""

    sequence: RunningSequence
    cached: CachedSequence
    count: int
    length: int
    start: int
    pending: list[int]
    hidden: Tensor | None = None
    drafted: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPiece:
    """Tokens of one turn in one pass; ``last``: a draft follows them."""

    turn: DraftTurn
    start: int
    token_ids: list[int]
    last: bool
    hidden: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Load:
    """The one micro-batch of a pass (`pass_runner.PackedPlan`)."""

    tokens: int
    prefill_only: bool
    continues: bool = False


class DraftModel:
    """The drafts of a loaded model, which are tokens below ``vocab_size``.

    Attributes:
        kind: of its drafts.
        seconds_spent: on all drafts so far.
    """

    kind: ClassVar[str] = MODEL

    def __init__(self, drafts: PlannedDrafts, machine: Machine, *, lanes: str, vocab_size: int) -> None:
        self.seconds_spent = 0.0
        self._policy, self._profile, self._discrete = drafts.policy, drafts.source.profile, machine.discrete
        self._vocab_size = vocab_size
        self._passes = PassRunner(drafts.source, drafts.policy, machine, lanes)
        self._pool, self._size = self._passes.pool, self._policy.kv_block_size
        self._windows = blocks_of_windows(self._profile, self._policy, self._passes.window_pool)
        self._prices = DraftPrices(drafts.prices)
        self._cached: dict[RunningSequence, CachedSequence] = {}

    def close(self) -> None:
        self._passes.close()

    def clear(self) -> None:
        """All sequences are finished, or will not be."""
        for sequence in list(self._cached):
            self.end(sequence)

    def end(self, sequence: RunningSequence) -> None:
        """``sequence`` is finished."""
        if (cached := self._cached.pop(sequence, None)) is not None:
            self._pool.release(cached.blocks)
            if self._windows is not None and cached.window is not None:
                self._windows.close(cached.window)

    def seconds(self, sequences: Sequence[RunningSequence], num_tokens: int) -> np.ndarray:
        """Predicted seconds float64 [num_tokens + 1] of 0 to ``num_tokens`` drafts of each of ``sequences``. Tokens
        that the cache lacks, but for a few, count by the share of the rest of the answer that a pass makes."""
        if not sequences:
            return np.zeros(num_tokens + 1)
        count, size, counts = len(sequences), self._policy.micro_batch_tokens, np.arange(num_tokens + 1)
        lengths = [len(one.request.token_ids) + len(one.generated) for one in sequences]
        cached = [0 if (held := self._cached.get(one)) is None else held.accepted for one in sequences]
        behind = [length - have for length, have in zip(lengths, cached, strict=True)]
        context, few = sum(lengths) / count, [min(tokens, _LONG) for tokens in behind]
        once = sum(
            (tokens - some) / max(1, one.max_tokens - len(one.generated))
            for one, tokens, some in zip(sequences, behind, few, strict=True)
        )
        plain, first = self._prices.seconds(self._policy, count, context, 0, np.array([0, sum(few) - count]))
        (prompt_s,) = self._prices.seconds(self._policy, 1, context, size, np.zeros(1))
        return np.where(counts > 0, first + (counts - 1) * plain + once * prompt_s / size * (1 + counts), 0.0)

    def landed(self, plans: Sequence[MicroBatchPlan], tokens: Sequence[Sequence[int]], model: LoadedModel) -> None:
        """A pass of the other model chose ``tokens``; only `PredictionDrafts` sees its hidden states."""

    def draft(self, asked: Iterable[tuple[RunningSequence, int]]) -> dict[RunningSequence, tuple[int, ...]]:
        """At most so many tokens that may follow each sequence; of none where the cache is full, or it exceeds the
        context or the vocabulary of the model."""
        began_s = time.perf_counter()
        turns = self._begin([turn for one, count in asked if (turn := self._turn(one, count)) is not None])
        going = turns
        while going := [turn for turn in going if len(turn.drafted) < turn.count]:
            self._compute(going)
        for turn in turns:
            turn.cached.accepted, turn.cached.ahead = turn.length, turn.drafted[:-1]
        self.seconds_spent += time.perf_counter() - began_s
        return {turn.sequence: tuple(takewhile(self._shared, turn.drafted)) for turn in turns}

    def _shared(self, token: int) -> bool:
        return token < self._vocab_size

    def _turn(self, sequence: RunningSequence, count: int) -> DraftTurn | None:
        """Where the model goes on with ``sequence``; None if it cannot."""
        prompt, generated = sequence.request.token_ids, sequence.generated
        length = len(prompt) + len(generated)
        count = min(count, self._profile.max_positions - length + 1)
        cached = self._cached.get(sequence) or CachedSequence()
        new = generated[cached.accepted - len(prompt) :] if cached.accepted else []
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(cached.ahead, new, strict=False)))
        start = min(cached.accepted + right, length - 1)
        pending = [*prompt[start:], *generated[max(0, start - len(prompt)) :]]
        if count < 1 or max(pending) >= self._profile.vocab_size:
            return None
        return DraftTurn(sequence=sequence, cached=cached, count=count, length=length, start=start, pending=pending)

    def _begin(self, turns: Sequence[DraftTurn]) -> list[DraftTurn]:
        """Compute the first draft of every turn for which there are blocks. Prompts that begin alike are computed one
        after the other: the second shares the blocks of the first."""
        begun = list[DraftTurn]()
        while turns:
            coming, later, promised = list[DraftTurn](), list[DraftTurn](), dict[bytes, int]()
            for turn in turns:
                keys = self._keys(turn)
                missing = next((key for key in keys if self._pool.find(key) is None), None)
                if missing in promised:
                    later.append(turn)
                elif self._open(turn, keys):
                    coming.append(turn)
                    promised.update(zip(keys, turn.cached.blocks, strict=False))
            self._compute(coming)
            for key, block in promised.items():
                self._pool.name(block, key)
            begun += coming
            turns = later
        return begun

    def _keys(self, turn: DraftTurn) -> Sequence[bytes]:
        """The keys of the blocks that hold nothing but the prompt of a sequence that is new, but for its last token."""
        if turn.cached.blocks or turn.hidden is not None or self._windows is not None:
            return ()
        return keys_of(turn.sequence.request.token_ids[: turn.length - 1], self._size)

    def _open(self, turn: DraftTurn, keys: Sequence[bytes]) -> bool:
        """Reserve blocks for all that ``turn`` computes; False if the cache is full."""
        cached, sequence = turn.cached, turn.sequence
        shared = list[int]()
        for key in keys:
            if (block := self._pool.find(key)) is None:
                break
            shared.append(block)
        need = -(-(turn.length + max(0, turn.count - 1)) // self._size) - len(cached.blocks) - len(shared)
        if need > self._pool.free_beside(shared):
            return False
        if self._windows is not None:
            turn.count = min(turn.count, self._size)
            if cached.window is None:
                held = self._windows.need(len(sequence.request.token_ids) + sequence.max_tokens, len(turn.pending))
                if not self._windows.fits(held):
                    return False
                cached.window = self._windows.open(held, ())
        self._pool.share(shared)
        cached.blocks += [*shared, *self._pool.take(max(0, need))]
        if shared:
            turn.start = len(shared) * self._size
            turn.pending = turn.pending[turn.start :]
        self._cached[sequence] = cached
        return True

    def _compute(self, turns: Sequence[DraftTurn]) -> None:
        """Compute what is pending of ``turns``, and the draft that follows, in as many passes as that takes."""
        pieces, room = list[DraftPiece](), self._policy.micro_batch_tokens
        for turn in turns:
            start, tokens, hidden = turn.start, turn.pending, turn.hidden
            while tokens:
                if not room or len(pieces) == self._policy.micro_batch_size:
                    self._run(pieces)
                    pieces, room = [], self._policy.micro_batch_tokens
                # A window that slides holds one new block.
                count = min(room, self._size if self._windows is not None and turn.start else room)
                part, tokens = tokens[:count], tokens[count:]
                before = None if hidden is None else hidden[: len(part)]
                hidden = None if hidden is None else hidden[len(part) :]
                last = not tokens and turn.count > 0
                pieces.append(DraftPiece(turn=turn, start=start, token_ids=part, last=last, hidden=before))
                start, room = start + len(part), 0 if tokens else room - len(part)
        if pieces:
            self._run(pieces)

    def _run(self, pieces: Sequence[DraftPiece]) -> None:
        """One pass."""
        pieces = sorted(pieces, key=lambda piece: (not _decodes(piece), len(piece.token_ids)))
        chunks = [self._chunk(piece, slot) for slot, piece in enumerate(pieces)]
        began_s = time.perf_counter()
        prefill_only = self._discrete and all(piece.start == 0 for piece in pieces)
        load = _Load(tokens=sum(chunk.count for chunk in chunks), prefill_only=prefill_only)
        self._see(pieces)
        packed = self._passes.pack_chunks([load], [chunks])
        launched = self._passes.launch_with(packed, (self._likeliest, _nothing, _nothing), follows=False)
        timeline, (tokens,) = self._passes.land(launched)
        busy_s = {str(lane): busy for lane, busy in timeline.busy_s().items()}
        self._observe(pieces, time.perf_counter() - began_s, busy_s)
        row, chosen = 0, iter(tokens)
        for piece in pieces:
            row += len(piece.token_ids)
            if piece.last:
                turn, token = piece.turn, next(chosen)
                turn.start, turn.pending = piece.start + len(piece.token_ids), [token]
                turn.hidden = None if turn.hidden is None else final_hidden(self._passes.model, row - 1, row)
                turn.drafted.append(token)

    def _see(self, pieces: Sequence[DraftPiece]) -> None:
        """Hand the hidden states of ``pieces`` to the model; only a prediction layer sees them."""

    def _chunk(self, piece: DraftPiece, slot: int) -> Chunk:
        cached, end = piece.turn.cached, piece.start + len(piece.token_ids)
        if self._windows is not None and cached.window is not None:
            if piece.start < piece.turn.length:
                self._windows.advance(cached.window, piece.start, decodes=_decodes(piece))
            self._windows.extend(cached.window, end)
        return Chunk(
            token_ids=piece.token_ids,
            start=piece.start,
            blocks=cached.blocks,
            slot=slot,
            samples=int(piece.last),
            decodes=_decodes(piece),
            window_blocks=() if cached.window is None else cached.window.blocks,
            window_first=0 if cached.window is None else cached.window.first,
        )

    def _likeliest(self, _micro_batch: int, _first: int, logits: Tensor) -> Tensor:
        return likeliest_tokens(logits, discrete=self._discrete)[0]

    def _observe(self, pieces: Sequence[DraftPiece], seconds: float, busy_s: Mapping[str, float]) -> None:
        rows = [piece for piece in pieces if _decodes(piece)]
        prompts = [len(piece.token_ids) for piece in pieces if not _decodes(piece)]
        run = Passed(
            decode_tokens=sum(len(piece.token_ids) for piece in rows),
            context=sum(piece.start for piece in rows) / max(1, len(rows)),
            prompt_tokens=sum(prompts),
            prompt_len=sum(prompts) / len(prompts) if prompts else 1.0,
            seconds=seconds,
            busy_s=busy_s,
            sequences=len(rows),
        )
        self._prices.observe(run, drafts=run.decode_tokens > len(rows), policy=self._policy)


def final_hidden(model: LoadedModel, begin: int, end: int) -> Tensor:
    """Copies of the final hidden states of rows ``begin`` to ``end`` of the last pass of ``model``."""
    return model.operations.decoder.final_hidden(model.hidden[begin:end]).clone()


def _decodes(piece: DraftPiece) -> bool:
    return piece.start > 0 and len(piece.token_ids) < _LONG


def _nothing(*_: int | Tensor) -> None:
    """Nothing is scored or pooled."""
