"""Reader of the traces that ``trace`` writes: line by line, to bound memory, with every value validated."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from moelight.core.errors import InputError, did_you_mean
from moelight.core.schedule import Lane, TaskKind
from moelight.core.small_files import open_regular, read_error_text
from moelight.observe.trace import HEAD, MOST_BYTES, TraceHeader

_LONGEST_LINE = 1 << 16
_LONGEST_TAIL = 8 << 20
_MOST_TASKS = 30_000_000
_FOREIGN = "not a trace that moelight wrote (generate --trace and simulate --trace write them)"
_CUT_OFF = "cut off before its end; was the run interrupted?"
_LANES = {str(lane): number for number, lane in enumerate(Lane)}
_KINDS = {str(kind): number for number, kind in enumerate(TaskKind)}
FOR_NOTHING, NOT_RECORDED = -1, -2


class TaskColumns:
    """All tasks of a trace as columns, 51 bytes a task.

    ``lanes`` and ``kinds`` hold positions in `Lane` and `TaskKind`. ``waited_for`` holds the kind (its position) of the
    dependency that ended last, at ``until_us``; or `FOR_NOTHING`; or `NOT_RECORDED` in a trace of an older version.
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


_Number = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
_Microseconds = Annotated[float, Meta(ge=0, le=1e15)]


class _Arguments(Struct):
    number: Annotated[int, Meta(ge=0, le=1 << 24)] = msgspec.field(name="pass")
    layer: _Number = -1
    micro_batch: _Number = -1
    expert: _Number = -1
    bytes: Annotated[int, Meta(ge=0, le=MOST_BYTES)] = 0
    waited_for: str | UnsetType | None = UNSET
    waited_until: _Microseconds | UnsetType = UNSET


class _TaskEvent(Struct, tag_field="ph", tag="X"):
    name: str
    cat: str
    ts: _Microseconds
    dur: _Microseconds
    args: _Arguments


class _MetadataEvent(Struct, tag_field="ph", tag="M"):
    pass


class _Tail(Struct):
    about: TraceHeader | None = msgspec.field(name="otherData", default=None)


_EVENT = msgspec.json.Decoder(_TaskEvent | _MetadataEvent)


def read_trace(path: Path) -> Recording:
    """Return the recording in the trace file ``path``; raises InputError, which names the fault, if it is invalid."""
    try:
        with open(open_regular(path), "rb") as file:
            return _read(file)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({read_error_text(error)})", code="trace_file") from None
    except _TraceError as fault:
        raise InputError(f"{path}: {fault}", code="trace_file") from None


class _TraceError(Exception):
    """An error in the content of a trace; the message omits the file name."""


def _read(file: BinaryIO) -> Recording:
    bars, head, number = TaskColumns(), file.readline(len(HEAD)), 0
    if head != HEAD:
        raise _TraceError(_CUT_OFF if HEAD.startswith(head) else _FOREIGN)
    while not (line := file.readline(_LONGEST_LINE)).startswith(b"]"):
        if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
            raise _TraceError(_CUT_OFF)
        try:
            event = _EVENT.decode(line.rstrip(b",\n"))
            if isinstance(event, _TaskEvent):
                _add(bars, event)
        except (ValueError, RecursionError, _TraceError) as error:
            raise _TraceError(f"event {number}: {str(error)[:200]}") from None
        number += 1
    try:
        about = msgspec.json.decode(HEAD + line + file.read(_LONGEST_TAIL), type=_Tail).about
        for lane in () if about is None else (*about.predicted, *about.roofs):
            _position(lane, _LANES, "a lane")
    except (msgspec.ValidationError, _TraceError) as error:
        raise _TraceError(f"otherData: {str(error)[:200]}") from None
    except (ValueError, RecursionError) as error:
        raise _TraceError(_CUT_OFF if "truncated" in str(error) else _FOREIGN) from None
    if not len(bars):
        raise _TraceError("holds no tasks: nothing ran while it was taken")
    return Recording(bars, about)


def _add(bars: TaskColumns, event: _TaskEvent) -> None:
    if len(bars) >= _MOST_TASKS:
        raise _TraceError(f"holds more than {_MOST_TASKS:,} tasks; trace a shorter run")
    args = event.args
    bars.lanes.append(_position(event.cat, _LANES, "cat"))
    bars.kinds.append(_position(event.name, _KINDS, "name"))
    bars.start_us.append(event.ts)
    bars.length_us.append(event.dur)
    bars.passes.append(args.number)
    bars.layers.append(args.layer)
    bars.micro_batches.append(args.micro_batch)
    bars.experts.append(args.expert)
    bars.bytes.append(args.bytes)
    until_us = 0.0
    if isinstance(args.waited_for, str):
        bars.waited_for.append(_position(args.waited_for, _KINDS, "waited_for"))
        if isinstance(args.waited_until, UnsetType):
            raise _TraceError("waited_for without waited_until")
        until_us = args.waited_until
    else:
        bars.waited_for.append(FOR_NOTHING if args.waited_for is None else NOT_RECORDED)
    bars.until_us.append(until_us)


def _position(word: str, known: dict[str, int], what: str) -> int:
    if word not in known:
        raise _TraceError(f"{what} is {word[:40]!r}, not one that moelight knows{did_you_mean(word[:40], known)}")
    return known[word]
