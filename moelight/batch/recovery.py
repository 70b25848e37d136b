"""Decides whether a job is new, resumed, complete or refused. A refusal leaves all files unchanged."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelight.batch import faults
from moelight.batch.append import ByteRange, sync_directory
from moelight.batch.fingerprint import differences
from moelight.batch.output import check_writable
from moelight.batch.paths import WHAT, JobPaths, Outputs, told
from moelight.batch.store import JobRecord, RowStore
from moelight.core.errors import InputError

_READ_BACK_BYTES = 1 << 30  # takes about a second; of older bytes only the length is checked
_BLOCK_BYTES = 1 << 20


def check_file(path: Path, extents: list[ByteRange], *, shown: str, journal: Path) -> None:
    """Raise InputError for a file that is shorter than its journal records, or has other contents; may raise OSError.
    The last gigabyte is read back; of earlier bytes only the length is checked."""
    end = extents[-1].end if extents else 0
    if end == 0:
        return
    choice = f"by its journal {journal}; put it back as it was, or --restart starts anew"
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise InputError(f"{shown}: is gone, {end} bytes were written to it {choice}", code="journal") from None
    if found < end:
        raise InputError(
            f"{shown}: is shorter than it was, {found} bytes found and {end} bytes expected {choice}", code="journal"
        )
    with path.open("rb") as file:
        for extent in extents:
            if extent.end > end - _READ_BACK_BYTES:
                file.seek(extent.start)
                if _crc(_blocks(file, extent.end - extent.start)) != extent.crc:
                    raise InputError(
                        f"{shown}: bytes {extent.start} to {extent.end} are not those that were written {choice}",
                        code="journal",
                    )


def _blocks(file: Any, size: int) -> Iterator[bytes]:
    while size > 0 and (block := file.read(min(size, _BLOCK_BYTES))):
        size -= len(block)
        yield block


def _crc(blocks: Iterator[bytes]) -> int:
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc)
    return crc


@dataclass(kw_only=True, slots=True)
class Opened:
    """An open job, locked until ``store`` is closed. ``changed`` lists the facts that differ."""

    places: JobPaths
    store: RowStore
    record: JobRecord
    changed: list[str]
    new: bool

    @property
    def complete(self) -> bool:
        """True if all rows are written, and the files have their final names."""
        return self.record.stage == "complete"


def open_job(
    outputs: Outputs, facts: Mapping[str, Any], *, informative: Iterable[str], restart: bool, allow_changed: bool
) -> Opened:
    """Lock the job and read its state; raises InputError as `Journal.open` does."""
    for what, path in ((WHAT["output"], outputs.rows), (WHAT["errors"], outputs.errors)):
        if path is not None and not path.exists():
            check_writable(path, what=what)
    places = JobPaths.of(outputs)
    with told(places.output):
        store = RowStore(places.journal, shown=outputs.rows)
        try:
            record = None if restart else store.read()
            if record is None or (record.empty and _layout_differs(record, places, outputs)):
                return _begin_new(store, places, outputs, facts, restart=restart or record is not None)
            return _go_on(store, record, places, outputs, facts, tuple(informative), allow_changed=allow_changed)
        except BaseException:
            store.close(remove=store.unused)
            raise


def _begin_new(
    store: RowStore, places: JobPaths, outputs: Outputs, facts: Mapping[str, Any], *, restart: bool
) -> Opened:
    for place in places.files.values():
        check_writable(place.shown, what=place.what)
        if not restart:
            place.refuse_found(places.journal)
    # The old state goes first: a crash in between leaves files without a job, which are refused, not an outdated job.
    store.clear()
    if restart:
        places.clear(keep_finals=outputs.atomic)
    record = JobRecord(layout=_layout(outputs, places), facts=dict(facts), pid=os.getpid())
    store.begin(record)
    return Opened(places=places, store=store, record=record, changed=[], new=True)


def _go_on(
    store: RowStore,
    record: JobRecord,
    places: JobPaths,
    outputs: Outputs,
    facts: Mapping[str, Any],
    informative: tuple[str, ...],
    *,
    allow_changed: bool,
) -> Opened:
    changed = differences(record.facts, facts, informative=informative)
    _refuse_changed(record, changed, places, outputs, allow_changed=allow_changed)
    for name, place in places.files.items():
        # Also after a crash between two renames.
        named = record.stage == "complete" or (record.stage == "renaming" and not place.written.exists())
        path = place.final if named else place.written
        check_file(path, record.extents.get(name, []), shown=str(place), journal=places.journal)
    if record.stage != "complete" or changed:
        for place in places.files.values():
            check_writable(place.shown, what=place.what)
        if changed:
            record.facts, record.scan, record.stage = dict(facts), None, "running"
        store.commit({"facts": record.facts, "scan": record.scan, "stage": record.stage, "pid": os.getpid()})
        if record.stage == "renaming":
            take_names(places, store, record.total)
            record.stage = "complete"
    return Opened(places=places, store=store, record=record, changed=changed, new=False)


def _refuse_changed(
    record: JobRecord, changed: list[str], places: JobPaths, outputs: Outputs, *, allow_changed: bool
) -> None:
    fixed = differences(record.layout, _layout(outputs, places))
    if fixed:
        raise InputError(
            f"{places.output}: was begun otherwise ({'; '.join(fixed)}); give these as they were, "
            "or --restart starts anew",
            code="job_changed",
        )
    # A job without rows may change freely: it may have been refused, or a mistake.
    if changed and not allow_changed and not record.empty:
        raise InputError(
            f"{places.output}: belongs to a job that was another ({'; '.join(changed)}); --allow-changed keeps its "
            "finished rows and goes on as asked now, --restart starts anew",
            code="job_changed",
        )
    if changed and outputs.atomic and record.stage != "running":
        raise InputError(
            f"{places.output}: is complete, of a job that was another ({'; '.join(changed)}), and as it is --atomic "
            "nothing is added to it; --restart starts anew",
            code="job_changed",
        )


def _layout_differs(record: JobRecord, places: JobPaths, outputs: Outputs) -> bool:
    """True if the layout differs but ``atomic`` does not: a new start then overwrites only this job's files. If
    ``atomic`` differs, an earlier job's files may still exist."""
    now = _layout(outputs, places)
    return record.layout != now and record.layout["atomic"] == now["atomic"]


def _layout(outputs: Outputs, places: JobPaths) -> dict[str, Any]:
    """The options that decide where bytes are written; they are fixed for the whole job."""
    errors = places.files.get("errors")
    return {
        "order": outputs.order,
        "atomic": outputs.atomic,
        "error file": None if errors is None else errors.final.name,
    }


def take_names(places: JobPaths, store: RowStore, total: int) -> None:
    """Rename the finished files to their final names, and record the job as complete with ``total`` rows."""
    for place in places.files.values():
        place.take_name()
    for directory in places.directories():
        sync_directory(directory)
    faults.reach("before_final_record")
    store.commit({"stage": "complete", "total": total})
    faults.reach("after_final_record")
    store.shrink()
