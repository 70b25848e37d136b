"""What contenders in other environments share: memory, rotation, and a conversation of one JSON object a line.

Imported by the benchmark itself and by the children (whose torch may be another version, and who have no moelight).

A child says who it is, then answers each line: ``{"do": "prepare", "op": NAME, "case": {...}}`` makes the operands and
checks one result; ``{"do": "run", "times": N}`` does the operation N times and says the seconds of all;
``{"do": "drop"}`` frees them. What libraries print goes to stderr.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Operation = Callable[[], object]
# Makes an operation out of a case; raises `UnableError` where it cannot.
Maker = Callable[[dict[str, Any]], tuple[Operation, float]]

WORST_ERROR = 0.03  # of the largest value: what bfloat16 contenders may differ from float32 by
_PATTERN = 1 << 22


class UnableError(Exception):
    """A case that a contender cannot do, with the reason."""


def huge(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Uninitialised memory that the system is asked to map in huge pages, where it knows them."""
    size = max(1, math.prod(shape) * dtype.itemsize)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)


def random_huge(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
    """The same, filled with one pattern of random numbers again and again, which takes little time."""
    tensor = huge(shape, dtype)
    flat = tensor.view(-1)
    first = flat[:_PATTERN]
    if dtype.is_floating_point:
        first.copy_(torch.randn(len(first), generator=torch.Generator().manual_seed(0)).mul_(std))
    else:
        info = torch.iinfo(dtype)
        first.copy_(torch.randint(info.min + (dtype == torch.int8), info.max + 1, (len(first),), dtype=dtype))
    for start in range(_PATTERN, len(flat), _PATTERN):
        part = flat[start : start + _PATTERN]
        part.copy_(first[: len(part)])
    return tensor


def sets_for(bytes_each: float, gib: float) -> int:
    """How many sets of operands take ``gib`` together; at least two, so that no call reads what the last one read."""
    return max(2, math.ceil(gib * 2**30 / bytes_each))


def turns(count: int) -> Iterator[int]:
    """0 to count - 1, round and round."""
    return itertools.cycle(range(count))


def block_tables(order: Tensor, blocks: list[int]) -> Tensor:
    """int32 [B, most blocks] out of the numbers of all blocks, sequence by sequence."""
    table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, part in zip(table, order.split(blocks), strict=True):
        row[: len(part)] = part
    return table


def agree(result: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest value expected. Raises `UnableError` beyond `WORST_ERROR`."""
    expected = expected.float()
    error = float((result.float() - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
    if not error <= WORST_ERROR:
        raise UnableError(f"its result is off by {error:.3f} of the largest value")
    return error


def seconds(operation: Operation, times: int) -> float:
    """Of ``times`` calls, together."""
    began = time.perf_counter()
    for _ in range(times):
        operation()
    return time.perf_counter() - began


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query in float32. q [Hq, D], k and v [Hkv, L, D] -> [Hq, D]."""
    group = q.shape[0] // k.shape[0]
    grouped = q.float().view(k.shape[0], group, -1)
    weights = torch.softmax(grouped @ k.float().transpose(1, 2) * q.shape[1] ** -0.5, dim=-1)
    return (weights @ v.float()).reshape(q.shape)


def fed_forward(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert in float32. x [R, H], gate_up [2I, H], down [H, I] -> [R, H]."""
    gate, up = (x.float() @ gate_up.float().t()).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ down.float().t()


def serve(name: str, makers: dict[str, Maker]) -> None:
    """Answers lines on stdin until it ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"name": name}), file=out)
    operation: Operation | None = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if order["do"] == "run" and operation is not None:
            answer["seconds"] = seconds(operation, order["times"])
        else:
            operation = None
            if order["do"] == "prepare":
                operation, answer = _prepare(makers.get(order["op"]), order["case"])
        print(json.dumps(answer), file=out)


def _prepare(maker: Maker | None, case: dict[str, Any]) -> tuple[Operation | None, dict[str, Any]]:
    if maker is None:
        return None, {"unable": "has no such operation"}
    try:
        operation, error = maker(case)
    except (UnableError, RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as reason:
        return None, {"unable": " ".join(str(reason).split())[:200]}
    return operation, {"error": error}
