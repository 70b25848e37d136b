"""Rows to standard output, pipes and devices, which cannot be truncated, and so cannot be resumed.

The interface is that of `Journal`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeAlias

from moelight.batch.append import AppendFile
from moelight.batch.journal import Journal, State
from moelight.batch.output import STANDARD_OUTPUT, check_writable, clear, writes_directly
from moelight.batch.paths import WHAT, Outputs
from moelight.batch.reorder_buffer import ReorderBuffer
from moelight.batch.row_set import RowSet
from moelight.core.errors import InputError, MoelightError

_HELD_BYTES = 16 << 20


def open_outputs(
    outputs: Outputs,
    facts: Mapping[str, Any],
    *,
    informative: Iterable[str] = (),
    restart: bool = False,
    allow_changed: bool = False,
) -> Ledger:
    """Return a `Journal`; or `StreamRows` if ``outputs.rows`` is standard output, a pipe or a device.

    Raises:
        InputError: as `Journal.open`; or the two kinds are mixed, or ``atomic`` is requested for a stream.
    """
    if writes_directly(outputs.rows):
        return StreamRows(outputs)
    if outputs.errors is not None and writes_directly(outputs.errors):
        raise InputError(
            f"error file {outputs.errors}: is a pipe or device, and the output is a file; give a file for both, "
            "or leave the error file out: failed rows are then in the output",
            code="output_path",
        )
    return Journal.open(outputs, facts, informative=informative, restart=restart, allow_changed=allow_changed)


class StreamRows:
    """Writes rows at once, in completion or input order. There is no journal: a job that ends early starts over.

    A closed pipe is a BrokenPipeError.
    """

    state: State = "new"
    struck: frozenset[int] = frozenset()
    scan: dict[str, Any] | None = None

    def __init__(self, outputs: Outputs) -> None:
        if outputs.atomic:
            raise InputError(f"output {outputs.rows}: is a pipe or device, --atomic needs a file", code="output_path")
        self.changed: list[str] = []
        self.completed = self.failed = 0
        self.totals: dict[str, int] = {}
        self._order = outputs.order
        self._done = RowSet()
        self._next = 0
        self._waiting = ReorderBuffer()
        self._output = _Stream(outputs.rows, WHAT["output"])
        try:
            self._errors = self._output if outputs.errors is None else _Stream(outputs.errors, WHAT["errors"])
        except BaseException:
            self._output.close()
            raise

    def __enter__(self) -> StreamRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def done(self, number: int) -> bool:
        """True if row ``number`` was put."""
        return number in self._done

    def preparing(self, number: int) -> AbstractContextManager[None]:  # noqa: ARG002 (the journal's interface)
        """Return an empty context: no deaths are recorded."""
        return contextlib.nullcontext()

    def note_scan(self, scan: Mapping[str, Any]) -> None:
        """Keep the result of scanning the input, in memory only."""
        self.scan = dict(scan)

    def put(self, number: int, data: bytes, *, failed: bool = False, totals: Mapping[str, int] | None = None) -> None:
        """Append ``data``, line end included, as row ``number``, from 0. ``totals`` is added to the job's totals.

        Raises:
            InputError: the row cannot be written.
            BrokenPipeError: the reader has closed the pipe.
        """
        if number in self._done:
            raise MoelightError(f"row {number} was answered twice")
        self._done.add(number)
        if failed:
            self.failed += 1
        else:
            self.completed += 1
        for name, count in (totals or {}).items():
            self.totals[name] = self.totals.get(name, 0) + count
        if self._order == "completion":
            self._write(data, failed=failed)
            return
        self._waiting.hold(number, data, failed=failed)
        while (ready := self._waiting.take(self._next)) is not None:
            self._write(ready[0], failed=ready[1])
            self._next += 1
        if self._waiting.held_bytes > _HELD_BYTES:
            self._spill()

    def tick(self) -> None:
        """Do nothing: rows are written at once."""

    def commit(self) -> None:
        """Do nothing: rows are written at once."""

    def finish(self, total: int) -> None:
        """Mark the job complete; all rows from 0 to ``total`` - 1 were put.

        Raises:
            MoelightError: a row is missing.
        """
        missing = self._done.missing(total)
        if missing is not None:
            raise MoelightError(f"row {missing} was never answered")
        self.state = "complete"

    def close(self) -> None:
        """Close the streams and the file of waiting rows."""
        self._output.close()
        if self._errors is not self._output:
            self._errors.close()
        if self._waiting.file is not None:
            self._waiting.file.close()
            self._waiting.file = None

    def _write(self, data: bytes, *, failed: bool) -> None:
        (self._errors if failed else self._output).write(data)

    def _spill(self) -> None:
        """Move waiting rows from memory to an unnamed file, truncated first if it holds no waiting row."""
        file = self._waiting.file
        if file is None:
            with tempfile.TemporaryFile() as temporary:
                file = AppendFile(os.dup(temporary.fileno()), Path(tempfile.gettempdir()))
        elif not self._waiting.filed_bytes:
            file.cut(0)
        with clear(file.path, "temporary rows in"):
            self._waiting.spill(file)


class _Stream:
    """Standard output, or a path that is written from its beginning."""

    def __init__(self, path: Path, what: str) -> None:
        check_writable(path, what=what)
        self._path = path
        self._what = what
        with clear(path, what):
            self._file: BinaryIO = sys.stdout.buffer if path == STANDARD_OUTPUT else path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        with clear(self._path, self._what):
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            self._file.flush()

    def close(self) -> None:
        if self._path != STANDARD_OUTPUT:
            self._file.close()


Ledger: TypeAlias = Journal | StreamRows  # the destination of the rows of a job
