"""Text to token ids and back, by the checkpoint's tokenizer, special tokens, chat template and end-of-sequence ids."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from moelight.core.errors import CheckpointError, InputError, UserError
from moelight.core.panics import panics_as
from moelight.core.small_files import read_bytes, read_text
from moelight.core.units import MiB
from moelight.engine.chat import DEFAULT, ChatTemplate, Conversation, read_chat_template, read_part
from moelight.engine.detokenizer import TokenBytes
from moelight.engine.special_tokens import (
    CONFIG,
    SpecialTokens,
    read_eos_token_ids,
    read_optional_object,
    read_special_tokens,
)
from moelight.engine.tiktoken_file import TIKTOKEN, read_tiktoken
from moelight.profiles.gguf import read_gguf
from moelight.profiles.gguf_vocabulary import CONTROL, UNKNOWN, USER_DEFINED, GGUFVocabulary, read_vocabulary
from moelight.profiles.pre_tokenizers import PreTokenizer

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"
MOST_TOKENIZER_BYTES = 256 * MiB  # the largest in use has 34 MB
_PIECES = ("tokenizer.model", "spiece.model")
_BLANK = "▁"  # in the place of a blank in tokens of SentencePiece
_READ_BY_TRANSFORMERS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Texts that faulty conversions encode differently.
_PROBES = ("The quick brown fox", "two  blanks", "a\n\tb", "é 世 🦊")
_ORDINARY = "The quick brown fox jumps over the lazy dog"  # enough to reveal a pattern that backtracks for ever
_GGUF_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_TEMPLATE = "tokenizer.chat_template"
_LEAST_CONTEXT, _MOST_CONTEXT = 4, 24  # tokens before a text that affect how it begins
_LETTERS = 4  # per token of an ordinary text; a text with fewer letters than this per allowed token is encoded at once
_LONG_LETTERS = 1 << 16  # texts this long take so long to encode that silencing the library's stderr pays
_ANSWER = "forty-two"
_TURN: list[dict[str, Any]] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
_CUT_TOKENS = 64  # last tokens of a truncated text, which can differ in the whole text


def _fails_at_the_text(message: str) -> InputError:
    return InputError(f"this model's tokenizer fails at the text ({message})", code="tokenizer_failed")


class Tokenizer:
    """The tokenizer of one checkpoint, with its chat ``template`` if it has one. ``eos_token_ids`` end a completion."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        template: ChatTemplate | None,
        eos_token_ids: frozenset[int],
        named: Mapping[str, str],
    ) -> None:
        """``named``: the texts of special tokens by role (``bos_token``, ...)."""
        self._inner = inner
        self._bytes = TokenBytes(inner)
        self._named = named
        self.template = template
        self.eos_token_ids = eos_token_ids

    @classmethod
    def of(cls, path: Path, chat_template: Path | None = None) -> Tokenizer:
        """The tokenizer of the checkpoint in directory or GGUF file ``path``; raises as `from_dir` and `from_gguf`."""
        return (cls.from_gguf if path.is_file() else cls.from_dir)(path, chat_template)

    @classmethod
    def from_dir(cls, directory: Path, chat_template: Path | None = None) -> Tokenizer:
        """Load the tokenizer of the checkpoint in ``directory``; the file ``chat_template`` replaces the checkpoint's
        template. Raises CheckpointError for a missing or damaged file, ConfigError for an unreadable ``chat_template``.
        """
        config = read_optional_object(directory / CONFIG)
        special = read_special_tokens(directory, config)
        named = special.named
        if chat_template is None:
            template = read_chat_template(directory, config, named)
        else:
            template = ChatTemplate.from_file(chat_template, special_tokens=named)
        ends = set(read_eos_token_ids(directory))

        def unusable(message: str) -> CheckpointError:
            return CheckpointError(f"{directory / TOKENIZER}: not a usable tokenizer ({message})")

        with _library_errors(unusable, quiet=True):
            inner = _read_tokenizer(directory)
            _add_tokens(inner, special)
            if "eos_token" in named and (closing := inner.token_to_id(named["eos_token"])) is not None:
                ends.add(closing)
            inner.no_truncation()
            inner.no_padding()
            for probe in (*_PROBES, _ORDINARY):
                inner.decode(inner.encode(probe).ids)
            return cls(inner, template=template, eos_token_ids=frozenset(ends), named=named)

    @classmethod
    def from_gguf(cls, path: Path, chat_template: Path | None = None) -> Tokenizer:
        """The tokenizer in the metadata of the GGUF file ``path``, with its chat template unless ``chat_template`` is
        given. Raises CheckpointError if the file is damaged, has none, or one of an unknown kind."""
        return cls.from_metadata(read_gguf(path).metadata, str(path), chat_template)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], where: str, chat_template: Path | None = None) -> Tokenizer:
        """As `from_gguf`, of ``metadata`` that were read ``where``."""

        def unusable(reason: str) -> CheckpointError:
            return CheckpointError(f"{where}: its vocabulary is no usable tokenizer: {reason}")

        with _library_errors(unusable, quiet=True):
            vocabulary = read_vocabulary(metadata)
            named = {
                role: vocabulary.tokens[vocabulary.roles[key]]
                for role, key in _GGUF_ROLES.items()
                if key in vocabulary.roles
            }
            template: ChatTemplate | None
            if chat_template is not None:
                template = ChatTemplate.from_file(chat_template, special_tokens=named)
            else:
                sources = _templates_in(metadata)
                template = ChatTemplate(sources, special_tokens=named) if sources else None
            inner = _of_vocabulary(vocabulary)
            for probe in (*_PROBES, _ORDINARY):
                inner.decode(inner.encode(probe).ids)
            return cls(inner, template=template, eos_token_ids=vocabulary.end_token_ids, named=named)

    def description(self) -> dict[str, Any]:
        """The tokenizer as ``tokenizer.json`` would have it."""
        return cast("dict[str, Any]", json.loads(self._inner.to_str()))

    def pieces(self, text: str) -> list[str]:
        """The pieces of ``text`` within which tokens are merged, as the tokenizer spells them."""
        pre = self._inner.pre_tokenizer
        return [text] if pre is None else [piece for piece, _ in pre.pre_tokenize_str(text)]

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included; ids are smaller unless they have gaps."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def vocabulary(self) -> dict[int, str]:
        """The tokens by their ids, added tokens included, as the tokenizer spells them."""
        return {token_id: text for text, token_id in self._inner.get_vocab(with_added_tokens=True).items()}

    @property
    def roles(self) -> Mapping[str, str]:
        """The texts of special tokens by their roles."""
        return self._named

    def token_id(self, role: str) -> int | None:
        """The id of the special token of this ``role`` (``bos_token``, ``eos_token``, ...), if any."""
        text = self._named.get(role)
        return None if text is None else self._inner.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """The ids of ``text``, by default with the special tokens this checkpoint puts around a prompt. A text far
        longer than ``max_tokens``, the context, is rejected before it is encoded whole (some 200 bytes per token).
        Raises InputError for that, for half of a surrogate pair, and if the tokenizers library fails."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InputError("the text holds half of a surrogate pair", code="invalid_text") from None
        with _library_errors(_fails_at_the_text, quiet=len(text) >= _LONG_LETTERS):
            if max_tokens is not None:
                self._refuse_far_too_long(text, max_tokens)
            return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def context(self, token_ids: Sequence[int]) -> list[int]:
        """The last of ``token_ids``, if any, on which the text of the following tokens depends."""
        if not self._bytes.first_differs:
            return []
        for count in range(_LEAST_CONTEXT, _MOST_CONTEXT):
            last = list(token_ids[-count:])
            if "\ufffd" not in self.decode(last) or count >= len(token_ids):
                break
        return last

    def decode_after(
        self, context: Sequence[int], token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """The text that ``token_ids`` add after the text of ``context``."""
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        if context:
            before, full = decode(context), decode([*context, *token_ids])
            if full.startswith(before):  # else a character is split between context and text
                return full[len(before) :]
        return decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token inside a text, possibly part of a character; empty for an id without a token."""
        return self._bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """The text of a token, with ``\ufffd`` for part of a character."""
        return self._bytes(token_id).decode(errors="replace")

    @property
    def special_ids(self) -> frozenset[int]:
        return self._bytes.special_ids

    def without_special_tokens(self, text: str) -> str:
        """``text`` without the texts of special tokens."""
        return self._special_texts.sub("", text)

    @cached_property
    def _special_texts(self) -> re.Pattern[str]:
        texts = sorted(map(self.token_text, self.special_ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def render(self, conversation: Conversation | object, *, max_tokens: int | None = None) -> list[int]:
        """The ids of a conversation rendered by the chat template; a plain list of messages opens the assistant's turn.
        ``max_tokens`` as for `encode`. Raises InputError if there is no template or the template rejects the
        conversation."""
        if self.template is None:
            raise InputError(
                "this model has no chat template; send a prompt instead, or name a template of your own",
                code="no_chat_template",
            )
        return self.encode(self.template.render(conversation), add_special_tokens=False, max_tokens=max_tokens)

    def unended_turn(self, stop_token_ids: Collection[int] = ()) -> int | None:
        """The special token with which the chat template closes the assistant's turn, if that ends no answer: it is no
        eos and none of ``stop_token_ids``. None as well where there is no such token, or no template that can be asked.
        """
        if self.template is None:
            return None
        try:
            text = self.template.render(Conversation(messages=_TURN, add_generation_prompt=False))
        except InputError:
            return None
        _, answer, after = text.rpartition(_ANSWER)
        closing = next(
            (token for token in self.encode(after, add_special_tokens=False) if token in self.special_ids), None
        )
        if not answer or closing is None or closing in self.eos_token_ids or closing in stop_token_ids:
            return None
        return closing

    def _refuse_far_too_long(self, text: str, max_tokens: int) -> None:
        """Count the tokens of the text's beginning, of which only the last can differ in the whole text."""
        max_tokens += _CUT_TOKENS
        count = _LETTERS * max_tokens
        while count < len(text):
            if len(self._inner.encode(text[:count], add_special_tokens=False)) > max_tokens:
                raise InputError(
                    f"the prompt has {len(text):,} letters, and more tokens than the model's context of "
                    f"{max_tokens - _CUT_TOKENS}",
                    code="context_length_exceeded",
                )
            count *= _LETTERS


@contextmanager
def _library_errors(make: Callable[[str], UserError], *, quiet: bool) -> Iterator[None]:
    """Raise ``make(message)`` where the tokenizers library fails: it panics, or raises a bare Exception."""
    with panics_as(make, quiet=quiet):
        try:
            yield
        except Exception as error:
            if type(error) not in (Exception, ValueError):
                raise
            raise make(" ".join(str(error).split())) from None


def _read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    import tokenizers

    path = directory / TOKENIZER
    if not path.exists():
        if (directory / TIKTOKEN).exists() and not any((directory / name).exists() for name in _PIECES):
            return read_tiktoken(directory, read_optional_object(directory / CONFIG))
        return _convert_pieces(directory)
    return tokenizers.Tokenizer.from_str(read_part(path, read_text, max_bytes=MOST_TOKENIZER_BYTES))


def _convert_pieces(directory: Path) -> tokenizers.Tokenizer:
    """Needs transformers and sentencepiece."""
    chunks = next((name for name in _PIECES if (directory / name).exists()), None)
    if chunks is None:
        raise CheckpointError(f"{directory}: no {TOKENIZER} there; fetch the tokenizer's files too")
    only = f"{directory}: only {chunks} is there, a SentencePiece tokenizer; "
    missing = [name for name in ("transformers", "sentencepiece") if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"{only}to convert it takes {' and '.join(missing)} (pip install {' '.join(missing)}), or a {TOKENIZER} "
            "beside it (transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one)"
        )
    proto = read_part(directory / chunks, read_bytes, max_bytes=MOST_TOKENIZER_BYTES)
    for name in _READ_BY_TRANSFORMERS:
        read_optional_object(directory / name)
    import transformers

    sentencepiece = importlib.import_module("sentencepiece")  # untyped and optional

    named = getattr(transformers, str(read_optional_object(directory / CONFIG).get("tokenizer_class")), None)
    is_class = isinstance(named, type) and issubclass(named, transformers.PreTrainedTokenizerBase)
    # AutoTokenizer picks a generic class for some models, mixtral among them, and loses the leading blank of a text.
    kind: Any = named if is_class else transformers.AutoTokenizer
    try:
        loaded = kind.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False, use_fast=True)
        model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    except (AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CheckpointError(f"{only}transformers cannot convert it ({reason}); put a {TOKENIZER} beside it") from None
    inner = getattr(loaded, "backend_tokenizer", None)
    if inner is None or any(inner.encode(text, add_special_tokens=False).ids != model.encode(text) for text in _PROBES):
        raise CheckpointError(f"{only}transformers reads it otherwise than SentencePiece; put a {TOKENIZER} beside it")
    return cast("tokenizers.Tokenizer", inner)


def _of_vocabulary(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """A tokenizer with the tokens of ``vocabulary`` at their ids, and no others."""
    import tokenizers

    inner = tokenizers.Tokenizer(_bpe(vocabulary))
    _add_steps(inner, vocabulary)
    inner.add_tokens(list(_added_tokens(vocabulary)))
    _add_ends(inner, vocabulary)
    return inner


def _bpe(vocabulary: GGUFVocabulary) -> Any:
    from tokenizers import models

    ids = {text: token_id for token_id, text in enumerate(vocabulary.tokens)}
    pre = vocabulary.pre
    if pre is None:
        unknown = vocabulary.roles.get("unknown")
        return models.BPE(
            vocab=ids,
            merges=list(_scored_merges(vocabulary, ids)),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    return models.BPE(
        vocab=ids,
        merges=list(vocabulary.merges),
        byte_fallback=not pre.byte_level,
        ignore_merges=pre.ignore_merges,
    )


def _scored_merges(vocabulary: GGUFVocabulary, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """All pairs of tokens that make a token, the best made first."""
    for token_id in sorted(ids.values(), key=lambda token_id: -vocabulary.scores[token_id]):
        text = vocabulary.tokens[token_id]
        for cut in range(1, len(text)):
            if text[:cut] in ids and text[cut:] in ids:
                yield text[:cut], text[cut:]


def _templates_in(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a GGUF file by name."""
    names = {DEFAULT: _TEMPLATE}
    names |= {key.removeprefix(f"{_TEMPLATE}."): key for key in metadata if key.startswith(f"{_TEMPLATE}.")}
    return {name: text for name, key in names.items() if isinstance(text := metadata.get(key), str)}


def gguf_pieces(pre: PreTokenizer, tokens: Sequence[str]) -> Any:
    """The pieces of a text within which tokens are merged. No merge crosses a byte that none of ``tokens`` has."""
    from tokenizers import Regex, pre_tokenizers

    cuts: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits]
    if pre.byte_level:
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()).difference(*tokens))
        if missing:
            cuts.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, missing))), behavior="removed"))
    return pre_tokenizers.Sequence(cuts)


def _add_steps(inner: tokenizers.Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """Normalizer, pre-tokenizer and decoder."""
    from tokenizers import decoders, normalizers

    pre = vocabulary.pre
    if pre is None or not pre.byte_level:
        # Every text between added tokens is normalized by itself, so all begin with a blank, as in llama.cpp.
        steps = [normalizers.Prepend(_BLANK)] if vocabulary.adds_space_prefix else []
        inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _BLANK)])
    if pre is not None:
        inner.pre_tokenizer = gguf_pieces(pre, vocabulary.tokens)
    if pre is not None and pre.byte_level:
        inner.decoder = decoders.ByteLevel()
        return
    parts = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * vocabulary.adds_space_prefix)


def _added_tokens(vocabulary: GGUFVocabulary) -> Iterator[tokenizers.AddedToken]:
    """The tokens that texts are cut at before anything else."""
    from tokenizers import AddedToken

    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            before, behind = vocabulary.takes_blanks(text)
            yield AddedToken(
                text,
                special=kind != USER_DEFINED,
                normalized=False,
                lstrip=before,
                rstrip=behind,
            )


def _add_ends(inner: tokenizers.Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """The tokens before and after a text."""
    from tokenizers.processors import TemplateProcessing

    roles = vocabulary.roles
    before = ["bos"] if vocabulary.adds_bos and "bos" in roles else []
    after = ["eos"] if vocabulary.adds_eos and "eos" in roles else []
    if before or after:
        inner.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[
                {"id": role, "ids": [roles[role]], "tokens": [vocabulary.tokens[roles[role]]]}
                for role in (*before, *after)
            ],
        )


def _add_tokens(inner: tokenizers.Tokenizer, special: SpecialTokens) -> None:
    """Add the tokens that only the configuration has; a token with a role is special in any case."""
    import tokenizers

    present = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    for token in special.listed:
        if token.content not in present:
            present[token.content] = tokenizers.AddedToken(token.content, **token.flags)
            inner.add_tokens([present[token.content]])
    inner.add_tokens(
        [
            tokenizers.AddedToken(token.content, **{"normalized": False, **token.flags, "special": True})
            for token in {token.content: token for token in special.special}.values()
            if not (token.content in present and present[token.content].special)
        ]
    )
