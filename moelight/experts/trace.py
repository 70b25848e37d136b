"""Routing traces: the experts that each batch of a layer chose. Each line is
``{"l": layer, "e": [ids], "s": [scores]}``: the ids of all tokens one after the other, repeats kept, and optional
router weights; files may be gzipped."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from moelight.core.errors import ConfigError, did_you_mean
from moelight.experts.eviction import FloatArray, IntArray
from moelight.profiles.model import MOST_EXPERTS, MOST_LAYERS

KEYS = ("l", "e", "s")
MOST_LINE_BYTES = 16 << 20  # a pass of 100,000 tokens with eight experts each takes 10 MB
MOST_SCORE = 1e9  # weights are about 1; sums of scores must be finite
SCORE_DIGITS = 4
_GZIP = b"\x1f\x8b"
_BUFFER_BYTES = 1 << 20

Refuse = Callable[[str], NoReturn]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """One batch of one layer, from ``line`` of its file: ``ids`` int64 [n] and, if given, ``scores`` float64 [n]."""

    line: int
    layer: int
    ids: IntArray
    scores: FloatArray | None = None


def read_rows(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of ``path`` in order, one at a time; empty lines are skipped. Raises ConfigError, with the line,
    if the file cannot be read or a line is not a row."""
    try:
        with path.open("rb") as raw:
            yield from _rows(path, gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP else raw)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ConfigError(f"trace {path}: cannot be read ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _rows(path: Path, file: BinaryIO | gzip.GzipFile) -> Iterator[TraceRow]:
    number = 0
    while data := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(data) > MOST_LINE_BYTES:
            _refuse(path, number, f"is longer than {MOST_LINE_BYTES >> 20} MiB; a row is one batch of one layer")
        if number == 1:
            data = data.removeprefix(b"\xef\xbb\xbf")
        if data.strip():
            yield _row(path, number, data)


def _row(path: Path, number: int, data: bytes) -> TraceRow:
    refuse: Refuse = partial(_refuse, path, number)
    row = _object(data, refuse)
    layer, ids = row["l"], row["e"]
    if type(layer) is not int or not 0 <= layer < MOST_LAYERS:
        refuse(f"key 'l': expected a layer from 0 to {MOST_LAYERS - 1}, not {_shown(layer)}")
    if not isinstance(ids, list):
        refuse(f"key 'e': expected a list of expert ids, not {_shown(ids)}")
    for expert in ids:
        if type(expert) is not int or not 0 <= expert < MOST_EXPERTS:
            refuse(f"key 'e': expected expert ids from 0 to {MOST_EXPERTS - 1}, not {_shown(expert)}")
    scores = _scores(row["s"], len(ids), refuse) if row.get("s") is not None else None
    return TraceRow(line=number, layer=layer, ids=np.array(ids, np.int64), scores=scores)


def _object(data: bytes, refuse: Refuse) -> dict[str, Any]:
    """Parse a line as an object with exactly the keys of a row."""
    try:
        pairs = json.loads(data.decode("utf-8"), object_pairs_hook=list, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        refuse(f"is not UTF-8 (byte {error.start + 1})")
    except RecursionError:
        refuse("is nested too deeply for a row")
    except json.JSONDecodeError as error:
        refuse(f"is not JSON ({error.msg}, column {error.colno})")
    except ValueError:
        refuse("is not JSON (NaN, Infinity or a number of thousands of digits)")
    # Objects are parsed as lists of pairs, so that duplicate keys are detected; other lists never contain tuples.
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        refuse('is not an object; write {"l": LAYER, "e": [IDS], "s": [SCORES]}')
    keys = [key for key, _ in pairs]
    for key in keys:
        if key not in KEYS:
            refuse(f"has an unknown key {key[:40]!r}{did_you_mean(key[:40], KEYS)}; known: {', '.join(KEYS)}")
        if keys.count(key) > 1:
            refuse(f"has key {key!r} twice")
    for key in KEYS[:2]:
        if key not in keys:
            refuse(f"lacks key {key!r} ({'layer' if key == 'l' else 'expert ids'})")
    return dict(pairs)


def _scores(values: Any, count: int, refuse: Refuse) -> FloatArray:
    if not isinstance(values, list) or len(values) != count:
        shown = f"{len(values)}" if isinstance(values, list) else _shown(values)
        refuse(f"key 's': expected one score for each of the {count} ids, not {shown}")
    for score in values:
        if type(score) not in (int, float) or not abs(score) <= MOST_SCORE:
            refuse(f"key 's': expected finite numbers, not {_shown(score)}")
    return np.array(values, np.float64)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "a list or an object"
    return json.dumps(value)[:40] if not isinstance(value, int) or abs(value) < 1 << 64 else "a number of many digits"


def _refuse(path: Path, number: int, complaint: str) -> NoReturn:
    raise ConfigError(f"trace {path}:{number}: {complaint}")


class RoutingTrace:
    """Writer of a trace. An existing file of that name is replaced immediately; `close` ends the trace."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("wb", buffering=_BUFFER_BYTES)
        except (OSError, ValueError) as error:
            raise self._fault(error) from None

    def write(self, layer: int, ids: ArrayLike, weights: ArrayLike) -> None:
        """Write one batch of ``layer``, buffered: ``ids`` int [T, k] and router ``weights`` float [T, k]. Raises
        ConfigError if the row cannot be written, for example because the disk is full."""
        chosen, shares = np.asarray(ids).ravel(), np.asarray(weights, np.float64).ravel()
        row: dict[str, Any] = {"l": int(layer), "e": chosen.tolist()}
        if math.isfinite(float(shares.sum())):  # else `read_rows` would reject the row
            row["s"] = shares.round(SCORE_DIGITS).tolist()
        with self._closed_on_failure():
            self._file.write(json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        """Flush and close the file, errors as `write`; may be called twice."""
        with self._closed_on_failure():
            self._file.close()

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):  # closing may fail again; the first failure is the one to report
                self._file.close()
            raise self._fault(error) from None

    def _fault(self, error: OSError | ValueError) -> ConfigError:
        return ConfigError(f"routing trace {self._path}: cannot be written ({_reason(error).lower()})")
