"""The message format of gpt-oss ("harmony"): an answer is a sequence of messages, each with a channel and, for a tool
call, a recipient. OpenAI's own parser downloads a vocabulary when it is loaded; this one reads the text alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_END = re.compile(r"<\|(?:end|call|return)\|>")
_START, _BODY = "<|start|>", "<|message|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class HarmonyMessage:
    """One message; ``source`` is its text with header, as generated."""

    channel: str
    recipient: str | None
    content: str
    source: str


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
