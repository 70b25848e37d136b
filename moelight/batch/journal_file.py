"""The journal on disk: one record a line, each with its checksum, each fsynced before the next is written.

Depends on lines of JSON, not on the meaning of records.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moelight.batch import faults
from moelight.batch.append import write_at
from moelight.core.errors import InputError

Record = dict[str, Any]
_HEAD = b'{"crc":"%08x","record":'


def to_line(record: Record) -> bytes:
    """Return ``record`` as a line: ``{"crc":"…","record":{…}}``, with the crc32 of the inner object's bytes."""
    body = json.dumps(record, separators=(",", ":")).encode()
    return _HEAD % zlib.crc32(body) + body + b"}\n"


def from_line(line: bytes) -> Record | None:
    """Return the record of a line, or None if the line is damaged."""
    body = line[len(_HEAD % 0) : -2]
    if not line.endswith(b"}\n") or line != _HEAD % zlib.crc32(body) + body + b"}\n":
        return None
    record = json.loads(body)
    return record if isinstance(record, dict) else None


def read_records(fd: int, *, shown: Path) -> Iterator[tuple[Record, int]]:
    """Yield every whole record of the journal ``fd``, and the offset behind its line. A torn last line is omitted.

    Raises:
        InputError: a line in the middle is damaged.
    """
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        end = 0
        for number, line in enumerate(file, 1):
            record = from_line(line)
            if record is None and file.read(1):
                raise InputError(
                    f"{shown}: line {number} is damaged, so what this job has done is not known; --restart starts anew",
                    code="journal",
                )
            if record is None:
                return
            end += len(line)
            yield record, end


class JournalFile:
    """The journal open for writing at ``end``, behind the last whole line; a torn line is truncated. Owns ``fd``."""

    def __init__(self, fd: int, *, end: int = 0) -> None:
        self._fd = fd
        self._end = end
        os.ftruncate(fd, end)

    def write(self, record: Record) -> None:
        """Write and fsync ``record``. After an OSError the record may or may not be on the disk."""
        line = to_line(record)
        faults.reach("before_journal_write")
        faults.reach("mid_journal_write", self._fd, line, self._end)
        write_at(self._fd, line, self._end)
        faults.reach("after_journal_write")
        os.fsync(self._fd)
        faults.reach("after_journal_fsync")
        self._end += len(line)

    def take_back(self) -> None:
        """Remove the bytes of a failed ``write`` from the file. Raises OSError."""
        os.ftruncate(self._fd, self._end)
        os.fsync(self._fd)
