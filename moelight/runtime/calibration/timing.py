"""Speed of a piece of work: the median of repeated samples in a round, and of several rounds that are apart in time.

What other programs of this system slow down is known and left out. Neighbours on the host of a virtual machine are not:
a core has fast and slow states for seconds, and a job meets all of them, so undisturbed rounds count alike.
"""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import torch

from moelight.kernels.device import Device

PROC = Path("/proc")
# Columns of a processor in /proc/stat: user, nice, system, irq, softirq, steal; not idle and iowait.
_BUSY = (0, 1, 2, 5, 6, 7)


class Others:
    """Load by other programs since construction, on the processors that threads of this process could use then."""

    def __init__(self, *, proc: Path = PROC) -> None:
        self._proc, self._processors = proc, _processors()
        self._began = self._now()

    def cores(self) -> float:
        """Mean number of processors that other programs kept busy; 0 if unknown."""
        wall, busy, own_s = map(operator.sub, self._now(), self._began)
        return max(0.0, (busy - own_s) / wall) if wall > 0 and busy > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._busy_seconds(), time.process_time()

    def _busy_seconds(self) -> float:
        names = {f"cpu{number}" for number in self._processors}
        try:
            lines = [line.split() for line in (self._proc / "stat").read_text(encoding="ascii").splitlines()]
            ticks = sum(int(line[1 + column]) for line in lines if line and line[0] in names for column in _BUSY)
        except (OSError, ValueError, IndexError):
            return 0.0
        return ticks / os.sysconf("SC_CLK_TCK")


def _processors() -> set[int]:
    """Return the processors of all threads, because each may be bound to its own."""
    processors = set[int]()
    if hasattr(os, "sched_getaffinity"):
        for thread in psutil.Process().threads():
            with suppress(ProcessLookupError):  # the thread has ended
                processors |= os.sched_getaffinity(thread.id)
    return processors


Work = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)
SAMPLE_S = 2e-3  # least duration of a sample, so that clock and launch overhead are negligible
MOST_SAMPLES = 300
DISTURBED_CORES = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Rate per second, the median of samples; ``spread`` is the width of their middle half as a share of the median."""

    rate: float
    spread: float


# Takes the seconds it may use and returns one measurement.
Measure = Callable[[float], Measurement]


def reading_of(seconds: Sequence[float], amount: float = 1.0) -> Measurement:
    """Measurement from at least one sample of ``amount`` that took ``seconds`` (above 0)."""
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return Measurement(rate=amount / float(middle), spread=float((high - low) / middle))


def sample(work: Work, *, seconds: float, amount: float = 1.0, finish: Work = lambda: None) -> Measurement:
    """``amount`` per second, where one call of ``work`` does that much, for about ``seconds``. The first call warms up,
    and counts only if it takes longer. A sample has several calls of short work, then ``finish``, which waits for
    device work."""
    began = time.perf_counter()
    work()
    finish()
    first = time.perf_counter() - began
    if first > seconds:
        return Measurement(rate=amount / first, spread=0.0)
    calls = max(1, round(SAMPLE_S / _timed(work, finish, 1)))
    samples = list[float]()
    while not samples or (time.perf_counter() - began < seconds and len(samples) < MOST_SAMPLES):
        samples.append(_timed(work, finish, calls))
    return reading_of(samples, amount)


def over_rounds(
    measurements: Mapping[Key, tuple[Measure, float]], *, quiet_rounds: int, seconds: float
) -> tuple[dict[Key, Measurement], float]:
    """Reading of each measurement (given with the seconds it may take), and the processors that other programs kept
    busy in the quietest round. The reading is that of median rate among undisturbed rounds, the fastest if none was.
    Rounds are repeated until ``quiet_rounds`` were undisturbed or ``seconds`` have passed; the first round is cut at
    twice ``seconds``, so order measurements by importance."""
    began, quiet, least = time.perf_counter(), 0, float("inf")
    readings: dict[Key, tuple[list[Measurement], list[Measurement]]] = {}  # of disturbed and of undisturbed rounds
    while quiet < quiet_rounds and (not readings or time.perf_counter() - began < seconds):
        others, first_round, taken = Others(), not readings, dict[Key, Measurement]()
        for key, (measure_one, each_s) in measurements.items():
            if (readings or taken) and time.perf_counter() - began > (2 * seconds if first_round else seconds):
                break
            taken[key] = measure_one(each_s)
        busy = others.cores()
        undisturbed = busy < DISTURBED_CORES
        for key, reading in taken.items():
            readings.setdefault(key, ([], []))[undisturbed].append(reading)
        quiet, least = quiet + undisturbed, min(least, busy)
    return {
        key: _middle(alone) if alone else max(beside, key=_rate) for key, (beside, alone) in readings.items()
    }, least


def _middle(readings: Sequence[Measurement]) -> Measurement:
    """That of median rate; of an even number the slower one in the middle."""
    return sorted(readings, key=_rate)[(len(readings) - 1) // 2]


def _rate(reading: Measurement) -> float:
    return reading.rate


def repeated(work: Work, seconds: float, *, before: Work = lambda: None) -> list[float]:
    """Seconds of each call of ``work``, called for about ``seconds``, at least once; ``before`` each is not timed."""
    samples, began = list[float](), time.perf_counter()
    while not samples or time.perf_counter() - began < seconds:
        before()
        samples.append(_timed(work, lambda: None, 1))
    return samples


@contextmanager
def beside(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run ``work`` on a thread within the context; at its end the event is set and the thread joined."""
    enough = threading.Event()
    worker = threading.Thread(target=work, args=(enough,), name=name, daemon=True)
    worker.start()
    try:
        yield
    finally:
        enough.set()
        worker.join()


def finisher(device: torch.device) -> Work:
    """Function that waits until ``device`` has completed all submitted work."""
    return Device(device).synchronize


def _timed(work: Work, finish: Work, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        work()
    finish()
    return max(time.perf_counter() - began, 1e-9) / calls
