"""Products in every form they may take, against one plain product in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moelight.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, MIXED_FLOAT16
from moelight.hrm.costs import expert_workspace
from moelight.kernels import native, products
from moelight.profiles.families import profile_from_config
from moelight.profiles.hf_config import HFConfig
from moelight.weights.torch_dtypes import to_torch
from tests.tiny import tiny_config

ROWS = (1, 3, 5, 11, 12, 13, 48, 49, 63, 64, 65, 130, 257)
# Of the largest number: two products and an activation in a row, each rounded to the dtype (bfloat16 keeps 8 bits).
LIMITS = {FLOAT32: 1e-5, BFLOAT16: 2e-2, FLOAT16: 3e-3}


@pytest.fixture(params=[False, True], ids=["no tiles", "tiles"], autouse=True)
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_tiles", lambda: request.param)
    monkeypatch.setattr(native, "has_fast_bfloat16", lambda: request.param)


@pytest.fixture(params=[1 << 21, 1000], ids=["one slab", "many slabs"], autouse=True)
def _slabs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_SLAB_NUMBERS", request.param)


def _distance(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype: object, bias: bool) -> None:
    wanted = to_torch(dtype)  # type: ignore[arg-type]
    weight, added = torch.randn(56, 40).to(wanted), torch.randn(56).to(wanted) if bias else None
    for rows in ROWS:
        x = torch.randn(rows, 40).to(wanted)
        truth = functional.linear(x.double(), weight.double(), None if added is None else added.double())
        result = products.linear(x, weight, added)
        assert result.dtype == wanted
        assert result.shape == truth.shape
        assert _distance(result, truth) <= LIMITS[dtype]  # type: ignore[index]


@pytest.mark.parametrize("extension", [False, True])
def test_mixed_precision(extension: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 rows over bfloat16 weights: beyond float16's range everywhere but in the rows, where each way goes on."""
    if not extension:
        monkeypatch.setattr(native, "available", lambda: False)
    model = profile_from_config(HFConfig(tiny_config("mixtral"), where="test"), name="tiny")
    hidden, width = model.hidden_size, model.experts.intermediate_size
    sizes = expert_workspace(model, 64, MIXED_FLOAT16, grouped=False)
    arena = torch.zeros(sizes.bytes, dtype=torch.uint8)
    space = products.Workspace(arena, sizes, hidden, torch.float16, mixed=True)
    gate_up, down = torch.randn(2 * width, hidden).bfloat16(), torch.randn(hidden, width).bfloat16()
    x = torch.randn(64, hidden).half()
    for factor in (1.0, 20.0):
        loud = x * factor
        gate, up = functional.linear(loud.double(), gate_up.double()).chunk(2, dim=-1)
        truth = functional.linear(functional.silu(gate) * up, down.double())
        for result in (
            products.feed_forward(loud, gate_up, down, space),
            products.feed_forward(loud, gate_up, down, space, wide=True),
            products.feed_forward_shrunk(loud, gate_up, down, space),
        ):
            assert result.dtype == torch.float32
            assert _distance(result, truth) <= LIMITS[FLOAT16]
    assert truth.abs().max() > 65504
    huge, bias = (gate_up * 1e6).bfloat16(), torch.randn(2 * width).bfloat16()
    result = products.linear(x, huge, bias)
    assert result.dtype == torch.float32
    assert _distance(result, functional.linear(x.double(), huge.double(), bias.double())) <= LIMITS[FLOAT32]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", LIMITS)
def test_feed_forward(family: str, dtype: object) -> None:
    """mixtral's experts are wider than its hidden states here, qwen3_moe's may be narrower."""
    model = profile_from_config(HFConfig(tiny_config(family), where="test"), name="tiny")
    wanted, hidden, width = to_torch(dtype), model.hidden_size, model.experts.intermediate_size  # type: ignore[arg-type]
    sizes = expert_workspace(model, max(ROWS), dtype, grouped=False)  # type: ignore[arg-type]
    space = products.Workspace(torch.zeros(sizes.bytes, dtype=torch.uint8), sizes, hidden, wanted)
    gate_up, down = torch.randn(2 * width, hidden).to(wanted), torch.randn(hidden, width).to(wanted)
    for rows in ROWS:
        x = torch.randn(products.padded_rows(rows), hidden).mul(0.3).to(wanted)
        gate, up = functional.linear(x.double(), gate_up.double()).chunk(2, dim=-1)
        truth = functional.linear(functional.silu(gate) * up, down.double())
        assert _distance(products.feed_forward(x, gate_up, down, space), truth) <= LIMITS[dtype]  # type: ignore[index]


def test_the_grid_is_coarse_monotone_and_close() -> None:
    padded = [products.padded_rows(rows) for rows in range(1, 5000)]
    assert padded == sorted(padded)
    assert all(0 <= result - rows < 32 for rows, result in enumerate(padded, start=1))
    assert len(set(padded)) < 230
    assert all(products.padded_rows(result) == result for result in padded)
