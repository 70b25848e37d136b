"""What every part of `benchmarks/gpu.py` is told, and how it starts programs that may crash, hang or take too long.

Nothing here imports torch: where torch itself fails, the parts still say so.
"""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelight.core.paths import CACHE_VARIABLE

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
_LONGEST_OUTPUT = 200_000  # characters of one program that the log keeps
_LEAST_S = 1.0
_LOG_LOCK = threading.Lock()
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class FailedError(Exception):
    """A part that cannot go on; the message is one line."""


class TimeOverError(FailedError):
    """The time of a part is over."""


class NeedsCardError(FailedError):
    """A part that a twin cannot play."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended: ``code`` is None where its time was over, and it was killed with all it had started."""

    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def why(self) -> str:
        """One line: the last of what it said, and how it ended."""
        lines = [line.strip() for line in _COLOURS.sub("", self.err or self.out).splitlines() if line.strip()]
        how = "time over" if self.code is None else f"exit code {self.code}"
        return f"{lines[-1][:300]} ({how})" if lines else how

    def check(self) -> Ended:
        """Itself, if it ended well; raises FailedError, or TimeOverError where it had no time."""
        if self.code is None:
            raise TimeOverError(self.why)
        if self.code:
            raise FailedError(self.why)
        return self


@dataclass(kw_only=True)
class Setting:
    """One part of one run.

    Attributes:
        device: as ``moelight --device`` takes it; ``small``: sizes for a machine without a card.
        host_memory: of models that fill it; None: 90 % of what is free.
        scratch: a directory that later parts see too; ``results``: the directory of the report.
        until: `time.monotonic` when the part's time is over.
        figures: what this one found so far; ``written`` is called whenever that grows.
    """

    device: str
    small: bool
    scratch: Path
    results: Path
    until: float
    written: Callable[[], None] = lambda: None
    figures: dict[str, Any] = field(default_factory=dict)
    host_memory: str | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the part's time is over."""
        return self.until - time.monotonic()

    @property
    def twin(self) -> bool:
        """Whether host memory plays the card."""
        return self.device.startswith("twin")

    def keep(self, **figures: Any) -> None:
        """Add ``figures`` to the part's; they are on the disk when this returns."""
        self.figures.update(figures)
        self.written()

    def add_row(self, **row: Any) -> None:
        """Add to the part's ``rows``."""
        self.keep(rows=[*self.figures.get("rows", []), row])

    def need_card(self, reason: str) -> None:
        """Raise NeedsCardError on a twin."""
        if self.twin:
            raise NeedsCardError(f"needs a card: {reason}")

    def moelight(self, *arguments: object, limit_s: float = 1e9) -> Ended:
        """``moelight`` with ``arguments``."""
        return self.python("moelight.cli.main", *arguments, limit_s=limit_s)

    def python(
        self, module: str, *arguments: object, limit_s: float = 1e9, environment: Mapping[str, str] | None = None
    ) -> Ended:
        """``python -m module`` with ``arguments``, which has the rest of the part's time or ``limit_s``; its output
        goes to the log, and profiles are kept under `build/gpu`. Raises TimeOverError where no time is left."""
        seconds = min(limit_s, self.left_s)
        if seconds < _LEAST_S:
            raise TimeOverError("no time was left to start it")
        retained = {CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE, str(ROOT / "build" / "gpu" / "cache"))}
        ended = run_module(
            module, [str(argument) for argument in arguments], seconds, {**retained, **(environment or {})}
        )
        self.log(f"$ python -m {module} {' '.join(map(str, arguments))}", ended)
        return ended

    def log(self, head: str, ended: Ended | None = None) -> None:
        """Append to the log: one line, and what a program said."""
        message = ""
        if ended is not None:
            texts = (text[-_LONGEST_OUTPUT:].rstrip() for text in (ended.out, ended.err))
            message = "".join(f"{text}\n" for text in texts if text) + f"[{ended.code}, {ended.seconds:.1f} s]\n"
        with _LOG_LOCK, (self.results / "gpu.log").open("a", encoding="utf-8") as file:
            file.write(f"{head}\n{message}")

    def keep_trace(self, trace: Path, name: str) -> None:
        """Put ``trace`` into the report's ``traces.tar``, compressed."""
        packed = self.scratch / f"{name}.json.gz"
        packed.write_bytes(gzip.compress(trace.read_bytes(), compresslevel=3))
        with tarfile.open(self.results / "traces.tar", "a") as archive:
            archive.add(packed, arcname=packed.name)


def run_module(module: str, arguments: list[str], seconds: float, environment: Mapping[str, str]) -> Ended:
    """``python -m module`` in a session of its own, which is killed as a whole after ``seconds``."""
    paths = [str(BENCHMARKS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "120", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    code: int | None = None
    try:
        out, err = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    return Ended(code=code, out=out, err=err, seconds=time.monotonic() - began)
