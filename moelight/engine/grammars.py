"""Compiles grammars with llguidance, after a trial in a separate process that a bad grammar may crash.

llguidance's compiler is recursive, and a stack overflow ends the process without an exception. Does not depend on
requests and answers. The trial process runs this file as a script with the standard library and llguidance alone, so
this module must not import moelight.

::

    GrammarProcess.why_not(kind, text) ──[kind, text]──► serve_grammars: compile, first token ──why or null──► why
                                                         or the process dies: why, by its signal
    compiled(trie, kind, text): the same in this process, on a stack four times as deep
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    import llguidance

TRIED_STACK_BYTES = 8 << 20  # each rule or $ref of a chain takes some 3 KiB
STACK_BYTES = 4 * TRIED_STACK_BYTES
TRIED_S = 10.0  # of processor time
TRIED_BYTES = 2 << 30  # of address space, beyond that of the vocabulary
NO_TOKEN = "no token of this model's vocabulary goes on with what it asks for"
_SHOWN = 300  # characters of the compiler's message
_TOO_LARGE = ("too big", "too many", "too large", "max is", "fuel", "limit")  # llguidance's words for exceeded limits
_TOO_LARGE_FOR_IT = "it is too large for llguidance"
_TOO_DEEP = f"it is chained or nested too deeply (compiling it overflows a stack of {TRIED_STACK_BYTES >> 20} MiB)"
_WHY = {
    signal.SIGSEGV: _TOO_DEEP,
    signal.SIGBUS: _TOO_DEEP,
    signal.SIGPROF: f"it is too large (compiling it takes more than {TRIED_S:g} s of processor time)",
    signal.SIGABRT: f"it is too large (compiling it takes more than {TRIED_BYTES >> 30} GiB), or llguidance gave it up",
}
# Between the parts of a JSON text: nothing, a space, or a new line with its indentation. Unbounded whitespace would let
# a model generate it for ever.
_WHITESPACE = {"whitespace_pattern": r"( |\n {0,16})"}
_STACK_SIZE = threading.Lock()  # threading.stack_size is global
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The tokens of a model: the bytes of each (empty: not text), the ``special`` ones, and those that end an answer.
    If no token ends an answer, ``ends`` holds one id past the last, which the model does not have."""

    tokens: Sequence[bytes]
    special: Sequence[int]
    ends: Sequence[int]


class _Wrapper:
    """A vocabulary behind llguidance's tokenizer interface."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, words: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = words.tokens, words.special, words.ends[0]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def trie_of(words: Vocabulary, encode: Callable[[str], list[int]]) -> llguidance.LLTokenizer:
    """The vocabulary as a prefix tree. ``encode`` returns the tokens of a forced text."""
    import llguidance

    wrapper: Any = _Wrapper(words, encode)
    return llguidance.LLTokenizer(wrapper, eos_token=list(words.ends))


def compiled(
    trie: llguidance.LLTokenizer, kind: str, text: str, *, stack_bytes: int = STACK_BYTES
) -> llguidance.LLMatcher | str:
    """The initial matcher of a grammar, or the reason why there is none. ``kind`` is ``json``, ``regex`` or
    ``lark``."""
    return _on_stack(stack_bytes, lambda: _compiled(trie, kind, text))


def _compiled(trie: llguidance.LLTokenizer, kind: str, text: str) -> llguidance.LLMatcher | str:
    import llguidance

    try:
        if kind == "json":
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_WHITESPACE)  # type: ignore[arg-type]
        else:
            grammar = llguidance.grammar_from(kind, text)  # type: ignore[arg-type]
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(trie, grammar, log_level=0, limits=limits)
    except ValueError as error:
        return said(str(error))
    return said(matcher.get_error()) if matcher.is_error() else matcher


def said(error: str) -> str:
    """llguidance's error message without the excerpt of the grammar; exceeded limits are named as such."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["it cannot be compiled"]
    short = " ".join([lines[0], *(line for line in lines[1:] if line.startswith("error:"))])[:_SHOWN]
    if lines[0].startswith("NoExtension"):
        return NO_TOKEN
    large = any(word in lines[0] for word in _TOO_LARGE)
    return f"{_TOO_LARGE_FOR_IT} ({short})" if large else short


