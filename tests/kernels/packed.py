"""Random packed prompts for the kernel tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moelight.kernels import reference
from moelight.kernels.attention import cpu_prefill_attention
from tests.kernels.paged import relative_error


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """One call: packed prompts, perhaps after a context, and how they attend."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    scale: float
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **more: Any) -> Tensor:
        return cpu_prefill_attention(self.q, self.k, self.v, self.cu_seqlens, self.scale, **self.options, **more)

    def truth(self) -> Tensor:
        options = dict(self.options)
        if (cache := options.get("cache")) and "k_scale" not in options:
            options["cache"] = (cache[0].double(), cache[1].double(), *cache[2:])
        if (sinks := options.get("sinks")) is not None:
            options["sinks"] = sinks.double()
        wide = (item.double() for item in (self.q, self.k, self.v))
        return reference.prefill_attention(*wide, self.cu_seqlens, self.scale, **options)

    def error(self) -> float:
        return relative_error(self.run(), self.truth())


def bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def prompts(
    lengths: Sequence[int],
    contexts: Sequence[int] | None = None,
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Prompts:
    tokens = sum(lengths)
    if contexts is not None:
        width = max(1, -(-max(contexts, default=0) // block_size))
        blocks = len(lengths) * width + 3
        tables = torch.randperm(blocks)[: len(lengths) * width].view(-1, width).int()
        pages = (torch.randn(blocks, kv_heads, block_size, head_dim).to(dtype) for _ in range(2))
        options["cache"] = (*pages, tables, torch.tensor(contexts, dtype=torch.int32))
    q, k, v = (torch.randn(tokens, heads, head_dim).to(dtype) for heads in (q_heads, kv_heads, kv_heads))
    return Prompts(q=q, k=k, v=v, cu_seqlens=bounds(lengths), scale=head_dim**-0.5, options=options)
