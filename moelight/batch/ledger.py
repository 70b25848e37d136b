"""Where the rows of a job go, whatever it is: the face that a durable `Journal` and a plain stream share.

Chooses between the two. Refuses to know how either keeps its rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from moelight.batch.direct import DirectRows
from moelight.batch.journal import Journal, State
from moelight.batch.output import writes_directly
from moelight.batch.places import Outputs
from moelight.core.errors import InputError

NOWHERE = Path(os.devnull)


class Ledger(Protocol):
    """Rows by number, each put once. A context manager.

    Attributes:
        state: ``new``, ``resumed`` (an earlier run has done some rows) or ``complete`` (all of them).
        scan: what `note_scan` was given, by this run or an earlier one.
        completed, failed: rows so far, of all runs.
        totals: sums of what ``put`` was given.
    """

    state: State
    scan: dict[str, Any] | None
    completed: int
    failed: int
    totals: dict[str, int]

    def done(self, number: int) -> bool:
        """The row needs no work."""

    def note_scan(self, scan: Mapping[str, Any]) -> None:
        """Keep what reading the input once has shown."""

    def put(self, number: int, data: bytes, *, failed: bool = False, totals: Mapping[str, int] | None = None) -> None:
        """The row's line."""

    def tick(self) -> None:
        """Make rows durable if it is time."""

    def commit(self) -> None:
        """Make them durable now."""

    def finish(self, total: int) -> None:
        """All ``total`` rows were put."""

    def __enter__(self) -> Ledger: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def open_ledger(
    outputs: Outputs, facts: Mapping[str, Any], *, restart: bool = False, allow_changed: bool = False
) -> Journal | DirectRows:
    """A journal beside a file; for standard output, pipes and devices, which cannot be gone on with, none.

    Raises:
        InputError: as `Journal.open`; or the two kinds are mixed, or ``atomic`` is asked of a stream.
    """
    if writes_directly(outputs.rows):
        return DirectRows(outputs)
    if outputs.errors is not None and writes_directly(outputs.errors):
        raise InputError(
            f"error file {outputs.errors}: is a pipe or device, and the output is a file; give a file for both, "
            "or leave the error file out: failed rows are then in the output",
            code="output_path",
        )
    return Journal.open(outputs, facts, restart=restart, allow_changed=allow_changed)
