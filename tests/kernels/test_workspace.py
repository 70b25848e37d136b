"""What the calls of `ffn.py` keep allocated is what they say."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moelight.kernels import native
from moelight.kernels.ffn import cpu_expert_ffn, cpu_expert_ffn_workspace, cpu_linear, cpu_linear_workspace
from tests.kernels.quantized import FORMATS, matrix
from tests.kernels.stored import KINDS, LANES, generator, serving, stored

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")


def kept_by(call: Callable[[], Any]) -> int:
    """Bytes that a thread of its own keeps after the call."""

    def run() -> int:
        call()
        return native.extension().ffn_workspace_kept()

    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(run).result()


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("kind", KINDS)
def test_linear(lanes, kind, monkeypatch):
    for tokens in [1, 33, 700]:
        with serving(lanes, monkeypatch):
            for dtype in (torch.bfloat16, torch.float32):
                x, retained = generator(0)(tokens, 98).to(dtype), stored(kind, 40, 98)
                announced = cpu_linear_workspace(tokens, 40, 98, dtype=dtype, weight_dtype=KINDS[kind], threads=2)
                result = kept_by(lambda x=x, retained=retained: cpu_linear(x, retained, threads=2))
                assert result == announced > 0


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("kind", KINDS)
def test_experts(lanes, kind, monkeypatch):
    with serving(lanes, monkeypatch):
        for counts in ([1], [3, 0, 1], [600, 2]):
            for transposed in (False, True):
                keeps_what_it_announces(kind, counts, transposed=transposed)


def keeps_what_it_announces(kind: str, counts: list[int], *, transposed: bool) -> None:
    tokens, hidden, inner = sum(counts), 66, 32
    up = [stored(kind, 2 * inner, hidden) for _ in counts]
    down = [stored(kind, hidden, inner) for _ in counts]

    def call() -> None:
        cpu_expert_ffn(
            generator(0)(tokens, hidden).bfloat16(),
            *([weight.t().contiguous().t() if transposed else weight for weight in weights] for weights in (up, down)),
            torch.tensor([0, *counts]).cumsum(0).int(),
            threads=2,
        )

    sizes = {"experts": len(counts), "weight_dtype": KINDS[kind], "transposed": transposed, "threads": 2}
    assert kept_by(call) == cpu_expert_ffn_workspace(tokens, hidden, inner, **sizes) > 0


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", ["mxfp4", "gptq int4", "Q4_K"])
def test_quantised(lanes, name, monkeypatch):
    form, hidden, inner = FORMATS[name], 512, 256
    up, down = matrix(form, 2 * inner, hidden), matrix(form, hidden, inner)
    with serving(lanes, monkeypatch):
        for counts in ([1], [3, 0, 1], [600, 2]):
            x, offsets = torch.zeros(sum(counts), hidden).bfloat16(), torch.tensor([0, *counts]).cumsum(0).int()
            sizes = {"weight_dtype": form, "threads": 2}
            announced = cpu_expert_ffn_workspace(len(x), hidden, inner, experts=len(counts), **sizes)
            lists = [up] * len(counts), [down] * len(counts)
            assert kept_by(lambda x=x, at=offsets, of=lists: cpu_expert_ffn(x, *of, at, threads=2)) == announced > 0
            announced = cpu_linear_workspace(len(x), hidden, hidden, **sizes)
            full = matrix(form, hidden, hidden)
            assert kept_by(lambda x=x, full=full: cpu_linear(x, full, threads=2)) == announced > 0


@pytest.mark.parametrize("pair", [("IQ2_XXS", "IQ2_XS"), ("Q4_K", "IQ2_XS")])
def test_gate_and_up_in_two_formats(pair):
    """Rounded tokens are kept twice where the formats round them otherwise."""
    hidden, inner = 512, 256
    gate, up, down = (
        matrix(FORMATS[name], *size)
        for name, size in zip((*pair, "Q8_0"), ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True)
    )
    how = {"activations": "int8", "threads": 2}
    for count in (1, 600):
        x, offsets = torch.zeros(count, hidden).bfloat16(), torch.tensor([0, count]).int()
        announced = cpu_expert_ffn_workspace(
            count, hidden, inner, experts=1, weight_dtype=FORMATS["Q4_K"], twice=pair[0] == "Q4_K", **how
        )
        assert kept_by(lambda x=x, at=offsets: cpu_expert_ffn(x, [gate], [down], at, up=[up], **how)) == announced > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", -1),
        ("tokens", 1.5),
        ("hidden", 0),
        ("intermediate", True),
        ("experts", "two"),
        ("dtype", torch.int8),
        ("weight_dtype", torch.float64),
        ("weight_dtype", torch.int8),
        ("threads", 0),
    ],
)
def test_wrong_sizes_are_named(name, value):
    sizes: dict[str, Any] = {"tokens": 1, "hidden": 8, "intermediate": 8, "experts": 2}
    with pytest.raises(ValueError, match=f"^{name}: "):
        cpu_expert_ffn_workspace(**(sizes | {name: value}))
