"""Reasoning in answers: the markers of each family, the family that a chat template names, and the end of thinking in a
growing answer. An answer of a reasoning model is its reasoning and then its content.

Modes: with ``auto``, the reasoning in answers to conversations is split off where the model's chat template names a
format, and stop strings and structured outputs apply behind it; with ``off`` it is left in the text.

An answer of gpt-oss is a sequence of messages ("harmony"), each with a channel and, for a tool call, a recipient.
OpenAI's own parser downloads a vocabulary when it is loaded; `read_harmony` reads the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.request import ReasoningStart
from moelight.engine.chat import Conversation
from moelight.engine.tokenizer import Tokenizer

AUTO, OFF = "auto", "off"
MODES = (AUTO, OFF)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_END = re.compile(r"<\|(?:end|call|return)\|>")
_START, _BODY = "<|start|>", "<|message|>"
OPEN, CLOSED, UNDECIDED = "open", "closed", "undecided"
_PROMPT_TAIL = 32  # last tokens of a prompt that may hold the markers of its generation prompt
_TAIL_BYTES = 128  # of a growing answer; longer than any marker
_HEADER_BYTES = 512  # longer than any header of a message


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning.

    Attributes:
        begin: the text that opens reasoning, written by the template or by the model.
        end: the text that closes reasoning and opens the content.
        pattern: a regular expression for all forms of ``end``; None if it has one form.
        named_by: the text by which a chat template shows that its model has this format.
        special: the markers are special tokens, which the text of an answer leaves out.
        channels: the answer consists of messages with channels, so that ``end`` comes before every content.
    """

    begin: str
    end: str
    pattern: str | None = None
    named_by: str | None = None
    special: bool = False
    channels: bool = False

    @property
    def end_pattern(self) -> re.Pattern[bytes]:
        return re.compile((self.pattern or re.escape(self.end)).encode())


# By name, in the order in which a template is searched for them.
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "harmony": ReasoningFormat(  # gpt-oss
        begin="<|channel|>analysis<|message|>",
        end="<|end|><|start|>assistant<|channel|>final<|message|>",
        pattern=r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
        named_by="<|channel|>analysis",
        special=True,
        channels=True,
    ),
    "mistral": ReasoningFormat(begin="[THINK]", end="[/THINK]", special=True),  # Magistral, Ministral 3
    "cohere": ReasoningFormat(begin="<|START_THINKING|>", end="<|END_THINKING|>", special=True),  # Command A
    "gemma": ReasoningFormat(begin="<|channel>thought\n", end="<channel|>", special=True),  # Gemma 4
    "seed": ReasoningFormat(begin="<seed:think>", end="</seed:think>"),  # Seed-OSS
    "kimi": ReasoningFormat(begin="◁think▷", end="◁/think▷"),  # Kimi-VL-Thinking
    "think": ReasoningFormat(begin="<think>", end="</think>"),  # Qwen, DeepSeek, GLM, MiniMax, Nemotron and most others
}
# A call of a tool that the row forces follows reasoning without a final message.
_CALLS = {
    "harmony": ReasoningFormat(begin="<|channel|>analysis<|message|>", end="<|end|>", special=True),
}


def check_mode(mode: str) -> str:
    """Return ``mode``; raise ConfigError unless it is ``auto`` or ``off``."""
    if mode not in MODES:
        raise ConfigError(f"reasoning must be {' or '.join(MODES)}, not {mode!r}{did_you_mean(mode, MODES)}")
    return mode


def reasoning_format(start: ReasoningStart) -> ReasoningFormat:
    """The format of an answer that begins with ``start``."""
    return (_CALLS if start.calls else REASONING_FORMATS).get(start.format) or REASONING_FORMATS[start.format]


def find_format(sources: Iterable[str]) -> str | None:
    """The name of the format whose closing marker, or other sign, a chat template among ``sources`` contains."""
    texts = list(sources)
    for name, form in REASONING_FORMATS.items():
        if any((form.named_by or form.end) in text for text in texts):
            return name
    return None


