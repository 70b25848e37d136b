"""Linear attention on our kernels: recognised by its numbers alone, and the same for a row in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING

from moelight.kernels import native
from moelight.models.graph import delta, self_test
from moelight.models.graph.delta import DeltaModule, delta_module
from moelight.models.graph.forwards import calling, undecorated
from moelight.models.graph.leaves import use_leaf_kernels
from moelight.models.graph.state import State
from tests.models.graph import measured

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())

FAMILIES = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5_moe": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5": "Qwen3_5GatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "kimi_linear": "KimiLinearDeltaAttention",
    "bailing_hybrid": "BailingHybridDeltaAttention",
    "glm5_next": "Glm5NextTextLinearAttention",
    "lara_mini": "LaraMiniGatedDeltaNet",
}


def module_of(model_type: str, name: str, **sizes: int) -> Any:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = self_test.tiny(measured.config_of(model_type))
    for option, size in sizes.items():
        if hasattr(config, option):
            setattr(config, option, size)
    module = self_test.random_model(config, 0)
    return next(part for part in module.modules() if type(part).__name__ == name)


@pytest.mark.parametrize(("model_type", "name"), FAMILIES.items())
def test_the_rule_is_recognised_in_every_family_that_has_it(model_type, name):
    result = delta_module(module_of(model_type, name), {})
    assert result is not None


def test_other_recurrences_stay_as_they_are():
    for model_type, name in (("bamba", "BambaMixer"), ("lfm2_moe", "Lfm2MoeShortConv")):
        assert delta_module(module_of(model_type, name), {}) is None


def altered(module: Any, **functions: Any) -> Any:
    """``module`` as one of a class whose forward calls other functions by these names."""
    made = calling(undecorated(type(module).forward), functions)
    module.__class__ = type("Altered", (type(module),), {"forward": made})
    return module


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule", "apply_mask_to_padding_states"])
def test_a_module_that_computes_something_else_is_not_recognised(name):
    """A rule or convolution with another result, and a step that looks at earlier rows by itself."""
    module = module_of("qwen3_next", FAMILIES["qwen3_next"])
    original = undecorated(type(module).forward).__globals__[name]

    def other(*inputs: Any, **named: Any) -> Any:
        result = original(*inputs, **named)
        if isinstance(result, tuple):
            return result[0] * 1.01, result[1]
        return result.cumsum(1) if name.startswith("apply") else result * 1.01

    assert delta_module(altered(module, **{name: other}), {}) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear"])
def test_a_row_is_the_same_in_any_company_and_any_parts(model_type, dtype):
    """As many heads as models have: the forward is transformers', and torch's elementwise functions round otherwise in
    what fills no vector at the end of a tensor."""
    heads = {"linear_num_value_heads": 32, "linear_num_heads": 32}
    module = module_of(model_type, FAMILIES[model_type], **heads).to(dtype)
    use_leaf_kernels(module)
    result = delta_module(module, {})
    x = [torch.randn(1, rows, module.hidden_size, generator=torch.Generator().manual_seed(rows)) for rows in (21, 6, 3)]
    x = [item.to(dtype) for item in x]
    alone = [result([(State(), item.shape[1])], item) for item in x]
    states, done = [State() for _ in x], [0, 0, 0]
    for part in (((0, 17), (1, 1)), ((1, 1), (2, 3), (0, 1)), ((0, 3), (1, 4))):
        rows = torch.cat([x[number][:, done[number] : done[number] + count] for number, count in part], dim=1)
        results = result([(states[number], count) for number, count in part], rows)
        for (number, count), item in zip(part, results.split([count for _, count in part], dim=1), strict=True):
            assert torch.equal(item, alone[number][:, done[number] : done[number] + count])
            done[number] += count
    assert done == [item.shape[1] for item in x]


def test_a_sequence_keeps_rows_of_the_convolution_and_a_state_of_every_head():
    module = module_of("qwen3_next", FAMILIES["qwen3_next"])
    result, state = delta_module(module, {}), State()
    result([(state, 2)], torch.zeros(1, 2, module.hidden_size))
    conv = (module.conv_kernel_size - 1, module.conv_dim)
    assert [item.shape for item in state.tensors.values()] == [
        conv,
        (module.num_v_heads, module.head_k_dim, module.head_v_dim),
    ]
    assert state.nbytes == sum(item.nbytes for item in state.tensors.values())


def test_modules_that_compute_alike_are_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(delta, "_agrees", lambda *inputs: tried.append(inputs) or True)
    known_names: dict[Any, Any] = {}
    modules = [module_of("qwen3_next", FAMILIES["qwen3_next"]) for _ in range(2)]
    assert all(isinstance(delta_module(module, known_names), DeltaModule) for module in modules)
    assert len(tried) == 1


def test_without_the_extension_modules_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(native, "extension", lambda: None)
    assert delta_module(module_of("qwen3_next", FAMILIES["qwen3_next"]), {}) is None


def test_bfloat16_is_as_near_the_truth_as_the_modules_own():
    module = module_of("qwen3_next", FAMILIES["qwen3_next"])
    x = torch.randn(1, 40, module.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        truth = module(x)
        original = module.bfloat16()(x.bfloat16()).float()
        use_leaf_kernels(module)
        ours = delta_module(module, {})([(State(), 40)], x.bfloat16()).float()
    assert (ours - truth).norm() <= 1.1 * (original - truth).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_with_a_gate_is_recognised_as_a_leaf(dtype):
    """Of SiLU alone: Kimi's gate is a sigmoid."""
    module = module_of("qwen3_next", FAMILIES["qwen3_next"]).to(dtype)
    other = module_of("kimi_linear", FAMILIES["kimi_linear"])
    original = module.norm.forward
    x, gate = torch.randn(2, 30, module.head_v_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = original(x, gate)
    for item in (module, other):
        use_leaf_kernels(item)
    assert "forward" in vars(module.norm)
    assert "forward" not in vars(other.o_norm)
    result = module.norm(x, gate)
    assert result.dtype == dtype
    assert torch.allclose(result, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2)
