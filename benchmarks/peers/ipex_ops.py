"""IPEX's paged decode attention, called alone: what `benchmarks/kernels.py --ipex-python` starts in IPEX's environment.

Needs intel-extension-for-pytorch (2.8, with torch 2.8) and nothing of moelight.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from common import Operation, agree, attended, block_tables, random_huge, serve, sets_for, turns


def decode(case: dict[str, Any]) -> tuple[Operation, float]:
    """single_query_cached_kv_attention over the same layout as moelight's, [blocks, Hkv, P, D]."""
    lengths, (q_heads, kv_heads, dim), size = case["lengths"], case["heads"], case["block"]
    blocks = [-(-length // size) for length in lengths]
    sets = sets_for(2 * kv_heads * dim * 2 * sum(lengths), case["gib"])
    keys, values = (random_huge((sets * sum(blocks), kv_heads, size, dim)) for _ in range(2))
    tables = [block_tables(order, blocks) for order in torch.randperm(len(keys), dtype=torch.int32).view(sets, -1)]
    lens = torch.tensor(lengths, dtype=torch.int32)
    heads = torch.arange(kv_heads, dtype=torch.int32).repeat_interleave(q_heads // kv_heads)
    q = torch.randn(len(lengths), q_heads, dim).to(torch.bfloat16)
    out, turn, longest = torch.empty_like(q), turns(sets), max(lengths)

    def once() -> None:
        PagedAttention.single_query_cached_kv_attention(
            out, q, keys, values, heads, dim**-0.5, tables[next(turn)], lens, size, longest, None
        )

    once()
    first = tables[0][0, : blocks[0]].long()
    k, v = (part[first].transpose(0, 1).reshape(kv_heads, -1, dim)[:, : lengths[0]] for part in (keys, values))
    return once, agree(out[0], attended(q[0], k, v))


if __name__ == "__main__":
    import intel_extension_for_pytorch as ipex
    from intel_extension_for_pytorch.llm.modules import PagedAttention

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    serve(f"IPEX {ipex.__version__}", {"decode": decode})