def reasoning_start(
    tokenizer: Tokenizer, conversation: object, token_ids: Sequence[int], *, calls: bool = False
) -> ReasoningStart | None:
    """Return the reasoning state at the start of the answer to ``conversation``, rendered to ``token_ids``; None if the
    model's template names no format. ``calls``: the row forces a tool call."""
    name = None if tokenizer.template is None else find_format(tokenizer.template.sources.values())
    if name is None:
        return None
    start = ReasoningStart(format=name, state=UNDECIDED, calls=calls)
    form = reasoning_format(start)
    if isinstance(conversation, Conversation) and conversation.continue_final_message:
        content = str(conversation.messages[-1].get("content") or "")
        opened = content.rfind(form.begin) > content.rfind(form.end)
        return ReasoningStart(format=name, state=OPEN if opened else CLOSED, calls=calls)
    tail = tokenizer.decode(token_ids[-_PROMPT_TAIL:], skip_special_tokens=False).rstrip()
    if tail.endswith(form.begin):
        state = OPEN
    elif any(match.end() == len(tail.encode()) for match in form.end_pattern.finditer(tail.encode())):
        state = CLOSED
    else:
        state = OPEN if form.channels else UNDECIDED
    return ReasoningStart(format=name, state=state, calls=calls)


class Thinking:
    """Follows one answer, token by token, to the end of its reasoning.

    Attributes:
        over: the reasoning is over, or there is none: later tokens are content.
        opened: the answer has reasoning.
        tokens: number of tokens up to the end of the reasoning, or so far.
        rest: what the token that ended the reasoning adds to the content.
    """

    def __init__(self, start: ReasoningStart, tokenizer: Tokenizer, budget: int | None = None) -> None:
        """``budget``: the most tokens between the markers."""
        form = reasoning_format(start)
        self._bytes: Callable[[int], bytes] = tokenizer.token_bytes
        self._end = form.end_pattern
        self._begin = form.begin.encode()
        self._begin_ids = tokenizer.encode(form.begin, add_special_tokens=False)
        self._end_ids = tokenizer.encode(form.end, add_special_tokens=False)
        self._tail = b""
        self._left, self._closing = budget, 0  # tokens of the budget, and of the end that closes it
        self.over, self.opened = start.state == CLOSED, start.state == OPEN
        self.tokens, self.rest = 0, b""

    @property
    def next_begin(self) -> int | None:
        """The token that may open, or goes on to open, the reasoning of an answer that has not begun otherwise."""
        undecided = not (self.over or self.opened) and self.tokens < len(self._begin_ids)
        return self._begin_ids[self.tokens] if undecided else None

    @property
    def next_end(self) -> int | None:
        """The token by which a reasoning that has used up its budget goes on to its end."""
        spent = self.opened and not self.over and self._left is not None and self._left <= 0
        return self._end_ids[self._closing] if spent and self._closing < len(self._end_ids) else None

    def go_on(self, token: int) -> bool:
        """Append a token of an answer whose reasoning is not over; return True if it is now."""
        new = self._bytes(token)
        self._closing += self.next_end is not None
        self._tail += new
        self.tokens += 1
        if not self.opened:
            pending = self._tail.lstrip()
            if not pending.startswith(self._begin):
                if not self._begin.startswith(pending):
                    self.over, self.tokens = True, 0
                return self.over
            self.opened = True
        elif self._left is not None:
            self._left -= 1
        if (match := self._end.search(self._tail)) is not None:
            self.over, self.rest = True, self._tail[match.end() :]
        elif len(self._tail) > _TAIL_BYTES + len(self._begin):
            self._tail = self._tail[-_TAIL_BYTES:]
        return self.over


