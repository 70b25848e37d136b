"""``--status``: the progress of a job, as OpenAI's batch object with a few additional fields.

Source of the names: OpenAI's API reference, object ``batch``; without the fields of `EXTRA` the object conforms to it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelight.batch.live_file import LiveFile
from moelight.batch.progress import JobCounts, JobStart, Progress, State
from moelight.batch.time_left import TimeLeft
from moelight.observe.stats import Binding

EXTRA = ("moelight",)
WINDOW = "24h"  # the only one that OpenAI has; a job here has no time limit


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """Constant fields of the object. Ids are file names, since no server assigns ids."""

    id: str
    input_file: str
    output_file: str | None = None
    error_file: str | None = None
    model: str = ""
    endpoint: str = ""


class StatusFile(Progress):
    """Keeps the file at ``path`` up to date with the job.

    Raises:
        InputError: the file cannot be written at the start.
    """

    def __init__(self, path: Path, facts: BatchFacts, eta: TimeLeft, *, clock: Callable[[], float] = time.time) -> None:
        self._facts, self._eta, self._clock = facts, eta, clock
        self._counts = JobCounts()
        self._endpoint = facts.endpoint
        self._stamps: dict[str, int] = {"created_at": int(clock())}
        self._state: State = "validating"
        self._read: tuple[int, int, int | None] = (0, 0, None)
        self._binding: Binding | None = None
        self._errors: list[dict[str, Any]] = []
        self._file = LiveFile(path, what="status")
        self._file.begin(self._text())

    @property
    def trouble(self) -> str:
        """The reason why the file is not up to date; empty if it is."""
        return self._file.trouble

    def reading(self, rows: int, read_bytes: int, total_bytes: int | None = None) -> None:
        """Renew the file while the input is validated."""
        self._read = (rows, read_bytes, total_bytes)
        self._file.renew(self._text)

    def started(self, start: JobStart) -> None:
        """Set the row counts; the input is validated."""
        self._endpoint = start.endpoint or self._endpoint
        self._counts = JobCounts(
            total=start.total, failed=start.refused, completed=start.resumed, resumed=start.resumed
        )
        self._enter("in_progress")

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:  # noqa: ARG002
        """Keep the busiest lane."""
        self._binding = binding

    def counts(self, counts: JobCounts) -> None:
        """Renew the file, at most once a second."""
        self._counts = counts
        self._binding = counts.binding or self._binding
        if counts.state != self._state and counts.state not in ("completed", "failed", "cancelled"):
            self._enter(counts.state)
        else:
            self._file.renew(self._text)

    def failed(self, code: str, message: str) -> None:
        """Keep the error for the final write."""
        self._errors.append({"code": code, "message": message, "line": None, "param": None})

    def ended(self, state: State) -> None:
        """Write the final state."""
        self._enter(state)

    def _enter(self, state: State) -> None:
        self._state = state
        if state != "validating":
            self._stamps.setdefault(f"{state}_at", int(self._clock()))
        if state == "cancelled":
            self._stamps.setdefault("cancelling_at", self._stamps["cancelled_at"])
        self._file.renew(self._text, now=True)

    def _text(self) -> str:
        return json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Return the batch object."""
        facts, counts = self._facts, self._counts
        stamped = ("created", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": facts.id,
            "object": "batch",
            "endpoint": self._endpoint,
            "errors": {"object": "list", "data": self._errors} if self._errors else None,
            "input_file_id": facts.input_file,
            "completion_window": WINDOW,
            "status": self._state,
            "output_file_id": facts.output_file,
            "error_file_id": facts.error_file,
            **{f"{name}_at": self._stamps.get(f"{name}_at") for name in stamped},
            "expires_at": None,
            "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
            "metadata": None,
            "model": facts.model or None,
            "moelight": self._more(counts),
        }

    def _more(self, counts: JobCounts) -> dict[str, Any]:
        rows, read_bytes, total_bytes = self._read
        left, binding = 0.0 if self._state == "completed" else self._eta.remaining_s, self._binding
        return {
            "updated_at": int(self._clock()),
            "rows_read": max(rows, counts.total),
            "bytes_read": read_bytes,
            "bytes_total": total_bytes,
            "resumed": counts.resumed,
            "running": counts.running,
            "waiting": counts.waiting,
            "prompt_tokens": counts.prompt_tokens,
            "generation_tokens": counts.generation_tokens,
            "expected_tokens": counts.expected_tokens,
            "tokens_per_second": round(counts.tokens_per_s, 3),
            "eta_seconds": None if left is None or not math.isfinite(left) else round(left, 1),
            "elapsed_seconds": round(counts.elapsed_s, 1),
            "pass": counts.passes,
            "binding": None if binding is None else {"lane": str(binding.lane), "share": round(binding.share, 4)},
        }


def without_extra(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``batch`` with only OpenAI's fields."""
    return {name: value for name, value in batch.items() if name not in EXTRA}
