"""Decides whether a job is new, resumed, complete or refused. A refusal leaves all files unchanged."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from moelight.batch import faults
from moelight.batch.append import ByteRange, sync_directory
from moelight.batch.fingerprint import differences
from moelight.batch.output import check_writable
from moelight.batch.paths import Outputs
from moelight.batch.store import JobRecord, RowStore
from moelight.core.errors import InputError

_READ_BACK_BYTES = 1 << 30  # takes about a second; of older bytes only the length is checked
_BLOCK_BYTES = 1 << 20


@dataclass(kw_only=True, slots=True)
class Opened:
    """An open job, locked until ``store`` is closed. ``changed`` lists the facts that differ."""

    store: RowStore
    record: JobRecord
    new: bool
    changed: list[str]


def open_job(outputs: Outputs, facts: Mapping[str, Any], *, restart: bool, allow_changed: bool) -> Opened:
    """Lock the job and read its state; raises InputError as `Journal.open` does, or OSError."""
    for place in outputs.files.values():
        if not place.shown.exists():
            check_writable(place.shown, what=place.what)
    store = RowStore(outputs.journal, shown=outputs.rows)
    try:
        record = None if restart else store.read()
        # A job without rows may begin with another layout, since a new start overwrites only its own files; but if
        # ``atomic`` differs, files of an earlier job may still exist.
        if record is None or (
            record.empty and record.layout != outputs.layout and record.layout["atomic"] == outputs.atomic
        ):
            return _begin_new(store, outputs, facts, restart=restart or record is not None)
        return _go_on(store, record, outputs, facts, allow_changed=allow_changed)
    except BaseException:
        store.close(remove=store.unused)
        raise


def _begin_new(store: RowStore, outputs: Outputs, facts: Mapping[str, Any], *, restart: bool) -> Opened:
    for place in outputs.files.values():
        check_writable(place.shown, what=place.what)
        if not restart:
            place.refuse_found(outputs.journal)
    # The old state goes first: a crash in between leaves files without a job, which are refused, not an outdated job.
    store.clear()
    if restart:
        outputs.clear()
    record = JobRecord(layout=outputs.layout, facts=dict(facts), pid=os.getpid())
    store.begin(record)
    return Opened(store=store, record=record, new=True, changed=[])


def _go_on(
    store: RowStore, record: JobRecord, outputs: Outputs, facts: Mapping[str, Any], *, allow_changed: bool
) -> Opened:
    changed = differences(record.facts, facts)
    _refuse_changed(record, changed, outputs, allow_changed=allow_changed)
    for name, place in outputs.files.items():
        # Also after a crash between two renames.
        named = record.stage == "complete" or (record.stage == "renaming" and not place.written.exists())
        path = place.final if named else place.written
        if name in record.extents:
            _check_file(path, record.extents[name], shown=str(place), journal=outputs.journal)
    if record.stage != "complete" or changed:
        for place in outputs.files.values():
            check_writable(place.shown, what=place.what)
        if changed:
            record.facts, record.scan, record.stage = dict(facts), None, "running"
        store.commit({"facts": record.facts, "scan": record.scan, "stage": record.stage, "pid": os.getpid()})
        if record.stage == "renaming":
            take_names(outputs, store, record.total)
            record.stage = "complete"
    return Opened(store=store, record=record, new=False, changed=changed)


def _refuse_changed(record: JobRecord, changed: list[str], outputs: Outputs, *, allow_changed: bool) -> None:
    fixed = differences(record.layout, outputs.layout)
    if fixed:
        why = f"was begun otherwise ({'; '.join(fixed)}); give these as they were, or --restart starts anew"
    # A job without rows may change freely: it may have been refused, or a mistake.
    elif changed and not allow_changed and not record.empty:
        why = (
            f"belongs to a job that was another ({'; '.join(changed)}); --allow-changed keeps its finished rows and "
            "goes on as asked now, --restart starts anew"
        )
    elif changed and outputs.atomic and record.stage != "running":
        why = (
            f"is complete, of a job that was another ({'; '.join(changed)}), and as it is --atomic nothing is added "
            "to it; --restart starts anew"
        )
    else:
        return
    raise InputError(f"{outputs.output}: {why}", code="job_changed")


def _check_file(path: Path, extents: list[ByteRange], *, shown: str, journal: Path) -> None:
    """Raise InputError for a file that is shorter than its journal records, or has other contents; may raise OSError.
    The last gigabyte is read back; of earlier bytes only the length is checked."""

    def refusal(why: str) -> InputError:
        choice = "put it back as it was, or --restart starts anew"
        return InputError(f"{shown}: {why} by its journal {journal}; {choice}", code="journal")

    end = extents[-1].end
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise refusal(f"is gone, {end} bytes were written to it") from None
    if found < end:
        raise refusal(f"is shorter than it was, {found} bytes found and {end} bytes expected")
    with path.open("rb") as file:
        for each in extents:
            if each.end > end - _READ_BACK_BYTES and _crc(file, each) != each.crc:
                raise refusal(f"bytes {each.start} to {each.end} are not those that were written")


def _crc(file: BinaryIO, extent: ByteRange) -> int:
    file.seek(extent.start)
    crc, left = 0, extent.end - extent.start
    while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
        crc, left = zlib.crc32(block, crc), left - len(block)
    return crc


def take_names(outputs: Outputs, store: RowStore, total: int) -> None:
    """Rename the finished files to their final names, and record the job as complete with ``total`` rows."""
    for place in outputs.files.values():
        place.take_name()
    for directory in outputs.directories:
        sync_directory(directory)
    faults.reach("before_final_record")
    store.commit({"stage": "complete", "total": total})
    faults.reach("after_final_record")
    store.shrink()
