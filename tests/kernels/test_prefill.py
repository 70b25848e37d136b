"""Attention over packed prompts through torch's fused kernel, against its plain twin."""

from __future__ import annotations

import pytest
import torch

from moelight.kernels import reference
from moelight.kernels.prefill import prefill_attention


@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("tokens", [1, 2, 130])
def test_a_fresh_prompt(tokens: int, window: int | None) -> None:
    q, k, v = torch.randn(tokens, 6, 40), torch.randn(tokens, 2, 40), torch.randn(tokens, 2, 40)
    found = prefill_attention(q, k, v, 0.2, window=window)
    twin = reference.prefill_attention(q, k, v, torch.tensor([0, tokens]), 0.2, window=window)
    torch.testing.assert_close(found, twin, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("context", "tokens", "window"), [(300, 600, None), (37, 257, 50), (600, 513, 128), (5, 2, 3)])
def test_a_later_chunk_sees_its_context(context: int, tokens: int, window: int | None) -> None:
    """Chunks longer than the rows taken at a time, over blocks in no order."""
    blocks = -(-context // 32)
    k_cache, v_cache = torch.randn(blocks + 3, 2, 32, 16), torch.randn(blocks + 3, 2, 32, 16)
    table = torch.randperm(blocks + 3)[:blocks].int()
    q, k, v = torch.randn(tokens, 6, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
    cache = (k_cache, v_cache, table)
    found = prefill_attention(q, k, v, 0.25, window=window, context=context, cache=cache)
    paged = (k_cache, v_cache, table.unsqueeze(0), torch.tensor([context]))
    twin = reference.prefill_attention(q, k, v, torch.tensor([0, tokens]), 0.25, window=window, cache=paged)
    torch.testing.assert_close(found, twin, rtol=1e-5, atol=1e-5)
