"""Whatever is wrong with an argument, the faces of the GPU's kernels say so by its name; nothing ever crashes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moelight.kernels.activations import SILU
from moelight.kernels.gpu.grouped import expert_ffn, expert_ffn_in_torch
from moelight.kernels.gpu.pages import ExpertTable
from moelight.kernels.gpu.routing import by_expert, combine, route
from tests.fuzz import fuzz
from tests.kernels.gpu_layers import floats, rows_of

FUZZ = fuzz(100)


def arguments(device: torch.device) -> dict[str, Any]:
    layer = floats(3, 32, 16, torch.float32, device)
    x, offsets = rows_of((2, 3, 1), 32, torch.float32, device)
    return {"x": x, "pages": layer.pages, "offsets": offsets, "tokens": None, "out": None}


WRONG: dict[str, Any] = {
    "x": [None, 3, lambda x: x.half(), lambda x: x[0], lambda x: x[:, :31], lambda x: x.t().contiguous().t(),
          lambda x: x[:1].expand(6, 32), lambda x: x.to("meta"), lambda x: x.to_sparse()],
    "pages": [None, [], "pages"],
    "offsets": [None, [0, 2, 5, 6], lambda o: o.long(), lambda o: o[:3], lambda o: o[None], lambda o: o + 1,
                lambda o: o.flip(0), lambda o: torch.stack((o, o), 1)[:, 0]],
    "tokens": [[0], lambda _: torch.arange(6, dtype=torch.int32), lambda _: torch.arange(6) + 1,
               lambda _: torch.arange(6)[:, None], lambda _: -torch.arange(6)],
    "out": [3, lambda _: torch.empty(6, 31), lambda _: torch.empty(6, 32, dtype=torch.float16),
            lambda _: torch.empty(32, 6).t()],
    "activation": ["relu", 3],
}  # fmt: skip


def test_experts_name_the_wrong_argument():
    for name, wrong in [(name, w) for name, all_wrong in WRONG.items() for w in all_wrong]:
        inputs = arguments(torch.device("cpu"))
        inputs[name] = wrong(inputs.get(name)) if callable(wrong) else wrong
        with pytest.raises(ValueError, match=rf"^{name}: "):
            expert_ffn(inputs.pop("x"), inputs.pop("pages"), inputs.pop("offsets"), **inputs)


def matrices(**change: Any) -> dict[str, Any]:
    return {"gate_up": [torch.zeros(32, 64)] * 2, "down": [torch.zeros(64, 16)] * 2} | change


def test_pages_name_the_wrong_argument():
    for name, change in [
        ("gate_up", {"gate_up": None}),
        ("gate_up", {"gate_up": [None, None]}),
        ("gate_up", {"gate_up": [torch.zeros(32, 64), 3]}),
        ("gate_up", {"gate_up": [torch.zeros(31, 64)] * 2}),
        ("gate_up", {"gate_up": [torch.zeros(32, 64, dtype=torch.int8)] * 2}),
        ("gate_up", {"gate_up": [torch.zeros(64, 32).t(), torch.zeros(32, 64)]}),
        ("gate_up", {"gate_up": [torch.zeros(1 + 32 * 64)[1:].view(32, 64)] * 2}),
        ("down", {"down": [torch.zeros(64, 16)]}),
        ("down", {"down": [torch.zeros(64, 16), None]}),
        ("down", {"down": [torch.zeros(64, 17)] * 2}),
        ("down", {"down": [torch.zeros(64, 16).half()] * 2}),
        ("down_bias", {"gate_up_bias": [torch.zeros(32)] * 2}),
    ]:
        ExpertTable.of(**matrices())
        with pytest.raises(ValueError, match=rf"^{name}: "):
            ExpertTable.of(**matrices(**change))


ROUTED: dict[str, Any] = {
    "logits": [
        None,
        [[1.0]],
        lambda t: t.int(),
        lambda t: t[0],
        lambda t: t.t().contiguous().t(),
        lambda t: t.to("meta"),
    ],
    "top_k": [None, 0, -1, 5, 1.0, "2", True],
}
SUMMED: dict[str, Any] = {
    "results": [None, lambda t: t.int(), lambda t: t[:, 0], lambda t: t.t().contiguous().t(), lambda t: t.to_sparse()],
    "weights": [None, lambda t: t.double(), lambda t: t[:, :0], lambda t: t[0]],
    "places": [None, lambda t: t.int(), lambda t: t[:, :1], lambda t: t + 5, lambda t: t - 1, lambda t: t.tolist()],
    "out": [3, lambda _: torch.empty(3, 7), lambda _: torch.empty(3, 8, dtype=torch.float16)],
}  # fmt: skip


@pytest.mark.parametrize(("name", "wrong"), [(name, w) for name, all_wrong in ROUTED.items() for w in all_wrong])
def test_route_names_the_wrong_argument(name, wrong):
    inputs = {"logits": torch.randn(3, 4), "top_k": 2}
    inputs[name] = wrong(inputs[name]) if callable(wrong) else wrong
    with pytest.raises(ValueError, match=rf"^{name}: "):
        route(inputs["logits"], inputs["top_k"], normalize=True)


def test_combine_names_the_wrong_argument():
    for name, wrong in [(name, w) for name, all_wrong in SUMMED.items() for w in all_wrong]:
        inputs = {
            "results": torch.randn(6, 8),
            "weights": torch.rand(3, 2),
            "places": torch.arange(6).view(3, 2),
            "out": None,
        }
        inputs[name] = wrong(inputs[name]) if callable(wrong) else wrong
        with pytest.raises(ValueError, match=rf"^{name}: "):
            combine(inputs.pop("results"), inputs.pop("weights"), inputs.pop("places"), **inputs)


def test_the_rest_names_the_wrong_argument():
    with pytest.raises(ValueError, match=r"^out: "):
        combine(torch.randn(6, 8), torch.rand(3, 2), torch.arange(6).view(3, 2), add=True)
    ids = torch.ones(2, 2, dtype=torch.int32)
    for wrong, experts, name in ((None, 4, "ids"), (ids.float(), 4, "ids"), (ids, 1, "ids"), (ids, 0, "experts")):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            by_expert(wrong, experts)


@st.composite
def tensors(draw: st.DrawFn, like: Tensor) -> Tensor:
    """The right tensor, or one whose shape, dtype, strides or values are off."""
    if draw(st.booleans()):
        return like
    shape = [draw(st.sampled_from((size, size, size, 0, 1, size + 1))) for size in like.shape]
    dtype = draw(st.sampled_from((like.dtype, like.dtype, torch.float32, torch.float16, torch.int32, torch.int64)))
    tensor = torch.full(shape, draw(st.sampled_from((0, 1, -1, 7, 2**31 - 1)))).to(dtype)
    return tensor.t() if tensor.ndim == 2 and draw(st.booleans()) else tensor


@FUZZ
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_experts_refuse_or_are_right(data):
    layer = floats(3, 16, 8, torch.float32, torch.device("cpu"))
    x, offsets = rows_of((2, 0, 3), 16, torch.float32, torch.device("cpu"))
    x, offsets = data.draw(tensors(x), label="x"), data.draw(tensors(offsets), label="offsets")
    tokens = data.draw(st.none() | tensors(torch.tensor([0, 4, 1, 1, 2])), label="tokens")
    try:
        result = expert_ffn(x, layer.pages, offsets, tokens=tokens)
    except ValueError as refusal:
        assert str(refusal).split(":")[0] in {"x", "offsets", "tokens"}
        return
    rest = {"activation": SILU, "tokens": tokens}
    expected = expert_ffn_in_torch(x, layer.pages, offsets, out=torch.empty_like(result), **rest)
    assert torch.allclose(result, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@FUZZ
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_combine_refuses_or_is_right(data):
    inputs = {
        "results": torch.randn(5, 4),
        "weights": torch.rand(3, 2),
        "places": torch.tensor([[0, 4], [1, 1], [3, 2]]),
    }
    inputs = {name: data.draw(tensors(tensor), label=name) for name, tensor in inputs.items()}
    try:
        result = combine(**inputs)
    except ValueError as refusal:
        assert str(refusal).split(":")[0] in inputs
        return
    truth = (inputs["results"].double()[inputs["places"]] * inputs["weights"].double().unsqueeze(-1)).sum(1)
    assert torch.allclose(result, truth.to(result.dtype), rtol=1e-2, atol=1e-3, equal_nan=True)
