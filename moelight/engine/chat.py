"""Chat templates: render a conversation to the text format of the model's training, in another process (`sandbox`)."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moelight.core.confined import ConfinedProcess, EndedError
from moelight.core.errors import CheckpointError, ConfigError, InputError
from moelight.core.small_files import read_error_text, read_text
from moelight.core.units import KiB, MiB, format_bytes

_T = TypeVar("_T")
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_DIRECTORY = "additional_chat_templates"
DEFAULT, TOOL_USE = "default", "tool_use"
_MOST_TEMPLATE_BYTES = 256 * KiB  # the longest in use have 50,000; compiling this many takes a second
RENDER_S = 3.0  # of processor time for one conversation
RENDER_BYTES = 512 * MiB
_RENDERER = ConfinedProcess("moelight.engine.sandbox:renderer", cpu_s=RENDER_S, memory_bytes=RENDER_BYTES)
_TOO_DEEP = "it nests too deeply"
_WHY: Mapping[signal.Signals | None, str] = {
    signal.SIGPROF: f"it takes more than {RENDER_S:g} s of processor time",
    signal.SIGABRT: f"it takes more than {format_bytes(RENDER_BYTES)} of memory",
    signal.SIGSEGV: _TOO_DEEP,
    signal.SIGBUS: _TOO_DEEP,
}
# Names that `ChatTemplate.render` and the sandbox define; a row's template_kwargs may not set them.
_TAKEN = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"),
        *("raise_exception", "strftime_now", "namespace", "range", "dict", "cycler", "joiner"),
        *("self", "loop", "caller", "varargs", "kwargs"),
    }
)
# A message's reasoning has several names; templates read the first, gpt-oss's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_SAY_WITHOUT_CONTENT = ("tool_calls", *_REASONING)
# Appended to the last message's text to find its end in the output; the blank shows if the template trims text.
_MARK = "<|moelight:continue-here|> "


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Input of a chat template: ``messages`` that `check_messages` returned, ``tools``, ``template_kwargs`` by name.
    ``add_generation_prompt`` opens the assistant's turn; ``continue_final_message`` keeps the last message open."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """A short label: the text of the last user message."""
        user_messages = [message for message in self.messages if message.get("role") == "user"]
        content = (user_messages or self.messages)[-1].get("content", "")
        return str(content) if not isinstance(content, list) else "\n".join(part["text"] for part in content)


class ChatTemplate:
    """The chat templates of one checkpoint, with the special tokens they may write; rendered in a process that is
    started for the first conversation. ``source`` is the only template, or templates by name: ``default``, and
    ``tool_use`` for conversations with tools."""

    def __init__(self, source: str | Mapping[str, str], *, special_tokens: Mapping[str, str]) -> None:
        self.sources = {DEFAULT: source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens)
        self._keys = {
            name: hashlib.blake2b(text.encode("utf-8", "surrogatepass")).hexdigest()
            for name, text in self.sources.items()
        }

    @classmethod
    def from_file(cls, path: Path, *, special_tokens: Mapping[str, str]) -> ChatTemplate:
        try:
            return cls(read_part(path, read_text, max_bytes=_MOST_TEMPLATE_BYTES), special_tokens=special_tokens)
        except CheckpointError as error:
            raise ConfigError(f"chat template {error}") from None

    def render(self, conversation: Conversation | object) -> str:
        """The conversation as text; a plain list of messages opens the assistant's turn. Raises InputError for anything
        else, or if the template rejects the conversation, fails or exceeds its limits."""
        if not isinstance(conversation, Conversation):
            conversation = Conversation(messages=check_messages(conversation))
        _check_conversation(conversation)
        name = TOOL_USE if conversation.tools and TOOL_USE in self.sources else DEFAULT
        if name not in self.sources:
            named = ", ".join(sorted(self.sources))
            raise InputError(f"this model has no default chat template, only {named}", code="no_chat_template")
        if conversation.continue_final_message:
            marked, text = _mark_last(conversation.messages)
            return _cut_at_mark(self._render(name, conversation, marked), text)
        return self._render(name, conversation, conversation.messages)

    def _render(self, name: str, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        """Messages that only call or reason have an empty text, as in vLLM. A template that fails at it, or does not
        write the calls (it tests for none), gets none."""
        silent = [message for message in messages if "content" not in message]
        if not silent:
            return self._ask(name, conversation, messages)
        calls = [str(call["function"].get("name", "")) for message in silent for call in message.get("tool_calls", ())]
        texts: list[str] = []
        errors: list[InputError] = []
        for content in ("", None):
            try:
                text = self._ask(name, conversation, [_with_content(message, content) for message in messages])
            except InputError as error:
                errors.append(error)
                continue
            if all(call in text for call in calls):
                return text
            texts.append(text)
        if not texts:
            raise errors[0]
        return texts[0]

    def _ask(self, name: str, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        values: dict[str, Any] = {
            "documents": None,
            **self._special_tokens,
            **conversation.template_kwargs,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": conversation.tools or None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            answer = _RENDERER.ask([self._keys[name], None, values])
            if answer is None:
                answer = _RENDERER.ask([self._keys[name], self.sources[name], values])
            text, reason = answer
        except EndedError as error:
            text, reason = None, _WHY.get(error.signal, str(error))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"messages, tools and chat_template_kwargs must be JSON ({error})") from None
        except OSError as error:
            raise ConfigError(f"no process can be started to render chat templates in ({error})") from None
        if text is None:
            raise InputError(f"the chat template fails: {reason}", code="chat_template")
        return str(text)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """``messages`` as a list of objects with a string ``role``, without null values; raises InputError otherwise.
    ``content`` is text or text parts, or absent beside tool calls or reasoning; JSON arguments of tool calls become
    objects."""
    if not isinstance(messages, list) or not messages:
        raise InputError("messages must be a non-empty list of objects with role and content")
    return [_checked(message, f"message {number}") for number, message in enumerate(messages, start=1)]


def read_chat_template(
    directory: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The checkpoint's templates: ``chat_template.jinja`` (the default) and the files of ``additional_chat_templates``,
    else those in tokenizer_config.json, if any. Raises CheckpointError for an unreadable or malformed template."""
    paths = {path.stem: path for path in sorted((directory / TEMPLATE_DIRECTORY).glob("*.jinja"))}
    if (directory / TEMPLATE_FILE).exists() or (directory / TEMPLATE_FILE).is_symlink():
        paths[DEFAULT] = directory / TEMPLATE_FILE
    sources = {name: read_part(path, read_text, max_bytes=_MOST_TEMPLATE_BYTES) for name, path in paths.items()}
    configured = config.get("chat_template")
    if not sources and configured is not None:
        path, entries = directory / "tokenizer_config.json", configured
        if isinstance(configured, str):
            entries = [{"name": DEFAULT, "template": configured}]
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
            for entry in entries
        ):
            raise CheckpointError(f"{path}: chat_template must be a string or a list of {{name, template}}")
        sources = {entry["name"]: entry["template"] for entry in entries}
        if max(map(len, sources.values()), default=0) > _MOST_TEMPLATE_BYTES:
            raise CheckpointError(f"{path}: its chat template is larger than {format_bytes(_MOST_TEMPLATE_BYTES)}")
    return ChatTemplate(sources, special_tokens=special_tokens) if sources else None


