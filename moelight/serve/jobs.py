"""One job in a process of its own: started, watched, interrupted, started again, and never left behind.

The journal of ``moelight generate`` alone decides if a job is done, whatever the exit code of its process. Does not
depend on batches or the origin of a job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from moelight.batch.paths import journal_of
from moelight.batch.store import read_record
from moelight.core.errors import InputError
from moelight.serve import child_process
from moelight.serve.store import LOG, RowCounts, private, try_lock

REFUSED, STORAGE = 2, 74
MOST_CRASHES = 3  # consecutive, without a completed row in between
_MAX_STATUS_BYTES = 1 << 20
_ROOM_BYTES = 1 << 20  # free space required before a job is started again
_LONGEST_WAIT = 64  # of Pace.retry_s
_MAX_MESSAGE = 2000


class _JobStatus(msgspec.Struct):
    request_counts: RowCounts


_STATUS = msgspec.json.Decoder(_JobStatus)  # made here: two threads at the first use of a class end the process


class Job:
    """The paths that one job reads and writes. ``directory`` belongs to the job and holds everything but the input."""

    def __init__(self, *, source: Path, directory: Path) -> None:
        self.source, self.directory, self.name = source, directory, directory.name
        self.output = directory / "output.jsonl"  # rows of answered requests
        self.errors = directory / "errors.jsonl"  # rows of requests that could not be served
        self.files = {"output": self.output, "errors": self.errors}
        self.status = directory / "status.json"  # progress of the job while it runs
        self.log = directory / LOG  # output of the process
        self.lock = directory / "worker.lock"  # held by the running process

    def counts(self) -> RowCounts | None:
        """Return the counts of the status file; None if the file is missing or invalid."""
        try:
            with self.status.open("rb") as file:
                return _STATUS.decode(file.read(_MAX_STATUS_BYTES)).request_counts
        except (OSError, ValueError):
            return None

    def result(self) -> tuple[RowCounts, bool]:
        """Return the counts of the journal, and True if the job is done.

        Done: each row is answered or an error row, and the files are as long as the journal says.
        """
        try:
            past = read_record(journal_of(self.output))
        except (OSError, InputError):
            past = None
        if past is None:
            return RowCounts(), False
        rows = RowCounts(total=past.total, completed=past.completed, failed=past.failed)
        sizes = {name: path.stat().st_size for name, path in self.files.items() if path.exists()}
        as_long = all(sizes.get(name, 0) == past.ends.get(name, 0) for name in self.files)
        return rows, past.stage == "complete" and rows.done == rows.total and as_long

    def usage(self) -> dict[str, Any] | None:
        """Return the sums of tokens of the answered rows, as OpenAI's batch object has them; None without a journal."""
        try:
            past = read_record(journal_of(self.output))
        except (OSError, InputError):
            past = None
        if past is None:
            return None
        names = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
        prompts, generated, cached, reasoning = (past.totals.get(name, 0) for name in names)
        return {
            "input_tokens": prompts,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompts + generated,
        }


