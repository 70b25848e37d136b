"""Checks that a file can be a batch: it has lines, and all are for the batch's endpoint.

Faults of single lines are left to the job, which turns each such line into an error row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from moelight.serve.store import BatchFailure

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
_MAX_LINE_BYTES = 16 << 20  # longer lines are counted and not parsed
_MAX_FAULTS = 100
_BOM = b"\xef\xbb\xbf"


class _Line(msgspec.Struct):
    url: str | msgspec.UnsetType = msgspec.UNSET


_DECODER = msgspec.json.Decoder(_Line)


def check_lines(path: Path, *, endpoint: str) -> tuple[int, list[BatchFailure]]:
    """The number of non-blank lines, and the faults that reject the file as a whole (empty if there are none).

    A file is rejected when it has no line, when none of its lines is a JSON object, or when a line is for another
    endpoint than the batch. At most 100 faults are returned.
    """
    total, objects, faults = 0, 0, list[BatchFailure]()
    for number, line in _lines(path):
        total += 1
        if len(line) >= _MAX_LINE_BYTES:
            objects += 1
            continue
        try:
            url = _DECODER.decode(line).url
        except msgspec.ValidationError:  # JSON; the job reports the fault in the line's error row
            objects += line.lstrip().startswith(b"{")
            continue
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        objects += 1
        if isinstance(url, str) and url != endpoint and len(faults) < _MAX_FAULTS:
            message = f"the line is for {url[:200]!r}, the batch for {endpoint!r}"
            faults.append(BatchFailure(code="mismatched_endpoint", message=message, param="url", line=number))
    if not total:
        return 0, [BatchFailure(code="empty_file", message="the input file has no lines", param="input_file_id")]
    if not objects:
        message = "no line of the input file is a JSON object: upload JSON Lines, uncompressed"
        return total, [BatchFailure(code="invalid_json_line", message=message, param="input_file_id", line=1)]
    return total, faults


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """``(number from 1, line)`` for each non-blank line; a very long line is cut."""
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
