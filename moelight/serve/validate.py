"""Whether a file can be a batch at all: lines there are, and all for the batch's endpoint.

What is wrong with single lines is left to the job, which turns each of them into an error row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from moelight.serve.store import BatchFailure

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
_MAX_LINE_BYTES = 16 << 20  # longer ones are counted and not looked into
_MAX_FAULTS = 100
_BOM = b"\xef\xbb\xbf"


class _Line(msgspec.Struct):
    url: str | msgspec.UnsetType = msgspec.UNSET


_DECODER = msgspec.json.Decoder(_Line)


def check_lines(path: Path, *, endpoint: str) -> tuple[int, list[BatchFailure]]:
    """The number of lines that are not blank, and what makes the file as a whole impossible (empty: nothing).

    A file is impossible when it has no line, when none of its lines is a JSON object, or when a line is for another
    endpoint than the batch. At most 100 faults are named.
    """
    total, objects, faults = 0, 0, list[BatchFailure]()
    for number, line in _lines(path):
        total += 1
        if len(line) >= _MAX_LINE_BYTES:
            objects += 1
            continue
        try:
            url = _DECODER.decode(line).url
        except msgspec.ValidationError:  # JSON, and its row will say what is wrong with it
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
    """``(number from 1, line)`` for each line that is not blank, the bytes of a very long one cut."""
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
