"""Transfers between host and device: pinned and pageable, in both directions, alone and while the CPU attends.

Measures copies and launches on one device. With the CPU as the device the figures mean nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial

import torch

from moelight.core.units import KiB
from moelight.runtime.calibration.timing import Measure, Measurement, Work, finisher, sample

SMALL_BYTES = 4 * KiB


def measure_links(device: torch.device, size: int, attend: Work) -> dict[str, Measure]:
    """Measurements of transfers of ``size`` bytes by kind in bytes/s, and of small ``transfers`` per second.

    ``attend`` keeps the CPU busy during ``host_to_device_under_attention``.
    """
    finish, crosses = finisher(device), device.type != "cpu"
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=crosses)
    plain = torch.zeros(size, dtype=torch.uint8)
    there = torch.zeros(size, dtype=torch.uint8, device=device)

    def copy(into: torch.Tensor, source: torch.Tensor, amount: float, seconds: float) -> Measurement:
        work = partial(into.copy_, source, non_blocking=True)
        return sample(work, seconds=seconds, amount=amount, finish=finish)

    def copy_beside(seconds: float) -> Measurement:
        with kept_busy(attend):
            return copy(there, pinned, size, seconds)

    return {
        "host_to_device": partial(copy, there, pinned, size),
        "device_to_host": partial(copy, pinned, there, size),
        "host_to_device_pageable": partial(copy, there, plain, size),
        "device_to_host_pageable": partial(copy, plain, there, size),
        "host_to_device_under_attention": copy_beside,
        "transfers": partial(copy, there[:SMALL_BYTES], pinned[:SMALL_BYTES], 1.0),
    }


def launches(device: torch.device) -> Measure:
    """Launches per second of a kernel with next to nothing to do, one after another."""
    number, finish = torch.zeros(1, device=device), finisher(device)
    return lambda seconds: sample(lambda: number.add_(1), seconds=seconds, finish=finish)


@contextlib.contextmanager
def kept_busy(work: Work) -> Iterator[None]:
    """Run ``work`` over and over on a thread of its own within the context."""
    enough = threading.Event()

    def toil() -> None:
        with torch.inference_mode():
            while not enough.is_set():
                work()

    worker = threading.Thread(target=toil, name="moelight-attention-beside", daemon=True)
    worker.start()
    try:
        yield
    finally:
        enough.set()
        worker.join()
