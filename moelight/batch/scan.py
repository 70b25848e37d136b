"""The first reading of a job's input: its total work, and the rows that repeat an earlier custom_id. It takes 24 bytes
of memory a row."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from moelight.batch.input import Input
from moelight.batch.progress import Progress
from moelight.batch.rows import BadRow, Row, bad_row
from moelight.batch.summary import ScanSummary, Summing
from moelight.core.errors import InputError
from moelight.core.request import SamplingParams

_DIGEST_BYTES = 16  # of a custom_id: a collision is expected once in 2**64 rows
_TOLD_EVERY_S = 0.2

Encode = Callable[[Row], list[tuple[int, ...]]]
Preparing = Callable[[int], AbstractContextManager[None]]


def _unwatched(_: int) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """The ``summary`` of the rows, and the numbers of ``repeated`` rows: an earlier row has their custom_id."""

    summary: ScanSummary
    repeated: frozenset[int] = frozenset()

    def as_dict(self) -> dict[str, Any]:
        return {"summary": self.summary.as_dict(), "repeated": sorted(self.repeated)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Scan:
        return cls(summary=ScanSummary.from_dict(given["summary"]), repeated=frozenset(given["repeated"]))


def scan(source: Input, encode: Encode, told: Progress, *, context: int, preparing: Preparing = _unwatched) -> Scan:
    """Read ``source`` once, and repeated rows a second time; raises InputError if it cannot be read or holds no row.
    ``context`` is the model's context length in tokens; ``preparing`` returns the context in which a row, by number, is
    encoded."""

    def asked(row: Row | BadRow) -> list[tuple[int, int]] | BadRow:
        return _asked(row, encode, context, preparing)

    found, ids, keys = Summing(), _CustomIds(), _Keys()
    last_s = time.monotonic()
    for rows, row in enumerate(source.rows(), start=1):
        if row.custom_id is not None:
            ids.add(row.custom_id, row.number)
        _count(found, row, asked(row), keys)
        if time.monotonic() - last_s > _TOLD_EVERY_S:
            last_s = time.monotonic()
            told.reading(rows, source.read_bytes, source.size_bytes)
    repeated = ids.repeated()
    if repeated:
        # Known only after all ids: these rows were counted as served, and are not.
        for row in source.rows(skip=lambda number: number not in repeated):
            _withdraw(found, row, asked(row))
    return Scan(summary=found.summary(), repeated=repeated)


def duplicate(row: Row) -> BadRow:
    """The error row of ``row``, whose custom_id an earlier row has."""
    error = InputError(f"custom_id {row.custom_id!r} was used by an earlier line", code="duplicate_custom_id")
    return bad_row(row.number, row.line, row.custom_id, error, kind=row.kind)


def check_length(tokens: int, context: int, *, generates: bool = True) -> None:
    """Raise InputError for a prompt that is too long for the model's context. The last token of a prompt that is only
    scored (``generates`` is false) needs no position in the context."""
    if tokens > (context - 1 if generates else context + 1):
        raise InputError(
            f"the prompt has {tokens} tokens, the model's context is {context}", code="context_length_exceeded"
        )


def room(row: Row, tokens: int, context: int) -> int:
    """The most tokens that may be generated for one sample of a prompt of ``row``."""
    return max(0, min(row.sampling.max_tokens, context - tokens))


def _asked(row: Row | BadRow, encode: Encode, context: int, preparing: Preparing) -> list[tuple[int, int]] | BadRow:
    """``(tokens, room)`` of every prompt of ``row``, or the error row if ``row`` cannot be served."""
    if isinstance(row, BadRow):
        return row
    try:
        with preparing(row.number):
            prompts = encode(row)
        for prompt in prompts:
            check_length(len(prompt), context, generates=row.sampling.max_tokens > 0)
    except InputError as error:
        return bad_row(row.number, row.line, row.custom_id, error, kind=row.kind)
    return [(len(prompt), room(row, len(prompt), context)) for prompt in prompts]


def _count(found: Summing, row: Row | BadRow, asked: list[tuple[int, int]] | BadRow, keys: _Keys) -> None:
    if isinstance(asked, BadRow):
        found.refuse(asked)
        return
    assert isinstance(row, Row)
    first, *others = asked
    found.add(row.kind, *first, samples=row.sampling.n, sampling=keys.of(row.sampling))
    for tokens, most in others:
        found.prompt(tokens, most, samples=row.sampling.n)


def _withdraw(found: Summing, row: Row | BadRow, asked: list[tuple[int, int]] | BadRow) -> None:
    """Uncount a row that repeats a custom_id, if it was counted as served."""
    if isinstance(row, Row) and not isinstance(asked, BadRow):
        found.withdraw(duplicate(row), asked, samples=row.sampling.n)


class _Keys:
    """Numbers shared by equal sampling parameters. Consecutive rows mostly share the object, too."""

    def __init__(self) -> None:
        self._last: tuple[SamplingParams | None, int] = (None, 0)

    def of(self, sampling: SamplingParams) -> int:
        if sampling is not self._last[0]:
            self._last = sampling, hash(repr(sampling))
        return self._last[1]


class _CustomIds:
    """Finds rows that repeat an earlier custom_id by sorting digests, so that no id is stored."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._numbers = array("q")

    def add(self, custom_id: str, number: int) -> None:
        self._digests += hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
        self._numbers.append(number)

    def repeated(self) -> frozenset[int]:
        if not self._numbers:
            return frozenset()
        halves = np.frombuffer(self._digests, dtype=np.uint64).reshape(-1, 2)
        numbers = np.frombuffer(self._numbers, dtype=np.int64)
        order = np.lexsort((numbers, halves[:, 0], halves[:, 1]))
        same = (halves[order[1:]] == halves[order[:-1]]).all(axis=1)
        return frozenset(numbers[order[1:][same]].tolist())
