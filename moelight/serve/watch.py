"""A watched folder: files dropped there are run one after another.

::

    DIR/NAME.jsonl               dropped; taken once it has stopped growing
    DIR/.moelight/NAME.jsonl/    taken: a job's directory with input.jsonl, and ending.json once the job has ended
    DIR/done/                    NAME.jsonl, NAME.output.jsonl, NAME.errors.jsonl
    DIR/failed/                  NAME.jsonl, NAME.error.txt, and the completed rows

Each step is a rename or an atomic file write, so a killed process resumes where it stopped. A step that the system
rejects is retried later, and does not block other files. In ``done`` and ``failed``, NAME is truncated to leave space
for the longest suffix.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from moelight.core.errors import ConfigError
from moelight.core.paths import write_whole
from moelight.serve import jobs
from moelight.serve.jobs import Command, Job, JobRunner, Pace, WorkThread, handled_signals
from moelight.serve.store import take_lock

SETTLE_S = 2.0  # a file that has not changed for this long is complete
_SUFFIX = ".jsonl"


class Watcher:
    """Locks ``root`` and runs the files dropped there; call `run` in a thread of its own, `stop` from any thread."""

    def __init__(
        self,
        root: Path,
        command: Command,
        *,
        say: Callable[[str], None],
        pace: Pace | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._root, self._say, self._settle_s = root.absolute(), say, settle_s
        self._runner = JobRunner(command, say=say, pace=pace)
        self._taken = self._root / ".moelight"
        self._sizes: dict[str, tuple[int, int, float]] = {}
        self._at = ""  # the name of the running file
        self._later: dict[str, float] = {}  # names of files with a failed step, and the time of the next try
        if not root.is_dir():
            raise ConfigError(f"--watch {root}: no such directory")
        try:
            self._taken.mkdir(mode=0o700, exist_ok=True)
            self._lock = take_lock(self._taken / "lock", what=f"--watch {root}")
            for name in ("done", "failed"):
                (self._root / name).mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--watch {root}: cannot be used ({(error.strerror or str(error)).lower()})") from None

    def stop(self) -> None:
        """Make `run` return soon: the running job is interrupted, and resumed by a later start."""
        self._runner.stop()

    def run(self) -> None:
        """Run present and future files, until stopped."""
        runner = self._runner
        while not runner.stopping.is_set():
            try:
                job = self._next()
                if job is not None:
                    self._work(job)
                    continue
            except OSError as error:  # the disk is full, most likely
                self._say(f"{error}; tried again in {runner.pace.retry_s:g} s")
                self._later[self._at] = time.monotonic() + runner.pace.retry_s
                if not self._at:
                    runner.news.wait(runner.pace.retry_s)
            runner.wait(max(runner.pace.poll_s, self._settle_s / 4))

    def _next(self) -> Job | None:
        """Return the job of a file taken before, or of a complete file, which is taken now; None if there is none."""
        now, self._at = time.monotonic(), ""
        self._later = {name: due for name, due in self._later.items() if due > now}
        taken = sorted(path for path in self._taken.iterdir() if path.is_dir())
        for directory in taken:
            if directory.name not in self._later:
                self._at = directory.name
                job = Job(source=directory / "input.jsonl", directory=directory)
                if job.source.exists() or _ending(job).exists():
                    return job
                shutil.rmtree(directory)
        path = self._complete(left={*self._later, *(path.name for path in taken)})
        if path is None:
            return None
        self._at = path.name
        job = Job(source=self._taken / path.name / "input.jsonl", directory=self._taken / path.name)
        job.directory.mkdir(mode=0o700)
        path.rename(job.source)
        return job

    def _complete(self, left: Collection[str]) -> Path | None:
        """Return the oldest file that has stopped growing. Links, hidden and empty files, and ``left``, are skipped."""
        now, before, ready = time.monotonic(), self._sizes, []
        self._sizes = {}
        with os.scandir(self._root) as entries:
            for entry in entries:
                if not entry.name.endswith(_SUFFIX) or entry.name.startswith(".") or entry.name in left:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if not entry.is_file(follow_symlinks=False) or not found.st_size:
                        continue
                    size, changed, since = before.get(entry.name, (-1, 0, now))
                    if (size, changed) != (found.st_size, found.st_mtime_ns):
                        since = now
                    self._sizes[entry.name] = (found.st_size, found.st_mtime_ns, since)
                    if now - since >= self._settle_s:
                        ready.append((found.st_mtime_ns, entry.name))
        return self._root / min(ready)[1] if ready else None

    def _work(self, job: Job) -> None:
        if not _ending(job).exists():
            name = job.directory.name
            self._say(f"{name}: begun")
            ending = self._runner.finish(job, name, unwanted=self._runner.stopping.is_set)
            if ending is None:
                return
            self._decide(job, "done" if ending.whole else "failed", None if ending.whole else ending.why())
        self._deliver(job)

    def _decide(self, job: Job, to: str, why: str | None) -> dict[str, Any]:
        """Record where the files will be moved, before the first of them is moved."""
        base, most = job.directory.name.removesuffix(_SUFFIX), self._longest_stem
        stem, tries = _cut(base, most), 1
        while any((self._root / to / f"{stem}{end}").exists() for end in _ENDS):
            tries += 1
            stem = _cut(base, most - len(f"-{tries}")) + f"-{tries}"
        ending = {"to": to, "stem": stem, "why": why}
        write_whole(_ending(job), json.dumps(ending))
        return ending

    @property
    def _longest_stem(self) -> int:
        """The most bytes of a name that leave space for its suffix."""
        return os.pathconf(self._root, "PC_NAME_MAX") - max(map(len, _ENDS))

    def _deliver(self, job: Job) -> None:
        """Move the job's output, then the input, to their destination; files moved by an earlier try are skipped."""
        ending = json.loads(_ending(job).read_text(encoding="utf-8"))
        if len(os.fsencode(ending["stem"])) > self._longest_stem:  # recorded by a version that did not check the length
            ending = self._decide(job, ending["to"], ending["why"])
        to, stem = self._root / ending["to"], ending["stem"]
        rows = {}
        for what, path in (("output", job.output), ("errors", job.errors)):
            rows[what] = jobs.truncate_partial_line(path)
            if rows[what]:
                path.rename(to / f"{stem}.{what}{_SUFFIX}")
        if ending["why"] is not None:
            write_whole(to / f"{stem}.error.txt", ending["why"] + "\n")
        with contextlib.suppress(FileNotFoundError):
            job.source.rename(to / f"{stem}{_SUFFIX}")
        shutil.rmtree(job.directory)
        why = f" ({ending['why']})" if ending["why"] else f", {rows['output']} answered, {rows['errors']} refused"
        named = "" if f"{stem}{_SUFFIX}" == job.directory.name else f" as {stem}{_SUFFIX}"
        self._say(f"{job.directory.name}: {ending['to']}{named}{why}")


_ENDS = (_SUFFIX, f".output{_SUFFIX}", f".errors{_SUFFIX}", ".error.txt")


def _cut(name: str, most: int) -> str:
    """Return ``name``, truncated to at most ``most`` bytes at a character boundary."""
    while len(os.fsencode(name)) > most:
        name = name[:-1]
    return name


def _ending(job: Job) -> Path:
    return job.directory / "ending.json"


def watch(watcher: Watcher, *, say: Callable[[str], None]) -> int:
    """Run ``watcher`` until a signal arrives, and return its number."""
    thread = WorkThread(watcher.run, on_end=lambda: None)

    def stop(*_: object) -> None:
        watcher.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one ends at once

    with handled_signals(stop) as came:
        thread.start()
        thread.join()
    if not thread.sound:
        raise RuntimeError("the watcher ended by a fault of its own")
    say("stopped; the same command goes on")
    return came[-1] if came else 0
