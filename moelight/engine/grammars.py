"""Compiles grammars with llguidance, after a trial in a process that a bad grammar may crash: llguidance's compiler is
recursive, and a stack overflow ends the process. `compiled` works in this process, on a stack four times as deep. A
JSON schema is checked in the trial process too, and reduced to what a grammar can enforce."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from moelight.core.confined import ConfinedProcess, EndedError
from moelight.engine.json_schema import SchemaDocument, SchemaError
from moelight.engine.schema_relaxation import EnforcedSchema, enforced

if TYPE_CHECKING:
    import llguidance

    from moelight.engine.schema_validation import Mismatch

TRIED_STACK_BYTES = 8 << 20  # each rule or $ref of a chain takes some 3 KiB
STACK_BYTES = 4 * TRIED_STACK_BYTES
TRIED_S = 10.0  # of processor time
TRIED_BYTES = 2 << 30  # of address space, beyond that of the vocabulary
NO_ALLOWED_TOKEN = "allowed_token_ids hold no token that goes on with what it asks for"
NO_TOKEN = "no token of this model's vocabulary goes on with what it asks for"
_SHOWN = 300  # characters of the compiler's message
_TOO_LARGE = ("too big", "too many", "too large", "max is", "fuel", "limit")  # llguidance's words for exceeded limits
_TOO_LARGE_FOR_IT = "it is too large for llguidance"
_TOO_DEEP = f"it is chained or nested too deeply (compiling it overflows a stack of {TRIED_STACK_BYTES >> 20} MiB)"
_WHY: Mapping[signal.Signals | None, str] = {
    signal.SIGSEGV: _TOO_DEEP,
    signal.SIGBUS: _TOO_DEEP,
    signal.SIGPROF: f"it is too large (compiling it takes more than {TRIED_S:g} s of processor time)",
    signal.SIGABRT: f"it is too large (compiling it takes more than {TRIED_BYTES >> 30} GiB), or llguidance gave it up",
}
# Between the parts of a JSON text: nothing, a space, or a new line with its indentation. Unbounded whitespace would let
# a model generate it for ever.
JSON_WHITESPACE = {"whitespace_pattern": r"( |\n {0,16})"}
_STACK_SIZE = threading.Lock()  # threading.stack_size is global
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens of a model, by llguidance's tokenizer interface: the bytes of each (empty: not text), the special
    ones, and those that end an answer. If no token ends an answer, ``ends`` is one id past the last. ``encode`` returns
    the tokens of a forced text."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    ends: Sequence[int]
    encode: Callable[[str], list[int]]
    is_tokenizer_wrapper = True
    bos_token_id = None

    @property
    def eos_token_id(self) -> int:
        return self.ends[0]

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)

    def trie(self) -> llguidance.LLTokenizer:
        """The vocabulary as a prefix tree."""
        import llguidance

        return llguidance.LLTokenizer(cast("Any", self), eos_token=list(self.ends))


def compiled(
    trie: llguidance.LLTokenizer, kind: str, text: str, *, stack_bytes: int = STACK_BYTES
) -> llguidance.LLMatcher:
    """The initial matcher of a grammar of ``kind`` ``json``, ``regex`` or ``lark``; raises ValueError, for
    `short_error`, if there is none."""
    import llguidance

    def compile_grammar() -> llguidance.LLMatcher:
        if kind == "json":
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_WHITESPACE)  # type: ignore[arg-type]
        else:
            grammar = llguidance.grammar_from(kind, text)  # type: ignore[arg-type]
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(trie, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    return _on_stack(stack_bytes, compile_grammar)


def short_error(error: str) -> str:
    """llguidance's error message without the excerpt of the grammar; exceeded limits are named as such."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["it cannot be compiled"]
    short = " ".join([lines[0], *(line for line in lines[1:] if line.startswith("error:"))])[:_SHOWN]
    if lines[0].startswith("NoExtension"):
        return NO_TOKEN
    large = any(word in lines[0] for word in _TOO_LARGE)
    return f"{_TOO_LARGE_FOR_IT} ({short})" if large else short


def _on_stack(size: int, work: Callable[[], _T]) -> _T:
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised again by whoever waits)
            outcome.set_exception(error)

    with _STACK_SIZE:
        before = threading.stack_size(size)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        except RuntimeError:
            raise MemoryError("no memory for a stack") from None
        finally:
            threading.stack_size(before)
    return outcome.result()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """The text that a structure is compiled from, ``enforced``, or the ``reason`` why it cannot be."""

    enforced: EnforcedSchema
    reason: str | None = None


