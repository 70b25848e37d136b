"""Reader of the traces that ``trace`` writes: event by event, to bound memory, and with validation of every value.

``report`` interprets the figures.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from moelight.core.errors import InputError, did_you_mean
from moelight.core.schedule import Lane, TaskKind
from moelight.core.small_files import open_regular, read_error_text
from moelight.observe.trace import LaneForecast, TraceHeader

_CHUNK = 1 << 20
_LONGEST_VALUE = 8 << 20
_LONGEST_EVENT = 1 << 16
_MOST_EVENTS = 30_000_000
_MOST_PASSES = 1 << 24
_MOST = 1 << 62
_MOST_US = 1e15
_FOREIGN = "not a trace that moelight wrote (generate --trace and simulate --trace write them)"
_BLANK = " \t\r\n"
_LANES = {str(lane): number for number, lane in enumerate(Lane)}
_KINDS = {str(kind): number for number, kind in enumerate(TaskKind)}
FOR_NOTHING, NOT_RECORDED = -1, -2


class TaskColumns:
    """All tasks of a trace as columns, 51 bytes a task.

    ``lanes`` and ``kinds`` hold positions in `Lane` and `TaskKind`. ``waited_for`` holds the position of the kind of
    the dependency that ended last, at ``until_us``; or `FOR_NOTHING`; or `NOT_RECORDED` in a trace of an older version.
    """

    def __init__(self) -> None:
        self.start_us, self.length_us, self.until_us = array("d"), array("d"), array("d")
        self.waited_for = array("b")
        self.lanes, self.kinds = array("B"), array("B")
        self.passes, self.layers, self.micro_batches, self.experts = (array("i") for _ in range(4))
        self.bytes = array("q")

    def __len__(self) -> int:
        return len(self.lanes)


class Recording:
    """One trace: its bars, and its header ``about`` (None if the trace has none)."""

    def __init__(self, bars: TaskColumns, about: TraceHeader | None) -> None:
        self.bars = bars
        self.about = about


def read_trace(path: Path) -> Recording:
    """Return the recording in the file ``path``, as written by ``generate --trace`` or ``simulate --trace``.

    Raises:
        InputError: the file is unreadable, not such a trace, truncated, or holds an impossible value, which the
            message names.
    """
    try:
        with open(open_regular(path), encoding="utf-8") as file:
            return _read(_Text(file))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({read_error_text(error)})", code="trace_file") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8, so not a trace", code="trace_file") from None
    except _TraceError as fault:
        raise InputError(f"{path}: {fault}", code="trace_file") from None


class _TraceError(Exception):
    """An error in the content of a trace; the message omits the file name."""


class _Text:
    """Incremental reader of JSON values from a file of any length."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._decoder = json.JSONDecoder()
        self._text, self._at = "", 0

    def next_mark(self) -> str:
        """Return the next non-blank character without consuming it; empty at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _BLANK:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def skip(self, marks: str) -> str:
        """Consume and return the next non-blank character, which must be one of ``marks``."""
        found = self.next_mark()
        if not found:
            raise _TraceError("cut off before its end; was the run interrupted?")
        if found not in marks:
            raise _TraceError(_FOREIGN)
        self._at += 1
        return found

    def value(self, longest: int) -> Any:
        """Return the next value, of at most about ``longest`` characters."""
        self.next_mark()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._more():  # a number may continue in the next chunk
                    self._at = end
                    return value
            except RecursionError:
                raise _TraceError("nested too deeply to be a trace") from None
            except ValueError as error:
                if len(self._text) - self._at > longest:
                    raise _TraceError(f"not a trace that moelight wrote ({str(error)[:80]})") from None
                if not self._more():
                    raise _TraceError("cut off before its end, or not JSON; was the run interrupted?") from None

    def _more(self) -> bool:
        piece = self._file.read(_CHUNK)
        if piece:
            self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)


def _read(text: _Text) -> Recording:
    bars, about = TaskColumns(), None
    seen: set[str] = set()
    text.skip("{")
    while text.next_mark() != "}":
        if seen:
            text.skip(",")
        key = text.value(_LONGEST_EVENT)
        if not isinstance(key, str) or key in seen:
            raise _TraceError(_FOREIGN)
        seen.add(key)
        text.skip(":")
        if key == "traceEvents":
            for number, event in enumerate(_events(text)):
                _add(bars, event, number)
        elif key == "otherData":
            about = _about(text.value(_LONGEST_VALUE))
        else:
            text.value(_LONGEST_VALUE)
    text.skip("}")
    if text.next_mark() or "traceEvents" not in seen:
        raise _TraceError(_FOREIGN)
    if not len(bars):
        raise _TraceError("holds no tasks: nothing ran while it was taken")
    return Recording(bars, about)


def _events(text: _Text) -> Iterator[Any]:
    text.skip("[")
    first = True
    while text.next_mark() != "]":
        if not first:
            text.skip(",")
        first = False
        yield text.value(_LONGEST_EVENT)
    text.skip("]")


def _add(bars: TaskColumns, event: Any, number: int) -> None:
    if not isinstance(event, dict):
        raise _TraceError(f"event {number} is not an object")
    if event.get("ph") == "M":
        return
    if event.get("ph") != "X" or not isinstance(event.get("args"), dict):
        raise _TraceError(f"event {number} is not a task of moelight's")
    if len(bars) >= _MOST_EVENTS:
        raise _TraceError(f"holds more than {_MOST_EVENTS:,} tasks; trace a shorter run")
    args = event["args"]
    bars.lanes.append(_word(event.get("cat"), _LANES, f"event {number}: cat"))
    bars.kinds.append(_word(event.get("name"), _KINDS, f"event {number}: name"))
    bars.start_us.append(_number(event.get("ts"), f"event {number}: ts"))
    bars.length_us.append(_number(event.get("dur"), f"event {number}: dur"))
    bars.passes.append(_integer(args.get("pass"), f"event {number}: pass", most=_MOST_PASSES))
    bars.layers.append(_integer(args.get("layer", -1), f"event {number}: layer", least=-1))
    bars.micro_batches.append(_integer(args.get("micro_batch", -1), f"event {number}: micro_batch", least=-1))
    bars.experts.append(_integer(args.get("expert", -1), f"event {number}: expert", least=-1))
    bars.bytes.append(_integer(args.get("bytes", 0), f"event {number}: bytes", most=_MOST))
    waited_for, until_us = NOT_RECORDED, 0.0
    if "waited_for" in args:
        waited_for = FOR_NOTHING
        if args["waited_for"] is not None:
            waited_for = _word(args["waited_for"], _KINDS, f"event {number}: waited_for")
            until_us = _number(args.get("waited_until"), f"event {number}: waited_until")
    bars.waited_for.append(waited_for)
    bars.until_us.append(until_us)


def _about(data: Any) -> TraceHeader | None:
    """Return the header of the trace; None if another program wrote ``data``."""
    if not isinstance(data, dict) or not isinstance(data.get("moelight"), str):
        return None
    predicted = {}
    for lane, forecast in _object(data, "predicted").items():
        _word(lane, _LANES, "otherData: predicted")
        if not isinstance(forecast, dict):
            raise _TraceError(f"otherData: predicted.{lane} is not an object")
        predicted[lane] = LaneForecast(
            busy_s=_number(forecast.get("busy_s"), f"otherData: predicted.{lane}.busy_s"),
            bytes=_integer(forecast.get("bytes", 0), f"otherData: predicted.{lane}.bytes", most=_MOST),
        )
    roofs = {}
    for lane, rate in _object(data, "roofs").items():
        _word(lane, _LANES, "otherData: roofs")
        roofs[lane] = _number(rate, f"otherData: roofs.{lane}", most=1e18)
    return TraceHeader(
        version=data["moelight"],
        source=str(data.get("source", "measured")),
        policy=_plain(data, "policy"),
        hardware=str(data.get("hardware", "")),
        predicted=predicted,
        pass_s=_number(data.get("pass_s", 0.0), "otherData: pass_s"),
        roofs=roofs,
        notes={name: str(value) for name, value in _plain(data, "notes").items()},
    )


def _object(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise _TraceError(f"otherData: {key} is not an object")
    return value


def _plain(data: dict[str, Any], key: str, *, depth: int = 1) -> dict[str, Any]:
    """Return the object ``key`` after checking that it holds few, short plain values, nested at most once (by tier)."""
    found = _object(data, key)
    for name, value in found.items():
        if isinstance(value, dict) and depth:
            _plain(found, name, depth=0)
        elif not isinstance(value, (str, int, float, bool, type(None))) or len(found) > 100 or len(str(value)) > 2000:
            raise _TraceError(f"otherData: {key}.{name[:40]} is not a short plain value")
    return found


def _word(value: Any, known: dict[str, int], what: str) -> int:
    if not isinstance(value, str) or value not in known:
        raise _TraceError(
            f"{what} is {str(value)[:40]!r}, not one that moelight knows{did_you_mean(str(value)[:40], known)}"
        )
    return known[value]


def _number(value: Any, what: str, *, most: float = _MOST_US) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 <= value <= most):
        raise _TraceError(f"{what} is {str(value)[:40]!r}, not a number of at least 0 that a run could have")
    return float(value)


def _integer(value: Any, what: str, *, least: int = 0, most: int = (1 << 31) - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _TraceError(f"{what} is {str(value)[:40]!r}, not a whole number that a run could have")
    return value
