"""Which form of each kernel is the fastest on this machine: all of them in turns over memory, a second or two where
there are many."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice

import torch
from torch import Tensor

from moelight.formats.matrix import Matrix
from moelight.formats.packed import PackedFormat
from moelight.kernels import variants
from moelight.kernels.ffn import cpu_linear
from moelight.kernels.matrices import INT8, Weight
from moelight.runtime.calibration.surfaces import Pool

_WEIGHT = (2048, 1024)  # a few of them, so that no cache holds them
_GROUPS, _ROUNDS = 6, 7
_MARGIN = 1.02  # by which another form must be faster than the one in force
_COPIES = 4 * _GROUPS
# Of quantised classes: bits and columns of a group of the matrices that stand for them, and the activations.
_STORED = {"low": (4, 128, "auto"), "high": (8, 128, "auto"), "fine": (4, 32, INT8), "coarse": (4, 128, INT8)}
_PARTS = (".weight_packed", ".weight_scale", ".weight_zero_point")

Clock = Callable[[], float]


def fastest_forms(pool: Pool, clock: Clock = time.perf_counter) -> dict[str, str]:
    """The form of every kernel in `KERNELS` that has several here, for weights out of ``pool``, with activations in
    bfloat16; nothing without the extension, or if the pool is too small to tell memory from a cache. The forms in force
    afterwards are those of before."""
    if pool.dtype != torch.bfloat16 or not pool.holds(*[_WEIGHT] * _GROUPS):
        return {}
    before, fastest = variants.chosen(), dict[str, str]()
    try:
        for kernel, current in before.items():
            fastest[kernel] = _fastest(kernel, pool, current, clock)
    finally:
        variants.choose(before)
    return fastest


def _fastest(kernel: str, pool: Pool, current: str, clock: Clock) -> str:
    x, products = pool.normal(variants.measured_rows(kernel), _WEIGHT[1]), variants.measured_weights(kernel)
    *_, activations = _STORED.get(products, ("auto",))
    groups, least = _groups(products, pool), dict.fromkeys(variants.forms(kernel), float("inf"))
    for _ in range(_ROUNDS):
        for form in least:
            variants.choose({kernel: form})
            weights = next(groups)
            began = clock()
            for weight in weights:
                cpu_linear(x, weight, activations=activations)
            least[form] = min(least[form], clock() - began)
    best = min(least, key=lambda form: least[form])
    return best if least[best] * _MARGIN < least[current] else current


def _groups(products: str, pool: Pool) -> Iterator[tuple[Weight, ...]]:
    """`_GROUPS` weights of a class again and again, further ones each time."""
    if products not in _STORED:
        yield from pool.groups(*[_WEIGHT] * _GROUPS)
    else:
        matrix = _quantised(products)
        parts = [{name: part.clone() for name, part in matrix.tensors.items()} for _ in range(_COPIES)]
        copies = cycle([replace(matrix, tensors=tensors) for tensors in parts])
        while True:
            yield tuple(islice(copies, _GROUPS))


def _quantised(products: str) -> Matrix[Tensor]:
    bits, group, _ = _STORED[products]
    stored = PackedFormat(name=f"int{bits}", bits=bits, scale="BF16", group=group, names=_PARTS)
    codes, scales, *_ = stored.tensors(*_WEIGHT)
    tensors = {
        codes.suffix: torch.randint(-(1 << 31), 1 << 31, codes.shape, dtype=torch.int32),
        scales.suffix: torch.full(scales.shape, 0.002, dtype=torch.bfloat16),
    }
    return Matrix(stored=stored, rows=_WEIGHT[0], columns=_WEIGHT[1], tensors=tensors)
