"""Work on untrusted input in a child process, which may crash, run out of processor time or out of memory.

::

    ConfinedProcess.ask(question) ──a line of JSON──► answer_questions: within the limits ──a line of JSON──► answer
                                                      or the process ends: EndedError
"""

from __future__ import annotations

import contextlib
import importlib
import json
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO, Any, cast

_MAIN = (
    "import json, sys; given = json.loads(sys.stdin.buffer.readline()); sys.path[:] = given['path']; "
    f"from {__name__} import answer_questions; answer_questions(given)"
)


class EndedError(Exception):
    """A question ended the process: by ``signal``, or with an exit code where that is None."""

    def __init__(self, code: int) -> None:
        self.signal = signal.Signals(-code) if code < 0 else None
        super().__init__(f"it ended with {self.signal.name if self.signal else f'exit code {code}'}")


class ConfinedProcess:
    """A process that answers questions, each within ``cpu_s`` seconds of processor time and ``memory_bytes`` of address
    space beyond that of the idle process. Thread-safe. It is started for the first question and after one that ended
    it, and ends with this object or the parent process."""

    def __init__(
        self, answerer: str, *, cpu_s: float, memory_bytes: int, setup: Callable[[], object] = lambda: None
    ) -> None:
        """``answerer``: ``module:function``; the process calls it with ``setup()`` for the function that answers."""
        self._answerer, self._setup = answerer, setup
        self._cpu_s, self._memory_bytes = cpu_s, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._lock = threading.RLock()

    def ask(self, question: object) -> Any:
        """The answer to ``question``, both JSON values. Raises EndedError if the question ended the process (asked
        twice if the signal may have been sent from outside), OSError if it cannot be started, TypeError or ValueError
        for no JSON value."""
        line = _encode(question)
        with self._lock:
            try:
                return self._ask(line)
            except EndedError as error:
                if error.signal in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    return self._ask(line)
                raise

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._end()
            self._process = None

    def _ask(self, line: bytes) -> Any:
        if self._process is None:
            self._start()
        process = cast("subprocess.Popen[bytes]", self._process)
        try:
            answer = _exchange(process, line)
        except BaseException:  # an interrupt between question and answer
            process.kill()
            self.close()
            raise
        if answer is not None:
            return json.loads(answer)
        code = process.wait()
        self.close()
        raise EndedError(code)

    def _start(self) -> None:
        # A separate session, so that Ctrl-C reaches the job but not this process.
        self._process = process = subprocess.Popen(
            [sys.executable, "-I", "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, process)
        request = {"path": sys.path, "answerer": self._answerer, "setup": self._setup()}
        request |= {"cpu_s": self._cpu_s, "memory_bytes": self._memory_bytes}
        if _exchange(process, _encode(request)) is None:
            self.close()
            raise OSError(f"the process for {self._answerer} ends with {process.returncode}")


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes | None:
    """The answer's line; None if the process is dead."""
    asked, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
    try:
        asked.write(line)
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


def answer_questions(request: dict[str, Any]) -> None:
    """The program of the process: answer each question on standard input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    module, _, function = request["answerer"].partition(":")
    answer = getattr(importlib.import_module(module), function)(request["setup"])
    _limit_memory(request["memory_bytes"])
    _write(_encode(None))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        reply = _encode(answer(json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(reply)


def _limit_memory(more: int) -> None:
    """Limit this process to ``more`` bytes of address space beyond its present use."""
    with open("/proc/self/statm", encoding="ascii") as file:
        max_bytes = int(file.read().split()[0]) * resource.getpagesize() + more
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or max_bytes < hard:
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def _encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
