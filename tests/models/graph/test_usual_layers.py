"""Decoder layers of the usual form on kernels: what is recognised, results beside those of the modules, and torch's
threads between effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from moelight.kernels import native
from moelight.kernels.arguments import kernel_threads, one_thread_for_torch
from moelight.models.graph import layers, self_test
from moelight.models.graph.effects import Attend, Ended, Experts
from moelight.models.graph.layers import use_kernels
from moelight.models.graph.model import GraphModel
from moelight.models.graph.self_test import lie_together
from moelight.models.graph.state import State
from tests.models.graph.measured import config_of

USUAL = ("mixtral", "qwen3_moe", "olmoe")  # no norms of heads, one for each head, one for all of them
ROWS = 5


def module_of(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A tiny model whose norms have weights that are not all one."""
    module = self_test.random_model(self_test.tiny(config_of(model_type, **changes)), seed=3)
    return module.to(dtype).eval()


def usual(model: GraphModel) -> list[bool]:
    """Of each layer, whether it was recognised."""
    return [isinstance(vars(layer).get("forward"), layers.UsualLayer) for layer in model.module.model.layers]


def hidden_of(model: GraphModel, ids: Tensor) -> Tensor:
    """What a run ends with, attention and experts replaced by functions of a row's own numbers."""
    run, value = model.start(ids, torch.arange(len(ids)), [(State(), 1)] * len(ids)), None
    while not isinstance(effect := run.resume(value), Ended):
        if isinstance(effect, Attend):
            group = effect.q.shape[1] // effect.k.shape[1]
            value = effect.q * 0.5 + (effect.k - effect.v).repeat_interleave(group, 1)
        else:
            assert isinstance(effect, Experts)
            value = effect.x * 0.5
    return effect.hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", USUAL)
def test_layers_of_the_usual_form_compute_what_their_modules_do(model_type: str, dtype: torch.dtype) -> None:
    ids = torch.arange(ROWS) + 7
    plain, ours = (GraphModel(module_of(model_type, dtype)) for _ in range(2))
    use_kernels(ours.module)
    lie_together(ours.module)
    assert all(usual(ours))
    result, expected = hidden_of(ours, ids), hidden_of(plain, ids)
    near = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(result, expected, rtol=near, atol=near)
    assert torch.equal(hidden_of(ours, ids[:1]), result[:1])


@pytest.mark.skipif(not native.available(), reason="without the extension layers compute by their own forward")
def test_layers_of_the_usual_form_call_none_of_their_linear_layers() -> None:
    ours = GraphModel(module_of("qwen3_moe"))
    use_kernels(ours.module)
    lie_together(ours.module)
    for part in ours.module.model.layers.modules():
        if isinstance(part, nn.Linear):
            part.forward = None
    assert hidden_of(ours, torch.arange(ROWS)).isfinite().all()


@pytest.mark.parametrize(
    ("model_type", "changes", "recognised"),
    [
        ("olmoe", {"clip_qkv": 1.0}, [False] * 4),
        ("granitemoe", {"residual_multiplier": 0.25}, [False] * 4),
        ("granitemoe", {"residual_multiplier": 1.0}, [True] * 4),
        ("qwen3_moe", {"attention_bias": True}, [True] * 4),  # but leaves compute it
        ("glm4_moe", {"partial_rotary_factor": 0.5, "attention_bias": False}, [True] * 4),  # but not by its angles
    ],
    ids=["clips", "scales sums", "does not scale", "biases", "turns a half"],
)
def test_another_form_is_left_alone(model_type: str, changes: dict[str, Any], recognised: list[bool]) -> None:
    plain, ours = (GraphModel(module_of(model_type, **changes)) for _ in range(2))
    use_kernels(ours.module)
    lie_together(ours.module)
    assert usual(ours) == recognised
    ids = torch.arange(ROWS)
    torch.testing.assert_close(hidden_of(ours, ids), hidden_of(plain, ids), rtol=1e-5, atol=1e-5)


def test_weights_that_lie_apart_are_computed_by_the_modules_own_forward() -> None:
    plain, ours = (GraphModel(module_of("mixtral")) for _ in range(2))
    use_kernels(ours.module)
    for part in ours.module.parameters():
        part.data = part.data.clone()
    ids = torch.arange(ROWS)
    torch.testing.assert_close(hidden_of(ours, ids), hidden_of(plain, ids), rtol=1e-5, atol=1e-5)


def test_torch_has_one_thread_between_effects_and_kernels_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        model = GraphModel(module_of("mixtral"))
        original = model.module.model.norm.forward
        monkeypatch.setattr(
            model.module.model.norm,
            "forward",
            lambda x: seen.append((torch.get_num_threads(), kernel_threads())) or original(x),
        )
        hidden_of(model, torch.arange(ROWS))
        assert seen == [(1, 3) if native.available() else (3, 3)]
        assert (torch.get_num_threads(), kernel_threads()) == (3, 3)
        with pytest.raises(KeyError), one_thread_for_torch(), one_thread_for_torch():
            raise KeyError
        assert (torch.get_num_threads(), kernel_threads()) == (3, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("model_type", "light"),
    [("mixtral", True), ("gpt_oss", True), ("deepseek_v2", False), ("qwen3_next", True), ("bamba", False)],
)
def test_graphs_that_compute_much_by_torch_keep_its_threads(model_type: str, light: bool) -> None:
    assert GraphModel(module_of(model_type)).light is light