def read_part(path: Path, read: Callable[..., _T], *, max_bytes: int) -> _T:
    """The contents of ``path``, at most ``max_bytes`` bytes, as ``read`` returns them; else CheckpointError."""
    try:
        return read(path, max_bytes=max_bytes)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({read_error_text(error)})") from None


def _checked(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not message:
        raise InputError(f"{where} must be an object with role and content")
    checked = {key: value for key, value in message.items() if value is not None}
    if not isinstance(checked.get("role"), str):
        raise InputError(f"{where}: role must be a string")
    if "tool_calls" in checked:
        checked["tool_calls"] = _checked_calls(checked["tool_calls"], where)
    content = checked.get("content")
    if isinstance(content, list) and content:
        checked["content"] = [_checked_part(part, f"{where}, part {n}") for n, part in enumerate(content, start=1)]
    elif not isinstance(content, str) and (content is not None or checked.keys().isdisjoint(_SAY_WITHOUT_CONTENT)):
        raise InputError(f"{where}: content must be a string or a list of text parts")
    return checked


def _checked_part(part: object, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InputError(f'{where} must be an object like {{"type": "text", "text": "..."}}')
    if kind != "text":
        raise InputError(f"{where}: {kind!r} is not served, only text; nothing was fetched or opened")
    if not isinstance(part.get("text"), str):
        raise InputError(f"{where}: text must be a string")
    return part


def _checked_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InputError(f"{where}: tool_calls must be a list of objects")
    checked = []
    for number, call in enumerate(calls, start=1):
        function, part = call.get("function"), f"{where}, tool call {number}"
        if not isinstance(function, dict):
            raise InputError(f"{part}: function must be an object with name and arguments")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise InputError(f"{part}: arguments is not JSON") from None
        checked.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return checked


def _check_conversation(conversation: Conversation) -> None:
    if conversation.add_generation_prompt and conversation.continue_final_message:
        raise InputError(
            "add_generation_prompt and continue_final_message exclude each other; set one of them to false"
        )
    tools: object = conversation.tools
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InputError("tools must be a list of objects")
    for name in conversation.template_kwargs:
        if name in _TAKEN or name.startswith("_"):
            raise InputError(f"chat_template_kwargs may not set {name!r}, which the template has already")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_content(message: dict[str, Any], content: str | None) -> dict[str, Any]:
    return message if "content" in message else {**message, "content": content}


def _mark_last(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """``messages`` with the mark appended to the last message's text, and that text."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": content + _MARK}], content
    if not content:
        raise InputError("continue_final_message: the final message has no content to continue")
    *parts, part = content
    return [*before, {**last, "content": [*parts, {**part, "text": part["text"] + _MARK}]}], part["text"]


def _cut_at_mark(rendered: str, text: str) -> str:
    position = rendered.rfind(_MARK.strip())
    if position < 0 or text.strip() not in rendered:
        raise InputError("continue_final_message: the chat template does not write the final message as it is")
    return rendered[:position] if rendered.startswith(_MARK, position) else rendered[:position].rstrip()
