"""Experts of graph models: which forms the kernels compute, and that they give the module's own numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from moelight.core.errors import ConfigError
from moelight.core.schedule import Page
from moelight.hrm.costs import ExpertWorkspace
from moelight.kernels.activations import SILU, Activation
from moelight.kernels.products import Workspace
from moelight.kernels.reference import gate_and_up
from moelight.models.expert import Expert, ExpertFunction, LayerExperts
from moelight.models.graph.experts import forward, recognised
from moelight.models.graph.families import ExpertForm
from moelight.models.graph.model import GraphModel, on_meta
from moelight.models.graph.self_test import tiny
from moelight.models.graph.support import moe_families
from moelight.models.graph.weights import _matrices
from moelight.models.moe import Routed, moe_forward
from moelight.models.pages import PagedExperts
from moelight.weights.boxes import Tiled
from moelight.weights.expert_pages import lay_out_pages
from moelight.weights.page_layout import lay_out
from moelight.weights.source import TensorInfo
from moelight.weights.torch_dtypes import from_torch
from tests.models.graph.released import RELEASED

FORMS = {
    "mixtral": SILU,
    "aria": SILU,  # transposed
    "dbrx": SILU,  # gate and up apart, down transposed
    "llama4": SILU,  # transposed, outside of the interface
    "gpt_oss": Activation(alpha=1.702, limit=7.0, shift=1.0),  # transposed, interleaved, biased
    "minimax_m3_vl": Activation(alpha=1.702, limit=7.0, shift=1.0),
    "deepseek_v4": Activation(limit=10.0),
    "step3p7": Activation(limit=1.5, late=True),
    "gemma4": Activation("gelu_tanh"),
    "nemotron_h": Activation("relu2", gated=False),
}
NOT_COMPUTED = {"inkling2": "soft caps of gate and up"}
ROWS = 7


def graph_of(model_type: str) -> GraphModel:
    from transformers import CONFIG_MAPPING

    config = tiny(CONFIG_MAPPING[model_type](**RELEASED.get(model_type, {})))
    if model_type == "step3p7":
        text = config.get_text_config()
        text.swiglu_limits = [1.5] * text.num_hidden_layers
    return GraphModel(on_meta(config))


def page_of(form: ExpertForm, module: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], Expert]:
    """The parameters of an expert by name, and the same as an expert in a page."""
    source = torch.Generator().manual_seed(3)
    shapes = {name: tuple(tensor.shape) for name, tensor in form.page(module, 0).items()}
    page = {name: torch.randn(shape, generator=source).mul(0.2).to(dtype) for name, shape in shapes.items()}
    stored = {"dtype": from_torch(dtype).safetensors, "file": Path("a"), "offset": 0}
    infos = {
        name: TensorInfo(name=name, shape=shape, nbytes=page[name].nbytes, **stored) for name, shape in shapes.items()
    }
    places, runs = lay_out(_matrices(form, {name: Tiled.of(info) for name, info in infos.items()}))
    pages = lay_out_pages({Page(layer=0, expert=0): tuple(run.info for run in runs)}, {0: places})
    values = torch.cat([page[run.info.name].flatten() for run in runs])
    return page, PagedExperts(pages).of_layout(0, [values.view(torch.uint8)])[0]


def _not_called(expert: Expert, x: Tensor) -> Tensor:
    raise AssertionError("torch computes the expert")


def normed(out: Tensor) -> Tensor:
    return out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-3)


@pytest.mark.parametrize("model_type", [*FORMS, "mixtral, then a norm"])
def test_kernels_give_the_numbers_of_the_module(model_type: str) -> None:
    model_type, _, finish = model_type.partition(", ")
    graph = graph_of(model_type)
    form, module = graph.forms[-1], graph.experts[-1]
    form = replace(form, finish=normed) if finish else form
    assert recognised(form) == FORMS[model_type]
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        page, expert = page_of(form, module, dtype)
        hidden = expert.down.shape[0]
        x = torch.randn(ROWS, hidden, generator=torch.Generator().manual_seed(4)).mul(3).to(dtype)
        wanted = form.forward({name: tensor.double() for name, tensor in page.items()}, x.double())
        sizes = ExpertWorkspace(rows_bytes=1 << 18, wide_bytes=1 << 18, narrow_bytes=1 << 18)
        space = Workspace(torch.zeros(1 << 20, dtype=torch.uint8), sizes, hidden, dtype)
        function = ExpertFunction(recognised(form), _not_called, form.finish)
        routed = Routed(x=x, weights=torch.ones(ROWS, 1), ids=torch.zeros(ROWS, 1, dtype=torch.int32))
        result = moe_forward(routed, LayerExperts([expert], function), space)
        assert ((result.double() - wanted).abs().max() / wanted.abs().max()).item() <= tolerance
        by_torch = forward(form, expert, x)
        assert ((by_torch.double() - wanted).abs().max() / wanted.abs().max()).item() <= tolerance


@pytest.mark.parametrize("model_type", [item for item, by in FORMS.items() if by.gated])
def test_torch_computes_gate_and_up_in_any_order(model_type: str) -> None:
    """Joined, interleaved and apart, as a quantised page may have them, whatever the order of the family."""
    graph = graph_of(model_type)
    form, module = graph.forms[-1], graph.experts[-1]
    page, weights = page_of(form, module, torch.float32)

    def pair(both: Any, up: Any) -> tuple[Any, ...]:
        return (both, up) if up is not None or both is None else gate_and_up(both.t(), interleaved=form.interleaved)

    gate, up = (item if weights.up is not None else item.t() for item in pair(weights.gate_up, weights.up))
    biases = pair(weights.gate_up_bias, weights.up_bias)
    x = torch.randn(ROWS, weights.down.shape[0], generator=torch.Generator().manual_seed(4)).mul(3)
    wanted = form.forward({name: tensor.double() for name, tensor in page.items()}, x.double())

    def arranged(gate: Any, up: Any, *, interleaved: bool) -> Any:
        return (
            None if gate is None else torch.stack((gate, up), 1).flatten(0, 1) if interleaved else torch.cat((gate, up))
        )

    for order in ("apart", "joined", "interleaved"):
        parts = {"gate_up": gate, "up": up, "gate_up_bias": biases[0], "up_bias": biases[1]}
        if order != "apart":
            both = {"gate_up": (gate, up), "gate_up_bias": biases}
            parts = {name: arranged(*two, interleaved=order == "interleaved") for name, two in both.items()}
        matrices = Expert(**parts, down=weights.down, down_bias=weights.down_bias, interleaved=order == "interleaved")
        result = forward(form, matrices, x).double()
        assert ((result - wanted).abs().max() / wanted.abs().max()).item() <= 2e-6, order


def test_other_activations_are_not_taken_for_ours() -> None:
    form = graph_of("mixtral").forms[0]

    def with_curve(curve: Any) -> Activation | None:
        return recognised(replace(form, activate=lambda both: curve(*both.chunk(2, dim=-1))))

    silu = torch.nn.functional.silu
    assert with_curve(lambda gate, up: silu(gate) * up) == SILU
    assert with_curve(lambda gate, up: silu(1.5 * gate) / 1.5 * up) == Activation(alpha=1.5)
    assert with_curve(lambda gate, up: torch.nn.functional.gelu(gate) * up) == Activation("gelu")
    assert with_curve(lambda gate, up: silu(gate.clamp(max=100.0)) * up) is None, "no limit of up"
    assert with_curve(lambda gate, up: silu(gate).tanh() * up) is None
    assert with_curve(lambda gate, up: silu(gate) * up + 1e-3) is None
    assert with_curve(lambda gate, up: torch.zeros_like(gate)) is None
    assert with_curve(lambda gate, up: silu(gate) @ up) is None


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", sorted(moe_families().values()))
def test_the_kernels_compute_every_family(model_type: str) -> None:
    try:
        graph = graph_of(model_type)
    except ConfigError as refusal:
        pytest.skip(str(refusal))
    assert [recognised(form) is None for form in graph.forms] == [model_type in NOT_COMPUTED] * len(graph.forms)
