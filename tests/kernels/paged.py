"""Random paged caches for the kernel tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@dataclass(frozen=True, kw_only=True)
class Paged:
    """One call of decode attention: its queries, a cache whose blocks lie in random order, and the lengths."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    scale: float

    def rows(self, indices: Sequence[int]) -> Paged:
        """The same sequences in another company: those of `indices`, in that order."""
        index = torch.tensor(indices)
        return replace(self, q=self.q[index], block_tables=self.block_tables[index], seq_lens=self.seq_lens[index])

    def double(self) -> Paged:
        return replace(self, q=self.q.double(), k_cache=self.k_cache.double(), v_cache=self.v_cache.double())

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.seq_lens, self.scale


def paged(
    lengths: Sequence[int],
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Paged:
    generator = torch.Generator().manual_seed(seed)
    width = max(1, -(-max(lengths, default=0) // block_size))
    blocks = len(lengths) * width + 3

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    order = torch.randperm(blocks, generator=generator)[: len(lengths) * width]
    return Paged(
        q=randn(len(lengths), q_heads, head_dim),
        k_cache=randn(blocks, kv_heads, block_size, head_dim),
        v_cache=randn(blocks, kv_heads, block_size, head_dim),
        block_tables=order.view(len(lengths), width).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        scale=head_dim**-0.5,
    )


def relative_error(result: Tensor, truth: Tensor) -> float:
    return ((result.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()
