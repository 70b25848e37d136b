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

pytestmark = pytest.mark.usefixtures("checks_overflow")
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


def near(result: Tensor, expected: Tensor) -> bool:
    """Equal up to the last place: only the order of a sum differs."""
    step = 2 * torch.finfo(expected.dtype).eps
    return torch.allclose(result.cpu().double(), expected.double(), rtol=max(step, 1e-6), atol=1e-30)


@EVERY_DTYPE
def test_norm(device: torch.device, dtype: torch.dtype) -> None:
    for shape in ((1, 1), (3, 48), (4, 1100), (0, 8)):
        x, weight = torch.randn(shape).mul(3).to(dtype), torch.randn(shape[-1]).to(dtype)
        result = norm.rms_norm(x.to(device), weight.to(device), EPS)
        assert near(result, norm.cpu_rms_norm(x, weight, EPS))


@EVERY_DTYPE
def test_what_is_added_stays_rounded_in_x(device: torch.device, dtype: torch.dtype) -> None:
    """Rows apart from each other, and what lies between them is left alone."""
    wide, add, weight = (torch.randn(shape).to(dtype) for shape in ((5, 200), (5, 90), (90,)))
    present = wide.clone().to(device)
    x, total = present[:, 30:120], wide[:, 30:120] + add
    result = norm.rms_norm(x, weight.to(device), EPS, add=add.to(device))
    assert torch.equal(x.cpu(), total)
    assert torch.equal(present[:, :30].cpu(), wide[:, :30]) and torch.equal(present[:, 120:].cpu(), wide[:, 120:])
    assert near(result, norm.cpu_rms_norm(total, weight, EPS))
    assert norm.rms_norm(x, weight.to(device), EPS, out=x) is x
    assert torch.equal(x, result)


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
        present = fused.clone().to(device)
        norm.finish_heads(
            present,
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
        result = present.cpu().split((queries, keys, keys), dim=1)
        assert torch.equal(result[2], parts[2])
        for selected, theirs in zip(result[:2], turned, strict=True):
            if normed:
                scale = float(theirs.abs().max()) if theirs.numel() else 1.0
                step = 4 * max(torch.finfo(dtype).eps, 1e-6)
                assert torch.allclose(selected.double(), theirs.double(), rtol=step, atol=step * scale)
            else:
                assert torch.equal(selected, theirs)


LOUD = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy, of the interpreter


@LOUD
@EVERY_DTYPE
def test_mixed_norm(device: torch.device, dtype: torch.dtype) -> None:
    """Weights of any dtype; rounded once; the watch stays finite until a result is not."""
    for shape in ((3, 48), (2, 1100), (0, 8)):
        x, add, weight = torch.randn(shape).mul(1e5), torch.randn(shape).half(), torch.randn(shape[-1]).to(dtype)
        present, finite, total = x.clone().to(device), torch.zeros(3, device=device), (x + add).double()
        inputs = weight.to(device), EPS, torch.float16
        result = norm.rms_norm_mixed(present, *inputs, add=add.to(device), finite=finite[1:2])
        assert torch.equal(present.cpu(), x + add)
        exact = total * (total.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()
        assert result.dtype == torch.float16 and near(result, exact.half())
        assert finite.isfinite().all()
        if shape[0]:
            present[1, 7] = torch.inf
            norm.rms_norm_mixed(present, *inputs, finite=finite[1:2])
            assert finite.isfinite().tolist() == [True, False, True]
            rows = present[:1].mul(1e-5).half()
            expected = norm.cpu_rms_norm(rows.cpu().float(), weight.float(), EPS).half()
            assert norm.rms_norm_mixed(rows, *inputs, out=rows) is rows and near(rows, expected)


@LOUD
@pytest.mark.parametrize("clip", [None, 60000.0], ids=["free", "clipped"])
@pytest.mark.parametrize("normed", [None, torch.float16, torch.bfloat16], ids=str)
def test_mixed_heads(
    device: torch.device, clip: float | None, normed: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query or key that is not finite makes the values of its token NaN; and only them, in any block of heads."""
    monkeypatch.setattr(norm, "_HEAD_NUMBERS", 16)  # two heads at a time
    queries, keys, size = 2, 1, 16
    for lost in (None, 0, 1, 2):
        fused = torch.randn(3, queries + 2 * keys, size).half()
        if lost is not None:
            fused[1, lost, 9] = torch.nan if clip else -torch.inf
        angle = torch.randn(3, size // 2).mul(9).repeat(1, 2)
        cos, sin = angle.cos().half(), angle.sin().half()
        norms = (torch.randn(size).to(normed), torch.randn(size).to(normed)) if normed else None
        present, inputs = fused.clone().to(device), {"queries": queries, "keys": keys, "clip": clip, "eps": EPS}
        placed = None if norms is None else (norms[0].to(device), norms[1].to(device))
        norm.finish_heads(present, cos.to(device), sin.to(device), norms=placed, mixed=True, **inputs)
        q, k, v = (part.contiguous() for part in fused.split((queries, keys, keys), dim=1))
        for part, weight in zip((q, k), norms or (), strict=norms is not None):
            part.copy_(norm.cpu_rms_norm(part.float(), weight.float(), EPS).half())
        result = present.cpu().split((queries, keys, keys), dim=1)
        for selected, theirs in zip(result[:2], (q, k), strict=True):
            assert torch.allclose(
                selected, norm.cpu_rotate(theirs, cos, sin), rtol=2e-3, atol=2e-3 * bool(norms), equal_nan=True
            )
        assert torch.equal(result[2][[0, 2]], v[[0, 2]])
        assert result[2][1].isnan().all() if lost is not None else torch.equal(result[2][1], v[1])


def test_what_is_not_a_number_stays_in_its_row(device: torch.device) -> None:
    x, weight = torch.randn(3, 64, device=device), torch.ones(64, device=device)
    x[1, 5] = torch.nan
    result = norm.rms_norm(x, weight, EPS)
    assert result[1].isnan().all() and result[[0, 2]].isfinite().all()
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
                inputs = rows | {name: wrong}
                norm.rms_norm(inputs["x"], inputs["weight"], EPS, add=inputs["add"], out=inputs["out"])
            else:
                inputs = heads | {name: wrong}
                norms = inputs["q_norm"], torch.zeros(8)
                norm.finish_heads(inputs["qkv"], inputs["cos"], inputs["sin"], queries=2, keys=1, norms=norms)


@examples(15)
@given(tokens=st.integers(0, 9), top_k=st.integers(1, 4), experts=st.integers(4, 9), seed=st.integers(0, 999))
def test_rows_by_expert(tokens: int, top_k: int, experts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].sort(1).values.int()
    check_sorted(ids, experts)


def test_more_rows_by_expert_than_are_read_at_a_time() -> None:
    check_sorted(torch.randint(0, 3, (1100, 2), dtype=torch.int32), 3)


def check_sorted(ids: Tensor, experts: int) -> None:
    result, (_, token, position, offsets) = by_expert(ids, experts), sort_by_expert(ids, experts)
    for selected, theirs in zip(result, (token, position, offsets), strict=True):
        assert torch.equal(selected.long(), theirs.long())
