"""Which form of each kernel is the fastest on this machine: all of them in turns over memory, less than a second."""

from __future__ import annotations

import time
from itertools import islice

import torch

from moelight.kernels import variants
from moelight.kernels.ffn import cpu_linear
from moelight.profiles.hardware import KERNELS
from moelight.runtime.calibration.surfaces import Pool

_WEIGHT = (2048, 1024)  # a few of them, so that no cache holds them
_GROUPS, _ROUNDS = 6, 7
_MARGIN = 1.02  # by which another form must be faster than the one in force


def fastest_forms(pool: Pool) -> dict[str, str]:
    """The form of every kernel in `KERNELS`, for weights out of ``pool``, in bfloat16; nothing without the extension,
    or if the pool is too small to tell memory from a cache. The forms in force afterwards are those of before."""
    if not variants.forms() or pool.dtype != torch.bfloat16 or not pool.holds(*[_WEIGHT] * _GROUPS):
        return {}
    before, fastest = variants.chosen(), dict[str, str]()
    try:
        for kernel in KERNELS:
            fastest[kernel] = _fastest(kernel, pool, before[kernel])
    finally:
        variants.choose(before)
    return fastest


def _fastest(kernel: str, pool: Pool, current: str) -> str:
    x = pool.normal(variants.tokens_of(kernel), _WEIGHT[1])
    groups, least = pool.groups(*[_WEIGHT] * _GROUPS), dict.fromkeys(variants.forms(), float("inf"))
    for _ in range(_ROUNDS):
        for form in least:
            variants.choose({kernel: form})
            (weights,) = islice(groups, 1)
            began = time.perf_counter()
            for weight in weights:
                cpu_linear(x, weight)
            least[form] = min(least[form], time.perf_counter() - began)
    best = min(least, key=lambda form: least[form])
    return best if least[best] * _MARGIN < least[current] else current
