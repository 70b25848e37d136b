"""Speed at which memory is read, copied, and touched by norms.

Measures one memory, of a host or of a device. Does not depend on links or disks.
"""

from __future__ import annotations

import torch

from moelight.kernels.norm import rms_norm
from moelight.runtime.calibration.pool import Pool
from moelight.runtime.calibration.timing import Measure, finisher, sample

ROWS, HIDDEN = 256, 2048
# Bytes that a norm and a residual sum read and write per 16-bit number: widen 2 + 4, square 4 + 4, mean 4, scale 4 + 4,
# round 4 + 2, weigh 2 + 2, add 4 + 2.
NORM_BYTES = 42


def reads(pool: Pool) -> Measure:
    """bytes/s of reading the whole pool, once per call, with all threads."""
    words, finish = pool.numbers.view(torch.float32), finisher(pool.device)
    return lambda seconds: sample(words.sum, seconds=seconds, amount=pool.nbytes, finish=finish)


def copies(pool: Pool) -> Measure:
    """bytes/s of payload: half of the pool is copied to the other half. Each byte counts once though it is read and
    written."""
    size, finish = pool.numbers.numel() // 2, finisher(pool.device)
    here, there = pool.numbers[:size], pool.numbers[size : 2 * size]
    return lambda seconds: sample(lambda: there.copy_(here), seconds=seconds, amount=here.nbytes, finish=finish)


def norms(pool: Pool, rows: int = ROWS, hidden: int = HIDDEN) -> Measure:
    """bytes/s of a norm and a residual sum over ``rows`` hidden states, as in a layer."""
    x = torch.randn(rows, hidden, device=pool.device).to(pool.dtype)
    weight, total = torch.ones(hidden, device=pool.device, dtype=pool.dtype), torch.zeros_like(x)
    amount, finish = NORM_BYTES * x.numel(), finisher(pool.device)
    return lambda seconds: sample(
        lambda: rms_norm(x, weight, 1e-5, add=total), seconds=seconds, amount=amount, finish=finish
    )
