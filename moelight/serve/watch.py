"""A watched folder: what is dropped there is run, one file after another.

::

    DIR/NAME.jsonl               dropped; taken once it has stopped growing
    DIR/.moelight/NAME.jsonl/    taken: input.jsonl, a job's directory around it, and ending.json once it has ended
    DIR/done/                    NAME.jsonl, NAME.output.jsonl, NAME.errors.jsonl
    DIR/failed/                  NAME.jsonl, NAME.error.txt, and the rows that were done

Each step is a rename or a whole file, so that whoever is killed goes on where that happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from moelight.core.errors import ConfigError
from moelight.core.paths import write_whole
from moelight.serve import jobs
from moelight.serve.data import take_lock
from moelight.serve.jobs import Command, Ending, Job, Pace, WorkThread

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
                self._news.wait(self._pace.retry_s)
            self._news.wait(max(self._pace.poll_s, self._settle_s / 4))
            self._news.clear()

    def _next(self) -> Job | None:
        """A file that was taken already, or one that is complete and is taken now."""
        for directory in sorted(self._taken.iterdir()):
            if directory.is_dir():
                job = Job(source=directory / "input.jsonl", directory=directory)
                if job.source.exists() or _ending(job).exists():
                    return job
                shutil.rmtree(directory)
        path = self._complete()
        if path is None:
            return None
        job = Job(source=self._taken / path.name / "input.jsonl", directory=self._taken / path.name)
        job.directory.mkdir(mode=0o700)
        path.rename(job.source)
        return job

    def _complete(self) -> Path | None:
        """The oldest dropped file that has stopped growing. Links, hidden files and empty ones are left alone."""
        now, before, ready = time.monotonic(), self._sizes, []
        self._sizes = {}
        with os.scandir(self._root) as entries:
            for entry in entries:
                if not entry.name.endswith(_SUFFIX) or entry.name.startswith("."):
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
            self._decide(job, ending)
        self._deliver(job)

    def _decide(self, job: Job, ending: Ending) -> None:
        """Write down where the files go, before the first of them is moved."""
        to = "done" if ending.well else "failed"
        base = stem = job.directory.name.removesuffix(_SUFFIX)
        tries = 1
        while any((self._root / to / f"{stem}{end}").exists() for end in _ENDS):
            tries += 1
            stem = f"{base}-{tries}"
        why = None if ending.well else ending.why()
        write_whole(_ending(job), json.dumps({"to": to, "stem": stem, "why": why}))

    def _deliver(self, job: Job) -> None:
        """Move what the job made, then the input, to where they belong; what was moved already stays there."""
        ending = json.loads(_ending(job).read_text(encoding="utf-8"))
        to, stem = self._root / ending["to"], ending["stem"]
        rows = {}
        for what, path in (("output", job.output), ("errors", job.errors)):
            rows[what] = jobs.mend_tail(path)
            if rows[what]:
                path.rename(to / f"{stem}.{what}{_SUFFIX}")
        if ending["why"] is not None:
            write_whole(to / f"{stem}.error.txt", ending["why"] + "\n")
        with contextlib.suppress(FileNotFoundError):
            job.source.rename(to / f"{stem}{_SUFFIX}")
        shutil.rmtree(job.directory)
        why = f" ({ending['why']})" if ending["why"] else f", {rows['output']} answered, {rows['errors']} refused"
        self._say(f"{job.directory.name}: {ending['to']}{why}")


_ENDS = (_SUFFIX, f".output{_SUFFIX}", f".errors{_SUFFIX}", ".error.txt")


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
