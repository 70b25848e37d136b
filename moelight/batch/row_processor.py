"""Turns rows into requests on demand, and completions into output lines. Every row that was read is either open (some
of its completions are missing) or put into the journal."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from moelight.batch.crash_guard import struck_row_error
from moelight.batch.input import Input
from moelight.batch.journal import Ledger
from moelight.batch.progress import Progress, ProgressFields
from moelight.batch.rows import AnswerHeader, BadRow, Row, RowFormat, bad_row, to_json_line
from moelight.batch.scan import Encode, check_length, duplicate, room
from moelight.core.errors import InputError, MoelightError
from moelight.core.request import Completion, Request

LONGEST_SHOWN = 400


def refuse_struck(ledger: Ledger, source: Input, *, model: str, job: str) -> None:
    """Put the error rows of struck rows first: the job then makes progress even if the process dies again soon."""
    left = {number for number in ledger.struck if not ledger.done(number)}
    if not left:
        return
    for row in source.rows(skip=lambda number: number not in left):
        bad = bad_row(row.number, row.line, row.custom_id, struck_row_error(), kind=row.kind)
        served = AnswerHeader(model=model, created=int(time.time()), job=job)
        ledger.put(row.number, to_json_line(source.format.refuse(bad, served)), failed=True)
    ledger.commit()


class Checks(Protocol):
    """The part of the engine that checks a request before it is submitted."""

    def check(self, request: Request) -> None:
        """Raise InputError for a request that can never be served."""


@dataclass(kw_only=True, slots=True)
class _Open:
    """A row with ``missing`` completions to come, of at most ``room`` tokens in all."""

    row: Row
    missing: int
    room: int
    asked_s: float
    completions: list[Completion] = field(default_factory=list)


class RowProcessor:
    """One run over the rows that are not done yet."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        answers: RowFormat,
        encode: Encode,
        context: int,
        repeated: Collection[int],
        model: str,
        job: str,
        told: Progress,
    ) -> None:
        """``context`` is the model's context length in tokens; an earlier row has the custom_id of each of
        ``repeated``."""
        self._ledger, self._answers, self._encode, self._context = ledger, answers, encode, context
        self._repeated = frozenset(repeated)
        self._model, self._job, self._told = model, job, told
        self._open: dict[int, _Open] = {}
        self._next = self._taken = 0
        self.asked = 0  # sequences requested
        self.first_error: BadRow | None = None
        self.spared = 0  # expected tokens that will not be generated: rows ended early or refused

    @property
    def running(self) -> int:
        """Sequences that were requested and are unfinished."""
        return self.asked - self._taken

    def refuse_all(self, rows: Iterable[Row | BadRow]) -> None:
        """Put every row of an input of which no row can be served."""
        for _ in self.requests(rows, None):
            raise MoelightError("a row that the first reading refused can be served")

    def requests(self, rows: Iterable[Row | BadRow], engine: Checks | None) -> Iterator[Request]:
        """The requests of ``rows``, created on demand. Requests that ``engine`` cannot serve become error rows."""
        for row in rows:
            if isinstance(row, BadRow):
                self._refuse(row)
                continue
            if row.number in self._repeated:
                self._refuse(duplicate(row))
                continue
            expected = 0
            try:
                with self._ledger.preparing(row.number):
                    prompts = self._encode(row)
                    for prompt in prompts:
                        check_length(len(prompt), self._context, generates=row.sampling.max_tokens > 0)
                    expected = sum(room(row, len(prompt), self._context) for prompt in prompts) * row.sampling.n
                    requests = [
                        Request(index=self._next + k, token_ids=prompt, sampling=row.sampling)
                        for k, prompt in enumerate(prompts)
                    ]
                    if engine is not None:
                        for request in requests:
                            engine.check(request)
            except InputError as error:
                self.spared += expected
                self._refuse(bad_row(row.number, row.line, row.custom_id, error, kind=row.kind), room=expected)
                continue
            opened = _Open(row=row, missing=len(requests) * row.sampling.n, room=expected, asked_s=time.monotonic())
            self._next += len(requests)
            self.asked += opened.missing
            for request in requests:
                self._open[request.index] = opened
            yield from requests

    def take(self, completion: Completion) -> None:
        """Add a completion; write its row if this was the last one missing."""
        opened = self._open[completion.index]
        opened.completions.append(completion)
        opened.missing -= 1
        self._taken += 1
        most = room(opened.row, completion.prompt_tokens, self._context)
        self._told.completion(completion, room=most, latency_s=time.monotonic() - opened.asked_s)
        if opened.missing:
            return
        for index in {each.index for each in opened.completions}:
            del self._open[index]
        completions = sorted(opened.completions, key=lambda each: (each.index, each.sample))
        row, generated = opened.row, sum(each.completion_tokens for each in completions)
        self.spared += opened.room - generated
        stuck = next((each for each in completions if each.finish_reason == "error"), None)
        if stuck is not None:
            error = InputError(str(stuck.stop_reason), code=stuck.error_code or "error")
            self._refuse(bad_row(row.number, row.line, row.custom_id, error, kind=row.kind), room=opened.room)
            return
        prompt_tokens = sum(each.prompt_tokens for each in completions if each.sample == 0)
        self._ledger.put(
            row.number,
            to_json_line(self._answers.answer(row, completions, self._served())),
            totals={"prompt_tokens": prompt_tokens, "completion_tokens": generated, "room": opened.room},
        )
        self._told.row(
            ProgressFields(
                number=row.number,
                prompt=_short(row.shown),
                texts=tuple(each.text for each in completions),
                finish_reasons=tuple(each.finish_reason for each in completions),
            )
        )

    def check_complete(self) -> None:
        """Raise MoelightError if a row is still open."""
        if self._open:
            first = min(each.row.line for each in self._open.values())
            raise MoelightError(f"line {first} was never answered")

    def _refuse(self, bad: BadRow, *, room: int = 0) -> None:
        """Put an error row, of which ``room`` tokens were expected."""
        self.first_error = self.first_error or bad
        line = to_json_line(self._answers.refuse(bad, self._served()))
        self._ledger.put(bad.number, line, failed=True, totals={"room": room} if room else None)
        self._told.row(ProgressFields(number=bad.number, prompt=f"(line {bad.line})", error=bad.message))

    def _served(self) -> AnswerHeader:
        return AnswerHeader(model=self._model, created=int(time.time()), job=self._job)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"
