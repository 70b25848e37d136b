"""Which form of each kernel is the fastest on this machine: all of them in turns over memory, a second or two where
there are many."""

from __future__ import annotations

import math
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
_ORDER_MARGIN = 1.1  # the same of forms that round otherwise
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
        for kernels in dict.fromkeys(map(variants.chosen_with, before)):
            times = {kernel: _times(kernel, pool, clock) for kernel in kernels}
            fastest |= _fastest(times, {kernel: before[kernel] for kernel in kernels})
    finally:
        variants.choose(before)
    return fastest


def _times(kernel: str, pool: Pool, clock: Clock) -> dict[str, float]:
    """Of every form, each of which serves all rows meanwhile: rows must not differ in the order of their sums."""
    x, products = pool.normal(variants.measured_rows(kernel), _WEIGHT[1]), variants.measured_weights(kernel)
    *_, activations = _STORED.get(products, ("auto",))
    groups, least = _groups(products, pool), dict.fromkeys(variants.forms(kernel), float("inf"))
    for _ in range(_ROUNDS):
        for form in least:
            variants.choose(dict.fromkeys(variants.chosen_with(kernel), form))
            weights = next(groups)
            began = clock()
            for weight in weights:
                cpu_linear(x, weight, activations=activations)
            least[form] = min(least[form], clock() - began)
    return least


def _fastest(times: dict[str, dict[str, float]], before: dict[str, str]) -> dict[str, str]:
    """Of kernels that sum in one order: first the order, by the geometric mean of their least times."""
    orders: dict[str, dict[str, dict[str, float]]] = {}
    for kernel, least in times.items():
        for form, seconds in least.items():
            orders.setdefault(variants.order_of_sums(kernel, form), {}).setdefault(kernel, {})[form] = seconds
    means = {
        order: math.prod(min(least.values()) for least in kernels.values()) ** (1 / len(kernels))
        for order, kernels in orders.items()
    }
    most_rows = list(before)[-1]
    order = variants.order_of_sums(most_rows, before[most_rows])
    best = min(means, key=lambda name: means[name])
    if means[best] * _ORDER_MARGIN < means[order]:
        order = best
    return {kernel: _faster(least, before[kernel]) for kernel, least in orders[order].items()}


def _faster(least: dict[str, float], current: str) -> str:
    best = min(least, key=lambda form: least[form])
    return current if current in least and least[best] * _MARGIN >= least[current] else best


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
