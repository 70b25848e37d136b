"""Paths of the files of a job: the output, the error file, and the files beside them while the job is unfinished."""

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
    """Destinations of rows; a name that ends in ``.gz`` selects gzip.

    ``rows`` receives every row, or, if there is a file of ``errors``, the rows that did not fail. In order ``input`` a
    row is written after all rows before it; in order ``completion`` when it is finished. With ``atomic`` the files take
    their final names when all rows are written. Finished rows are fsynced about every ``sync_s`` seconds.
    """

    rows: Path
    errors: Path | None = None
    order: Literal["input", "completion"] = "input"
    atomic: bool = False
    sync_s: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputPath:
    """A file of rows: ``shown`` as given, ``final`` with links resolved, ``written`` until the job is done."""

    what: str
    shown: Path
    final: Path
    written: Path

    def __str__(self) -> str:
        return f"{self.what} {self.shown}"

    @property
    def gzip(self) -> bool:
        return self.shown.suffix == ".gz"

    def refuse_found(self, journal: Path) -> None:
        """Refuse an existing file: without its ``journal`` the rows in it are unknown."""
        for path in dict.fromkeys((self.final, self.written)):
            if path.exists() and path.stat().st_size:
                name = self if path == self.final else f"{self.what} {path}"
                raise InputError(
                    f"{name}: is here already, and its journal {journal.name} is not; "
                    "choose another name, or --restart replaces it",
                    code="journal",
                )

    def take_name(self) -> None:
        """Rename the finished file to its final name, with the mode of the file it replaces. Idempotent."""
        if self.written == self.final or not self.written.exists():
            return
        if self.final.exists():
            shutil.copymode(self.final, self.written)
        faults.reach("before_rename")
        self.written.replace(self.final)
        faults.reach("after_rename")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPaths:
    """All files of a job. ``files`` has one or two entries, ``output`` and ``errors``."""

    files: dict[str, OutputPath]
    journal: Path

    @classmethod
    def of(cls, outputs: Outputs) -> JobPaths:
        """The paths of ``outputs``; resolves links and reads nothing else."""
        named = {"output": outputs.rows, "errors": outputs.errors}
        files = {
            name: _place(WHAT[name], path, atomic=outputs.atomic) for name, path in named.items() if path is not None
        }
        return cls(files=files, journal=journal_of(outputs.rows))

    @property
    def output(self) -> OutputPath:
        """The file of all rows that are not written to the error file."""
        return self.files["output"]

    @property
    def deaths(self) -> Path:
        """The file of rows at which the process died (`CrashGuard`)."""
        final = self.output.final
        return final.with_name(f"{final.name}.deaths")

    def directories(self) -> set[Path]:
        return {place.final.parent for place in self.files.values()}

    def clear(self, *, keep_finals: bool) -> None:
        """Remove the files of an earlier job, except its journal and, with ``keep_finals``, the files it finished."""
        for place in self.files.values():
            for path in {place.final, place.written, _hidden(place.final)}:
                if not (keep_finals and path == place.final):
                    path.unlink(missing_ok=True)
        for generation in range(2):  # of a journal of version 1
            self.output.final.with_name(f"{self.output.final.name}.waiting{generation}").unlink(missing_ok=True)


def journal_of(output: Path) -> Path:
    """The path of the journal, a database, of ``output``: beside the file that a link points to."""
    final = target(output)
    return final.with_name(f"{final.name}.journal")


def _place(what: str, shown: Path, *, atomic: bool) -> OutputPath:
    final = target(shown)
    return OutputPath(what=what, shown=shown, final=final, written=_hidden(final) if atomic else final)


def _hidden(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


@contextlib.contextmanager
def told(place: OutputPath) -> Iterator[None]:
    """Raise file system errors as one-line InputErrors about ``place``."""
    try:
        yield
    except OSError as error:
        raise failed(error, place) from None


def failed(error: OSError, place: OutputPath) -> InputError:
    """The one-line error of a write to ``place`` that the system refused."""
    kept = "; every row that was on the disk is kept: put that right, and the same command goes on from there"
    return refused_write(error, str(place), kept=kept)
