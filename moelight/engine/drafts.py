"""Drafts without a model: the tokens that followed the longest earlier occurrence of a sequence's last tokens, in the
sequence itself (its prompt included) or in other answers of the job.

Memory is bounded: eight bytes for each token of a running sequence, and `Continuations` of fixed size. The same tokens
in the same order give the same drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from moelight.engine.batcher import RunningSequence

# Kinds of drafts: looked up in the sequence, or in another answer of the job; of a draft model, or of the model's
# prediction layer; what a grammar leaves.
SEQUENCE, JOB, MODEL, PREDICTED, FORCED = "sequence", "job", "model", "mtp", "forced"
LONGEST_MATCH = 16  # tokens; longer ones predict no better
LEAST_MATCH = 2
RESUMED = 4  # a repetition of so many tokens is resumed after other tokens, unless there is a match as long
NEAR = 8  # tokens before and after the place expected
ORDER = 3  # tokens that an entry of `Continuations` is found by
STORED_TOKENS, ENTRIES = 1 << 20, 1 << 19
PIECE = 64  # tokens that a growing answer adds to `Continuations` at a time
_SEPARATOR = -1
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)


class Draft(NamedTuple):
    """``token_ids`` that may follow a sequence. ``match``: last tokens of the sequence that they followed before, at
    most `LONGEST_MATCH`; 1 where nothing is looked up. ``kind``: where they are from."""

    token_ids: tuple[int, ...]
    match: int
    kind: str = SEQUENCE


NO_DRAFT = Draft((), 0)


class Continuations:
    """Tokens of the answers of a job, of which the last `STORED_TOKENS` are kept, found by `ORDER` consecutive tokens;
    the latest occurrence wins."""

    def __init__(self) -> None:
        self._tokens = np.full(STORED_TOKENS, _SEPARATOR, dtype=np.int32)
        self._entries = np.full(ENTRIES, -1, dtype=np.int64)  # of the tokens that follow, by number
        self._written = 0

    def add(self, token_ids: np.ndarray) -> None:
        """Add consecutive tokens int32 [n] of an answer, which do not continue those added before."""
        token_ids = token_ids[: STORED_TOKENS // 2]
        if len(token_ids) <= ORDER:
            return
        begin, count = self._written, len(token_ids) + 1
        self._tokens[np.arange(begin, begin + count) % STORED_TOKENS] = np.append(token_ids, np.int32(_SEPARATOR))
        self._written += count
        windows = np.lib.stride_tricks.sliding_window_view(token_ids[:-1], ORDER)
        self._entries[_hashed(windows)] = np.arange(begin + ORDER, begin + len(token_ids))

    def find(self, token_ids: np.ndarray, count: int) -> Draft:
        """At most ``count`` tokens that followed the last ones of a sequence int32 [n]."""
        if len(token_ids) < ORDER or not self._written:
            return NO_DRAFT
        after = int(self._entries[_hashed(token_ids[-ORDER:])])
        if after < max(ORDER, self._written - STORED_TOKENS + LONGEST_MATCH):
            return NO_DRAFT  # nothing, or written over
        before, last = self._at(max(0, after - LONGEST_MATCH), after), token_ids[-LONGEST_MATCH:].tolist()
        pairs = zip(reversed(before), reversed(last), strict=False)
        match = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if match < ORDER:
            return NO_DRAFT
        following = self._at(after, min(after + count, self._written))
        if _SEPARATOR in following:
            following = following[: following.index(_SEPARATOR)]
        return Draft(tuple(following), match, JOB)

    def _at(self, begin: int, end: int) -> list[int]:
        if begin // STORED_TOKENS == (end - 1) // STORED_TOKENS:
            first = begin % STORED_TOKENS
            return self._tokens[first : first + end - begin].tolist()
        return self._tokens[np.arange(begin, end) % STORED_TOKENS].tolist()


def _hashed(windows: np.ndarray) -> np.ndarray:
    """Entry of each window int32 [..., `ORDER`] of tokens."""
    mixed = (windows.astype(np.uint64) * _MULTIPLIERS).sum(axis=-1, dtype=np.uint64)
    return (mixed >> np.uint64(40)) % np.uint64(ENTRIES)


@dataclass(slots=True)
class _Cursor:
    """Where a sequence goes on repeating itself: position ``at`` follows ``match`` tokens like its last ones."""

    at: int
    match: int


@dataclass(frozen=True, slots=True)
class _Interrupted:
    """A repetition that other tokens interrupted, so many ``tokens`` ago: it would go on at position ``at`` now."""

    at: int
    tokens: int


class History:
    """The tokens of one sequence, in which it looks up what may follow."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self._buffer = np.empty(2 * len(prompt) + 64, dtype=np.int32)
        self._buffer[: len(prompt)] = prompt
        self._count = self._stored = len(prompt)
        self._cursor: _Cursor | None = None
        self._interrupted: _Interrupted | None = None

    def extend(self, token_ids: list[int]) -> None:
        """Append new tokens."""
        end = self._count + len(token_ids)
        if end > len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty(end, dtype=np.int32)))
        self._buffer[self._count : end] = token_ids
        if (gap := self._interrupted) is not None:
            self._interrupted = _Interrupted(gap.at + len(token_ids), gap.tokens + len(token_ids))
        if (cursor := self._cursor) is not None:
            at, before = cursor.at + len(token_ids), self._buffer[cursor.at : cursor.at + len(token_ids)].tolist()
            pairs = zip(before, token_ids, strict=True)
            repeated = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            goes_on = repeated == len(token_ids)
            self._cursor = _Cursor(at, cursor.match + repeated) if goes_on else None
            if cursor.match + repeated >= RESUMED:
                self._interrupted = None if goes_on else _Interrupted(at, len(token_ids) - repeated - 1)
        self._count = end

    def __len__(self) -> int:
        return self._count

    def store(self, continuations: Continuations, *, ended: bool = False) -> None:
        """Add generated tokens that are not there yet: full pieces, or all if the sequence ``ended``."""
        new = self._count - self._stored
        if new >= PIECE or (ended and new):
            continuations.add(self._buffer[max(0, self._stored - ORDER) : self._count])
            self._stored = self._count

    def draft(self, count: int, continuations: Continuations) -> Draft:
        """At most ``count`` tokens after the longest match; of equal ones the sequence's, and of these the latest."""
        tokens = self._buffer[: self._count]
        if self._cursor is None or self._cursor.match < LONGEST_MATCH:
            self._cursor = _longest_match(tokens)
        at, match = (0, 0) if self._cursor is None else (self._cursor.at, min(self._cursor.match, LONGEST_MATCH))
        if match < RESUMED and (resumed := self._resumed(tokens)) is not None:
            self._cursor = _Cursor(resumed, 1)
            return Draft(tuple(tokens[resumed : resumed + count].tolist()), 1)
        if match < LONGEST_MATCH:
            shared = continuations.find(tokens, count)
            if shared.match > match and shared.token_ids:
                return shared
        if match < LEAST_MATCH:
            return NO_DRAFT
        return Draft(tuple(tokens[at : at + count].tolist()), match)

    def _resumed(self, tokens: np.ndarray) -> int | None:
        """Where an interrupted repetition goes on: after the last token, if that occurs near the place expected, or
        else at that place, as if one token took the place of another. None a few tokens later."""
        if (gap := self._interrupted) is None or gap.tokens > NEAR or gap.at >= len(tokens) - 1:
            return None
        expected = gap.at
        begin = max(0, expected - NEAR - 1)
        near = np.flatnonzero(tokens[begin : min(expected + NEAR, len(tokens) - 1)] == tokens[-1]) + begin + 1
        if not len(near):
            return expected
        return int(near[np.argmin(np.abs(near - expected))])


