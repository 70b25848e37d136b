"""Weights that stay stored, as parameters of modules: products, rows and all else are those of their values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moelight.kernels import native
from moelight.kernels.gpu.stored_linear import matrix_table, stored_linear
from moelight.kernels.products import feed_forward_stored, linear, linear_of_all
from moelight.kernels.quantized import dense_values
from moelight.kernels.stored_weight import StoredWeight
from tests.cases import thorough
from tests.kernels.quantized import FORMATS, matrix
from tests.kernels.test_gpu_quantized import BY_TRITON, moved

BY_ROWS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ2_XXS", "MXFP4")


def stored(*names: str, rows: int = 48, columns: int = 256, dtype: torch.dtype = torch.float32) -> StoredWeight:
    stack = tuple(matrix(FORMATS[name], rows, columns, seed) for seed, name in enumerate(names))
    return StoredWeight.of(stack, dtype)


def values_of(weight: StoredWeight) -> Tensor:
    return torch.cat([dense_values(part, torch.float32) for part in weight.stack])


def close(result: Tensor, wanted: Tensor, atol: float = 2e-4) -> bool:
    return torch.allclose(result.float(), wanted.float(), rtol=1e-4, atol=atol)


def test_a_module_holds_one_as_any_parameter() -> None:
    """Products with a bias, rows of an embedding, and operations that need the values."""
    weight, layer = stored("Q4_K", "Q6_K"), nn.Linear(256, 96, device="meta")
    values, bias, x = values_of(weight), torch.randn(96), torch.randn(2, 3, 256)
    layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
    assert isinstance(layer._parameters["weight"], StoredWeight) and layer.weight.shape == (96, 256)
    with torch.inference_mode():
        assert close(layer(x), functional.linear(x, values, bias))
        assert close(linear(x[0], layer.weight, bias), functional.linear(x[0], values, bias))
        assert torch.equal(layer.weight.unflatten(0, (2, -1))[1], values[48:])
        assert torch.equal(layer.weight.float() + 1, values + 1)
        embedding, ids = nn.Embedding(48, 256, device="meta"), torch.tensor([[5, 0], [47, 5]])
        embedding.weight = nn.Parameter(single := stored("Q4_K"), requires_grad=False)
        assert torch.equal(embedding(ids), values_of(single)[ids])
        assert torch.equal(functional.embedding(ids, weight), values[ids])


def test_several_are_one_product() -> None:
    weights, x = [stored("Q4_1"), stored("Q5_0", "Q8_0")], torch.randn(5, 256)
    assert close(linear_of_all(x, weights), functional.linear(x, torch.cat([values_of(weight) for weight in weights])))


@pytest.mark.skipif(not native.available(), reason="the extension is not built")
@pytest.mark.parametrize("up", ["Q4_K", "Q5_K"])
def test_a_feed_forward_is_one_call(up: str) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(3)) / 10
    narrow = stored("Q8_0", rows=256, columns=96)
    assert feed_forward_stored(x, [stored("Q4_K", "Q6_K", "Q4_K")], narrow, activation="silu") is None
    wide = [stored("Q4_K", rows=96), stored(up, rows=96)]
    inner = functional.silu(functional.linear(x, values_of(wide[0]))) * functional.linear(x, values_of(wide[1]))
    result = feed_forward_stored(x, wide, narrow, activation="silu")
    assert result is not None and close(result, functional.linear(inner, values_of(narrow)), 1e-3)


@pytest.mark.skipif(not native.available(), reason="the extension is not built")
@pytest.mark.parametrize("name", thorough(BY_ROWS, but=("Q4_1", "Q5_0", "Q4_K", "IQ2_XXS")))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_are_those_with_the_rounded_values(name: str, dtype: torch.dtype) -> None:
    """One row at a time tells each value of the matrix: bit for bit that of `dense_values`, rounded to x's dtype."""
    weight = matrix(FORMATS[name], 37, 512, seed=5)
    unit = torch.eye(512, dtype=dtype)
    result = linear(unit, StoredWeight.of((weight,), dtype))
    assert torch.equal(result.float(), dense_values(weight, torch.float32).to(dtype).float().t())


@BY_TRITON
@pytest.mark.usefixtures("checks_overflow")
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q4_1"])
def test_a_gpu_multiplies_by_one(name: str, device: torch.device) -> None:
    weight, bias = matrix(FORMATS[name], 40, 256, seed=2), torch.randn(40)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    table = matrix_table(moved(weight, device), bias.to(device))
    assert table is not None
    out = torch.empty((5, 40), device=device)
    stored_linear(x.to(device), table, out)
    assert close(out.cpu(), functional.linear(x, dense_values(weight, torch.float32), bias), 1e-3)


@pytest.mark.thorough
def test_memory_does_not_grow_by_the_values() -> None:
    """Of a matrix of 64 MiB in float32, products and rows take a fraction."""
    script = """
import resource, torch
from torch.nn import functional
from moelight.kernels.stored_weight import StoredWeight
from tests.kernels.quantized import FORMATS, matrix

def use(rows):
    weight = StoredWeight.of((matrix(FORMATS["Q4_K"], rows, 512),), torch.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    functional.linear(torch.randn(2, 512), weight)
    functional.embedding(torch.tensor([5, 9]), weight)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

use(64)
print(use(32768))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=root)
    assert int(done.stdout) < 16 << 10
