"""Losses of speed, on any machine and beside any work: processor seconds of a few paths of ours over those of work that
is not ours (a product by torch, a loop of Python), in one thread, on operands that caches hold.

The least of many turns counts on either side. A ratio that is more than `LOSS` above the one that ``guard.json`` has
for this processor is measured again, `TRIES` times in all: other programs make a turn slower, never all of them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from runner import report

from kernel_cases.decode import BLOCK, DIM, KV_HEADS, Q_HEADS, SCALE
from kernel_cases.quantized import PACKED_INT4, random_matrices
from moelight.core.request import Request, SamplingParams
from moelight.engine.engine import Engine
from moelight.formats.ggml import ggml_format
from moelight.kernels.attention import cpu_gqa_decode
from moelight.kernels.ffn import cpu_expert_ffn

LOSS, TRIES, SECONDS = 0.15, 3, 6.0
RATIOS = Path(__file__).resolve().parents[1] / "guard.json"
HIDDEN, WIDTH, EXPERTS = 256, 256, 2
_PRODUCT, _LOOP = "product by torch", "loop of Python"
# Product by product of ours, by what it is divided.
_OVER = {
    "experts bf16, 4 rows": _PRODUCT,
    "experts bf16, 64 rows": _PRODUCT,
    "experts int4, 4 rows": _PRODUCT,
    "experts Q4_K, 16 rows": _PRODUCT,
    f"attention {Q_HEADS}/{KV_HEADS} heads, 4 x 128": _PRODUCT,
    "passes of 4 short answers": _LOOP,
}

Operation = Callable[[], object]


def guard(*, record: bool) -> dict[str, Any]:
    """The ratios here, those of ``guard.json``, and the ``losses``. With ``record`` medians of `TRIES` are written
    there where they are larger: a quiet and a busy machine differ by up to a quarter. An entry deleted begins anew."""
    torch.set_num_threads(1)
    python = ".".join(map(str, sys.version_info[:2]))
    machine = f"{report.machine_name(1).rpartition('-')[0]}-python{python}"
    recorded: dict[str, dict[str, float]] = json.loads(RATIOS.read_text()) if RATIOS.exists() else {}
    expected = recorded.get(machine, {})
    with Engine.from_pretrained("demo", batch_size=4, lanes="inline", adapt=False, dtype="float32") as engine:
        operations = _operations(engine)
        tries = [_ratios(operations)]
        while len(tries) < TRIES and (record or _losses(_over(min, tries), expected)):
            tries.append(_ratios(operations))
    ratios = _over(statistics.median if record else min, tries)
    if record:
        recorded[machine] = {name: round(max(ratio, expected.get(name, 0.0)), 3) for name, ratio in ratios.items()}
        RATIOS.write_text(json.dumps(recorded, indent=2, sort_keys=True) + "\n")
    losses = [] if record else _losses(ratios, expected)
    for name, ratio in ratios.items():
        note = f"{ratio / expected[name] - 1.0:+.0%}" if name in expected else "not recorded"
        print(f"{name:32}{ratio:9.3f} of a {_OVER[name]:18}{note:>14}{'  LOSS' if name in losses else ''}")
    if not expected and not record:
        print(f"no ratios of a {machine} in {RATIOS.name}; --guard-record writes them")
    return {"machine": machine, "ratios": ratios, "recorded": expected, "losses": losses}


def _over(reduction: Callable[[Sequence[float]], float], tries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: reduction([ratios[name] for ratios in tries]) for name in _OVER}


def _losses(ratios: Mapping[str, float], expected: Mapping[str, float]) -> list[str]:
    return [name for name, ratio in ratios.items() if ratio > (1.0 + LOSS) * expected.get(name, ratio)]


def _ratios(operations: Mapping[str, Operation]) -> dict[str, float]:
    """The least processor seconds of this thread that an operation took, over those of what it is divided by."""
    least: dict[str, float] = {}
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for name, operation in operations.items():
            began = time.thread_time()
            operation()
            taken = time.thread_time() - began
            least[name] = min(taken, least.get(name, taken))
    return {name: least[name] / least[over] for name, over in _OVER.items()}


def _operations(engine: Engine) -> dict[str, Operation]:
    left, right = torch.randn(192, 192), torch.randn(192, 192)
    shapes = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)
    plain = [[(torch.randn(shape) * 0.02).to(torch.bfloat16) for _ in range(EXPERTS)] for shape in shapes]
    int4, q4_k = (
        [random_matrices(form, EXPERTS, *shape) for shape in shapes] for form in (PACKED_INT4, ggml_format("Q4_K"))
    )
    requests = [
        Request(index=n, token_ids=tuple(range(8, 12)), sampling=SamplingParams(max_tokens=3, ignore_eos=True))
        for n in range(4)
    ]
    ours = (_experts(plain, 4), _experts(plain, 64), _experts(int4, 4), _experts(q4_k, 16), _attention())
    return {
        _PRODUCT: lambda: torch.mm(left, right),
        _LOOP: lambda: sum(n * n % 7 for n in range(20_000)),
        **dict(zip(_OVER, (*ours, lambda: list(engine.run(iter(requests)))), strict=True)),
    }


def _experts(matrices: list[Any], rows: int) -> Operation:
    x = torch.randn(EXPERTS * rows, HIDDEN).to(torch.bfloat16)
    offsets, out = torch.arange(EXPERTS + 1, dtype=torch.int32) * rows, torch.empty_like(x)
    return lambda: cpu_expert_ffn(x, *matrices, offsets, out=out, threads=1)


def _attention() -> Operation:
    sequences, blocks = 4, 128 // BLOCK
    q = torch.randn(sequences, Q_HEADS, DIM).to(torch.bfloat16)
    keys, values = (torch.randn(sequences * blocks, KV_HEADS, BLOCK, DIM).to(torch.bfloat16) for _ in range(2))
    tables = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    lengths, out = torch.full((sequences,), 128, dtype=torch.int32), torch.empty_like(q)
    return lambda: cpu_gqa_decode(q, keys, values, tables, lengths, SCALE, out=out, threads=1)