def _longest_match(tokens: np.ndarray) -> _Cursor | None:
    """The latest of the longest earlier occurrences of the last tokens of int32 [n]; None if there is none."""
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    if not len(ends):
        return None
    match = 1
    while match < LONGEST_MATCH:
        longer = ends[ends >= match]
        longer = longer[tokens[longer - match] == tokens[last - match]]
        if not len(longer):
            break
        ends, match = longer, match + 1
    return _Cursor(int(ends[-1]) + 1, match)


class NgramDrafts:
    """The drafts of all running sequences of an engine, and what its answers have in common."""

    def __init__(self) -> None:
        self._continuations = Continuations()
        self._histories: dict[RunningSequence, History] = {}

    def clear(self) -> None:
        """Forget all sequences, but not the tokens of their answers."""
        self._histories.clear()

    def draft(self, sequence: RunningSequence, count: int) -> Draft:
        """At most ``count`` tokens that may follow the last one of ``sequence``."""
        return self._history(sequence).draft(count, self._continuations)

    def end(self, sequence: RunningSequence) -> None:
        """Forget ``sequence``, which is finished."""
        if sequence in self._histories:
            self._history(sequence).store(self._continuations, ended=True)
            del self._histories[sequence]

    def _history(self, sequence: RunningSequence) -> History:
        """The history of ``sequence``, up to its last token."""
        if (history := self._histories.get(sequence)) is None:
            history = self._histories[sequence] = History(sequence.request.token_ids)
        generated = len(history) - len(sequence.request.token_ids)
        if generated < len(sequence.generated):
            history.extend(sequence.generated[generated:])
            history.store(self._continuations)
        return history
