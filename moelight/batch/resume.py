"""A job is opened: new, gone on with, or found complete; or refused, with the choices named.

Knows which files fit together, and what a crash may leave of them. Refuses to know what is written next.
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
    """A job that may be written by nobody else until ``fd``, its journal, is closed. ``changed``: what now is other."""

    places: JobPaths
    fd: int
    past: RecoveredJob
    journal: JournalFile | None
    changed: list[str]
    new: bool

    @property
    def complete(self) -> bool:
        """All rows are there, and the files have their names."""
        return self.past.stage == "complete"


def open_job(
    outputs: Outputs, facts: Mapping[str, Any], *, informative: Iterable[str], restart: bool, allow_changed: bool
) -> Opened:
    """Lock the job and find out how it stands. A refusal leaves all files as they were.

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
            if past is None or (past.empty and _began_otherwise(past, places, outputs)):
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
    # The journal first: a crash in between leaves files without one, which are refused, and not a journal of others.
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
        # A crash behind the final record leaves them; on a disk that is read-only by now they may stay.
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
    # A job that has no row yet binds nobody: it may have been refused, or mistaken.
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


def _began_otherwise(past: RecoveredJob, places: JobPaths, outputs: Outputs) -> bool:
    """The layout is another, and what that would overwrite is this job's own: with ``atomic`` an earlier job's files
    are still there."""
    now = _layout(outputs, places)
    return past.header["layout"] != now and past.header["layout"]["atomic"] == now["atomic"]


def _layout(outputs: Outputs, places: JobPaths) -> dict[str, Any]:
    """What decides where bytes go: it holds as long as the job."""
    errors = places.files.get("errors")
    return {
        "order": outputs.order,
        "atomic": outputs.atomic,
        "error file": None if errors is None else errors.final.name,
    }


def _check_files(past: RecoveredJob, places: JobPaths) -> None:
    """The files are as the journal says, wherever a crash between two renames left them."""
    for name, place in places.files.items():
        named = past.stage == "complete" or (past.stage == "renaming" and not place.written.exists())
        path = place.final if named else place.written
        check_file(path, past.extents.get(name, []), shown=str(place), journal=places.journal)
    if past.stage == "running" and past.waiting:
        path = places.waiting(past.generation)
        check_file(path, past.extents.get("waiting", []), shown=str(path), journal=places.journal)


def take_names(places: JobPaths, journal: JournalFile, total: int) -> None:
    """Files that have all their rows get their names, and the job is complete with ``total`` rows."""
    for place in places.files.values():
        place.take_name()
    for directory in places.directories():
        sync_directory(directory)
    faults.reach("before_final_record")
    journal.write({"kind": "complete", "total": total})
    faults.reach("after_final_record")
    places.clear_waiting()
