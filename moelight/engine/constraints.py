"""Structured outputs: answers constrained token by token to a JSON schema, a regular expression, choices or a grammar.
Each form is translated to a grammar, which is compiled once. Finished JSON answers are validated too."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from moelight.core.errors import ConfigError, InputError
from moelight.core.panics import panics_as
from moelight.core.request import INVALID, StructuredOutputs, StructureError
from moelight.engine.grammars import (
    NO_ALLOWED_TOKEN,
    NO_TOKEN,
    GrammarTrial,
    TrialResult,
    Vocabulary,
    compiled,
    short_error,
)
from moelight.engine.schema_relaxation import EnforcedSchema
from moelight.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

    from moelight.engine.schema_validation import Mismatch

KEPT = 256  # compiled grammars; most jobs have a single one, or one per row
_META = str.maketrans({letter: f"\\{letter}" for letter in r"\.+*?()|[]{}^$#&-~"})  # escapes for regular expressions


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledStructure:
    """A compiled specification of structured outputs, or the ``reason`` why it cannot be compiled."""

    matcher: llguidance.LLMatcher | None
    reason: str | None
    enforced: EnforcedSchema


class Constraints:
    """Compiles the structured outputs of one checkpoint, each distinct specification once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size``: the model's, which may be padded beyond the tokenizer's."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        ends = tokenizer.eos_token_ids
        self._special = bits([token for token in tokenizer.special_ids - ends if token < vocab_size], vocab_size)
        self._tools: tuple[llguidance.LLTokenizer, GrammarTrial] | None = None
        self._structures = lru_cache(KEPT)(self._compile)

    def close(self) -> None:
        """End the trial process and forget what was compiled; the next call begins anew."""
        if self._tools is not None:
            self._tools[1].process.close()
        self._tools = None
        self._structures.cache_clear()

    def compile(self, kind: str, text: str) -> CompiledStructure:
        """Compile a grammar of ``kind`` ``json``, ``regex`` or ``lark``, or return the reason why it cannot be
        compiled."""
        return self._structures(kind, text)

    def check(self, outputs: StructuredOutputs) -> tuple[str, ...]:
        """Return warnings about ``outputs``: keywords of a schema that only validation checks, and those without
        effect. Raises InputError if it cannot be compiled, or if no token of this model can begin an answer."""
        schema = self._structure(outputs).enforced
        checked = tuple(f"{keyword} is checked in finished answers" for keyword in schema.unenforced)
        return (*checked, *(f"{note}: ignored" for note in schema.notes))

    def open(self, outputs: StructuredOutputs) -> Constraint:
        """The constraint of a new answer; raises InputError as `check`."""
        matcher = self._structure(outputs).matcher
        assert matcher is not None
        return Constraint(matcher.deep_copy(), self._special)

    def mismatch(self, outputs: StructuredOutputs, text: str) -> StructureError | None:
        """Why ``text`` is not a JSON text that ``outputs`` accepts; None if it is, or if no JSON was asked for."""
        if (schema := outputs.schema) is None:
            return None
        try:
            problem: Mismatch | None = self._trial[1].mismatch(schema, text)
        except OSError as error:
            raise ConfigError(f"structured_outputs: no process can be begun to validate answers ({error})") from None
        return None if problem is None else StructureError(code=INVALID, **problem)

    def _structure(self, outputs: StructuredOutputs) -> CompiledStructure:
        structure = self._structures(*_written(outputs))
        reason = structure.reason
        if reason is None and outputs.strict and structure.enforced.unenforced:
            reason = (
                f"{'; '.join(structure.enforced.unenforced)} cannot be enforced while an answer is generated, and "
                "strict is true (with strict false finished answers are validated)"
            )
        if reason is None:
            return structure
        named = "structured_outputs" if outputs.json is None else "structured_outputs: JSON Schema"
        raise InputError(f"{named}: {reason}", code="invalid_structured_output")

    @property
    def _trial(self) -> tuple[llguidance.LLTokenizer, GrammarTrial]:
        if self._tools is None:
            tokenizer, size = self.tokenizer, self.vocab_size
            ends = sorted(token for token in tokenizer.eos_token_ids if token < size) or [size]
            words = Vocabulary(
                tokens=[tokenizer.token_bytes(token) for token in range(size)] + [b""] * (ends[0] == size),
                special_token_ids=sorted(token for token in tokenizer.special_ids if token < size),
                ends=ends,
                encode=tokenizer.encode,
            )
            self._tools = words.trie(), GrammarTrial(words)
        return self._tools

    def _compile(self, kind: str, text: str) -> CompiledStructure:
        trie, trial = self._trial
        try:
            tried = trial.compile(kind, text)
        except OSError as error:
            raise ConfigError(f"structured_outputs: no process can be begun to compile it ({error})") from None
        matcher, reason = (None, tried.reason) if tried.reason is not None else self._matcher(trie, kind, tried)
        return CompiledStructure(matcher=matcher, reason=reason, enforced=tried.enforced)

    def _matcher(
        self, trie: llguidance.LLTokenizer, kind: str, tried: TrialResult
    ) -> tuple[llguidance.LLMatcher | None, str | None]:
        """The initial matcher of a grammar, or the reason why there is none."""
        try:
            with panics_as(ValueError):
                matcher = compiled(trie, kind, tried.enforced.text)
        except ValueError as error:
            return None, short_error(str(error))
        first = Constraint(matcher.deep_copy(), self._special)
        return (None, first.reason) if first.allowed() is None else (matcher, None)


