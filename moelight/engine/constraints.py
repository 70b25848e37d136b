"""Answers that must match a JSON schema, a regular expression, a list of choices or a grammar, token by token.

The only room that knows llguidance. Knows the bytes of tokens; refuses to know logits, sequences and passes.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from moelight.core.errors import InputError
from moelight.core.request import StructuredOutputs
from moelight.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

KEPT = 256  # compiled grammars; most jobs have one, or one a row
_SHOWN = 300  # characters of what a grammar's compiler says
# Between the parts of a JSON text: nothing, a space, or a new line with its indentation. Without a bound a model that
# likes white space would never come to an end.
_WHITESPACE = {"whitespace_pattern": r"( |\n {0,16})"}


class Constraints:
    """Compiles what answers of one checkpoint must match, each distinct specification once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size``: of the model, which may pad the tokenizer's."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        ends = tokenizer.eos_token_ids
        self._special = bits([token for token in tokenizer.special_ids - ends if token < vocab_size], vocab_size)
        self._trie: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher | str] = OrderedDict()

    def check(self, outputs: StructuredOutputs) -> None:
        """Compile it.

        Raises:
            InputError: it cannot be compiled, or no token of this model can begin it.
        """
        compiled = self._compile(outputs)
        if isinstance(compiled, str):
            raise InputError(f"structured_outputs: {compiled}", code="invalid_structured_output")

    def open(self, outputs: StructuredOutputs) -> Constraint:
        """What holds for one answer, at its beginning.

        Raises:
            InputError: as `check`.
        """
        self.check(outputs)
        return Constraint(self._compile(outputs).deep_copy(), self._special)  # type: ignore[union-attr]

    def _compile(self, outputs: StructuredOutputs) -> llguidance.LLMatcher | str:
        """Its matcher at the beginning, or why there is none."""
        kind, text = _written(outputs)
        key = f"{kind}:{text}"
        if key not in self._compiled:
            self._compiled[key] = self._matcher(kind, text)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def _matcher(self, kind: str, text: str) -> llguidance.LLMatcher | str:
        import llguidance

        if self._trie is None:
            self._trie = _trie(self._tokenizer, self._vocab_size)
        try:
            if kind == "json":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_WHITESPACE)  # type: ignore[arg-type]
            else:
                grammar = llguidance.grammar_from(kind, text)  # type: ignore[arg-type]
        except ValueError as error:
            return _short(str(error))
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._trie, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            return _short(matcher.get_error())
        if Constraint(matcher.deep_copy(), self._special).allowed() is None:
            return "no token of this model's vocabulary can begin what it asks for"
        return matcher


class Constraint:
    """What one answer may go on with. ``complete``: nothing may follow. ``stuck``: no token of the vocabulary can go
    on, and the answer is not complete."""

    def __init__(self, matcher: llguidance.LLMatcher, special: np.ndarray) -> None:
        """``special``: uint32 [V / 32], a bit for each token that is no text and does not end a sequence."""
        self._matcher, self._special, self._words = matcher, special, len(special)
        self.stuck = False

    def allowed(self) -> np.ndarray | None:
        """uint32 [V / 32], a bit for each token that may come next; None where the answer is `stuck`."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self.stuck = True
            return None
        found = np.frombuffer(mask, dtype=np.uint32)
        allowed = np.zeros(self._words, dtype=np.uint32)
        allowed[: len(found)] = found[: self._words]
        self._drop_strangers(allowed)
        self.stuck = not allowed.any()
        return None if self.stuck else allowed

    def _drop_strangers(self, allowed: np.ndarray) -> None:
        """Where no token fits, llguidance's mask names a special one that does not fit either."""
        for token in bits_of(allowed & self._special):
            if not self._matcher.validate_tokens([token]):
                allowed[token // 32] &= ~np.uint32(1 << token % 32)

    def go_on(self, token: int) -> None:
        """``token`` was chosen."""
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """The answer matches, and nothing may follow but its end."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()


def bits(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """uint32 [V / 32] with the bits of ``tokens`` set."""
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def without(words: np.ndarray, tokens: Collection[int]) -> np.ndarray:
    """``words`` without the bits of ``tokens``; as they are where no other bit is set."""
    rest = words & ~bits([token for token in tokens if token < 32 * len(words)], 32 * len(words))
    return rest if rest.any() else words


def bits_of(words: np.ndarray) -> list[int]:
    """The tokens whose bits are set."""
    return [32 * int(at) + bit for at in words.nonzero()[0] for bit in range(32) if int(words[at]) >> bit & 1]


class _Vocabulary:
    """The checkpoint's tokens as llguidance wants them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < vocab_size)
        # Where nothing ends a sequence, a token that the model does not have.
        self.eos_token_id = min(tokenizer.eos_token_ids, default=vocab_size)
        if self.eos_token_id == vocab_size:
            self.tokens.append(b"")

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _trie(tokenizer: Tokenizer, vocab_size: int) -> llguidance.LLTokenizer:
    import llguidance

    words: Any = _Vocabulary(tokenizer, vocab_size)
    ends = sorted(token for token in tokenizer.eos_token_ids if token < vocab_size) or [vocab_size]
    return llguidance.LLTokenizer(words, eos_token=ends)


def _written(outputs: StructuredOutputs) -> tuple[str, str]:
    """The kind of grammar and its text."""
    if outputs.json is not None:
        return "json", outputs.json if isinstance(outputs.json, str) else json.dumps(outputs.json, sort_keys=False)
    if outputs.regex is not None:
        return "regex", outputs.regex
    if outputs.choice is not None:
        return "choice", json.dumps(list(outputs.choice), ensure_ascii=False)
    if outputs.grammar is not None:
        return "lark", outputs.grammar
    return "json", '{"type": "object"}'


def _short(said: str) -> str:
    """What a compiler says, without its drawing of the place."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it cannot be compiled"]
    return " ".join([lines[0], *(line for line in lines[1:] if line.startswith("error:"))])[:_SHOWN]
