"""Incremental detokenization: the bytes of a token, and stop strings in a growing answer. Depends only on the decoders
of the tokenizers library."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_MOST_TOKENS_PER_CHARACTER = 4
_REPLACEMENT = "\ufffd".encode()
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# The characters by which byte-level tokenizers write bytes: printable ones as they are, others from U+0100.
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): bytes([byte]) for byte in _PLAIN}
_BYTE_OF |= {chr(0x100 + n): bytes([byte]) for n, byte in enumerate(sorted({*range(256)} - {*_PLAIN}))}
CHARACTER_OF = {data[0]: character for character, data in _BYTE_OF.items()}
# Decoders that treat the first token of a text differently.
_FIRST_DIFFERS = {"Strip", "Metaspace", "WordPiece", "BPEDecoder", "CTC"}


class TokenBytes:
    """The bytes of each token inside a text. ``first_differs``: the first token of a text decodes differently."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self._added = inner.get_added_tokens_decoder()
        self._steps = _steps(json.loads(inner.decoder.__getstate__())) if inner.decoder is not None else []
        self.first_differs = not self._steps or any(step["type"] in _FIRST_DIFFERS for step in self._steps)

    def __call__(self, token_id: int) -> bytes:
        """Empty for an id without a token."""
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        chunk = self._inner.id_to_token(token_id)
        if chunk is None:
            return b""
        for step in self._steps:
            match step:
                case {"type": "ByteLevel"}:
                    return b"".join(_BYTE_OF.get(character) or character.encode() for character in chunk)
                case {"type": "ByteFallback"}:
                    if byte := _BYTE.fullmatch(chunk):
                        return bytes.fromhex(byte[1])
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    chunk = chunk.replace(old, new)
                case {"type": "Metaspace", "replacement": str(mark)} | {"type": "BPEDecoder", "suffix": str(mark)}:
                    chunk = chunk.replace(mark, " ")
                case {"type": "WordPiece", "prefix": str(mark)}:
                    chunk = chunk[len(mark) :] if chunk.startswith(mark) else " " + chunk
        return str(chunk).encode()

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(token_id for token_id, token in self._added.items() if token.special)


class TokenTexts:
    """Texts of the tokens of one sequence, as vLLM writes them: a token that leaves a character unfinished has an empty
    text, and the one that finishes it has the whole character. ``token_bytes``: a token's bytes inside a text."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._bytes = token_bytes
        self._open: deque[bytes] = deque(maxlen=_MOST_TOKENS_PER_CHARACTER)  # tokens of an unfinished character

    def text(self, token_id: int) -> str:
        """The text of ``token_id`` as the next token."""
        raw = self._bytes(token_id)
        if not _unfinished(raw):
            return raw.decode(errors="replace")
        for chunk in reversed(self._open):
            raw = chunk + raw
            if not _unfinished(raw):
                return raw.decode(errors="replace")
        return ""

    def follow(self, token_id: int) -> None:
        """``token_id`` is the next token."""
        raw = self._bytes(token_id)
        if _unfinished(raw) and not self.text(token_id):
            self._open.append(raw)
        else:
            self._open.clear()


def _unfinished(raw: bytes) -> bool:
    """True if ``raw`` ends in part of a character, or in bytes that are none."""
    return raw.decode(errors="replace").endswith("\ufffd") and not raw.endswith(_REPLACEMENT)


def without_unfinished(
    token_ids: Sequence[int], token_bytes: Callable[[int], bytes], decode: Callable[[Sequence[int]], str]
) -> str:
    """The text of ``token_ids`` without last tokens that leave a character unfinished, as in vLLM."""
    text, count = decode(token_ids), len(token_ids)
    while count and text.endswith("\ufffd"):
        last = token_ids[max(0, count - _MOST_TOKENS_PER_CHARACTER) : count]
        if b"".join(map(token_bytes, last)).endswith(_REPLACEMENT):
            break
        count -= 1
        text = decode(token_ids[:count])
    return text


def cut_at_stop(text: str, stops: Sequence[str], *, begin: int = 0, include: bool = False) -> tuple[str, str | None]:
    """``text`` before the first occurrence of any of ``stops`` from ``begin`` on, and the stop found, if any.
    ``include``: keep that stop in the text."""
    places = [(position, stop) for stop in stops if (position := text.find(stop, max(0, begin))) >= 0]
    if not places:
        return text, None
    position, stop = min(places, key=lambda match: match[0])
    return text[: position + len(stop) * include], stop


class StopMatcher:
    """Finds stop strings in the growing tokens of one sequence, decoding only the newest tokens.

    ::

        tokens   0 .......... context .......... searched .......... now
                 never again   decoded, not         new: decoded and
                 decoded       searched again       searched with the tail

    A character split between tokens is new until it is complete. ``context``: tokens before the sequence on which its
    text depends; ``unsearched``: number of first tokens that are decoded but not searched.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        *,
        context: Sequence[int] = (),
        unsearched: int = 0,
    ) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self._ids = list(context)  # starts with ``context``
        self._searched = len(self._ids)
        self._unsearched = unsearched
        self._tail = ""

    def matches(self, token_id: int) -> bool:
        """Append a token; return True if the text of the sequence now contains a stop string."""
        self._ids.append(token_id)
        self._unsearched -= 1
        before = self._decode(self._ids[: self._searched])
        decoded = self._decode(self._ids)
        tail = self._tail + decoded[len(before) :]
        if self._unsearched < 0 and any(stop in tail for stop in self._stops):
            return True
        unfinished = decoded.endswith("\ufffd") and len(self._ids) - self._searched < _MOST_TOKENS_PER_CHARACTER
        if not unfinished:
            self._tail = tail[max(0, len(tail) - self._keep) :]
            del self._ids[: self._searched]
            self._searched = len(self._ids)
        return False


class BadWords:
    """Tokens that would complete one of ``words`` after the tokens generated so far. Each word is encoded as it is and
    behind a blank, as in vLLM: the second form counts if it differs in its first token alone."""

    def __init__(self, encode: Callable[[str], Sequence[int]], words: Sequence[str]) -> None:
        forms: set[tuple[int, ...]] = set()
        for word in words:
            bare, spaced = (tuple(encode(prefix + word.lstrip())) for prefix in ("", " "))
            forms.add(bare)
            if spaced[:1] != bare[:1] and len(spaced) == len(bare):
                forms.add(spaced)
        self._forms = tuple(sorted(forms - {()}))
        self._recent: deque[int] = deque(maxlen=max(map(len, self._forms), default=1) - 1)

    def forbidden(self) -> set[int]:
        """The tokens that may not come next."""
        recent = tuple(self._recent)
        return {form[-1] for form in self._forms if recent[len(recent) - len(form) + 1 :] == form[:-1]}

    def follow(self, token_id: int) -> None:
        """``token_id`` is the next token."""
        self._recent.append(token_id)

    def copy(self) -> BadWords:
        """The same words after the same tokens, to follow others."""
        other = copy(self)
        other._recent = self._recent.copy()
        return other


def _steps(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A decoder of tokenizer.json as a flat list of simple decoders."""
    return [step for decoder in spec["decoders"] for step in _steps(decoder)] if spec["type"] == "Sequence" else [spec]