Command = Callable[[Job], Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The end of a process: its exit code, negative for a signal, its last line of output, and `Job.result`."""

    code: int
    message: str
    rows: RowCounts
    complete: bool

    def reason(self) -> str:
        if self.code == REFUSED:
            return self.message or "the job was refused"
        if self.code == STORAGE:
            return self.message.partition(";")[0] or "the disk is full or fails"
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        if self.code in (0, 1):  # the exit code of a finished job, but the journal is incomplete
            how += f" and {self.rows.done} rows"
        return f"the job ended with {how}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Seconds: between polls of a job, for an interrupted job to end, before a crashed job is started again."""

    poll_s: float = 0.25
    grace_s: float = 30.0
    retry_s: float = 5.0


def generate_command(model: str, options: Sequence[str] = (), *, line_format: str) -> Command:
    """Return the command of a job: ``moelight generate`` with ``options`` unchanged."""

    def command(job: Job) -> list[str]:
        return [
            *(sys.executable, "-m", "moelight.cli.main", "generate", str(job.source), "--model", model),
            *("-o", str(job.output), "--error-file", str(job.errors), "--status", str(job.status)),
            *("--order", "completion", "--format", line_format, *options),
        ]

    return command


class JobRunner:
    """Runs jobs one after another, each in processes of ``command`` until its ending is final.

    Other threads may set ``news``, so that the runner checks at once, and call `stop`. ``blocked`` is the name of a job
    that waits for its disk, and the reason.
    """

    def __init__(self, command: Command, *, say: Callable[[str], None], pace: Pace | None = None) -> None:
        self.say, self.pace = say, pace or Pace()
        self.stopping, self.news = threading.Event(), threading.Event()
        self.blocked: tuple[str, str] | None = None
        self._command = command

    def stop(self) -> None:
        """Set ``stopping``: the running job is interrupted, and resumed by a later start."""
        self.stopping.set()
        self.news.set()

    def wait(self, seconds: float | None = None) -> None:
        self.news.wait(seconds)
        self.news.clear()

    def finish(
        self,
        job: Job,
        *,
        unwanted: Callable[[], bool] = lambda: False,
        seen: Callable[[RowCounts], None] = lambda _: None,
    ) -> Ending | None:
        """Run the job, again after a crash, until its ending is final; return None if the runner is stopped or the job
        ``unwanted`` first.

        ``seen`` is called with every change of the counts. The same job run again resumes after its finished rows.
        """
        crashes, refusals, rows = 0, 0, 0

        def look(counts: RowCounts) -> None:
            nonlocal crashes, refusals, rows
            if counts.done > rows:
                crashes, refusals, rows = 0, 0, counts.done
            seen(counts)

        def ends() -> bool:
            return self.stopping.is_set() or unwanted()

        while not ends():
            ending = self._process(job, ends, look)
            if ending.complete:
                return ending
            look(ending.rows)
            if ends():
                return None
            if ending.code == STORAGE:
                self.say(f"{job.name}: {ending.reason()}; goes on once there is room")
                self.blocked = job.name, f"{ending.reason()}; the batch goes on once there is room"
                self._wait_for_room(job.directory, self.pace.retry_s * min(1 << refusals, _LONGEST_WAIT), ends)
                self.blocked = None
                refusals += 1
                continue
            crashes += 1
            if ending.code == REFUSED or crashes == MOST_CRASHES:
                return ending
            self.say(f"{job.name}: {ending.reason()}; begun again")
            self.wait(self.pace.retry_s)
        return None

    def _process(self, job: Job, ends: Callable[[], bool], look: Callable[[RowCounts], None]) -> Ending:
        """Run one process; interrupt it when the job ``ends`` early, and kill it if it does not exit in time."""
        job.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        guard = (sys.executable, "-I", "-S", child_process.__file__, str(os.getpid()), str(job.lock))
        with open(job.log, "ab", opener=private) as log:
            begin = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                [*guard, *self._command(job)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        last, deadline = None, None
        try:
            while True:
                ended = process.poll() is not None  # polled first, so that the last write of the process is seen
                counts = job.counts()
                if counts is not None and counts != last:
                    look(counts)
                    last = counts
                if ended or (deadline is not None and time.monotonic() > deadline):
                    break
                if deadline is None and ends():
                    process.send_signal(signal.SIGINT)
                    deadline = time.monotonic() + self.pace.grace_s
                self.wait(self.pace.poll_s)
        finally:
            if process.poll() is None:  # the process did not exit, or watching failed
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        rows, complete = job.result()
        return Ending(code=process.returncode, message=_last_line(job.log, begin), rows=rows, complete=complete)

    def _wait_for_room(self, directory: Path, every_s: float, ends: Callable[[], bool]) -> None:
        """Return when ``directory`` is writable again or the job ``ends``."""
        while not ends():
            self.wait(every_s)
            with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory) as probe:
                probe.write(bytes(_ROOM_BYTES))
                probe.flush()
                os.fsync(probe.fileno())
                return


def _last_line(log: Path, begin: int) -> str:
    """Return the last non-blank line of ``log`` after byte ``begin``."""
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(begin, end - 8 * _MAX_MESSAGE))
        lines = file.read().decode("utf-8", "replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last.removeprefix("moelight: error: ")[:_MAX_MESSAGE]


def wait_until_free(job: Job, *, within_s: float) -> None:
    """Wait until a job's process of an earlier server is gone; raises TimeoutError after ``within_s`` seconds."""
    if not job.directory.is_dir():
        return
    deadline = time.monotonic() + within_s
    while (held := try_lock(job.lock)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{job.directory}: an earlier process still works there")
        time.sleep(0.05)
    os.close(held)


class WorkThread(threading.Thread):
    """The one thread that starts jobs: the kernel kills a job with the thread that started it (`child_process`).

    A daemon, so that a second interrupt ends the program at once.
    """

    def __init__(self, work: Callable[[], None], *, on_end: Callable[[], None] = lambda: None) -> None:
        super().__init__(name="worker", daemon=True)
        self._work, self._on_end, self._sound = work, on_end, False

    def run(self) -> None:
        try:
            self._work()
            self._sound = True
        finally:
            self._on_end()

    def finish(self) -> None:
        """Wait for the end; raises RuntimeError if ``work`` raised, which is printed already."""
        self.join()
        if not self._sound:
            raise RuntimeError("the worker ended by a fault of its own")


@contextlib.contextmanager
def handled_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[list[int]]:
    """Call ``handle`` for SIGINT and SIGTERM within the block; yield the list of signals received so far."""
    came: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        came.append(number)
        handle(number, frame)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def truncate_partial_line(path: Path) -> int:
    """Cut off a line left incomplete by a kill; return the number of complete lines, 0 where there is no file."""
    lines = size = 0
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        for line in file:
            if line.endswith(b"\n"):
                lines, size = lines + 1, size + len(line)
        file.truncate(size)
        os.fsync(file.fileno())
    return lines
