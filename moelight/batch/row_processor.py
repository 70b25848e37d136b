"""Turns rows into requests on demand, and completions into output lines. Every row that was read is either open (some
of its completions are missing) or put into the journal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from moelight.batch.crash_guard import struck_row_error
from moelight.batch.embedding import embedding_label
from moelight.batch.fields import Input
from moelight.batch.journal import Ledger
from moelight.batch.options import JobOptions
from moelight.batch.progress import Progress, ProgressFields
from moelight.batch.rows import (
    AnswerHeader,
    BadRow,
    Row,
    bad_row,
    reasoning_totals,
    structure_totals,
    to_json_line,
)
from moelight.batch.scan import duplicate, encode_row, expected, room
from moelight.batch.scoring import EncodedPrompt, best_choice, check_choices, encode_choices
from moelight.core.errors import InputError, MoelightError
from moelight.core.request import Completion, Request, ToolRequest
from moelight.engine.model import LazyModel
from moelight.engine.reasoning import OFF, reasoning_start
from moelight.engine.routing import check_routing
from moelight.engine.tool_calls import NO_TOOL_FORMAT, TOOL_FORMATS, call_id
from moelight.profiles.pooling import check_dimensions

if TYPE_CHECKING:
    from moelight.engine.engine import Engine

LONGEST_SHOWN = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class JobInput:
    """The prompts and the model of a job, before the model is loaded. ``facts`` determine the rows."""

    options: JobOptions
    source: Input
    model: LazyModel
    facts: dict[str, Any]

    def check_structure(self, row: Row) -> tuple[str, ...]:
        """Return warnings about the structured outputs and the tools of ``row``; raises InputError if they cannot be
        compiled, or experts are to be returned of a model without any."""
        check_routing(row.sampling, self.model.profile)
        notes = self.model.check_structure(row.sampling)
        if row.tools is None:
            return notes
        try:
            return (*notes, *self.model.check_tools(self._tools(row.tools)))
        except InputError as error:
            raise InputError(str(error), field="tools", code=error.code) from None

    def encode(self, row: Row) -> list[EncodedPrompt]:
        """Each prompt of ``row``, or its prompt with each choice; raises InputError if one is empty, the chat template
        refuses the conversation, or an embedding cannot have the dimensions asked for."""
        tokenizer, max_tokens = self.model.tokenizer, self.model.context
        if row.pooling is not None:
            check_dimensions(self.model.pooling(row.pooling), self.model.profile.hidden_size)
        if row.choices:
            with_choices = encode_choices(row, tokenizer, max_tokens)
            check_choices(row, with_choices)
            return with_choices
        if row.conversation is not None:
            prompts = [tuple(tokenizer.render(row.conversation, max_tokens=max_tokens))]
        else:
            prompts = [
                tuple(tokenizer.encode(p, max_tokens=max_tokens)) if isinstance(p, str) else p for p in row.prompts
            ]
        if not all(prompts):
            raise InputError("the prompt is empty: it holds no token", code="empty_prompt")
        return [EncodedPrompt(prompt) for prompt in prompts]

    def request(self, row: Row, prompt: EncodedPrompt, index: int) -> Request:
        """The request of ``row``, encoded as ``prompt``; raises InputError if calls of this model cannot be read."""
        reasoning, tools = None, None if row.tools is None else self._tools(row.tools)
        if row.conversation is not None and row.sampling.generates and self.options.reasoning != OFF:
            forced = tools is not None and tools.forced
            reasoning = reasoning_start(self.model.tokenizer, row.conversation, prompt.token_ids, calls=forced)
        return Request(
            index=index,
            token_ids=prompt.token_ids,
            sampling=row.sampling,
            scored_from=prompt.scored_from,
            reasoning=reasoning,
            tools=tools,
            pooling=None if row.pooling is None else self.model.pooling(row.pooling),
        )

    def _tools(self, tools: ToolRequest) -> ToolRequest:
        """``tools`` with the format of this model's calls."""
        if self.model.tool_format is None:
            raise InputError(NO_TOOL_FORMAT, code="unsupported_parameter")
        return replace(tools, format=self.model.tool_format)

    def name_calls(self, row: Row, completions: Sequence[Completion]) -> Sequence[Completion]:
        """``completions`` of ``row`` with ids of their calls, the same in every run."""
        if self.model.tool_format is None:
            return completions
        letters, digest = TOOL_FORMATS[self.model.tool_format].id_letters, self.facts["prompts"]["digest"]

        def named(number: int, completion: Completion) -> Completion:
            identity = f"{digest}:{row.number}:{number}"
            calls = tuple(
                replace(call, id=call.id or call_id(f"{identity}:{position}", letters))
                for position, call in enumerate(completion.tool_calls)
            )
            return replace(completion, tool_calls=calls)

        return [named(number, completion) for number, completion in enumerate(completions)]

    def header(self) -> AnswerHeader:
        """The header of an answer that is written now."""
        activations = self.facts["numbers"].get("activations")
        return AnswerHeader(
            model=self.model.name,
            created=int(time.time()),
            job=str(self.facts["prompts"]["digest"]),
            system_fingerprint=None if activations is None else f"activations-{activations}",
        )

    def refusal(self, bad: BadRow) -> bytes:
        """The output line of ``bad``."""
        return to_json_line(self.source.format.refuse(bad, self.header()))


class RowSink(Protocol):
    """Where the rows of a `RowProcessor` go: a job's `Ledger`, or the driver that leased them."""

    def preparing(self, number: int) -> AbstractContextManager[None]:
        """A context in which row ``number`` is prepared; raises InputError if it is not to be."""

    def put(self, number: int, data: bytes, *, failed: bool = False, totals: Mapping[str, int] | None = None) -> None:
        """Take the line ``data`` of row ``number``."""


