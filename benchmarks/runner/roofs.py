"""The two roofs, measured now and again beside the kernels: reading memory, and multiplying from registers.

Reading is the faster of the extension's own reader (several streams, lines asked for ahead) and torch's sum of float32,
over 1 GiB and with the threads of the kernels. Products are the extension's loops over registers with the instruction
set in force: no kernel that touches memory gets there.
"""

from __future__ import annotations

import statistics
import time

import torch
from peers.common import huge

from moelight.kernels import native
from moelight.kernels.arguments import as_dlpack
from runner.threads import PAUSE_S, spreading

PRODUCT_S = 0.02
_TRIAL_ROUNDS = 1600


class Roofs:
    """Made once, asked in every round. Keeps what it found, for the heading and the JSON line."""

    def __init__(self, gib: float, threads: int) -> None:
        self.threads = threads
        self.extension = native.extension()
        self._buffer = huge((int(gib * 2**28) * 4,), torch.uint8)
        self._buffer.fill_(1)
        self._rounds = _TRIAL_ROUNDS
        self.reads: list[float] = []
        self.products: list[float] = []
        for _ in range(2):
            self.read_seconds_per_byte()
            self._rounds = max(1, round(self._rounds * PRODUCT_S / self._product_seconds("bfloat16")[0]))
        self.reads.clear()
        self.products.clear()

    def measure(self) -> None:
        """Both once; to be called before and after what runs under them."""
        with spreading():
            self.read_seconds_per_byte()
            self.seconds_per_flop()

    def figures(self) -> dict[str, float]:
        """Medians so far."""
        return {"read_bytes_per_s": statistics.median(self.reads), "bf16_flops": statistics.median(self.products)}

    def read_seconds_per_byte(self) -> float:
        """The faster of two ways."""
        lent = as_dlpack("bytes", self._buffer)
        times = []
        for way in (lambda: self.extension.read_peak(lent, self.threads), self._buffer.view(torch.float32).sum):
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            way()
            times.append(time.perf_counter() - began)
        self.reads.append(self._buffer.nbytes / min(times))
        return 1 / self.reads[-1]

    def seconds_per_flop(self, dtype: str = "bfloat16") -> float:
        """Of products of ``dtype``, sums in float32, or of int8 in int32."""
        took, flop = self._product_seconds(dtype)
        if dtype == "bfloat16":
            self.products.append(flop / took)
        return took / flop

    def _product_seconds(self, dtype: str) -> tuple[float, float]:
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        flop = self.extension.product_peak(dtype, self._rounds, self.threads)
        return time.perf_counter() - began, flop
