"""Paths of the files of a job: the output, the error file, and the files beside them while the job is unfinished."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from moelight.batch import faults
from moelight.batch.output import refused_write, target
from moelight.core.errors import InputError

_KEPT = "; every row that was on the disk is kept: put that right, and the same command goes on from there"


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputPath:
    """A file of rows: ``shown`` as given, ``final`` with links resolved, ``written`` until the job is done."""

    label: str
    shown: Path
    final: Path
    written: Path

    def __str__(self) -> str:
        return f"{self.label} {self.shown}"

    @property
    def gzip(self) -> bool:
        return self.shown.suffix == ".gz"

    def refuse_found(self, journal: Path) -> None:
        """Refuse an existing file: without its ``journal`` the rows in it are unknown."""
        for path in dict.fromkeys((self.final, self.written)):
            if path.exists() and path.stat().st_size:
                name = self if path == self.final else f"{self.label} {path}"
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

    def failed(self, error: OSError) -> InputError:
        """The one-line error of a write that the system refused."""
        return refused_write(error, str(self), note=_KEPT)


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
    def files(self) -> dict[str, OutputPath]:
        """``output`` and, if there is one, ``errors``, by these names; links are resolved once."""
        named = {"output": ("output", self.rows), "errors": ("error file", self.errors)}
        finals = {name: (label, path, target(path)) for name, (label, path) in named.items() if path is not None}
        return {
            name: OutputPath(label=label, shown=path, final=final, written=_hidden(final) if self.atomic else final)
            for name, (label, path, final) in finals.items()
        }

    @property
    def output(self) -> OutputPath:
        """The file of all rows that are not written to the error file."""
        return self.files["output"]

    @property
    def journal(self) -> Path:
        return _beside(self.output.final, "journal")

    @property
    def deaths(self) -> Path:
        """The file of rows at which the process died (`CrashGuard`)."""
        return _beside(self.output.final, "deaths")

    @property
    def directories(self) -> set[Path]:
        return {file.final.parent for file in self.files.values()}

    @property
    def layout(self) -> dict[str, Any]:
        """The options that decide where bytes are written; they are fixed for the whole job."""
        errors = self.files.get("errors")
        return {"order": self.order, "atomic": self.atomic, "error file": None if errors is None else errors.final.name}

    def clear(self) -> None:
        """Remove the files of an earlier job, except its journal and, with ``atomic``, the files it finished."""
        for file in self.files.values():
            _hidden(file.final).unlink(missing_ok=True)
            if not self.atomic:
                file.final.unlink(missing_ok=True)
        for generation in range(2):  # of a journal of version 1
            _beside(self.output.final, f"waiting{generation}").unlink(missing_ok=True)


def journal_of(output: Path) -> Path:
    """The path of the journal, a database, of ``output``: beside the file that a link points to."""
    return _beside(target(output), "journal")


def _beside(final: Path, suffix: str) -> Path:
    return final.with_name(f"{final.name}.{suffix}")


def _hidden(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")
