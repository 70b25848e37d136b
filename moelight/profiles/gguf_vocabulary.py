"""The vocabulary in the metadata of a GGUF file.

It is read as llama.cpp reads it: tokens at the file's ids and no others, types that llama.cpp infers from their texts,
its defaults for absent keys, and the tokens that end a generation. A ValueError names the key at fault. One default is
not taken over: where a BPE vocabulary names no BOS or EOS token, llama.cpp takes id 11, which is right for Falcon
alone; here such a vocabulary has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeGuard

from moelight.core.errors import did_you_mean, quoted
from moelight.profiles.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer, pre_tokenizer

_PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # values of token_type
BYTE_LEVEL, SENTENCEPIECE, GEMMA4 = "gpt2", "llama", "gemma4"
VOCABULARY_MODELS = (BYTE_LEVEL, SENTENCEPIECE, GEMMA4)
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding", "fim_pad", "fim_rep", "fim_sep")
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where the file does not say
# Tokens that llama.cpp takes for control tokens by their texts, whatever the type in the file. The first of a row that
# the vocabulary has takes the role unless the file names its token.
_ROLES_BY_TEXT = {
    "fim_pre": [
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ],
    "fim_suf": [
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ],
    "fim_mid": [
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ],
    "fim_pad": ["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    "fim_rep": ["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    "fim_sep": ["<|file_sep|>"],
}
_ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ENDING_TEXTS = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
]
# A text that ends nothing where all of the others end a generation: messages of gpt-oss and Solar Open, and a plain
# token of Gemma 4.
_NOT_ENDING = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|return|>", "<|calls|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)
_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # matched in text, whatever their type
# Texts of Phi 3 behind which blanks are part of the text; behind its other special tokens they are dropped.
_PHI3, _BEFORE_BLANKS = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFVocabulary:
    """Tokens by id with their types, the ids of ``roles`` such as ``bos``, and how texts are cut into tokens.

    ``scores`` order the merges of a SentencePiece vocabulary, ``merges`` are those of a BPE vocabulary; ``pre`` is None
    for SentencePiece.
    """

    model: str
    pre: PreTokenizer | None
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[tuple[str, str], ...]
    roles: Mapping[str, int]
    adds_bos: bool
    adds_eos: bool
    adds_space_prefix: bool
    drops_blanks: bool

    def takes_blanks(self, text: str) -> tuple[bool, bool]:
        """Whether blanks before and behind the token ``text`` belong to it."""
        before = self.pre is not None and self.pre.mask_takes_blanks and text == "<mask>"
        return before, self.drops_blanks and text not in _BEFORE_BLANKS

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end a generation in llama.cpp."""
        ends = {self.roles[role] for role in _ENDING_ROLES if role in self.roles}
        texts = {self.tokens[token_id] for token_id in ends}.union(_ENDING_TEXTS).intersection(self.tokens)
        for text, others in _NOT_ENDING:
            if others <= texts:
                texts = texts - {text}
        return frozenset(token_id for token_id, text in enumerate(self.tokens) if text in texts)


def read_vocabulary(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """The vocabulary of a file's ``metadata``; raises ValueError if it is missing, damaged or of another kind."""
    model = metadata.get(f"{_PREFIX}model")
    if model not in VOCABULARY_MODELS:
        near = did_you_mean(model, VOCABULARY_MODELS) if isinstance(model, str) else ""
        raise ValueError(
            f"{_PREFIX}model is {quoted(model)}{near}; moelight reads {', '.join(VOCABULARY_MODELS)}; use the "
            "checkpoint in safetensors"
        )
    tokens = _tokens(metadata)
    name = metadata.get(f"{_PREFIX}pre")
    bpe = model != SENTENCEPIECE
    pre = (PRE_TOKENIZERS[GEMMA4] if model == GEMMA4 else pre_tokenizer(name)) if bpe else None
    adds_bos = pre.adds_bos if pre else True
    adds_bos = _flag(metadata, "add_bos_token", adds_bos) or bool(pre and pre.always_adds_bos)
    return GGUFVocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        types=_types(metadata, tokens),
        scores=() if bpe else _scores(metadata, len(tokens)),
        merges=_merges(metadata, tokens) if bpe else (),
        roles=MappingProxyType(_roles(metadata, tokens, {} if bpe else _SENTENCEPIECE_IDS)),
        adds_bos=adds_bos,
        adds_eos=_flag(metadata, "add_eos_token", False),
        adds_space_prefix=_flag(metadata, "add_space_prefix", True) and not bpe,
        drops_blanks=any(part in str(metadata.get("general.name", "")).lower() for part in _PHI3),
    )


