"""Vocabularies in tiktoken's format, a line of base64 and a rank for each token, as Kimi's checkpoints have them. The
expressions that cut texts are in code of those checkpoints, which is never run; they are kept here."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelight.core.errors import CheckpointError
from moelight.core.small_files import read_bytes
from moelight.engine.chat import read_part
from moelight.engine.detokenizer import CHARACTER_OF

if TYPE_CHECKING:
    import tokenizers

TIKTOKEN = "tiktoken.model"
_MAX_BYTES = 64 << 20  # Kimi's has 2.8 MB
_RESERVED = 256  # ids after the vocabulary that are special tokens, named or not
_ADDED = "added_tokens_decoder"
_HAN = r"\p{Han}"
_CAPITALS = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_HAN}]]"
_SMALL = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_HAN}]]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# By the class of the tokenizer, as ``auto_map`` of tokenizer_config.json names it.
_EXPRESSIONS = {
    "tokenization_kimi.TikTokenTokenizer": "|".join((
        rf"[{_HAN}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+{_ENDINGS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )),
}  # fmt: skip


def read_tiktoken(directory: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of ``directory``, whose tokenizer_config.json holds ``config``. Raises CheckpointError for a
    damaged file, or one whose expressions are not kept here."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    path, mapped = directory / TIKTOKEN, config.get("auto_map")
    named = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else None
    kind = str(named[0] if isinstance(named, list) and named else named)
    if kind not in _EXPRESSIONS:
        raise CheckpointError(
            f"{path}: how it cuts texts is in code of the checkpoint ({kind[:60]}), which is never run; put a "
            "tokenizer.json beside it (the GGUF files of the same model have one inside)"
        )
    ranks = _read_ranks(path, read_part(path, read_bytes, max_bytes=_MAX_BYTES))
    special = _special_tokens(path, config, len(ranks))
    vocabulary = {_spelt(token): rank for token, rank in ranks.items()} | {text: n for n, (text, _) in special.items()}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=list(_merges(ranks)), ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_EXPRESSIONS[kind]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(text, special=flag, normalized=False) for text, flag in special.values()])
    return inner


def _read_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """The tokens in the order of their ranks, which are 0, 1, 2, ..."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        text, _, rank = line.strip().partition(b" ")
        try:
            token = base64.b64decode(text, validate=True)
            valid = bool(token) and int(rank) == len(ranks) and token not in ranks
        except (binascii.Error, ValueError):
            valid = False
        if not valid:
            raise CheckpointError(
                f"{path}: line {number} is no token in base64 and its rank {len(ranks)}; fetch the file again"
            )
        ranks[token] = len(ranks)
    if any(bytes([value]) not in ranks for value in range(256)):
        raise CheckpointError(f"{path}: not every byte is a token of it; fetch the file again")
    return ranks


def _special_tokens(path: Path, config: Mapping[str, Any], first: int) -> dict[int, tuple[str, bool]]:
    """The tokens from id ``first`` on, those that are not named included: their texts, and True if they are special."""
    listed = config.get(_ADDED)
    special = {token: (f"<|reserved_token_{token}|>", True) for token in range(first, first + _RESERVED)}
    for key, entry in listed.items() if isinstance(listed, dict) else ():
        token = int(key) if str(key).isdecimal() else -1
        content = entry.get("content") if isinstance(entry, dict) else None
        if token not in special or not isinstance(content, str) or not content:
            raise CheckpointError(
                f"{path.parent / 'tokenizer_config.json'}: {_ADDED} {str(key)[:20]} is no text with an id from {first} "
                f"to {first + _RESERVED - 1}, behind the {first} tokens of {TIKTOKEN}"
            )
        special[token] = (content, entry.get("special") is not False)
    return special


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[str, str]]:
    """All pairs of tokens that make a token, by the rank of that token: tiktoken merges the pair of lowest rank."""
    for token in ranks:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        parts = [(ranks[left], ranks[right], left, right) for left, right in pairs if left in ranks and right in ranks]
        for _, _, left, right in sorted(parts):
            yield _spelt(left), _spelt(right)


def _spelt(token: bytes) -> str:
    """The token in the printable characters of byte-level vocabularies."""
    return "".join(CHARACTER_OF[value] for value in token)