class GrammarTrial:
    """Compiles grammars, and validates answers, in a process that a bad one may end."""

    def __init__(self, words: Vocabulary) -> None:
        self._words = words
        self.process = ConfinedProcess(f"{__name__}:tester", setup=self._setup, cpu_s=TRIED_S, memory_bytes=TRIED_BYTES)

    def compile(self, kind: str, text: str) -> TrialResult:
        """Try to compile ``text``; raises OSError if the process cannot be started."""
        try:
            answer: dict[str, Any] = self.process.ask(["compile", kind, text])
        except EndedError as error:
            answer = {"reason": _WHY.get(error.signal, f"compiling {error}")}
        enforced_schema = EnforcedSchema(
            text=answer.get("text", ""),
            unenforced=tuple(answer.get("unenforced", ())),
            notes=tuple(answer.get("notes", ())),
        )
        return TrialResult(enforced=enforced_schema, reason=answer.get("reason"))

    def mismatch(self, schema: str, answer: str) -> Mismatch | None:
        """As `schema_validation.mismatch`; an answer that cannot be validated within the limits is one, too."""
        try:
            return cast("Mismatch | None", self.process.ask(["validate", schema, answer]))
        except EndedError as error:
            reason = f"it takes more than {TRIED_S:g} s" if error.signal == signal.SIGPROF else str(error)
            return {"message": f"the answer cannot be validated: {reason}", "path": "", "schema_path": ""}

    def _setup(self) -> object:
        words = self._words
        named = {*words.special_token_ids, *words.ends}
        # Compile cost depends only on tokens that a grammar can name; building a tree of all others takes a second.
        texts = [
            token.decode("latin-1") if n in named or len(token) == 1 else "" for n, token in enumerate(words.tokens)
        ]
        return {"tokens": texts, "special_token_ids": list(words.special_token_ids), "ends": list(words.ends)}


def tester(setup: dict[str, Any]) -> Callable[[list[str]], Mapping[str, Any] | None]:
    """The function of the trial process: from ``["compile", kind, text]`` to the fields of a `TrialResult`, and from
    ``["validate", schema, answer]`` to a mismatch or None."""

    from moelight.engine.schema_validation import mismatch

    def encode(text: str) -> list[int]:
        return trie.greedy_tokenize(text)

    tokens = [token.encode("latin-1") for token in setup["tokens"]]
    trie = Vocabulary(**{**setup, "tokens": tokens}, encode=encode).trie()

    def answer(question: list[str]) -> Mapping[str, Any] | None:
        try:
            return answered(*question)
        except MemoryError:
            os.abort()  # a process that has once reached its limit cannot go on

    def answered(task: str, first: str, second: str) -> Mapping[str, Any] | None:
        if task == "validate":
            return mismatch(first, second)
        if first == "json":
            return _tried_schema(trie, second)
        return {"text": second, "reason": _tried(trie, first, second)}

    return answer


def _tried_schema(trie: llguidance.LLTokenizer, text: str) -> dict[str, Any]:
    from moelight.engine.schema_validation import check_schema

    try:
        document = SchemaDocument(text)
        if document.problems:
            return {"reason": "; ".join(document.problems)}
        check_schema(document)
        result = enforced(document, lambda schema: _tried(trie, "json", schema), BytePatterns())
    except SchemaError as error:
        return {"reason": str(error)}
    return {"text": result.text, "unenforced": result.unenforced, "notes": result.notes}


class BytePatterns:
    """Answers questions about regular expressions with grammars over single bytes."""

    def __init__(self) -> None:
        tokens = [bytes([value]) for value in range(256)]
        words = Vocabulary(tokens=[*tokens, b"<end>"], special_token_ids=[256], ends=[256], encode=_byte_tokens)
        self._trie = words.trie()

    def matches(self, pattern: str, name: str) -> bool:
        """True if ``pattern`` matches somewhere in ``name``."""
        return self._accepts({"type": "string", "pattern": pattern}, json.dumps(name, ensure_ascii=False)) is True

    def exhausted(self, pattern: str, names: Collection[str]) -> bool:
        """True if ``pattern`` matches no other property name than ``names``."""
        schema = {
            "type": "object",
            "properties": {name: {"type": "null"} for name in names},
            "required": list(names),
            "patternProperties": {pattern: {"type": "null"}},
            "additionalProperties": False,
        }
        members = ",".join(f"{json.dumps(name, ensure_ascii=False)}:null" for name in names)
        return self._accepts(schema, f'{{{members},"') is False

    def _accepts(self, schema: dict[str, Any], text: str) -> bool | None:
        """True if ``text`` begins a text of ``schema``; None if that does not compile."""
        try:
            matcher = compiled(self._trie, "json", json.dumps(schema), stack_bytes=TRIED_STACK_BYTES)
        except ValueError:
            return None
        tokens = _byte_tokens(text)
        return matcher.validate_tokens(tokens) == len(tokens)


def _byte_tokens(text: str) -> list[int]:
    return list(text.encode())


def _tried(trie: llguidance.LLTokenizer, kind: str, text: str) -> str | None:
    try:
        matcher = compiled(trie, kind, text, stack_bytes=TRIED_STACK_BYTES)
        # Advance one token: some grammars grow only then. The parent process, which has the whole vocabulary, rejects a
        # grammar that no token fits.
        mask = matcher.compute_bitmask()
        allowed = (token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1)
        fits = next((token for token in allowed if matcher.validate_tokens([token])), None)
        if fits is not None:
            matcher.consume_token(fits)
        message = short_error(matcher.get_error()) if matcher.is_error() else ""
        return message if message.startswith(_TOO_LARGE_FOR_IT) else None
    except ValueError as error:
        return short_error(str(error))
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 (a panic of llguidance is no Exception)
        return short_error(f"{type(error).__name__}: {error}")