def _on_stack(size: int, work: Callable[[], _T]) -> _T:
    """Return ``work()``, run on a stack of ``size`` bytes."""
    found: list[_T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 (raised again by whoever waits)
            raised.append(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(size)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


class GrammarProcess:
    """The process in which grammars are tried: started for the first grammar, and restarted after one that crashed it.
    The process ends with this object or with the parent process."""

    def __init__(self, words: Vocabulary) -> None:
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = _nothing

    def why_not(self, kind: str, text: str) -> str | None:
        """The reason why a grammar cannot be compiled; None if it can.

        Raises:
            OSError: the process cannot be started.
        """
        why = self._ask(kind, text)
        if isinstance(why, signal.Signals) and why not in _WHY:  # sent from outside, so not caused by the grammar
            why = self._ask(kind, text)
        if not isinstance(why, signal.Signals):
            return why
        return _WHY.get(why, f"compiling it ended with {why.name}")

    def close(self) -> None:
        """End the process; the next grammar starts another."""
        self._end()
        self._process = None

    def _ask(self, kind: str, text: str) -> str | signal.Signals | None:
        """The reason why a grammar cannot be compiled, or the signal that ended the process."""
        if self._process is None:
            self._begin()
        process = cast("subprocess.Popen[bytes]", self._process)
        try:
            answer = _exchange(process, [kind, text])
        except BaseException:  # an interrupt between request and answer
            process.kill()
            self.close()
            raise
        if answer is not None:
            return cast("str | None", json.loads(answer))
        code = process.wait()
        self.close()
        return signal.Signals(-code) if code < 0 else f"compiling it ended with exit code {code}"

    def _begin(self) -> None:
        command = [sys.executable, "-I", __file__]
        # A separate session, so that Ctrl-C reaches the job but not this process.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._process, self._end = process, weakref.finalize(self, _end, process)
        words = self._words
        named = {*words.special, *words.ends}
        # Compile cost depends only on tokens that a grammar can name; building a tree of all others takes a second.
        texts = [
            token.decode("latin-1") if n in named or len(token) == 1 else "" for n, token in enumerate(words.tokens)
        ]
        given = {"path": sys.path, "tokens": texts, "special": list(words.special), "ends": list(words.ends)}
        given |= {"stack_bytes": TRIED_STACK_BYTES, "cpu_s": TRIED_S, "bytes": TRIED_BYTES}
        if _exchange(process, given) is None:
            self.close()
            raise OSError(f"no process to try grammars in: {' '.join(command)} ends with {process.returncode}")


def _exchange(process: subprocess.Popen[bytes], question: object) -> bytes | None:
    """The answer's line; None if the process is dead."""
    asked, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
    try:
        asked.write(json.dumps(question).encode() + b"\n")
        asked.flush()
    except BrokenPipeError:
        return None
    answer = answers.readline()
    return answer if answer.endswith(b"\n") else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes, upon which the process exits, and wait for it."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            cast("IO[bytes]", pipe).close()
    process.wait()


def _nothing() -> None:
    return None


def serve_grammars() -> None:
    """Answer each grammar on standard input, a line of JSON, with a line: the reason why it cannot be compiled, or
    null."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    given = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = given["path"]
    tokens = [token.encode("latin-1") for token in given["tokens"]]

    def encode(text: str) -> list[int]:
        return trie.greedy_tokenize(text)

    trie = trie_of(Vocabulary(tokens=tokens, special=given["special"], ends=given["ends"]), encode)
    _limit_memory(given["bytes"])
    _answer(None)
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, given["cpu_s"])
        why = _tried(trie, kind, text, given["stack_bytes"])
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _answer(why)


def _tried(trie: llguidance.LLTokenizer, kind: str, text: str, stack_bytes: int) -> str | None:
    try:
        found = compiled(trie, kind, text, stack_bytes=stack_bytes)
        if isinstance(found, str):
            return found
        # Advance one token: some grammars grow only then. The parent process, which has the whole vocabulary, rejects a
        # grammar that no token fits.
        mask = int.from_bytes(found.compute_bitmask(), "little")
        fits = next((token for token in _bits(mask) if found.validate_tokens([token])), None)
        if fits is not None:
            found.consume_token(fits)
        why = said(found.get_error()) if found.is_error() else None
        return why if why is not None and why.startswith(_TOO_LARGE_FOR_IT) else None
    except BaseException as error:  # noqa: BLE001 (a panic of llguidance is no Exception)
        return said(f"{type(error).__name__}: {error}")


def _bits(mask: int) -> Iterator[int]:
    """Positions of the ones in ``mask``, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _limit_memory(more: int) -> None:
    """Limit this process to ``more`` bytes of address space beyond its present use."""
    with open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + more
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(value: str | None) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve_grammars()
