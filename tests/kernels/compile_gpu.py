"""Compiles the GPU's kernels for cards that need not be here, and prints what came out as JSON; not a test.

`python -m tests.kernels.compile_gpu 75 80 90`, in a process where Triton does not interpret.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moelight.kernels.gpu import grouped, grouped_triton, routing_triton, tiles
from moelight.kernels.gpu.pages import PageTable

HIDDEN, WIDTH, EXPERTS, ROWS = 256, 512, 4, 64
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}


def experts(form: str, dtype: torch.dtype) -> PageTable:
    """Pages of a layer whose sizes are multiples of 16."""
    shapes = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    if form == "float":
        return PageTable.of(*([torch.empty(shape, dtype=dtype)] * EXPERTS for shape in shapes))
    packing = 2 if form == "int4" else 1
    group = None if form == "int8" else 128
    stored = torch.uint8 if form == "int4" else torch.int8
    scales = [torch.ones(rows, inputs // group) if group else torch.ones(rows) for rows, inputs in shapes]
    return PageTable.of(
        *([torch.empty((rows, inputs // packing), dtype=stored)] * EXPERTS for rows, inputs in shapes),
        gate_up_scale=[scales[0]] * EXPERTS,
        down_scale=[scales[1]] * EXPERTS,
        group_size=group,
    )


def facts(
    what: str, card: int, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], **options: int
) -> dict[str, Any]:
    """What the launch of ``kernel`` with these would compile to: its shared memory, registers, bytes of registers that
    spill, and which instructions are there. Sizes and addresses are multiples of 16."""
    signature, divisible = {}, {}
    for position, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            divisible[(position,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    with contextlib.redirect_stdout(io.StringIO()) as log:  # of ptxas
        found = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    numbers = {
        name: int(re.search(pattern, log.getvalue()).group(1))
        for name, pattern in (("registers", r"Used (\d+) registers"), ("spilled", r"(\d+) bytes spill stores"))
    }
    words = ("mma.sync", "wgmma", "cp.async", "ld.global.v4", "fma.rn.f32")
    code = found.asm["ptx"]
    row = {"what": what, "card": card, "shared": found.metadata.shared, **numbers}
    return row | {word: code.count(word) for word in words}


def products(card: int) -> list[dict[str, Any]]:
    """Both products in every format: for many rows in either 16-bit dtype, for few in float16, and in float32, which
    has the same tile for both. Each product meets each dtype, and where it has many rows, which need most registers and
    shared memory, each format too."""
    rows = []
    for number, form in enumerate(("float", "int8", "int8 groups", "int4")):
        turned = number % 2 == 1
        parts = ("down", "gate_up") if turned else ("gate_up", "down")
        cases = [(torch.float16, 4, parts[0])]
        if card >= 80:
            cases += [(torch.float16, 512, parts[0]), (torch.bfloat16, 512, parts[1])]
        if form in ("float", "int4"):
            cases.append((torch.float32, 4, parts[0]))
        for dtype, mean_rows, part in cases:
            rows.append(product(card, dtype, form, part, mean_rows))
    mixed = [(4, "gate_up", False), (4, "down", True)]
    mixed += [(512, "gate_up", False), (512, "down", False)] if card >= 80 else [(4, "down", False)]
    for mean_rows, part, wide in mixed:
        rows.append(product(card, torch.float16, "float", part, mean_rows, torch.bfloat16, wide=wide))
    return rows


def product(
    card: int,
    dtype: torch.dtype,
    form: str,
    part: str,
    mean_rows: int,
    stored: torch.dtype | None = None,
    *,
    wide: bool = False,
) -> dict[str, Any]:
    """One product of ``mean_rows`` rows an expert; in mixed precision if floats are ``stored`` in another dtype."""
    pages = experts(form, stored or dtype)
    inputs, outputs = (HIDDEN, WIDTH) if part == "gate_up" else (WIDTH, HIDDEN)
    result = dtype if stored is None or part == "gate_up" else torch.float32
    x, out = torch.empty(ROWS, inputs, dtype=dtype), torch.empty(ROWS, outputs, dtype=result)
    tile = tiles.choose(
        divmod(card, 10),
        itemsize=4 if wide else dtype.itemsize,
        mean_rows=mean_rows,
        group=pages.group,
        matrices=2 if part == "gate_up" else 1,
    )
    slots = torch.empty((16, 3), dtype=torch.int32)
    tokens = torch.empty(ROWS, dtype=torch.int64) if part == "gate_up" else None
    arguments, constants = grouped.arguments_of(pages, part, x, out, slots, tokens, tile, "silu", 7.0, wide=wide)
    constants |= {"PRODUCT": grouped.triton_dtype(torch.float32 if wide else dtype), "BY_HAND": False}
    what = f"{'fp32' if wide else NAMES[dtype]} {NAMES[stored] if stored else form} {part} {mean_rows}"
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return facts(what, card, grouped_triton.grouped, arguments, constants, **options)


def others(card: int) -> list[dict[str, Any]]:
    """The map of slots, the router and the weighted sum."""
    i32, i64 = torch.empty(16, dtype=torch.int32), torch.empty(16, dtype=torch.int64)
    half, single = torch.empty(16, dtype=torch.float16), torch.empty(16)
    found = {
        "map": (grouped_triton.map_slots, (i32, i32, 5, 40, 11), {"BM": 16, "PADDED": 128, "SLOTS": 32}),
        "route": (
            routing_triton.route,
            (half, single, i32, 40, 60, 60),
            {"TOP_K": 2, "NORMALIZE": True, "NARROW": True, "BY_HAND": False, "BT": 32, "PADDED": 64},
        ),
        "combine": (
            routing_triton.combine,
            (half, single, i64, half, 40, 1500),
            {"TOP_K": 4, "ADD": True, "BY_HAND": False, "BW": 1024},
        ),
    }
    return [facts(name, card, *rest) for name, rest in found.items()]


if __name__ == "__main__":
    triton.knobs.nvidia.dump_ptxas_log = True
    print(json.dumps([row for card in map(int, sys.argv[1:]) for row in others(card) + products(card)]))
