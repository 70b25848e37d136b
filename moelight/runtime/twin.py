"""The emulated device ``twin``: a GPU played in host memory by streams whose work is done at launch, and the habits of
real cards that it takes on request: a link's rate, the cost of launches, a memory that ends, no bfloat16."""

from __future__ import annotations

import re
import threading
import time
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.schedule import Lane, Task
from moelight.core.units import format_bytes, parse_bytes
from moelight.runtime.lanes import MovedBytes, Outcome, Skipped, Work

_KNOWN = ("fp16", "link", "launch", "memory")
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}
_SPIN_S = 2e-4  # the system's sleep may take tens of microseconds longer


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinHabits:
    """The limits that the emulated device imitates; none by default.

    Attributes:
        fp16: it has no bfloat16.
        link_bytes_per_s: the rate of either direction of its link, which no transfer exceeds; 0: that of the copy.
        launch_s: seconds of the launching thread for every task of the device's lanes.
        memory_bytes: the memory of the device: what tensors of its lanes and arenas take beyond it is refused; 0: none
            of its own.
    """

    fp16: bool = False
    link_bytes_per_s: float = 0.0
    launch_s: float = 0.0
    memory_bytes: int = 0

    @staticmethod
    def parse(text: str) -> TwinHabits:
        """The habits ``text``, as in ``fp16,link=12GB/s,launch=5us,memory=16GiB``, each at most once. Raises
        ConfigError."""
        habits: dict[str, Any] = {}
        for item in text.split(","):
            key, equals, value = item.strip().partition("=")
            if key not in _KNOWN or (key == "fp16") is bool(equals) or key in habits:
                raise ConfigError(
                    f"--device twin:{text}: {item!r} is not one of fp16, link=RATE, launch=TIME and memory=SIZE, each "
                    f"once, as in twin:fp16,link=12GB/s,launch=5us,memory=16GiB{did_you_mean(key, _KNOWN)}"
                )
            habits[key] = value
        return TwinHabits(
            fp16="fp16" in habits,
            link_bytes_per_s=_rate(habits["link"]) if "link" in habits else 0.0,
            launch_s=_seconds(habits["launch"]) if "launch" in habits else 0.0,
            memory_bytes=parse_bytes(habits["memory"], label="--device twin: memory") if "memory" in habits else 0,
        )

    @property
    def takes_time(self) -> bool:
        return self.link_bytes_per_s > 0 or self.launch_s > 0

    def timed(self, task: Task, work: Work) -> Work:
        """``work`` of ``task``, which takes the time of its launch and of its bytes on the link."""
        if task.lane is Lane.DEVICE:
            return partial(self._launched, work)
        if task.lane in (Lane.H2D, Lane.D2H):
            return partial(self._moved, work, task.bytes)
        return work

    def _launched(self, work: Work) -> Outcome:
        _wait_until(time.perf_counter() + self.launch_s)
        return work()

    def _moved(self, work: Work, size: int) -> Outcome:
        began_s = time.perf_counter()
        outcome = work()
        if isinstance(outcome, Skipped):
            return outcome
        size = outcome.bytes if isinstance(outcome, MovedBytes) else size
        took_s = size / self.link_bytes_per_s if self.link_bytes_per_s else 0.0
        _wait_until(began_s + self.launch_s + took_s)
        return outcome


class EmulatedEvent:
    """An event that holds the time of its recording."""

    def __init__(self) -> None:
        self._at_s: float | None = None

    def record(self, stream: EmulatedStream) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once; raises RuntimeError if the event was never recorded, where a real device would hang."""
        if self._at_s is None:
            raise RuntimeError("waited for an event that was never recorded")

    def query(self) -> bool:
        """True; raises RuntimeError if the event was never recorded."""
        self.synchronize()
        return True

    def elapsed_time(self, later: EmulatedEvent) -> float:
        """Milliseconds between the two recordings."""
        self.synchronize()
        later.synchronize()
        return ((later._at_s or 0.0) - (self._at_s or 0.0)) * 1e3


class EmulatedStream(AbstractContextManager["EmulatedStream"]):
    """A stream whose work is done at launch. With ``memory``, tensors that its work allocates take some of it."""

    def __init__(self, memory: EmulatedMemory | None = None) -> None:
        self._counting = None if memory is None else _Allocations(memory)

    def __enter__(self) -> EmulatedStream:
        if self._counting is not None:
            self._counting.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._counting is not None:
            self._counting.__exit__(*error)

    def wait_event(self, event: EmulatedEvent) -> None:
        """Return at once; raises RuntimeError if the event was never recorded, where a real stream would race."""
        event.synchronize()

    def synchronize(self) -> None:
        """Return at once: no work is outstanding."""

    def query(self) -> bool:
        """True: no work is outstanding."""
        return True


class EmulatedMemory:
    """Device memory of ``limit`` bytes, from which tensors take until they are freed; used by several threads."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.peak = limit, 0, 0
        self._lock = threading.Lock()
        self._known = WeakIdKeyDictionary()

    def take(self, size: int) -> None:
        """Raise torch.OutOfMemoryError if fewer than ``size`` bytes are left."""
        with self._lock:
            if self.used + size > self.limit:
                raise torch.OutOfMemoryError(
                    f"twin out of memory: {format_bytes(size)} more than {format_bytes(self.used)} of "
                    f"{format_bytes(self.limit)}"
                )
            self.used += size
            self.peak = max(self.peak, self.used)

    def give(self, size: int) -> None:
        with self._lock:
            self.used -= size

    def hold(self, tensor: Tensor, size: int | None = None) -> None:
        """Take ``size`` bytes (None: those of ``tensor``) until its storage is freed, unless it is held already."""
        storage = tensor.untyped_storage()
        with self._lock:
            if storage in self._known:
                return
            self._known[storage] = True
        size = storage.nbytes() if size is None else size
        self.take(size)
        weakref.finalize(storage, self.give, size)


class _Allocations(TorchDispatchMode):
    """Every tensor that an operator returns in memory other than its arguments' is held in ``memory``."""

    def __init__(self, memory: EmulatedMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and _place(leaf) not in inputs:
                self._memory.hold(leaf)
        return output


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _wait_until(end_s: float) -> None:
    """Sleep, and spin for the last `_SPIN_S`: never less than asked for."""
    while (left_s := end_s - time.perf_counter()) > 0:
        if left_s > _SPIN_S:
            time.sleep(left_s - _SPIN_S)


def _rate(text: str) -> float:
    size, per, unit = text.partition("/")
    if per and unit.strip() != "s":
        raise ConfigError(f"--device twin: link: {text!r} is not a rate, as in 12GB/s")
    return float(parse_bytes(size, label="--device twin: link"))


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s)\s*", text)
    if match is None or not float(match.group(1)):
        raise ConfigError(f"--device twin: launch: {text!r} is not a time, as in 5us")
    return float(match.group(1)) / _PER_SECOND[match.group(2)]
