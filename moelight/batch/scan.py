"""The first reading of a job's input: its total work, and the rows that repeat an earlier custom_id. It takes 24 bytes
of memory a row."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
import numpy as np

from moelight.batch.fields import Input
from moelight.batch.progress import Progress
from moelight.batch.rows import BadRow, Row, bad_row
from moelight.batch.scoring import EncodedPrompt
from moelight.batch.summary import RowLimit, ScanSummary
from moelight.core.errors import InputError
from moelight.core.request import SamplingParams, most_prompt_tokens
from moelight.profiles.workload import EXPECTED_GEN_LEN

_DIGEST_BYTES = 16  # of a custom_id: a collision is expected once in 2**64 rows
_TOLD_EVERY_S = 0.2
_MOST_SAMPLINGS = 4096

Encode = Callable[[Row], list[EncodedPrompt]]
Check = Callable[[Row], Sequence[str]]
Preparing = Callable[[int], AbstractContextManager[None]]


def _unwatched(_: int) -> AbstractContextManager[None]:
    return nullcontext()


def _unchecked(_: Row) -> tuple[str, ...]:
    return ()


class Scan(msgspec.Struct, kw_only=True, frozen=True):
    """The ``summary`` of the rows, and the numbers of ``repeated`` rows: an earlier row has their custom_id."""

    summary: ScanSummary
    repeated: frozenset[int] = frozenset()


def scan(
    source: Input,
    encode: Encode,
    told: Progress,
    *,
    context: int,
    preparing: Preparing = _unwatched,
    check: Check = _unchecked,
) -> Scan:
    """Read ``source`` once, and repeated rows a second time; raises InputError if it cannot be read or holds no row.
    ``context`` is the model's context length in tokens; ``preparing`` returns the context in which a row, by number, is
    encoded; ``check`` returns what should be noted about a row, or raises InputError."""

    def prompts_of(row: Row) -> list[tuple[int, int]] | BadRow:
        """``(tokens, expected tokens of an answer)`` of every prompt of ``row``, or the error row if ``row`` cannot be
        served."""
        try:
            with preparing(row.number):
                notes = check(row)
                prompts = encode_row(row, encode, context)
        except InputError as error:
            return bad_row(row.number, row.line, row.custom_id, error, kind=row.kind)
        summary.note(notes, row.line)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        return [(tokens, expected(row, tokens, context)) for tokens in lengths]

    summary, ids, samplings = ScanSummary(), _CustomIds(), _Samplings()
    last_s = time.monotonic()
    for rows, row in enumerate(source.rows(), start=1):
        if row.custom_id is not None:
            ids.add(row.custom_id, row.number)
        if isinstance(row, BadRow):
            summary.refuse(row)
        elif isinstance(prompts := prompts_of(row), BadRow):
            summary.refuse(prompts)
        else:
            summary.add(row.kind, prompts, samples=row.sampling.n, limit=limit_of(row, context))
            samplings.add(row.sampling)
        if time.monotonic() - last_s > _TOLD_EVERY_S:
            last_s = time.monotonic()
            told.reading(rows, source.read_bytes, source.size_bytes)
    summary.samplings = samplings.count
    repeated = ids.repeated()
    if repeated:
        # Known only after all ids: these rows were counted as served, and are not.
        for row in source.rows(skip=lambda number: number not in repeated):
            if isinstance(row, Row) and not isinstance(prompts := prompts_of(row), BadRow):
                limit = limit_of(row, context)
                summary.withdraw(duplicate(row), prompts, samples=row.sampling.n, limit=limit)
    return Scan(summary=summary, repeated=repeated)


def duplicate(row: Row) -> BadRow:
    """The error row of ``row``, whose custom_id an earlier row has."""
    error = InputError(f"custom_id {row.custom_id!r} was used by an earlier line", code="duplicate_custom_id")
    return bad_row(row.number, row.line, row.custom_id, error, kind=row.kind)


def encode_row(row: Row, encode: Encode, context: int) -> list[EncodedPrompt]:
    """Every prompt of ``row``; raises InputError for a prompt that is too long for the model's context, or
    leaves less of it than the row's ``max_tokens``."""
    prompts, max_prompt = encode(row), most_prompt_tokens(row.sampling, row.pooling, context)
    for tokens in (len(prompt.token_ids) for prompt in prompts):
        if tokens > max_prompt:
            raise InputError(
                f"the prompt has {tokens} tokens, the model's context is {context}", code="context_length_exceeded"
            )
        if row.limit and tokens + row.limit > context:
            raise InputError(
                f"max_tokens {row.limit:,} and a prompt of {tokens:,} tokens exceed the model's context of "
                f"{context:,}; set max_tokens to at most {context - tokens:,}",
                field="max_tokens",
                code="context_length_exceeded",
            )
    return prompts


def room(row: Row, tokens: int, context: int) -> int:
    """The most tokens that may be generated for one sample of a prompt of ``row``."""
    return row.sampling.most_tokens(tokens, context)


def expected(row: Row, tokens: int, context: int) -> int:
    """The tokens that one sample of a prompt of ``row`` is planned with: the most that it may have or, if only the
    context limits it, as many as an answer is expected to have."""
    max_tokens = room(row, tokens, context)
    return max_tokens if row.sampling.max_tokens is not None else min(max_tokens, EXPECTED_GEN_LEN)


def limit_of(row: Row, context: int) -> RowLimit:
    """Return the limit of the answers of ``row``."""
    if row.sampling.max_tokens is None:
        return RowLimit(context=context)
    return RowLimit(default=None if row.limit is not None else row.sampling.max_tokens)


class _Samplings:
    """Counts distinct sampling parameters, up to a bound. Consecutive rows mostly share the object, too."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()
        self._last: SamplingParams | None = None

    @property
    def count(self) -> int:
        return len(self._hashes)

    def add(self, sampling: SamplingParams) -> None:
        if sampling is not self._last and len(self._hashes) < _MOST_SAMPLINGS:
            self._last = sampling
            self._hashes.add(hash(repr(sampling)))


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
        row_numbers = np.frombuffer(self._numbers, dtype=np.int64)
        order = np.lexsort((row_numbers, halves[:, 0], halves[:, 1]))
        same = (halves[order[1:]] == halves[order[:-1]]).all(axis=1)
        return frozenset(row_numbers[order[1:][same]].tolist())
