"""The torch twins against formulas written another way, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from moelight.kernels import quantized, reference
from moelight.kernels.ffn import cpu_expert_ffn
from tests.kernels.paged import paged, relative_error

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
EVERY_DTYPE = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)


def spread(k: torch.Tensor, q_heads: int) -> torch.Tensor:
    """[n, Hkv, D] -> [Hq, n, D]: every query head with a copy of its key head."""
    return k.repeat_interleave(q_heads // k.shape[1], dim=1).transpose(0, 1)


@EVERY_DTYPE
@pytest.mark.parametrize("window", [None, 1, 30])
def test_gqa_decode(dtype, tolerance, window):
    call = paged([1, 45, 0, 100], q_heads=6, kv_heads=2, head_dim=40, block_size=7, dtype=dtype)
    result = reference.gqa_decode(*call.arguments, window=window)
    assert result.dtype == dtype
    for b, length in enumerate(call.seq_lens.tolist()):
        positions = range(max(0, length - window) if window else 0, length)
        if not positions:
            assert not result[b].any()
            continue
        rows = [(call.block_tables[b, p // 7], p % 7) for p in positions]
        k, v = (torch.stack([c[block, :, at] for block, at in rows]).double() for c in (call.k_cache, call.v_cache))
        weights = (spread(k, 6) @ call.q[b].double().unsqueeze(-1)).squeeze(-1).mul(call.scale).softmax(-1)
        assert relative_error(result[b], (weights.unsqueeze(1) @ spread(v, 6)).squeeze(1)) <= tolerance


@EVERY_DTYPE
@pytest.mark.parametrize("window", [None, 1, 5])
def test_prefill_is_causal_attention_sequence_by_sequence(dtype, tolerance, window):
    bounds = [0, 1, 1, 20, 33]
    q, k, v = (torch.randn(33, heads, 24).to(dtype) for heads in (4, 2, 2))
    result = reference.prefill_attention(q, k, v, torch.tensor(bounds), 0.2, window=window)
    for first, last in itertools.pairwise(bounds):
        n = last - first
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        if window is not None:
            mask = mask.triu(1 - window)
        expected = functional.scaled_dot_product_attention(
            q[first:last].double().transpose(0, 1),
            spread(k[first:last].double(), 4),
            spread(v[first:last].double(), 4),
            attn_mask=mask,
            scale=0.2,
        ).transpose(0, 1)
        if n:
            assert relative_error(result[first:last], expected) <= tolerance


@pytest.mark.parametrize("window", [None, 3, 12])
def test_a_prompt_in_chunks_is_the_prompt(window):
    tokens, cuts, block_size = 40, [0, 13, 14, 40], 8
    q, k, v = torch.randn(tokens, 4, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
    full = reference.prefill_attention(q, k, v, torch.tensor([0, tokens]), 0.25, window=window)
    k_cache, v_cache = (
        torch.full((9, 2, block_size, 16), float("nan")),
        torch.full((9, 2, block_size, 16), float("nan")),
    )
    table = torch.tensor([[4, 0, 7, 2, 8]], dtype=torch.int32)
    for first, last in itertools.pairwise(cuts):
        part = reference.prefill_attention(
            q[first:last],
            k[first:last],
            v[first:last],
            torch.tensor([0, last - first]),
            0.25,
            window=window,
            cache=(k_cache, v_cache, table, torch.tensor([first])),
        )
        torch.testing.assert_close(part, full[first:last])
        slots = torch.tensor([int(table[0, p // block_size]) * block_size + p % block_size for p in range(first, last)])
        reference.kv_append(k_cache, v_cache, k[first:last], v[first:last], slots)
    decoded = reference.gqa_decode(
        q[-1:], k_cache, v_cache, table, torch.tensor([tokens], dtype=torch.int32), 0.25, window=window
    )
    torch.testing.assert_close(decoded, full[-1:])


@EVERY_DTYPE
def test_rms_norm(dtype, tolerance):
    x, weight = (100 * torch.randn(5, 48)).to(dtype), torch.randn(48).to(dtype)
    expected = functional.rms_norm(x.double(), (48,), weight.double(), 1e-6)
    result = reference.rms_norm(x, weight, 1e-6)
    assert result.dtype == dtype
    assert relative_error(result, expected) <= tolerance


@EVERY_DTYPE
def test_rotation_turns_pairs_by_their_angle(dtype, tolerance):
    x, angle = torch.randn(6, 3, 24).to(dtype), 100 * torch.rand(6, 12)
    full = angle.repeat(1, 2)
    result = reference.rotate(x, full.cos().to(dtype), full.sin().to(dtype))
    pairs = torch.complex(x[..., :12].double(), x[..., 12:].double())
    turned = pairs * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    assert result.dtype == dtype
    assert relative_error(result, expected) <= tolerance


@pytest.mark.parametrize("normalize", [False, True])
def test_route_topk(normalize):
    logits = torch.randn(50, 9)
    weights, ids = reference.route_topk(logits, 3, normalize)
    probabilities = logits.double().softmax(-1)
    assert weights.dtype == torch.float32
    for token in range(50):
        chosen = sorted(range(9), key=lambda e: -probabilities[token, e].item())[:3]
        assert ids[token].tolist() == chosen
        expected = probabilities[token, chosen]
        expected = expected / expected.sum() if normalize else expected
        torch.testing.assert_close(weights[token].double(), expected)


def test_of_equal_experts_the_lowest_wins():
    logits = torch.zeros(4, 64)
    logits[:, 40] = 1.0
    _, ids = reference.route_topk(logits.bfloat16(), 5, normalize=True)
    assert ids.tolist() == [[40, 0, 1, 2, 3]] * 4


@EVERY_DTYPE
def test_expert_ffn(dtype, tolerance):
    offsets = [0, 3, 3, 4, 10]
    x = torch.randn(10, 32).to(dtype)
    gate_up = [torch.randn(48, 32).to(dtype) / 6 for _ in range(4)]
    down = [torch.randn(32, 24).to(dtype) / 5 for _ in range(4)]
    result = quantized.expert_ffn(x, [gate_up[0], None, *gate_up[2:]], [down[0], None, *down[2:]], offsets)
    assert result.dtype == dtype
    expert_of = [0, 0, 0, 2, 3, 3, 3, 3, 3, 3]
    for token, e in enumerate(expert_of):
        gate, up = (gate_up[e].double() @ x[token].double()).chunk(2)
        assert relative_error(result[token], down[e].double() @ (gate / (1 + (-gate).exp()) * up)) <= tolerance


def test_an_expert_with_rows_needs_weights():
    with pytest.raises(ValueError, match="gate_up: expert 0 has 2 tokens and None"):
        cpu_expert_ffn(torch.randn(2, 8), [None], [None], torch.tensor([0, 2], dtype=torch.int32))


def test_expert_ffn_without_tokens():
    assert quantized.expert_ffn(torch.randn(0, 8), [None], [None], [0, 0]).shape == (0, 8)