def refuse_struck(ledger: Ledger, prepared: JobInput) -> None:
    """Put the error rows of struck rows first: the job then makes progress even if the process dies again soon."""
    left = {number for number in ledger.struck if not ledger.done(number)}
    if not left:
        return
    for row in prepared.source.rows(skip=lambda number: number not in left):
        bad = bad_row(row.number, row.line, row.custom_id, struck_row_error(), kind=row.kind)
        ledger.put(row.number, prepared.refusal(bad), failed=True)
    ledger.commit()


@dataclass(kw_only=True, slots=True)
class _Open:
    """A row with ``missing`` completions to come, planned with ``room`` tokens in all."""

    row: Row
    missing: int
    room: int
    asked_s: float
    completions: list[Completion] = field(default_factory=list)


class RowProcessor:
    """One run over the rows that are not done yet. An earlier row has the custom_id of each of ``repeated``."""

    def __init__(self, sink: RowSink, prepared: JobInput, told: Progress, *, repeated: frozenset[int]) -> None:
        self._sink, self.prepared, self.told, self._repeated = sink, prepared, told, repeated
        self._context = prepared.model.context
        self._open: dict[int, _Open] = {}
        self._next = self._taken = 0
        self.asked = 0  # sequences requested
        self.first_error: BadRow | None = None
        # Expected tokens that are not generated: of rows ended early or refused, less those of longer answers.
        self.spared = 0
        self.unlimited = 0  # finished sequences that only the context limited

    @property
    def running(self) -> int:
        """Sequences that were requested and are unfinished."""
        return self.asked - self._taken

    def requests(self, rows: Iterable[Row | BadRow | None], engine: Engine | None) -> Iterator[Request | None]:
        """The requests of ``rows``, created on demand; None for None, which `Engine.run` understands. Requests that
        ``engine`` cannot serve become error rows."""
        for row in rows:
            if row is None:
                yield None
                continue
            if isinstance(row, BadRow):
                self.refuse(row)
                continue
            if row.number in self._repeated:
                self.refuse(duplicate(row))
                continue
            tokens = 0
            try:
                with self._sink.preparing(row.number):
                    prompts = encode_row(row, self.prepared.encode, self._context)
                    lengths = [len(prompt.token_ids) for prompt in prompts]
                    tokens = sum(expected(row, length, self._context) for length in lengths) * row.sampling.n
                    requests = [
                        self.prepared.request(row, prompt, index)
                        for index, prompt in enumerate(prompts, start=self._next)
                    ]
                    if engine is None:
                        self.prepared.check_structure(row)
                    else:
                        for request in requests:
                            engine.check(request)
            except InputError as error:
                self.spared += tokens
                self.refuse(bad_row(row.number, row.line, row.custom_id, error, kind=row.kind), room=tokens)
                continue
            opened = _Open(row=row, missing=len(requests) * row.sampling.n, room=tokens, asked_s=time.monotonic())
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
        self.unlimited += opened.row.sampling.max_tokens is None
        limit = room(opened.row, completion.prompt_tokens, self._context)
        self.told.completion(completion, room=limit, latency_s=time.monotonic() - opened.asked_s)
        if opened.missing:
            return
        for index in {output.index for output in opened.completions}:
            del self._open[index]
        completions: Sequence[Completion] = sorted(opened.completions, key=lambda output: (output.index, output.sample))
        row, generated = opened.row, sum(output.completion_tokens for output in completions)
        self.spared += opened.room - generated - sum(output.discarded_tokens for output in completions)
        stuck = next((output for output in completions if output.finish_reason == "error"), None)
        if stuck is not None:
            error = InputError(str(stuck.stop_reason), code=stuck.error_code or "error")
            self.refuse(bad_row(row.number, row.line, row.custom_id, error, kind=row.kind), room=opened.room)
            return
        if row.tools is not None:
            completions = self.prepared.name_calls(row, completions)
        prompt_tokens = sum(output.prompt_tokens for output in completions if output.sample == 0)
        self._sink.put(
            row.number,
            to_json_line(self.prepared.source.format.answer(row, completions, self.prepared.header())),
            totals={
                "prompt_tokens": prompt_tokens,
                "completion_tokens": generated,
                "cached_tokens": sum(output.cached_tokens for output in completions if output.sample == 0),
                "room": opened.room,
                "cut_chats": int(
                    row.conversation is not None
                    and row.sampling.generates
                    and all(output.finish_reason == "length" for output in completions)
                ),
                **structure_totals(completions),
                **reasoning_totals(completions),
            },
        )
        text = row.shown
        shown = text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"
        texts, reasons = zip(*((output.text, output.finish_reason) for output in completions), strict=True)
        if row.choices:
            texts, reasons = (best_choice(row, completions),), ("stop",)
        elif row.pooling is not None:
            texts = tuple(map(embedding_label, completions))
        self.told.row(ProgressFields(number=row.number, prompt=shown, texts=texts, finish_reasons=reasons))

    def check_complete(self) -> None:
        """Raise MoelightError if a row is still open."""
        if self._open:
            first = min(opened.row.line for opened in self._open.values())
            raise MoelightError(f"line {first} was never answered")

    def refuse(self, bad: BadRow, *, room: int = 0) -> None:
        """Put an error row, of which ``room`` tokens were expected."""
        self.first_error = self.first_error or bad
        self._sink.put(bad.number, self.prepared.refusal(bad), failed=True, totals={"room": room} if room else None)
        self.told.row(ProgressFields(number=bad.number, prompt=f"(line {bad.line})", error=bad.message))
