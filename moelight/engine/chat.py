"""Chat templates: a conversation becomes the one text the model was trained to continue.

Knows jinja2, sandboxed, because a template comes with a downloaded model and is nobody's trusted code. Refuses to know
token ids.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelight.core.errors import CheckpointError, InputError

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What a chat template renders: ``messages`` that `check_messages` let through, the ``tools`` the model may call,
    and ``template_kwargs``, which reach the template by name. ``add_generation_prompt`` opens the assistant's turn;
    ``continue_final_message`` leaves the last message open instead, to be continued."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """What a person would call it: the last thing the user said."""
        said = [message.get("content") for message in self.messages if message.get("role") == "user"]
        return str((said or [self.messages[-1].get("content")])[-1])


class ChatTemplate:
    """One template and the special tokens it may write; compiled at first use."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: object) -> str:
        """The conversation as text, open for the assistant's turn.

        Raises:
            InputError: ``messages`` is not a list of messages, or the template refuses or fails.
        """
        import jinja2

        conversation = check_messages(messages)
        # What a template may raise: its own refusal, the sandbox's, and what wrong types and sizes lead to.
        faults = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError)
        try:
            return self._compiled.render(
                messages=conversation, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (*faults, TypeError, ValueError) as error:
            raise InputError(f"the chat template fails: {_one_line(error)}", code="chat_template") from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self._source)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """``messages`` as a list of objects with a string ``role`` and ``content``; keys that are null are dropped.

    Raises:
        InputError: it is anything else; names the message at fault, counted from 1.
    """
    if not isinstance(messages, list) or not messages:
        raise InputError("messages must be a non-empty list of objects with role and content")
    conversation = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not message:
            raise InputError(f"message {number} must be an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InputError(f"message {number}: {key} must be a string")
        conversation.append({key: value for key, value in message.items() if value is not None})
    return conversation


def read_chat_template(
    directory: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The checkpoint's template: ``chat_template.jinja``, else tokenizer_config.json's; None where there is none.

    Raises:
        CheckpointError: the template is there but cannot be read, or is neither text nor a list of named texts.
    """
    path = directory / TEMPLATE_FILE
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens=special_tokens)
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    given = config.get("chat_template")
    if isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
        given = next((entry.get("template") for entry in given if entry.get("name") == "default"), None)
    if given is not None and not isinstance(given, str):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be a string or a list of {{name, template}}"
        )
    return None if given is None else ChatTemplate(given, special_tokens=special_tokens)


def _environment() -> jinja2.Environment:
    """The environment transformers gives its templates, so that one text serves both."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks the assistant's words for training; here its body is simply written."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        """``namespace()`` without the names by which Python calls an object's internals."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            for name, value in dict(*args, **kwargs).items():
                self[name] = value

        def __setitem__(self, name: str, value: object) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")
            super().__setitem__(name, value)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=Namespace)
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, not escaped for HTML as jinja2's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().strftime(pattern)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