def _tokens(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    values = metadata.get(f"{_PREFIX}tokens")
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{_PREFIX}tokens must be a list of texts; convert the model again")
    tokens = tuple(text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(values))
    ids: dict[str, int] = {}
    for token_id, text in enumerate(tokens):
        if ids.setdefault(text, token_id) != token_id:
            raise ValueError(
                f"{_PREFIX}tokens has {quoted(text)} twice, at {ids[text]} and {token_id}; convert the model again"
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{_PREFIX}tokens has a text at {token_id} that is no UTF-8; convert the model again")
    return tokens


def _types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[int, ...]:
    """The type of each token, with those that llama.cpp recognises by their texts."""
    types = _list_of(metadata, "token_type", len(tokens), int) or [NORMAL] * len(tokens)
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    by_text = [text for role, texts in _ROLES_BY_TEXT.items() if (text := _first_in(ids, metadata, role, texts))]
    for text in (*_ENDING_TEXTS, *by_text):
        if text in ids:
            types[ids[text]] = CONTROL
    for text in _HARMONY:
        if text in ids and types[ids[text]] not in (CONTROL, UNKNOWN):
            types[ids[text]] = USER_DEFINED
    if "</s>" in ids and "<|tool_response>" in ids:
        types[ids["</s>"]] = NORMAL
    return tuple(types)


def _first_in(ids: Mapping[str, int], metadata: Mapping[str, Any], role: str, texts: Iterable[str]) -> str | None:
    """The first of ``texts`` that is a token, unless the file names the token of ``role``."""
    if _is_id(metadata.get(f"{_PREFIX}{role}_token_id"), len(ids)):
        return None
    return next((text for text in texts if text in ids), None)


def _is_id(value: object, count: int) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < count


def _roles(metadata: Mapping[str, Any], tokens: Sequence[str], defaults: Mapping[str, int]) -> dict[str, int]:
    """Ids by role: the file's where they are tokens, else ``defaults``, else by text."""
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    roles = {role: token_id for role, token_id in defaults.items() if token_id < len(tokens)}
    for role in _ROLES:
        value = metadata.get(f"{_PREFIX}{role}_token_id")
        if _is_id(value, len(tokens)):
            roles[role] = value
        elif text := _first_in(ids, metadata, role, _ROLES_BY_TEXT.get(role, ())):
            roles[role] = ids[text]
    return roles


def _scores(metadata: Mapping[str, Any], count: int) -> tuple[float, ...]:
    scores = _list_of(metadata, "scores", count, (int, float))
    if scores is None:
        raise ValueError(f"{_PREFIX}scores is missing, which orders the merges; convert the model again")
    return tuple(scores)


def _merges(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The pairs to merge, first first; of equal ones the first."""
    lines = metadata.get(f"{_PREFIX}merges")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        state = "missing" if lines is None else "no list of texts"
        raise ValueError(
            f"{_PREFIX}merges is {state}, without which a BPE vocabulary has no tokens longer than a letter; convert "
            "the model again"
        )
    texts = frozenset(tokens)
    pairs: dict[tuple[str, str], None] = {}
    for line in lines:
        cut = line.find(" ", 1)
        pair = (line[:cut], line[cut + 1 :])
        if cut < 0 or not pair[1]:
            raise ValueError(f"{_PREFIX}merges has {quoted(line)}, no pair of texts; convert the model again")
        if lacking := next((text for text in (*pair, pair[0] + pair[1]) if text not in texts), None):
            raise ValueError(
                f"{_PREFIX}merges has {quoted(line)}, but {quoted(lacking)} is no token; convert the model again"
            )
        pairs.setdefault(pair)
    return tuple(pairs)


def _list_of(metadata: Mapping[str, Any], key: str, count: int, kind: type | tuple[type, ...]) -> list[Any] | None:
    """A list of at least ``count`` values, one for each token; None where the file has none."""
    values = metadata.get(f"{_PREFIX}{key}")
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"{_PREFIX}{key} must be a list of numbers; convert the model again")
    if len(values) < count:
        raise ValueError(f"{_PREFIX}{key} has {len(values)} values for {count} tokens; convert the model again")
    return values[:count]


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"{_PREFIX}{key}", default)
    if not isinstance(value, bool):
        raise ValueError(f"{_PREFIX}{key} must be true or false, not {quoted(value)}; convert the model again")
    return value