class AnswerSplit:
    """Splits the text of a finished answer ``token_ids`` into its reasoning and its content."""

    def __init__(self, start: ReasoningStart, tokenizer: Tokenizer, token_ids: Sequence[int]) -> None:
        self._form, self._tokenizer = reasoning_format(start), tokenizer
        self._messages = start.state != CLOSED and REASONING_FORMATS[start.format].channels
        self._token_ids = token_ids
        self._thinking = Thinking(start, tokenizer)
        for token in token_ids:
            if self._thinking.over:
                break
            self._thinking.go_on(token)

    @property
    def special(self) -> bool:
        """True if the text must contain its special tokens."""
        return self._form.special

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens up to the end of the reasoning; a message to a tool ends it as the final one does."""
        if not self._thinking.opened:
            return 0
        if not self._messages:
            return self._thinking.tokens
        tail = b""
        for number, token in enumerate(self._token_ids, start=1):
            tail = (tail + self._tokenizer.token_bytes(token))[-_HEADER_BYTES:]
            if tail.endswith(_BODY.encode()):
                if not _reasons(tail[max(0, tail.rfind(_START.encode())) :].decode(errors="replace")):
                    return number
                tail = b""
        return len(self._token_ids)

    def content_begin(self, text: str) -> int:
        """Return the position in ``text``, that of the answer, where the content begins."""
        if not self._thinking.opened:
            return 0
        end = self._end(text)
        return len(text) if end is None else end.end()

    def __call__(self, text: str, *, skip_special_tokens: bool) -> tuple[str | None, str]:
        """The reasoning, None if there is none, and the content. Line breaks around both belong to the markers. Without
        ``skip_special_tokens`` messages keep their headers, for a parser of tool calls."""
        reasoning, content = self._split_messages(text, skip_special_tokens) if self._messages else self._split(text)
        if self.special and skip_special_tokens:
            clean = self._tokenizer.without_special_tokens
            reasoning, content = None if reasoning is None else clean(reasoning), clean(content)
        return reasoning, content

    def _split(self, text: str) -> tuple[str | None, str]:
        if not self._thinking.opened:
            return None, text
        end = self._end(text)
        reasoning, content = (text, "") if end is None else (text[: end.start()], text[end.end() :])
        return reasoning.lstrip().removeprefix(self._form.begin).strip("\n"), content.lstrip("\n")

    def _split_messages(self, text: str, skip_special_tokens: bool) -> tuple[str | None, str]:
        reasoning, content = [], []
        for message in read_harmony(text):
            if message.channel == ANALYSIS and message.recipient is None:
                reasoning.append(message.content)
            else:
                content.append(message.content if skip_special_tokens else message.source)
        return "\n".join(reasoning) if reasoning else None, "".join(content)

    def _end(self, text: str) -> re.Match[str] | None:
        if not self._thinking.over:
            return None
        return re.search(self._form.end_pattern.pattern.decode(), text)


@dataclass(frozen=True, kw_only=True, slots=True)
class HarmonyMessage:
    """One message; ``source`` is its text with header, as generated."""

    channel: str
    recipient: str | None
    content: str
    source: str


def _reasons(header: str) -> bool:
    """True if a message with this header is part of the reasoning."""
    channel = _CHANNEL.search(header)
    return channel is not None and channel[1] == ANALYSIS and _RECIPIENT.search(header) is None


def read_harmony(text: str) -> list[HarmonyMessage]:
    """The messages of an answer after ``<|start|>assistant``. Text without a header belongs to the final channel; a
    header that is cut off is no message."""
    messages = []
    for source in re.split(rf"(?={re.escape(_START)})", text):
        header, body, content = source.partition(_BODY)
        if not body:
            if "<|channel|>" in source or source.startswith(_START) or not source.strip():
                continue
            header, content = "", source
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        messages.append(
            HarmonyMessage(
                channel=FINAL if channel is None else channel[1],
                recipient=None if recipient is None else recipient[1],
                content=_END.split(content, maxsplit=1)[0],
                source=source,
            )
        )
    return messages
