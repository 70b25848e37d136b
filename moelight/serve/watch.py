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
import stat
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from moelight.core.errors import ConfigError
from moelight.core.paths import write_whole
from moelight.serve import jobs
from moelight.serve.jobs import Job, JobRunner, WorkThread, handled_signals
from moelight.serve.store import take_lock

SETTLE_S = 2.0  # a file that has not changed for this long is complete
_SUFFIX = ".jsonl"


class Watcher:
    """Locks ``root`` and runs the files dropped there; call `run` in a thread of its own, which ends when ``runner`` is
    stopped."""

    def __init__(self, root: Path, runner: JobRunner, *, settle_s: float = SETTLE_S) -> None:
        self._root, self._runner, self._settle_s = root.absolute(), runner, settle_s
        self._taken = self._root / ".moelight"
        self._since: dict[tuple[str, int, int], float] = {}  # first seen with this name, size and time of change
        self._later: dict[str, float] = {}  # names of files with a failed step, and the time of the next try
        if not root.is_dir():
            raise ConfigError(f"--watch {root}: no such directory")
        try:
            self._taken.mkdir(mode=0o700, exist_ok=True)
            self._lock = take_lock(self._taken / "lock", label=f"--watch {root}")
            for name in ("done", "failed"):
                (self._root / name).mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--watch {root}: cannot be used ({(error.strerror or str(error)).lower()})") from None

    def run(self) -> None:
        """Run present and future files, until stopped."""
        runner = self._runner
        while not runner.stopping.is_set():
            if not self._step():
                runner.wait(max(runner.pace.poll_s, self._settle_s / 4))

    def _step(self) -> bool:
        """Run a file taken before, or one that is complete; return False if there is none, or a step failed."""
        now, retry_s, name = time.monotonic(), self._runner.pace.retry_s, ""
        self._later = {name: due for name, due in self._later.items() if due > now}
        try:
            taken = sorted(path.name for path in self._taken.iterdir() if path.is_dir())
            ready = [name for name in taken if name not in self._later] or self._complete(but={*self._later, *taken})
            if not ready:
                return False
            name = ready[0]
            self._work(name, taken=name in taken)
        except OSError as error:  # the disk is full, most likely
            self._runner.say(f"{error}; tried again in {retry_s:g} s")
            self._later[name] = time.monotonic() + retry_s
            if not name:
                self._runner.news.wait(retry_s)
            return False
        return True

    def _complete(self, but: Collection[str]) -> list[str]:
        """Return the files that have stopped growing, oldest first; not links, hidden and empty files, and ``but``."""
        now, before, ready = time.monotonic(), self._since, []
        self._since = {}
        for path in self._root.iterdir():
            if path.suffix != _SUFFIX or path.name.startswith(".") or path.name in but:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_size:
                    state = (path.name, status.st_size, status.st_mtime_ns)
                    self._since[state] = before.get(state, now)
                    if now - self._since[state] >= self._settle_s:
                        ready.append((status.st_mtime_ns, path.name))
        return [name for _, name in sorted(ready)]

    def _work(self, name: str, *, taken: bool) -> None:
        job = Job(source=self._taken / name / "input.jsonl", directory=self._taken / name)
        if not taken:
            job.directory.mkdir(mode=0o700)
            (self._root / name).rename(job.source)
        if not _ending(job).exists():
            if not job.source.exists():  # killed before the file was taken
                shutil.rmtree(job.directory)
                return
            self._runner.say(f"{name}: begun")
            ending = self._runner.finish(job)
            if ending is None:
                return
            self._decide(job, "done" if ending.complete else "failed", None if ending.complete else ending.reason())
        self._deliver(job)

    def _decide(self, job: Job, to: str, reason: str | None) -> dict[str, Any]:
        """Record where the files will be moved, before the first of them is moved."""
        base, max_bytes = job.name.removesuffix(_SUFFIX), self._longest_stem
        stem, tries = _cut(base, max_bytes), 1
        while any((self._root / to / f"{stem}{end}").exists() for end in _ENDS):
            tries += 1
            stem = _cut(base, max_bytes - len(f"-{tries}")) + f"-{tries}"
        ending = {"to": to, "stem": stem, "why": reason}
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
        for kind, path in job.files.items():
            rows[kind] = jobs.truncate_partial_line(path)
            if rows[kind]:
                path.rename(to / f"{stem}.{kind}{_SUFFIX}")
        if ending["why"] is not None:
            write_whole(to / f"{stem}.error.txt", ending["why"] + "\n")
        with contextlib.suppress(FileNotFoundError):
            job.source.rename(to / f"{stem}{_SUFFIX}")
        shutil.rmtree(job.directory)
        reason = f" ({ending['why']})" if ending["why"] else f", {rows['output']} answered, {rows['errors']} refused"
        named = "" if f"{stem}{_SUFFIX}" == job.name else f" as {stem}{_SUFFIX}"
        self._runner.say(f"{job.name}: {ending['to']}{named}{reason}")


_ENDS = (_SUFFIX, f".output{_SUFFIX}", f".errors{_SUFFIX}", ".error.txt")


def _cut(name: str, max_bytes: int) -> str:
    """Return ``name``, truncated to at most ``max_bytes`` bytes at a character boundary."""
    while len(os.fsencode(name)) > max_bytes:
        name = name[:-1]
    return name


def _ending(job: Job) -> Path:
    return job.directory / "ending.json"


def watch(watcher: Watcher, runner: JobRunner) -> int:
    """Run ``watcher`` until a signal arrives, and return its number."""
    thread = WorkThread(watcher.run)

    def stop(*_: object) -> None:
        runner.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one ends at once

    with handled_signals(stop) as came:
        thread.start()
        thread.finish()
    runner.say("stopped; the same command goes on")
    return came[-1] if came else 0
