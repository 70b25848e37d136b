"""Latent attention: right for every dtype, instruction set and odd shape, and the same in any company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moelight.kernels import reference
from moelight.kernels.attention import cpu_mla_append, cpu_mla_decode
from tests.kernels.paged import TOLERANCE, relative_error
from tests.kernels.stored import LANES, serving

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RAGGED = (1, 5000, 0, 17, 1024, 1025, 2049, 31, 33, 3)


@pytest.fixture(params=[*LANES, "torch"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(request.param, monkeypatch):
        yield request.param


@dataclass(frozen=True, kw_only=True)
class Latent:
    """One call of latent attention over a cache whose blocks lie in random order."""

    q_nope_absorbed: Tensor
    q_rope: Tensor
    cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    scale: float

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return self.q_nope_absorbed, self.q_rope, self.cache, self.block_tables, self.seq_lens, self.scale

    def rows(self, order: list[int]) -> Latent:
        index = torch.tensor(order)
        names = ("q_nope_absorbed", "q_rope", "block_tables", "seq_lens")
        return replace(self, **{name: getattr(self, name)[index] for name in names})

    def truth(self) -> Tensor:
        wide = (tensor.double() for tensor in (self.q_nope_absorbed, self.q_rope, self.cache))
        return reference.mla_decode(*wide, self.block_tables, self.seq_lens, self.scale)


def latent(lengths, *, heads=4, size=32, rotary=8, block_size=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = max(1, -(-max(lengths, default=0) // block_size))
    blocks = len(lengths) * width + 3

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    order = torch.randperm(blocks, generator=generator)[: len(lengths) * width]
    return Latent(
        q_nope_absorbed=randn(len(lengths), heads, size),
        q_rope=randn(len(lengths), heads, rotary),
        cache=randn(blocks, block_size, size + rotary),
        block_tables=order.view(len(lengths), width).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        scale=(size + rotary) ** -0.5,
    )


def test_the_twin_is_the_formula():
    call = latent([1, 45, 0, 100], heads=3, size=20, rotary=6, block_size=7)
    result = call.truth()
    for b, length in enumerate(call.seq_lens.tolist()):
        rows = call.cache[call.block_tables[b].long()].flatten(0, 1)[:length].double()
        q = torch.cat((call.q_nope_absorbed[b], call.q_rope[b]), dim=-1).double()
        expected = (call.scale * q @ rows.T).softmax(-1) @ rows[:, :20]
        assert relative_error(result[b], expected) <= 1e-12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size(server, dtype):
    for size, rotary in [(512, 64), (32, 16), (1, 1), (7, 3), (33, 31), (100, 12), (256, 8)]:
        call = latent([1, 33, 0, 200], heads=5, size=size, rotary=rotary, dtype=dtype)
        out = cpu_mla_decode(*call.arguments)
        assert out.dtype == dtype
        assert out.shape == call.q_nope_absorbed.shape
        assert relative_error(out, call.truth()) <= TOLERANCE[dtype]
        assert not out[2].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_heads(server, dtype):
    for heads in [1, 2, 3, 4, 16, 37, 128]:
        call = latent([40, 7, 70], heads=heads, size=48, rotary=16, dtype=dtype)
        assert relative_error(cpu_mla_decode(*call.arguments, threads=2), call.truth()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_lengths_from_none_to_five_thousand(server, dtype):
    for block_size in [1, 5, 16, 128]:
        call = latent(RAGGED, heads=2, size=16, rotary=8, block_size=block_size, dtype=dtype)
        out, expected = cpu_mla_decode(*call.arguments), call.truth()
        for row in range(len(RAGGED)):
            assert relative_error(out[row], expected[row]) <= TOLERANCE[dtype]


def test_rising_and_huge_logits(server):
    """Every later block holds a larger score: what was summed before is brought down again and again."""
    call = latent([1500], heads=3, size=16, rotary=8)
    rows = call.cache[call.block_tables[0].long()].flatten(0, 1)
    rising = rows * torch.linspace(0, 4, len(rows)).unsqueeze(-1)
    call.cache[call.block_tables[0].long()] = rising.view(-1, 16, 24)
    for scale in (1.0, 100.0, -100.0, 1e-20):
        scaled = replace(call, scale=scale)
        assert relative_error(cpu_mla_decode(*scaled.arguments), scaled.truth()) <= 1e-4


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_row_is_not_hidden(server, poison):
    call = latent([50, 50])
    call.cache[call.block_tables[0, 1], 3] = poison
    out = cpu_mla_decode(*call.arguments)
    assert out[0].isnan().any()
    assert out[1].isfinite().all()


def test_blocks_after_the_end_are_never_looked_at(server):
    call = latent([40, 70])
    tables = call.block_tables.clone()
    tables[0, 3:] = -1
    expected = cpu_mla_decode(*call.arguments)
    assert torch.equal(cpu_mla_decode(*replace(call, block_tables=tables).arguments), expected)


def test_empty_batch(server):
    call = latent([])
    assert cpu_mla_decode(*call.arguments).shape == call.q_nope_absorbed.shape


def test_rows_may_be_strided_and_out_may_be_the_queries(server):
    call = latent([30, 60])
    expected = cpu_mla_decode(*call.arguments)
    both = torch.cat((call.q_nope_absorbed.flatten(1), call.q_rope.flatten(1)), dim=1)
    views = replace(
        call,
        q_nope_absorbed=both[:, : 4 * 32].view(2, 4, 32),
        q_rope=both[:, 4 * 32 :].view(2, 4, 8),
        cache=torch.stack((call.cache, call.cache), dim=1)[:, 1],
    )
    out = torch.empty(2, 5, 32)[:, :4]
    assert cpu_mla_decode(*views.arguments, out=out) is out
    assert torch.equal(out, expected)
    assert cpu_mla_decode(*views.arguments, out=views.q_nope_absorbed) is views.q_nope_absorbed
    assert torch.equal(both[:, : 4 * 32].view(2, 4, 32), expected)
    assert torch.equal(both[:, 4 * 32 :].view(2, 4, 8), call.q_rope)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [6, 70])
def test_a_sequence_is_the_same_in_any_company(isa, dtype, heads):
    """With many threads the heads of a short batch are shared out, alone they are not: the sums are the same."""
    lengths = [1, 700, 2100, 0, 1025, 16, 90]
    call = latent(lengths, heads=heads, size=40, rotary=8, dtype=dtype)
    together = cpu_mla_decode(*call.arguments, threads=2)
    for row in range(len(lengths)):
        for threads in (1, 2, 9):
            assert torch.equal(cpu_mla_decode(*call.rows([row]).arguments, threads=threads)[0], together[row])
    for threads, order in ((1, [3, 1, 4, 0]), (2, [6, 5, 4, 3, 2, 1]), (5, [2, 2, 2])):
        company = call.rows(order)
        assert torch.equal(cpu_mla_decode(*company.arguments, threads=threads), together[order])


def test_a_batch_whose_partials_do_not_fit_at_once(isa):
    call = latent([1] * 150, heads=128, size=1024, rotary=8, block_size=1)
    out = cpu_mla_decode(*call.arguments, threads=2)
    rows = call.cache[call.block_tables[:, 0].long(), 0, :1024]
    assert torch.equal(out, rows.unsqueeze(1).expand_as(out))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_writes_its_slots_and_nothing_else(server, dtype):
    for tokens in [0, 1, 7, 40]:
        call = latent([100], block_size=5, dtype=dtype)
        cache, new = call.cache.clone(), torch.randn(tokens, 50).to(dtype)[:, :40]
        slots = torch.randperm(cache.shape[0] * 5)[:tokens]
        cpu_mla_append(cache, new.contiguous(), slots)
        expected = call.cache.clone()
        expected[slots // 5, slots % 5] = new
        assert torch.equal(cache, expected)


def test_append_keeps_the_later_of_two_tokens_for_one_slot(server):
    cache, new, slots = torch.zeros(4, 16, 576), torch.randn(2000, 576), torch.arange(2000) % 7
    cpu_mla_append(cache, new, slots, threads=4)
    for slot in range(7):
        assert torch.equal(cache[0, slot], new[max(range(slot, 2000, 7))])