class Constraint:
    """The tokens that may continue one answer. ``stuck``: none may, though it is incomplete, for the reason ``reason``;
    ``left``: a token came that was not allowed, such as the first one of a reasoning."""

    def __init__(self, matcher: llguidance.LLMatcher, special: np.ndarray) -> None:
        """``special``: uint32 [V / 32], a bit for each special token that does not end a sequence."""
        self._matcher, self._special, self._words = matcher, special, len(special)
        self.stuck = self.left = False
        self.reason = NO_TOKEN

    def allowed(self, among: np.ndarray | None = None) -> np.ndarray | None:
        """uint32 [V / 32], a bit for each allowed next token, ``among`` those of uint32 [V / 32] (None: all); None if
        the answer is ``stuck``."""
        if self.left:
            self.stuck = True
            return None
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self.stuck, self.reason = True, short_error(self._matcher.get_error())
            return None
        words = np.frombuffer(mask, dtype=np.uint32)
        allowed = np.zeros(self._words, dtype=np.uint32)
        allowed[: len(words)] = words[: self._words]
        for token in bits_of(allowed & self._special):  # where no token matches, llguidance's mask holds a special one
            if not self._matcher.validate_tokens([token]):
                allowed[token // 32] &= ~np.uint32(1 << token % 32)
        if among is not None and allowed.any():
            allowed &= among
            self.reason = NO_ALLOWED_TOKEN if not allowed.any() else self.reason
        self.stuck = not allowed.any()
        return None if self.stuck else allowed

    def copy(self) -> Constraint:
        """The constraint of the same answer, to go on apart from this one."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def possible(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """The first of ``tokens`` that may follow; where the text has to go on in one way, at most ``count`` tokens of
        it."""
        if self.left or self.stuck:
            return ()
        forced = self._matcher.compute_ff_tokens()[:count]
        return forced or tokens[: self._matcher.validate_tokens(list(tokens))]

    def go_on(self, token: int) -> None:
        self._matcher.consume_token(token)

    def go_on_if_allowed(self, token: int) -> None:
        if self.left or not self._matcher.validate_tokens([token]):
            self.left = True
        else:
            self.go_on(token)

    def go_on_from(self, tokens: Iterable[int]) -> None:
        """Append the content that the last token of the reasoning begins."""
        for token in tokens:
            self.go_on_if_allowed(token)
        if self.left:
            self.reason = "the token that ends the reasoning begins an answer that does not match"

    @property
    def accepts(self) -> bool:
        """True if the answer matches as it is."""
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    @property
    def complete(self) -> bool:
        """True if the answer matches and only its end may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()


def bits(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """uint32 [V / 32] with the bits of ``tokens`` set."""
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def without(words: np.ndarray, tokens: Collection[int]) -> np.ndarray:
    """``words`` without the bits of ``tokens``; unchanged if no other bit is set."""
    rest = words & ~bits([token for token in tokens if token < 32 * len(words)], 32 * len(words))
    return rest if rest.any() else words


def bits_of(words: np.ndarray) -> list[int]:
    """The tokens whose bits are set."""
    return [32 * int(at) + bit for at in words.nonzero()[0] for bit in range(32) if int(words[at]) >> bit & 1]


def _written(outputs: StructuredOutputs) -> tuple[str, str]:
    """The kind of the grammar and its text."""
    if (schema := outputs.schema) is not None:
        return "json", schema
    if outputs.regex is not None:
        return "regex", outputs.regex
    if outputs.choice is not None:
        # One regular expression: in a grammar, each choice would be a parser item, and the parser holds 2,000 of them.
        return "regex", "|".join(text.translate(_META) for text in outputs.choice)
    return "lark", str(outputs.grammar)
