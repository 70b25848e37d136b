"""Rows to standard output, pipes and devices, which cannot be truncated, and so cannot be resumed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from moelight.batch.journal import Journal, Ledger
from moelight.batch.output import STANDARD_OUTPUT, check_writable, clear, writes_directly
from moelight.batch.paths import WHAT, Outputs
from moelight.batch.store import JobRecord, WaitingRows
from moelight.core.errors import InputError

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


class StreamRows(Ledger):
    """Writes rows at once, in completion or input order; no deaths are recorded, and a job that ends early starts over.

    A closed pipe is a BrokenPipeError.
    """

    def __init__(self, outputs: Outputs) -> None:
        if outputs.atomic:
            raise InputError(f"output {outputs.rows}: is a pipe or device, --atomic needs a file", code="output_path")
        super().__init__(outputs, JobRecord(layout={}, facts={}), WaitingRows())
        self._output = _Stream(outputs.rows, WHAT["output"])
        try:
            self._errors = self._output if outputs.errors is None else _Stream(outputs.errors, WHAT["errors"])
        except BaseException:
            self._output.close()
            raise

    def put(self, number: int, data: bytes, *, failed: bool = False, totals: Mapping[str, int] | None = None) -> None:
        """As `Ledger.put`."""
        super().put(number, data, failed=failed, totals=totals)
        if self._waiting.held_bytes > _HELD_BYTES:
            with clear(Path(tempfile.gettempdir()), "temporary rows in"):
                self._waiting.spill(self._next)

    def close(self) -> None:
        """Close the streams and the file of waiting rows."""
        self._output.close()
        if self._errors is not self._output:
            self._errors.close()
        self._waiting.close()

    def _write(self, data: bytes, *, failed: bool) -> None:
        (self._errors if failed else self._output).write(data)


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
