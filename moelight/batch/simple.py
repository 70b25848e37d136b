"""The simple format, one object a line with a prompt or messages; and plain text, one prompt a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from moelight.batch.embedding import embedding_numbers
from moelight.batch.fields import (
    LineReader,
    RowContext,
    SamplingCache,
    are_token_ids,
    read_custom_id,
    read_messages,
    read_row_object,
    unknown_field,
)
from moelight.batch.openai_answers import logprobs_row, prompt_logprobs_row
from moelight.batch.rows import (
    AnswerHeader,
    BadRow,
    Prompt,
    Row,
    bad_row,
    metrics_fields,
    routing_fields,
    structure_fields,
)
from moelight.batch.scoring import read_choices, score_fields
from moelight.batch.source import InputSource
from moelight.batch.tasks import CLASSIFY, EMBED, GENERATE, SCORE, SCORING_TASKS
from moelight.core.errors import InputError
from moelight.core.request import PROMPT_ONLY, Completion, SamplingParams
from moelight.engine.chat import Conversation

SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))
PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
CHOICES = "choices"
_FIELDS = (*PROMPT_FIELDS, "custom_id", CHOICES, *SAMPLING_FIELDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimpleFormat:
    """Answers with ``text``, ``finish_reason`` and ``usage``, and further fields on request. With ``numbered`` an
    answer has the line of its prompt, which identifies it when rows are written in another order."""

    name: str = "simple"
    token_ids: bool = False
    per_request_metrics: bool = False
    numbered: bool = False

    def answer(self, row: Row, completions: Sequence[Completion], served: AnswerHeader) -> dict[str, Any]:  # noqa: ARG002
        """With ``n`` > 1 the fields of each sample are in ``choices``."""
        head: dict[str, Any] = {} if row.custom_id is None else {"custom_id": row.custom_id}
        if self.numbered:
            head["line"] = row.line
        first = completions[0]
        if row.choices:
            scored_tokens = sum(completion.prompt_tokens for completion in completions)
            usage = {"prompt_tokens": scored_tokens, "completion_tokens": 0}
            return {**head, **score_fields(row, completions), "usage": usage}
        if row.pooling is not None:
            usage = {"prompt_tokens": first.prompt_tokens, "completion_tokens": 0}
            return {**head, "embedding": embedding_numbers(first), "usage": usage}
        generated = sum(completion.completion_tokens for completion in completions)
        usage = {"prompt_tokens": first.prompt_tokens, "completion_tokens": generated}
        of_prompt = routing_fields(first, of_prompt=True)
        if row.sampling.prompt_logprobs is not None:
            of_prompt["prompt_logprobs"] = prompt_logprobs_row(first)
        if self.per_request_metrics:
            of_prompt["metrics"] = metrics_fields(completions)
        if row.sampling.n > 1:
            choices = [
                {"index": completion.sample, **self._said(row, completion), **self._more(row, completion)}
                for completion in completions
            ]
            return {**head, "choices": choices, "usage": usage, **of_prompt}
        return {**head, **self._said(row, first), "usage": usage, **self._more(row, first), **of_prompt}

    def refuse(self, bad: BadRow, served: AnswerHeader) -> dict[str, Any]:  # noqa: ARG002
        head = {} if bad.custom_id is None else {"custom_id": bad.custom_id}
        return {**head, "line": bad.line, "error": {"code": bad.code, "message": bad.message}}

    def _said(self, row: Row, completion: Completion) -> dict[str, Any]:
        result: dict[str, Any] = {"text": completion.text, "finish_reason": completion.finish_reason}
        if completion.reasoning_tokens is not None:
            result["reasoning_content"] = completion.reasoning
        result |= structure_fields(completion)
        if row.sampling.stop or row.sampling.stop_token_ids:
            result["stop_reason"] = completion.stop_reason
        return result

    def _more(self, row: Row, completion: Completion) -> dict[str, Any]:
        more: dict[str, Any] = {"token_ids": list(completion.token_ids)} if self.token_ids else {}
        if row.sampling.logprobs is not None:
            more["cumulative_logprob"] = completion.cumulative_logprob
            more["logprobs"] = [logprobs_row(likely) for likely in completion.logprobs or ()]
        return more | routing_fields(completion, of_prompt=False)


def format_of(context: RowContext, name: str = "simple") -> SimpleFormat:
    """The format ``name`` with the options of ``context``."""
    return SimpleFormat(
        name=name,
        token_ids=context.token_ids,
        per_request_metrics=context.per_request_metrics,
        numbered=context.numbered,
    )


class SimpleReader(LineReader):
    """Reads rows from lines that are objects with a prompt or messages."""

    def __init__(self, context: RowContext, source: InputSource) -> None:
        super().__init__(context, source)
        self.format = format_of(context)

    def read(self, raw: bytes, number: int, line: int) -> Row | BadRow:
        try:
            values = read_row_object(raw, holding="prompt or messages")
        except (InputError, RecursionError) as error:
            return bad_row(number, line, None, error)
        return read_values(values, number, line, self._context, self._samplings)


class TextReader(LineReader):
    """Reads rows from lines that are prompts."""

    def __init__(self, context: RowContext, source: InputSource) -> None:
        super().__init__(context, source)
        self.format = format_of(context, "text")

    def read(self, raw: bytes, number: int, line: int) -> Row | BadRow:
        try:
            text = raw.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            bad = InputError(f"not UTF-8 (byte {error.start + 1})", code="invalid_utf8")
            return bad_row(number, line, None, bad)
        return read_values({"prompt": text}, number, line, self._context, self._samplings)


def read_values(
    values: Mapping[str, Any], number: int, line: int, context: RowContext, samplings: SamplingCache
) -> Row | BadRow:
    """The row of the fields ``values``."""
    custom_id: str | None = None
    kind = ""
    try:
        custom_id = read_custom_id(values)
        for name in values:
            if name not in _FIELDS:
                raise unknown_field(name, _FIELDS)
        kind = _kind(values)
        prompts, conversation = _asked(kind, values[kind], add_generation_prompt=context.task != EMBED)
        set_fields = {name: values[name] for name in values if name in SAMPLING_FIELDS and values[name] is not None}
        head: dict[str, Any] = {
            "number": number,
            "line": line,
            "custom_id": custom_id,
            "kind": "messages" if conversation is not None else "prompt",
            "prompts": prompts,
            "conversation": conversation,
        }
        choices = values.get(CHOICES)
        if choices is not None and context.task not in SCORING_TASKS:
            raise InputError(f"choices needs --task {SCORE} or --task {CLASSIFY}", field=CHOICES)
        if context.task == GENERATE:
            return Row(**head, sampling=samplings.make(set_fields), limit=set_fields.get("max_tokens"))
        for name in set_fields:
            raise InputError(f"{name} cannot be used with --task {context.task}: nothing is generated", field=name)
        if context.task == EMBED:
            return Row(**head, sampling=PROMPT_ONLY, pooling=context.pooling)
        choices = read_choices(choices if choices is not None else context.choices or None)
        return Row(**head, sampling=PROMPT_ONLY, choices=choices, answered={"task": context.task})
    except InputError as error:
        return bad_row(number, line, custom_id, error, kind="messages" if kind == "messages" else "prompt" * bool(kind))


def _kind(values: Mapping[str, Any]) -> str:
    prompt_fields = [name for name in PROMPT_FIELDS if values.get(name) is not None]
    if not prompt_fields:
        raise InputError("neither prompt nor messages is given", code="missing_prompt")
    if len(prompt_fields) > 1:
        raise InputError(
            f"both {prompt_fields[0]} and {prompt_fields[1]} are given; send one of them", field=prompt_fields[0]
        )
    return prompt_fields[0]


def _asked(kind: str, value: Any, *, add_generation_prompt: bool) -> tuple[tuple[Prompt, ...], Conversation | None]:
    if kind == "messages":
        return (), Conversation(messages=read_messages(value), add_generation_prompt=add_generation_prompt)
    if kind == "prompt":
        if not isinstance(value, str):
            raise InputError("prompt must be a string", field=kind)
        return (value,), None
    if not are_token_ids(value):
        raise InputError("prompt_token_ids must be a list of token ids", field=kind)
    return (tuple(value),), None
