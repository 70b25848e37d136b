"""Opens a job: new, resumed or complete. A refusal names the user's options.

Depends on which files belong together, and on the states that a crash may leave, not on later writes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moelight.batch import faults
from moelight.batch.append import sync_directory
from moelight.batch.differences import differences
from moelight.batch.journal_file import JournalFile
from moelight.batch.lock import open_locked
from moelight.batch.output import check_writable
from moelight.batch.paths import WHAT, JobPaths, Outputs, told
from moelight.batch.recovery import VERSION, RecoveredJob, check_file, read_past
from moelight.core.errors import InputError


@dataclass(kw_only=True, slots=True)
class Opened:
    """An open job, locked until ``fd``, its journal, is closed. ``changed`` lists the facts that differ."""

    places: JobPaths
    fd: int
    past: RecoveredJob
    journal: JournalFile | None
    changed: list[str]
    new: bool

    @property
    def complete(self) -> bool:
        """True if all rows are written, and the files have their final names."""
        return self.past.stage == "complete"


def open_job(
    outputs: Outputs, facts: Mapping[str, Any], *, informative: Iterable[str], restart: bool, allow_changed: bool
) -> Opened:
    """Lock the job and read its state. A refusal leaves all files unchanged.

    Raises:
        InputError: see `Journal.open`.
    """
    for what, path in ((WHAT["output"], outputs.rows), (WHAT["errors"], outputs.errors)):
        if path is not None and not path.exists():
            check_writable(path, what=what)
    places = JobPaths.of(outputs)
    with told(places.output):
        fd = open_locked(places.journal, shown=outputs.rows)
        try:
            past = None if restart else read_past(fd, shown=places.journal)
            if past is None or (past.empty and _layout_differs(past, places, outputs)):
                return _begin(fd, places, outputs, facts, restart=restart or past is not None)
            return _go_on(fd, past, places, outputs, facts, tuple(informative), allow_changed=allow_changed)
        except BaseException:
            if os.fstat(fd).st_size == 0:
                places.journal.unlink(missing_ok=True)
            os.close(fd)
            raise


def _begin(fd: int, places: JobPaths, outputs: Outputs, facts: Mapping[str, Any], *, restart: bool) -> Opened:
    for place in places.files.values():
        check_writable(place.shown, what=place.what)
        if not restart:
            place.refuse_found(places.journal)
    # The journal first: a crash in between leaves files without a journal, which are refused, not an outdated journal.
    journal = JournalFile(fd)
    os.fsync(fd)
    if restart:
        places.clear(keep_finals=outputs.atomic)
    header = {
        "kind": "job",
        "version": VERSION,
        "pid": os.getpid(),
        "created": int(time.time()),
        "layout": _layout(outputs, places),
        "facts": dict(facts),
    }
    journal.write(header)
    past = RecoveredJob(header=header, facts=dict(facts), end=0)
    return Opened(places=places, fd=fd, past=past, journal=journal, changed=[], new=True)


def _go_on(
    fd: int,
    past: RecoveredJob,
    places: JobPaths,
    outputs: Outputs,
    facts: Mapping[str, Any],
    informative: tuple[str, ...],
    *,
    allow_changed: bool,
) -> Opened:
    changed = differences(past.facts, facts, informative=informative)
    _refuse_changed(past, changed, places, outputs, allow_changed=allow_changed)
    _check_files(past, places)
    journal = None
    if past.stage != "complete" or changed:
        for place in places.files.values():
            check_writable(place.shown, what=place.what)
        journal = JournalFile(fd, end=past.end)
        journal.write({"kind": "opened", "pid": os.getpid(), "time": int(time.time())})
        if changed:
            journal.write({"kind": "facts", "facts": dict(facts)})
            past.follow({"kind": "facts", "facts": dict(facts)})
        if past.stage == "renaming":
            take_names(places, journal, past.total)
            past.stage = "complete"
    else:
        # A crash after the final record leaves these files; on a disk that is now read-only they remain.
        with contextlib.suppress(OSError):
            places.clear_waiting()
    return Opened(places=places, fd=fd, past=past, journal=journal, changed=changed, new=False)


def _refuse_changed(
    past: RecoveredJob, changed: list[str], places: JobPaths, outputs: Outputs, *, allow_changed: bool
) -> None:
    fixed = differences(past.header["layout"], _layout(outputs, places))
    if fixed:
        raise InputError(
            f"{places.output}: was begun otherwise ({'; '.join(fixed)}); give these as they were, "
            "or --restart starts anew",
            code="job_changed",
        )
    # A job without rows may change freely: it may have been refused, or a mistake.
    if changed and not allow_changed and not past.empty:
        raise InputError(
            f"{places.output}: belongs to a job that was another ({'; '.join(changed)}); --allow-changed keeps its "
            "finished rows and goes on as asked now, --restart starts anew",
            code="job_changed",
        )
    if changed and outputs.atomic and past.stage != "running":
        raise InputError(
            f"{places.output}: is complete, of a job that was another ({'; '.join(changed)}), and as it is --atomic "
            "nothing is added to it; --restart starts anew",
            code="job_changed",
        )


def _layout_differs(past: RecoveredJob, places: JobPaths, outputs: Outputs) -> bool:
    """True if the layout differs but ``atomic`` does not: a new start then overwrites only this job's files. If
    ``atomic`` differs, an earlier job's files may still exist."""
    now = _layout(outputs, places)
    return past.header["layout"] != now and past.header["layout"]["atomic"] == now["atomic"]


def _layout(outputs: Outputs, places: JobPaths) -> dict[str, Any]:
    """Return the options that decide where bytes are written; they are fixed for the whole job."""
    errors = places.files.get("errors")
    return {
        "order": outputs.order,
        "atomic": outputs.atomic,
        "error file": None if errors is None else errors.final.name,
    }


def _check_files(past: RecoveredJob, places: JobPaths) -> None:
    """Verify the files against the journal, also after a crash between two renames."""
    for name, place in places.files.items():
        named = past.stage == "complete" or (past.stage == "renaming" and not place.written.exists())
        path = place.final if named else place.written
        check_file(path, past.extents.get(name, []), shown=str(place), journal=places.journal)
    if past.stage == "running" and past.waiting:
        path = places.waiting(past.generation)
        check_file(path, past.extents.get("waiting", []), shown=str(path), journal=places.journal)


def take_names(places: JobPaths, journal: JournalFile, total: int) -> None:
    """Rename the finished files to their final names, and record the job as complete with ``total`` rows."""
    for place in places.files.values():
        place.take_name()
    for directory in places.directories():
        sync_directory(directory)
    faults.reach("before_final_record")
    journal.write({"kind": "complete", "total": total})
    faults.reach("after_final_record")
    places.clear_waiting()
