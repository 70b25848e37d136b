"""Profiles of module graphs: those of `profiles.families` where both know a model, and every number of the others."""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from moelight.core.dtypes import BFLOAT16
from moelight.core.errors import ConfigError
from moelight.hrm import costs
from moelight.hrm.inventory import Inventory, inventory
from moelight.models.graph.profile import profile_of, profile_of_directory
from moelight.profiles.families import profile_from_config
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.quantization import read_quantization, with_stored
from moelight.profiles.tensor_list import page_shapes
from tests.cases import thorough
from tests.models.graph.test_families import KINDS, WITHOUT, config_of
from tests.profiles.theirs import their_config

KNOWN_TO_BOTH = ("deepseek-v2", "deepseek-v3", "gpt-oss-20b", "dbrx", "glm-4.5-air", "phi-3.5-moe", "qwen2-57b-a14b")
TOTALS = ("parameters", "active", "bytes", "pages", "page_bytes", "kv_token_bytes", "state_bytes")


def of_config(config: dict[str, Any]) -> ModelProfile:
    from transformers import AutoConfig

    from moelight.models.graph.model import GraphModel, on_meta

    return profile_of(GraphModel(on_meta(AutoConfig.for_model(**config))), name="it", where="config.json")


@functools.cache
def tiny_profile(model_type: str) -> tuple[ModelProfile, Any]:
    from moelight.models.graph.model import GraphModel, on_meta
    from moelight.models.graph.self_test import tiny

    graph = GraphModel(on_meta(tiny(config_of(model_type))))
    return profile_of(graph, name="it", where="config.json"), graph


def directory(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def totals(parts: Inventory) -> dict[str, Any]:
    return {name: getattr(parts, name) for name in TOTALS}


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("deepseek-v3", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("gpt-oss-20b", {"quant_method": "mxfp4"}),
        ("qwen2-57b-a14b", {"quant_method": "gptq", "bits": 4, "group_size": 128}),
    ],
)
def test_quantised_layers_have_the_bytes_of_the_family_that_is_data(name: str, quantization: dict[str, Any]) -> None:
    config = {**their_config(name), "num_hidden_layers": 4}
    config.pop("layer_types", None)
    ours = profile_from_config(HFConfig({**config, "quantization_config": quantization}, where=name), name="it")
    result = read_quantization(HFConfig({"quantization_config": quantization}, where=name))
    assert result is not None and ours.stored is not None
    graph = with_stored(of_config(config), result.format_of, name)
    assert graph.stored is not None and graph.stored.name == ours.stored.name
    assert graph.stored.pages == ours.stored.pages
    assert sum(size for *_, size in graph.stored.dense) == sum(size for *_, size in ours.stored.dense)


