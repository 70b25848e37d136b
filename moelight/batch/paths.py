"""Where a job's rows go, by name: the output, the error file, and what lies beside them while the job is not done.

Knows paths. Refuses to know what is in the files.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moelight.batch import faults
from moelight.batch.output import refused_write, target
from moelight.core.errors import InputError

WHAT = {"output": "output", "errors": "error file"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Where rows go, and how.

    ``rows`` gets every row, or, where there is a file of ``errors``, those that did not fail. A name that ends in
    ``.gz`` asks for gzip. In order ``input`` a row waits for all rows before it; in order ``completion`` it does not.
    With ``atomic`` the files take their names when all rows are there. What is finished is put on the disk about every
    ``sync_s`` seconds.
    """

    rows: Path
    errors: Path | None = None
    order: Literal["input", "completion"] = "input"
    atomic: bool = False
    sync_s: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputPath:
    """A file of rows: ``shown`` as the user calls it, ``final`` behind links, ``written`` until the job is done."""

    what: str
    shown: Path
    final: Path
    written: Path

    def __str__(self) -> str:
        return f"{self.what} {self.shown}"

    @property
    def gzip(self) -> bool:
        """Rows are packed."""
        return self.shown.suffix == ".gz"

    def refuse_found(self, journal: Path) -> None:
        """Without a journal nobody knows what is in a file that is here already."""
        for path in dict.fromkeys((self.final, self.written)):
            if path.exists() and path.stat().st_size:
                name = self if path == self.final else f"{self.what} {path}"
                raise InputError(
                    f"{name}: is here already, and its journal {journal.name} is not; "
                    "choose another name, or --restart replaces it",
                    code="journal",
                )

    def take_name(self) -> None:
        """The finished file gets its name, and the mode of the one it replaces. Does nothing the second time."""
        if self.written == self.final or not self.written.exists():
            return
        if self.final.exists():
            shutil.copymode(self.final, self.written)
        faults.reach("before_rename")
        self.written.replace(self.final)
        faults.reach("after_rename")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPaths:
    """All files of a job. ``files`` has one or two, by ``output`` and ``errors``."""

    files: dict[str, OutputPath]
    journal: Path

    @classmethod
    def of(cls, outputs: Outputs) -> JobPaths:
        """Names only; nothing is looked at but links."""
        named = {"output": outputs.rows, "errors": outputs.errors}
        files = {
            name: _place(WHAT[name], path, atomic=outputs.atomic) for name, path in named.items() if path is not None
        }
        return cls(files=files, journal=journal_of(outputs.rows))

    @property
    def output(self) -> OutputPath:
        """The file of all rows that have no other."""
        return self.files["output"]

    def waiting(self, generation: int) -> Path:
        """The file of rows whose turn has not come; the next generation has another name, the one after it the same."""
        final = self.output.final
        return final.with_name(f"{final.name}.waiting{generation % 2}")

    @property
    def deaths(self) -> Path:
        """Of rows at which the process died (`deaths`)."""
        final = self.output.final
        return final.with_name(f"{final.name}.deaths")

    def directories(self) -> set[Path]:
        """Where files are made."""
        return {place.final.parent for place in self.files.values()}

    def clear(self, *, keep_finals: bool) -> None:
        """Remove what an earlier job left, but for its journal; ``keep_finals``: and for the files it finished."""
        for place in self.files.values():
            for path in {place.final, place.written, _hidden(place.final)}:
                if not (keep_finals and path == place.final):
                    path.unlink(missing_ok=True)
        self.clear_waiting()

    def clear_waiting(self) -> None:
        """Remove the files of waiting rows."""
        for generation in range(2):
            self.waiting(generation).unlink(missing_ok=True)


def journal_of(output: Path) -> Path:
    """Where the journal of ``output`` lies: beside what a link leads to."""
    final = target(output)
    return final.with_name(f"{final.name}.journal")


def _place(what: str, shown: Path, *, atomic: bool) -> OutputPath:
    final = target(shown)
    return OutputPath(what=what, shown=shown, final=final, written=_hidden(final) if atomic else final)


def _hidden(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


@contextlib.contextmanager
def told(place: OutputPath) -> Iterator[None]:
    """Faults of the file system as one line on ``place``."""
    try:
        yield
    except OSError as error:
        raise failed(error, place) from None


def failed(error: OSError, place: OutputPath) -> InputError:
    """The one line on a write that the system refused."""
    kept = "; every row that was on the disk is kept: mend that, and the same command goes on from there"
    return refused_write(error, str(place), kept=kept)
