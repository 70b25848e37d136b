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
    found = delta_module(module_of(model_type, name), {})
    assert found is not None


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
    own = undecorated(type(module).forward).__globals__[name]

    def other(*given: Any, **named: Any) -> Any:
        found = own(*given, **named)
        if isinstance(found, tuple):
            return found[0] * 1.01, found[1]
        return found.cumsum(1) if name.startswith("apply") else found * 1.01

    assert delta_module(altered(module, **{name: other}), {}) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear"])
def test_a_row_is_the_same_in_any_company_and_any_parts(model_type, dtype):
    """As many heads as models have: the forward is transformers', and torch's elementwise functions round otherwise in
    what fills no vector at the end of a tensor."""
    heads = {"linear_num_value_heads": 32, "linear_num_heads": 32}
    module = module_of(model_type, FAMILIES[model_type], **heads).to(dtype)
    use_leaf_kernels(module)
    found = delta_module(module, {})
    x = [torch.randn(1, rows, module.hidden_size, generator=torch.Generator().manual_seed(rows)) for rows in (21, 6, 3)]
    x = [each.to(dtype) for each in x]
    alone = [found([(State(), each.shape[1])], each) for each in x]
    states, done = [State() for _ in x], [0, 0, 0]
    for part in (((0, 17), (1, 1)), ((1, 1), (2, 3), (0, 1)), ((0, 3), (1, 4))):
        rows = torch.cat([x[number][:, done[number] : done[number] + count] for number, count in part], dim=1)
        results = found([(states[number], count) for number, count in part], rows)
        for (number, count), each in zip(part, results.split([count for _, count in part], dim=1), strict=True):
            assert torch.equal(each, alone[number][:, done[number] : done[number] + count])
            done[number] += count
    assert done == [each.shape[1] for each in x]


def test_a_sequence_keeps_rows_of_the_convolution_and_a_state_of_every_head():
    module = module_of("qwen3_next", FAMILIES["qwen3_next"])
    found, state = delta_module(module, {}), State()
    found([(state, 2)], torch.zeros(1, 2, module.hidden_size))
    conv = (module.conv_kernel_size - 1, module.conv_dim)
    assert [each.shape for each in state.tensors.values()] == [
        conv,
        (module.num_v_heads, module.head_k_dim, module.head_v_dim),
    ]
    assert state.nbytes == sum(each.nbytes for each in state.tensors.values())


def test_modules_that_compute_alike_are_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(delta, "_agrees", lambda *given: tried.append(given) or True)
    known: dict[Any, Any] = {}
    modules = [module_of("qwen3_next", FAMILIES["qwen3_next"]) for _ in range(2)]
    assert all(isinstance(delta_module(each, known), DeltaModule) for each in modules)
    assert len(tried) == 1


def test_without_the_extension_modules_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(native, "extension", lambda: None)
    assert delta_module(module_of("qwen3_next", FAMILIES["qwen3_next"]), {}) is None


def test_bfloat16_is_as_near_the_truth_as_the_modules_own():
    module = module_of("qwen3_next", FAMILIES["qwen3_next"])
    x = torch.randn(1, 40, module.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        truth = module(x)
        own = module.bfloat16()(x.bfloat16()).float()
        use_leaf_kernels(module)
        ours = delta_module(module, {})([(State(), 40)], x.bfloat16()).float()
    assert (ours - truth).norm() <= 1.1 * (own - truth).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_with_a_gate_is_recognised_as_a_leaf(dtype):
    """Of SiLU alone: Kimi's gate is a sigmoid."""
    module = module_of("qwen3_next", FAMILIES["qwen3_next"]).to(dtype)
    other = module_of("kimi_linear", FAMILIES["kimi_linear"])
    own = module.norm.forward
    x, gate = torch.randn(2, 30, module.head_v_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = own(x, gate)
    for each in (module, other):
        use_leaf_kernels(each)
    assert "forward" in vars(module.norm)
    assert "forward" not in vars(other.o_norm)
    found = module.norm(x, gate)
    assert found.dtype == dtype
    assert torch.allclose(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2)
