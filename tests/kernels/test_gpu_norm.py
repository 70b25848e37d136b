"""Norms and heads as a device computes them, Triton's and torch's, against the CPU's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moelight.kernels import native, norm
from moelight.kernels.gpu import serving
from moelight.kernels.gpu.routing import by_expert
from moelight.kernels.reference import sort_by_expert
from tests.shapes import examples

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EPS = 1e-5


@pytest.fixture(params=["interpreted", "torch", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the tensors of a test lie; they are computed as on a device."""
    monkeypatch.setattr(native, "on_cpu", lambda _: False)
    if request.param == "torch":
        monkeypatch.setattr(serving, "triton_available", lambda: False)
    elif not serving.triton_available() or serving.interpreting() != (request.param == "interpreted"):
        pytest.skip("triton is not there, or imported the other way")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


def near(found: Tensor, expected: Tensor) -> bool:
    """Equal up to the last place: only the order of a sum differs."""
    step = 2 * torch.finfo(expected.dtype).eps
    return torch.allclose(found.cpu().double(), expected.double(), rtol=max(step, 1e-6), atol=1e-30)


@EVERY_DTYPE
def test_norm(device: torch.device, dtype: torch.dtype) -> None:
    for shape in ((1, 1), (3, 48), (4, 1100), (0, 8)):
        x, weight = torch.randn(shape).mul(3).to(dtype), torch.randn(shape[-1]).to(dtype)
        found = norm.rms_norm(x.to(device), weight.to(device), EPS)
        assert near(found, norm.cpu_rms_norm(x, weight, EPS))


@EVERY_DTYPE
def test_what_is_added_stays_rounded_in_x(device: torch.device, dtype: torch.dtype) -> None:
    """Rows apart from each other, and what lies between them is left alone."""
    wide, add, weight = (torch.randn(shape).to(dtype) for shape in ((5, 200), (5, 90), (90,)))
    there = wide.clone().to(device)
    x, total = there[:, 30:120], wide[:, 30:120] + add
    found = norm.rms_norm(x, weight.to(device), EPS, add=add.to(device))
    assert torch.equal(x.cpu(), total)
    assert torch.equal(there[:, :30].cpu(), wide[:, :30]) and torch.equal(there[:, 120:].cpu(), wide[:, 120:])
    assert near(found, norm.cpu_rms_norm(total, weight, EPS))
    assert norm.rms_norm(x, weight.to(device), EPS, out=x) is x
    assert torch.equal(x, found)


HEADS = [(1, 1, 1, 2), (5, 6, 2, 40), (3, 4, 1, 128), (2, 1, 3, 66), (0, 2, 1, 8)]


@EVERY_DTYPE
@pytest.mark.parametrize("clip", [None, 0.7], ids=["free", "clipped"])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_heads(device: torch.device, dtype: torch.dtype, clip: float | None, normed: bool) -> None:
    """Bit for bit without norms; values are only clipped."""
    for tokens, queries, keys, size in HEADS:
        fused = torch.randn(tokens, queries + 2 * keys, size).to(dtype)
        angle = torch.randn(tokens, size // 2).mul(9).repeat(1, 2)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        norms = (torch.randn(size).to(dtype), torch.randn(size).to(dtype)) if normed else None
        there = fused.clone().to(device)
        norm.finish_heads(
            there,
            cos.to(device),
            sin.to(device),
            queries=queries,
            keys=keys,
            clip=clip,
            norms=None if norms is None else (norms[0].to(device), norms[1].to(device)),
            eps=EPS,
        )
        expected = fused if clip is None else fused.clamp(-clip, clip)
        parts = list(expected.split((queries, keys, keys), dim=1))
        for part, weight in enumerate(norms or ()):
            parts[part] = norm.cpu_rms_norm(parts[part].contiguous(), weight, EPS)
        turned = [norm.cpu_rotate(part.contiguous(), cos, sin) for part in parts[:2]]
        found = there.cpu().split((queries, keys, keys), dim=1)
        assert torch.equal(found[2], parts[2])
        for mine, theirs in zip(found[:2], turned, strict=True):
            if normed:
                scale = float(theirs.abs().max()) if theirs.numel() else 1.0
                step = 4 * max(torch.finfo(dtype).eps, 1e-6)
                assert torch.allclose(mine.double(), theirs.double(), rtol=step, atol=step * scale)
            else:
                assert torch.equal(mine, theirs)


def test_what_is_not_a_number_stays_in_its_row(device: torch.device) -> None:
    x, weight = torch.randn(3, 64, device=device), torch.ones(64, device=device)
    x[1, 5] = torch.nan
    found = norm.rms_norm(x, weight, EPS)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
    qkv, cos = torch.full((1, 3, 4), torch.nan, device=device), torch.ones(1, 4, device=device)
    norm.finish_heads(qkv, cos, cos, queries=1, keys=1, clip=1.0)
    assert qkv.isnan().all()


@pytest.mark.parametrize("name", ["x", "weight", "add", "out", "qkv", "cos", "sin", "q_norm"])
def test_wrong_arguments_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not serving.triton_available() or not serving.interpreting():
        pytest.skip(serving.triton_reason())
    monkeypatch.setattr(native, "on_cpu", lambda _: False)
    rows = {"x": torch.zeros(3, 8), "weight": torch.zeros(8), "add": torch.zeros(3, 8), "out": torch.zeros(3, 8)}
    heads = {"qkv": torch.zeros(3, 4, 8), "cos": torch.zeros(3, 8), "sin": torch.zeros(3, 8), "q_norm": torch.zeros(8)}
    for wrong in (torch.zeros(7), torch.zeros(3, 5), torch.zeros(3, 8, dtype=torch.float64), torch.zeros(3, 4, 7)):
        with pytest.raises(ValueError, match=rf"^(x|weight|{name}): "):
            if name in rows:
                given = rows | {name: wrong}
                norm.rms_norm(given["x"], given["weight"], EPS, add=given["add"], out=given["out"])
            else:
                given = heads | {name: wrong}
                norms = given["q_norm"], torch.zeros(8)
                norm.finish_heads(given["qkv"], given["cos"], given["sin"], queries=2, keys=1, norms=norms)


@examples(15)
@given(tokens=st.integers(0, 9), top_k=st.integers(1, 4), experts=st.integers(4, 9), seed=st.integers(0, 999))
def test_rows_by_expert(tokens: int, top_k: int, experts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].sort(1).values.int()
    check_sorted(ids, experts)


def test_more_rows_by_expert_than_are_read_at_a_time() -> None:
    check_sorted(torch.randint(0, 3, (1100, 2), dtype=torch.int32), 3)


def check_sorted(ids: Tensor, experts: int) -> None:
    found, (_, token, position, offsets) = by_expert(ids, experts), sort_by_expert(ids, experts)
    for mine, theirs in zip(found, (token, position, offsets), strict=True):
        assert torch.equal(mine.long(), theirs.long())