@pytest.mark.parametrize("name", KNOWN_TO_BOTH)
def test_four_layers_have_the_totals_of_the_family_that_is_data(name: str) -> None:
    config = their_config(name)
    config["n_layers" if name == "dbrx" else "num_hidden_layers"] = 4
    config.pop("layer_types", None)
    ours, graph = profile_from_config(HFConfig(config, where=name), name="it"), of_config(config)
    assert totals(inventory(graph)) == totals(inventory(ours))
    assert graph.moe_layers == ours.moe_layers
    assert costs.seen_positions(graph, 5000.0) == costs.seen_positions(ours, 5000.0)
    products = [
        sum(element.before_attention + element.after_attention for element in costs.layer_elements(model))
        for model in (graph, ours)
    ]
    assert products[0] == products[1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", KNOWN_TO_BOTH)
def test_released_models_have_the_totals_of_the_family_that_is_data(name: str) -> None:
    assert totals(inventory(of_config(their_config(name)))) == totals(inventory(load_model_profile(name)))


def assert_complete(model_type: str) -> None:
    """Every number of the module is in a page or a tensor; LongCat's has rows of experts that have no weights."""
    profile, graph = tiny_profile(model_type)
    spare = {
        f"{name}.gate_up_proj" for name, module in graph.module.named_modules() if hasattr(module, "zero_expert_num")
    }
    stored = {item: name for name, item in graph.module.state_dict(keep_vars=True).items()}
    values = sum(item.numel() for item, name in stored.items() if name not in spare)
    spared = sum(item[: profile.experts.num_experts].numel() for item, name in stored.items() if name in spare)
    in_page = sum(map(math.prod, page_shapes(profile).values()))
    in_pages = profile.num_moe_layers * profile.experts.num_experts * in_page
    assert sum(tensor.elements for tensor in profile.tensors) + in_pages == values + spared
    assert profile.num_layers == len(profile.layers) == len(profile.moe_layers)
    assert all(
        min(layer.before, layer.after, layer.state_bytes, layer.state_token_bytes) >= 0 for layer in profile.layers
    )
    assert costs.kv_token_bytes(profile, BFLOAT16) or any(costs.state_bytes(profile))


@pytest.mark.parametrize(
    "model_type", thorough(["gemma4", "qwen3_next", "deepseek_v32", "nemotron_h"], but=["gemma4", "nemotron_h"])
)
def test_every_number_of_the_module_is_in_a_page_or_a_tensor(model_type: str) -> None:
    assert_complete(model_type)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", [item for item in KINDS if item not in WITHOUT])
def test_every_family_has_a_complete_profile(model_type: str) -> None:
    assert_complete(model_type)


def test_layers_keep_what_their_mixers_keep() -> None:
    """Gemma 4: windows of 8 but in the last layer; Qwen3-Next: a state in three of four layers, float32 heads
    of 16 x 16 and three positions of a convolution over 128 channels; DeepSeek-V3.2: keys of its own."""
    gemma, _ = tiny_profile("gemma4")
    assert [layer.attention.window for layer in gemma.layers] == [8] * 5 + [None]
    assert costs.seen_positions(gemma, 100) == 100 + 5 * 8
    recurrent, graph = tiny_profile("qwen3_next")
    config = graph.config
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    channels += config.linear_num_value_heads * config.linear_value_head_dim
    heads = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    assert recurrent.layers[0].state_bytes == 4 * (heads + channels * config.linear_conv_kernel_dim)
    assert [bool(layer.attention.num_heads) for layer in recurrent.layers] == [False, False, False, True]
    assert costs.kv_token_bytes(recurrent, BFLOAT16) == 2 * recurrent.layers[3].attention.cache_width
    opaque, _ = tiny_profile("deepseek_v32")
    assert costs.kv_token_bytes(opaque, BFLOAT16) == 0
    assert costs.state_bytes(opaque)[0] == 0
    assert costs.state_bytes(opaque)[1] > 0


@pytest.mark.thorough
def test_a_directory_of_any_family_is_planned_for(tmp_path: Path) -> None:
    from moelight.engine.api import optimize, simulate

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 1000}
    path = directory(tmp_path, model_type="minimax_m2", num_local_experts=8, **sizes)
    model = load_model_profile(str(path / "config.json"), profile_of_directory)
    assert model == load_model_profile(str(path), profile_of_directory)
    assert (model.model_type, model.num_layers, model.experts.num_experts) == ("minimax_m2", 4, 8)
    plan = optimize("cpu-amx", model, cache=False)
    assert plan.estimate.tokens_per_s > 0
    assert simulate(plan, model=model).spans


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mixtrall"}, r"is not a family that moelight knows \(did you mean 'mixtral'"),
        ({"model_type": "minimax_m22"}, r"\(did you mean 'minimax_m2'\?\); `moelight models` lists those that run"),
        ({"model_type": "minimax_m2", "num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to"),
        (
            {"model_type": "minimax_m2", "quantization_config": {"quant_method": "quanto"}},
            "the weights are quantised 'quanto'",
        ),
        (
            {"model_type": "minimax_m2", "num_local_experts": 10**6, "num_hidden_layers": 2},
            "are more than can be planned for",
        ),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        profile_of_directory(directory(tmp_path, **config))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_quantised_checkpoint_of_another_family_is_counted(tmp_path: Path) -> None:
    """Matrices alone: not the convolutions and decays of linear attention, whose sizes no group divides."""
    config = config_of("qwen3_next").to_dict()
    config |= {"num_hidden_layers": 4, "layer_types": None, "dtype": "bfloat16", "vocab_size": 96}
    original = profile_of_directory(directory(tmp_path, **config))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 8, "group_size": 64}
    result = profile_of_directory(directory(tmp_path, **config))
    assert result.stored is not None and result.stored.name == "GPTQ int8 in groups of 64"
    assert 0.5 < inventory(result).total_bytes / inventory(original).total_bytes < 0.6
    assert not any("conv1d" in name for name, *_ in result.stored.dense)


def test_without_transformers_other_families_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", None)
    with pytest.raises(ConfigError, match=r"'minimax_m2' .* not installed: pip install 'moelight\[graph\]'"):
        profile_of_directory(directory(tmp_path, model_type="minimax_m2"))


@pytest.mark.parametrize(
    ("keys", "base"),
    [({}, 5e5), ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 1e4), ({"rope_theta": 2e4}, 2e4)],
)
def test_rotary_embeddings_of_dbrx_have_the_base_of_its_file(keys: dict[str, Any], base: float, tmp_path: Path) -> None:
    """Published files have it in ``attn_config``, where transformers 5 does not look."""
    from moelight.models.graph.model import on_meta, read_config

    config = {"model_type": "dbrx", "n_layers": 1, "attn_config": {"kv_n_heads": 8, "rope_theta": 500000}, **keys}
    module = on_meta(read_config(directory(tmp_path, **config)))
    (frequencies,) = {tuple(part.inv_freq.tolist()) for part in module.modules() if hasattr(part, "inv_freq")}
    assert frequencies[1] == pytest.approx(base ** (-1 / len(frequencies)))
