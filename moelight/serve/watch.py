"""A watched folder: what is dropped there is run, one file after another.

::

    DIR/NAME.jsonl               dropped; taken once it has stopped growing
    DIR/.moelight/NAME.jsonl/    taken: input.jsonl, a job's directory around it, and ending.json once it has ended
    DIR/done/                    NAME.jsonl, NAME.output.jsonl, NAME.errors.jsonl
    DIR/failed/                  NAME.jsonl, NAME.error.txt, and the rows that were done

Each step is a rename or a whole file, so that whoever is killed goes on where that happened. A step that the system
refuses is tried again later, and holds up no other file. In ``done`` and ``failed`` a NAME is cut to what leaves room
for the longest ending.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from moelight.core.errors import ConfigError
from moelight.core.paths import write_whole
from moelight.serve import jobs
from moelight.serve.data import take_lock
from moelight.serve.jobs import Command, Job, Pace, WorkThread

SETTLE_S = 2.0  # a file that has not changed for so long is complete
_SUFFIX = ".jsonl"


class Watcher:
    """Runs what is dropped in ``root``; `run` is for a thread of its own, `stop` for any."""

    def __init__(
        self,
        root: Path,
        command: Command,
        *,
        say: Callable[[str], None],
        pace: Pace | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        """Takes ``root`` for this process.

        Raises:
            ConfigError: it is no directory that can be written, or another process watches it.
        """
        self._root, self._command, self._say = root.absolute(), command, say
        self._pace, self._settle_s = pace or Pace(), settle_s
        self._taken = self._root / ".moelight"
        self._stopping, self._news = threading.Event(), threading.Event()
        self._sizes: dict[str, tuple[int, int, float]] = {}
        self._at = ""  # the name of the file at work
        self._later: dict[str, float] = {}  # names of files that something was refused for, and when to try again
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
        """Let `run` return soon: the job that runs is interrupted, and a later start goes on with it."""
        self._stopping.set()
        self._news.set()

    def run(self) -> None:
        """Run what there is and what comes, until stopped."""
        while not self._stopping.is_set():
            try:
                job = self._next()
                if job is not None:
                    self._work(job)
                    continue
            except OSError as error:  # the disk is full, most likely
                self._say(f"{error}; tried again in {self._pace.retry_s:g} s")
                self._later[self._at] = time.monotonic() + self._pace.retry_s
                if not self._at:
                    self._news.wait(self._pace.retry_s)
            self._news.wait(max(self._pace.poll_s, self._settle_s / 4))
            self._news.clear()

    def _next(self) -> Job | None:
        """A file that was taken already, or one that is complete and is taken now."""
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
        """The oldest dropped file that has stopped growing. Links, hidden files, empty ones and those that are ``left``
        are left alone."""
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
        name = job.directory.name
        if not _ending(job).exists():
            self._say(f"{name}: begun")
            ending = jobs.finish(
                job,
                self._command,
                unwanted=self._stopping.is_set,
                seen=lambda _: None,
                say=lambda text: self._say(f"{name}: {text}"),
                news=self._news,
                pace=self._pace,
            )
            if ending is None:
                return
            why = None if ending.well else ending.why()
            self._decide(job, "done" if ending.well else "failed", why)
        self._deliver(job)

    def _decide(self, job: Job, to: str, why: str | None) -> dict[str, Any]:
        """Write down where the files go, before the first of them is moved."""
        base, most = job.directory.name.removesuffix(_SUFFIX), self._longest_stem
        stem, tries = _cut(base, most), 1
        while any((self._root / to / f"{stem}{end}").exists() for end in _ENDS):
            tries += 1
            number = f"-{tries}"
            stem = _cut(base, most - len(number)) + number
        ending = {"to": to, "stem": stem, "why": why}
        write_whole(_ending(job), json.dumps(ending))
        return ending

    @property
    def _longest_stem(self) -> int:
        """Bytes of a name that leave room for what is put behind it."""
        return os.pathconf(self._root, "PC_NAME_MAX") - max(map(len, _ENDS))

    def _deliver(self, job: Job) -> None:
        """Move what the job made, then the input, to where they belong; what was moved already stays there."""
        ending = json.loads(_ending(job).read_text(encoding="utf-8"))
        if len(os.fsencode(ending["stem"])) > self._longest_stem:  # decided by a version that did not look
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
    """``name``, or as much of its beginning as ``most`` bytes hold, without half a character at its end."""
    raw = os.fsencode(name)
    end = min(most, len(raw))
    while most - 3 <= end < len(raw) and raw[end] & 0xC0 == 0x80:  # what is cut off begins within a character
        end -= 1
    return os.fsdecode(raw[:end])


def _ending(job: Job) -> Path:
    return job.directory / "ending.json"


def watch(watcher: Watcher, *, say: Callable[[str], None]) -> int:
    """Let ``watcher`` run until a signal comes, and return its number."""
    number = 0
    thread = WorkThread(watcher.run, on_end=lambda: None)

    def on_signal(came: int, _: object) -> None:
        nonlocal number
        number = came
        watcher.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one ends at once

    before = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        thread.start()
        thread.join()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if not thread.sound:
        raise RuntimeError("the watcher ended by a fault of its own")
    say("stopped; the same command goes on")
    return number
