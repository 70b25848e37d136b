"""Kills a small job at every point of `moelight.batch.faults`, and starts it again. Run by `test_journal.py`.

A process of its own, because it forks: the children have nothing but the journal.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Literal

from moelight.batch import faults, store
from moelight.batch.journal import Journal
from moelight.batch.paths import Outputs

ROWS = 12


def row(number: int) -> bytes:
    return b"row %d\n" % number


def work(outputs: Outputs) -> None:
    with Journal.open(outputs, {}) as journal:
        if journal.state == "complete":
            return
        for number in sorted(range(ROWS), key=lambda number: number * 5 % ROWS):
            if not journal.done(number):
                journal.put(number, row(number), failed=number % 3 == 0)
                if number % 2:
                    journal.commit()
        journal.finish(ROWS)


def killed(outputs: Outputs, point: str, count: int) -> bool:
    """One start in a child that is killed there; False if it came to its end before."""
    child = os.fork()
    if child == 0:
        faults._FAULT = faults._InjectedFault(point=point, count=count, action="kill")
        code = 1
        try:
            work(outputs)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), (point, count, status)
    return status != 0


def is_complete(outputs: Outputs) -> bool:
    """All rows are there once, and nothing else is."""
    assert outputs.errors is not None
    rows, errors = outputs.rows.read_bytes().splitlines(True), outputs.errors.read_bytes().splitlines(True)
    if outputs.order == "completion":
        rows.sort(key=lambda line: int(line[4:]))
        errors.sort(key=lambda line: int(line[4:]))
    return (
        rows == [row(number) for number in range(ROWS) if number % 3]
        and errors == [row(number) for number in range(0, ROWS, 3)]
        and len(list(outputs.rows.parent.iterdir())) == 3
    )


def main(directory: Path) -> None:
    """Print how many kills there were."""
    os.fsync = lambda fd: None  # a kill loses nothing that the system has
    store._SYNCHRONOUS = "OFF"
    kills = 0
    orders: tuple[Literal["input", "completion"], ...] = ("input", "completion")
    for order in orders:
        for point in faults.POINTS:
            position = directory / f"{order}-{point}"
            position.mkdir()
            outputs = Outputs(
                rows=position / "o", errors=position / "e", order=order, atomic=order == "input", sync_s=0.0
            )
            reached = 0
            # Each start is killed at that point again, a little later than the one before.
            while killed(outputs, point, reached // 2 + 1):
                reached += 1
            assert reached or (point in ("before_rename", "after_rename") and not outputs.atomic), point
            assert is_complete(outputs), point
            kills += reached
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
