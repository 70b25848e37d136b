"""The rows of a job: the request of a line, or the reason why it cannot be served, and the interface of a row format. A
line that cannot be served is a value (`BadRow`), never an exception, so that one bad row does not end a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeAlias

from moelight.core.errors import InputError
from moelight.core.request import TRUNCATED, Completion, PoolingParams, SamplingParams, ToolRequest
from moelight.engine.chat import Conversation

Prompt: TypeAlias = str | tuple[int, ...]
LONGEST_NAME = 64  # characters of a field of an error row
_LONGEST_MESSAGE = 300
LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have
BAD_REQUEST, NOT_FOUND = 400, 404


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line that requests completions of each of its ``prompts`` (texts or token ids), or of its ``conversation``.

    Attributes:
        number: index among the rows of the input, from 0; blank lines are not rows.
        line: line number in the file, from 1.
        kind: category for row counts: an endpoint (``/v1/completions``), ``prompt`` or ``messages``.
        limit: the row's ``max_tokens``; None if it sets none and the job's default applies.
        tools: the tools that the answer may call, and which it must call.
        choices: texts whose likelihood after the prompt is scored; then nothing is generated.
        pooling: how each prompt becomes an embedding, where it sets something; then nothing is generated.
        answered: fields of the request that the format needs to write the answer; format-specific.
    """

    number: int
    line: int
    custom_id: str | None
    kind: str
    prompts: tuple[Prompt, ...] = ()
    conversation: Conversation | None = None
    sampling: SamplingParams
    limit: int | None = None
    tools: ToolRequest | None = None
    choices: tuple[str, ...] = ()
    pooling: PoolingParams | None = None
    answered: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The prompt's text, or the last user message."""
        if self.conversation is not None:
            return self.conversation.shown
        first = self.prompts[0]
        return first if isinstance(first, str) else f"({len(first)} token ids)"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A line that cannot be served: ``code`` and the HTTP ``status`` for programs, ``message`` for people, ``param``
    the invalid field, if any. ``kind`` is empty if unknown."""

    number: int
    line: int
    custom_id: str | None
    kind: str = ""
    code: str
    message: str
    status: int = BAD_REQUEST
    param: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerHeader:
    """The fields common to all answers of a job: the model's name as the user gave it, the time of the answer (seconds
    since 1970), an identity of the input, equal for equal inputs alone, and the arithmetic if it is not the
    checkpoint's."""

    model: str
    created: int
    job: str
    system_fingerprint: str | None = None


class RowFormat(Protocol):
    """Writes rows in one format."""

    @property
    def name(self) -> str: ...

    def answer(self, row: Row, completions: Sequence[Completion], served: AnswerHeader) -> dict[str, Any]:
        """The output line of ``row``; ``completions`` are ordered by prompt, then by sample."""

    def refuse(self, bad: BadRow, served: AnswerHeader) -> dict[str, Any]:
        """The output line of a row that was not served."""


def bad_row(number: int, line: int, custom_id: str | None, error: Exception, *, kind: str = "") -> BadRow:
    """The error row for ``error``: an InputError, or the RecursionError of JSON that is nested too deeply. A long
    message, which may quote a huge value, is shortened."""
    if not isinstance(error, InputError):
        error = InputError("nested too deeply", code="invalid_json")
    message = " ".join(str(error).split())
    if len(message) > _LONGEST_MESSAGE:
        message = message[: _LONGEST_MESSAGE - 1] + "…"
    return BadRow(
        number=number,
        line=line,
        custom_id=custom_id,
        kind=kind,
        code=error.code,
        message=message,
        status=NOT_FOUND if error.code == "model_not_found" else BAD_REQUEST,
        param=None if error.field is None else error.field[:LONGEST_NAME],
    )


def structure_totals(completions: Sequence[Completion]) -> dict[str, int]:
    """Return the number of ``completions`` that do not match the requested structure: ``invalid`` ones, and those
    ``truncated`` by ``max_tokens`` or a stop. A count of 0 is absent."""
    errors = [completion.structure_error for completion in completions if completion.structure_error is not None]
    truncated = sum(error.code == TRUNCATED for error in errors)
    counts = {"invalid": len(errors) - truncated, "truncated": truncated}
    return {name: count for name, count in counts.items() if count}


def reasoning_totals(completions: Sequence[Completion]) -> dict[str, int]:
    """The tokens of reasoning in ``completions``, absent if there are none."""
    tokens = sum(completion.reasoning_tokens or 0 for completion in completions)
    return {"reasoning_tokens": tokens} if tokens else {}


def structure_fields(completion: Completion) -> dict[str, Any]:
    """The fields of an answer that had to be generated again, or has not the structure asked for; its text stays."""
    result: dict[str, Any] = {} if completion.attempts == 1 else {"attempts": completion.attempts}
    if completion.structure_error is not None:
        result["error"] = asdict(completion.structure_error)
    return result


def routing_fields(completion: Completion, *, of_prompt: bool) -> dict[str, Any]:
    """The experts of the tokens of an answer, or ``of_prompt``, as lists [tokens, layers, k] in vLLM's names; no field
    if none are to be returned."""
    experts = completion.prompt_routed_experts if of_prompt else completion.routed_experts
    name = "prompt_routed_experts" if of_prompt else "routed_experts"
    return {} if experts is None else {name: experts.tolist()}


def metrics_fields(completions: Sequence[Completion]) -> dict[str, Any] | None:
    """The timing of the only answer of a row, in vLLM's names; None where there are several."""
    if len(completions) != 1 or (metrics := completions[0].metrics) is None:
        return None
    tokens, first_s, decode_s = completions[0].completion_tokens, metrics.first_token_s, metrics.generation_s
    total_s = (first_s or 0.0) + (decode_s or 0.0)
    between_s = completions[0].time_per_output_token_s
    return {
        "time_to_first_token_ms": _milliseconds(first_s),
        "generation_time_ms": _milliseconds(decode_s),
        "queue_time_ms": _milliseconds(metrics.queue_s),
        "mean_itl_ms": _milliseconds(between_s),
        "tokens_per_second": round(tokens / total_s, 3) if total_s > 0 else None,
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def to_json_line(row: dict[str, Any]) -> bytes:
    """One line of UTF-8. A lone surrogate, which UTF-8 cannot encode, becomes its JSON escape."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
