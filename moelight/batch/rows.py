"""The rows of a job: what a line asks for, or why it cannot be served, and the face of a format that reads and answers
them.

Knows no JSON, no files and no tokens. A line that cannot be served is a value (`BadRow`), never an exception, so that
one bad row does not end a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from moelight.core.errors import InputError
from moelight.core.request import Completion, SamplingParams
from moelight.engine.chat import Conversation

Prompt: TypeAlias = str | tuple[int, ...]
_LONGEST_MESSAGE = 300
BAD_REQUEST, NOT_FOUND = 400, 404


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line that asks for completions: of each of its ``prompts`` (texts or token ids), or of its ``conversation``.

    Attributes:
        number: its place among the rows of the input, from 0: blank lines have none.
        line: its place in the file, from 1.
        kind: what a person counts rows by: an endpoint (``/v1/completions``), ``prompt`` or ``messages``.
        answered: what the format needs of the request to write the answer, in its own words.
    """

    number: int
    line: int
    custom_id: str | None
    kind: str
    prompts: tuple[Prompt, ...] = ()
    conversation: Conversation | None = None
    sampling: SamplingParams
    answered: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """What a person would call the prompt: the text, or the last thing the user said."""
        if self.conversation is not None:
            return self.conversation.shown
        first = self.prompts[0]
        return first if isinstance(first, str) else f"({len(first)} token ids)"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A line that cannot be served, and why: ``code`` and the HTTP ``status`` for programs, ``message`` for people,
    ``param`` the field at fault, if one is. ``kind`` is empty where it could not be told."""

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
    """What every answer of a job says beside its completions: the model's name as the user gave it, when the answer
    was made (seconds since 1970), and a text that is the same for one input and differs between inputs."""

    model: str
    created: int
    job: str


class RowFormat(Protocol):
    """How rows are written in one kind of file."""

    name: str

    def answer(self, row: Row, completions: Sequence[Completion], served: AnswerHeader) -> dict[str, Any]:
        """The output line of ``row``: its ``completions`` in the order of prompts, each prompt's samples in order."""

    def refuse(self, bad: BadRow, served: AnswerHeader) -> dict[str, Any]:
        """The output line of a row that was not served."""


def bad_row(
    number: int, line: int, custom_id: str | None, error: InputError, *, kind: str = "", param: str | None = None
) -> BadRow:
    """``error`` as the fate of one row; a message that quotes a huge value is shortened."""
    message = " ".join(str(error).split())
    if len(message) > _LONGEST_MESSAGE:
        message = message[: _LONGEST_MESSAGE - 1] + "…"
    status = NOT_FOUND if error.code == "model_not_found" else BAD_REQUEST
    return BadRow(
        number=number,
        line=line,
        custom_id=custom_id,
        kind=kind,
        code=error.code,
        message=message,
        status=status,
        param=param,
    )
