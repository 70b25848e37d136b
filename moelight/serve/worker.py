"""The worker: runs batches one after another, each along its states, also those that a killed server left open.

Checks that an input can be a batch; the job turns each faulty line into an error row. Does not depend on HTTP or on how
a job runs.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from moelight.serve import jobs
from moelight.serve.jobs import Job, JobRunner
from moelight.serve.store import Batch, BatchFailure, DataDirectory, RowCounts, StoredFile

_MAX_LINE_BYTES = 16 << 20  # longer lines are counted and not parsed
_MAX_FAULTS = 100
_BOM = b"\xef\xbb\xbf"
_LOST_INPUT = BatchFailure(code="missing_file", message="the input file is no longer there", param="input_file_id")


class Worker:
    """Runs the open batches of ``data``; call `run` in a thread of its own, which ends when ``runner`` is stopped."""

    def __init__(self, data: DataDirectory, runner: JobRunner, *, expire: bool = False) -> None:
        self._data, self._store, self._runner, self._expire = data, data.store, runner, expire

    def wake(self) -> None:
        """Check the batches again: one was created, or is to be cancelled. Callable from any thread."""
        self._runner.news.set()

    def blocked(self, batch_id: str) -> BatchFailure | None:
        """Return the reason why the batch waits for its disk; None if it does not. Callable from any thread."""
        name, reason = self._runner.blocked or ("", "")
        return BatchFailure(code="insufficient_storage", message=reason) if name == batch_id else None

    def run(self) -> None:
        runner = self._runner
        while not runner.stopping.is_set():
            batches = self._store.open_batches()
            if not batches:
                runner.wait()
                continue
            runner.blocked = None
            try:
                self._advance(batches[0])
            except (OSError, sqlite3.OperationalError) as error:  # the disk is full, most likely
                runner.say(f"{batches[0].id}: {error}; tried again in {runner.pace.retry_s:g} s")
                runner.blocked = batches[0].id, f"{error}; tried again every {runner.pace.retry_s:g} s"
                runner.stopping.wait(runner.pace.retry_s)

    def _advance(self, batch: Batch) -> None:
        """Run one step of the batch. Each step can be repeated: its effect is one transaction."""
        if batch.status == "finalizing":
            self._end(batch, "completed")
        elif batch.status == "cancelling":
            self._end(batch, "cancelled")
        elif self._late(batch):
            self._end(batch, "expired")
        else:
            source = self._store.file(batch.input_file_id)
            if source is None or not self._data.path(source).is_file():
                self._end(batch, "failed", _LOST_INPUT)
            elif batch.status == "validating":
                self._validate(batch, source)
            else:
                self._run(batch, source)

    def _validate(self, batch: Batch, source: StoredFile) -> None:
        counts, faults = check_lines(self._data.path(source), endpoint=batch.endpoint)
        batch = replace(batch, counts=counts)
        if faults:
            self._end(batch, "failed", *faults)
        elif self._store.move(batch.id, "in_progress", counts=batch.counts):
            self._runner.say(f"{batch.id}: {counts.total} lines")

    def _run(self, batch: Batch, source: StoredFile) -> None:
        """Run the batch's job and move the batch to the state of its ending; an interrupted batch keeps its state."""

        def seen(counts: RowCounts) -> None:
            if counts.total:  # 0: the job still reads its input, and has no counts of an earlier run yet
                with contextlib.suppress(sqlite3.OperationalError):  # a full disk: the job detects that itself
                    self._store.count(batch.id, replace(counts, total=max(counts.total, batch.counts.total)))

        ending = self._runner.finish(
            Job(source=self._data.path(source), directory=self._data.batches / batch.id),
            unwanted=lambda: self._unwanted(batch),
            seen=seen,
        )
        if ending is None:
            return
        if ending.complete:
            self._store.move(batch.id, "finalizing", counts=ending.rows)
        else:
            code = "job_refused" if ending.code == jobs.REFUSED else "worker_failed"
            self._end(self._store.batch(batch.id) or batch, "failed", BatchFailure(code=code, message=ending.reason()))

    def _unwanted(self, batch: Batch) -> bool:
        now = self._store.batch(batch.id)
        return self._late(batch) or now is None or now.status != "in_progress"

    def _late(self, batch: Batch) -> bool:
        return self._expire and time.time() >= batch.expires_at

    def _end(self, batch: Batch, status: str, *faults: BatchFailure) -> None:
        """Register the rows done as files, and close the batch."""
        job = Job(source=Path(), directory=self._data.batches / batch.id)
        jobs.wait_until_free(job, within_s=self._runner.pace.grace_s)
        rows, files = {}, {}
        for kind, column in (("output", "output_file_id"), ("errors", "error_file_id")):
            rows[kind] = jobs.truncate_partial_line(job.files[kind])
            if rows[kind]:
                file_id, name = f"file-{batch.id.removeprefix('batch_')}-{kind}", f"{batch.id}_{kind}.jsonl"
                files[column] = self._data.stored(job.files[kind], file_id, filename=name, purpose="batch_output")
        total = max(batch.counts.total, sum(rows.values()))
        malformed = batch.counts.failed if batch.status == "validating" else 0  # such a batch has no job
        counts = RowCounts(total=total, completed=rows["output"], failed=rows["errors"] or malformed)
        if status == "completed" and counts.done < total:
            lost = f"{counts.done} of {total} rows are in the job's files"
            status, faults = "failed", (BatchFailure(code="worker_failed", message=lost),)
        if self._store.move(batch.id, status, counts=counts, errors=faults, files=files, usage=job.usage()):
            reason = f" ({faults[0].message})" if faults else ""
            ended = f"{status}, {counts.completed} answered, {counts.failed} refused of {total}{reason}"
            self._runner.say(f"{batch.id}: {ended}")
            self._data.clear_job(batch.id)


class _Line(msgspec.Struct):
    url: Any = None


_DECODER = msgspec.json.Decoder(_Line)


def check_lines(path: Path, *, endpoint: str) -> tuple[RowCounts, list[BatchFailure]]:
    """Return the counts of non-blank lines, and the faults, 100 at most, that reject the file as a whole.

    A file is rejected if it has no line, none of its lines is a JSON object, or a line is for another endpoint than
    ``endpoint``. All other faults are left to the job.
    """
    total, objects, faults, malformed = 0, 0, list[BatchFailure](), list[BatchFailure]()
    for number, line in _lines(path):
        total += 1
        try:
            url = None if len(line) >= _MAX_LINE_BYTES else _DECODER.decode(line).url
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not objects and len(malformed) < _MAX_FAULTS:
                message = f"the line is no JSON object ({error}): upload JSON Lines, uncompressed"
                malformed.append(BatchFailure(code="invalid_json_line", message=message, line=number))
            continue
        objects += 1
        if isinstance(url, str) and url != endpoint and len(faults) < _MAX_FAULTS:
            message = f"the line is for {url[:200]!r}, the batch for {endpoint!r}"
            faults.append(BatchFailure(code="mismatched_endpoint", message=message, param="url", line=number))
    if not total:
        return RowCounts(), [
            BatchFailure(code="empty_file", message="the input file has no lines", param="input_file_id")
        ]
    if not objects:
        return RowCounts(total=total, failed=total), malformed
    return RowCounts(total=total), faults


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield ``(number from 1, line)`` for each non-blank line; a very long line is cut."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            rest = line
            while len(rest) == _MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(_MAX_LINE_BYTES)
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield number, line
