"""Where ``config.json`` says one thing under two keys, ours is what transformers' own config class makes of them; what
it reads elsewhere or what is not computed is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from moelight.cli.main import main
from moelight.core.errors import ConfigError
from moelight.formats.methods import METHODS
from moelight.profiles.families import FAMILIES, profile_from_config
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile
from tests.profiles.theirs import assert_same_tensors, on_meta
from tests.tiny import tiny_config

LAYERS, HEADS, HIDDEN = 4, 4, 64
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_routed_experts": 16}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**SMALL, "num_local_experts": 16},
    "qwen3_moe": {**SMALL, "moe_intermediate_size": 24, "num_experts": 16},
    "olmoe": {**SMALL, "num_experts": 16},
    "qwen2_moe": {**SMALL, "moe_intermediate_size": 24, "num_experts": 16},
    "deepseek_v2": {**SMALL, **DEEPSEEK, **LATENT},
    "deepseek_v3": {**SMALL, **DEEPSEEK, **LATENT},
    "gpt_oss": {**SMALL, "num_local_experts": 16},
    "phimoe": {**SMALL, "num_local_experts": 16},
    "glm4_moe": {**SMALL, **DEEPSEEK},
    "dbrx": {
        "vocab_size": 96,
        "d_model": HIDDEN,
        "n_heads": HEADS,
        "n_layers": LAYERS,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 80, "moe_num_experts": 16, "moe_top_k": 2},
    },
}
RUN = ("mixtral", "qwen3_moe", "olmoe")
ALL = tuple(CONFIGS)
WINDOWED = ("mixtral", "qwen3_moe", "phimoe")
BASE = {"rope_type": "default", "rope_theta": 5e5}
MSCALE = {"short_mscale": 1.0, "long_mscale": 1.0}  # transformers wants them of Phi-MoE; other families have no use
LINEAR = {"factor": 4.0, **MSCALE}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128, **MSCALE}
SLIDING, FULL = ["sliding_attention"] * LAYERS, ["full_attention"] * LAYERS

# What stands in the file beside the family's own config, and the families that refuse it.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "nothing": ({}, ()),
    "scaling beside parameters": ({"rope_parameters": BASE, "rope_scaling": {"rope_type": "linear", **LINEAR}}, ()),
    "the old spelling of it": ({"rope_parameters": BASE, "rope_scaling": {"type": "linear", **LINEAR}}, ()),
    "scaling beside parameters and theta": (
        {"rope_parameters": BASE, "rope_scaling": {"rope_type": "linear", **LINEAR}, "rope_theta": 7e4},
        (),
    ),
    "three bases": (
        {"rope_parameters": BASE, "rope_scaling": {"type": "linear", "rope_theta": 3e3, **LINEAR}, "rope_theta": 7e4},
        (),
    ),
    "default scaling beside linear parameters": (
        {"rope_parameters": {"rope_type": "linear", **LINEAR}, "rope_scaling": {"rope_type": "default"}},
        (),
    ),
    "yarn beside parameters": ({"rope_parameters": BASE, "rope_scaling": {"rope_type": "yarn", **YARN}}, ()),
    "the old spelling of yarn": ({"rope_parameters": BASE, "rope_scaling": {"type": "yarn", **YARN}}, ()),
    "yarn alone": ({"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 7e4}, ()),
    "two types, the new one linear": ({"rope_scaling": {"type": "default", "rope_type": "linear", **LINEAR}}, ()),
    "two types, the new one default": ({"rope_scaling": {"type": "linear", "rope_type": "default", **LINEAR}}, ()),
    "empty scaling": ({"rope_parameters": {"rope_type": "linear", **LINEAR}, "rope_scaling": {}}, ()),
    "scaling of null": ({"rope_parameters": {"rope_type": "linear", **LINEAR}, "rope_scaling": None}, ()),
    "empty parameters": ({"rope_parameters": {}, "rope_theta": 7e4}, ()),
    "theta twice": ({"rope_parameters": BASE, "rope_theta": 7e4}, ()),
    "theta beside parameters": ({"rope_parameters": {"rope_type": "linear", **LINEAR}, "rope_theta": 7e4}, ()),
    "theta alone": ({"rope_theta": 7e4}, ()),
    "share twice": ({"rope_parameters": {**BASE, "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.75}, ()),
    "share beside scaling": ({"rope_scaling": {"rope_type": "default"}, "partial_rotary_factor": 0.75}, ()),
    "share in the scaling": (
        {"rope_parameters": {**BASE, "partial_rotary_factor": 0.25}, "rope_scaling": {"rope_type": "default"}},
        (),
    ),
    "positions by layer type": ({"rope_parameters": {"full_attention": BASE, "sliding_attention": BASE}}, ALL),
    "num_experts": ({"num_experts": 24}, ("mixtral", "deepseek_v2", "gpt_oss")),
    "num_local_experts": ({"num_local_experts": 24}, ("qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe")),
    "n_routed_experts": ({"n_routed_experts": 24}, ()),
    "all names of the experts' number": (
        {"num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16},
        (),
    ),
    "both dtypes": ({"dtype": "float16", "torch_dtype": "bfloat16"}, ()),
    "the old dtype": ({"torch_dtype": "bfloat16"}, ()),
    "the new dtype": ({"dtype": "float16"}, ()),
    "tied": ({"tie_word_embeddings": True}, ()),
    "key heads of null": ({"num_key_value_heads": None}, ("qwen2_moe",)),
    "a head size": ({"head_dim": 32}, ()),
    "experts a token, another name": ({"moe_top_k": 3}, ()),
    "window": ({"sliding_window": 7}, ()),
    "window off": ({"sliding_window": 7, "use_sliding_window": False}, ()),
    "window on": ({"sliding_window": 7, "use_sliding_window": True}, ()),
    "window on, no size": ({"use_sliding_window": True}, ()),
    "window up to a layer": ({"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}, ()),
    "all layers sliding": (
        {"sliding_window": 7, "use_sliding_window": True, "layer_types": SLIDING},
        ("olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "dbrx"),
    ),
    "no layer sliding": ({"sliding_window": 7, "use_sliding_window": True, "layer_types": FULL}, WINDOWED),
    "another file": ({"configuration_files": ["config.1.json"]}, ALL),
    "an inner config": ({"text_config": {"hidden_size": 8}}, ALL),
    "layers of their own": ({"per_layer_config": {"0": {"num_experts_per_tok": 1}}}, ALL),
    "GPTQ": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ()),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, ()),
    "bitsandbytes": ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, ()),
    "compressed": ({"compression_config": {"quant_method": "compressed-tensors"}}, ALL),
}
# Usual names beside those of DBRX.
USUAL = {"hidden_size": 80, "num_attention_heads": 8, "num_hidden_layers": 3, "max_position_embeddings": 99}
# Cases that change sizes: there, transformers builds its model too, on the meta device.
SIZES = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "all names of the experts' number",
    "tied",
    "key heads of null",
    "a head size",
    "experts a token, another name",
)
# transformers builds it and cannot run it: its norms over whole projections are as wide as the hidden size
BUILT_ONLY = (("olmoe", "a head size"),)


def read(values: dict[str, Any]) -> ModelProfile:
    return profile_from_config(HFConfig(values, where="config.json"), name="some")


def theirs(values: dict[str, Any], directory: Path) -> PreTrainedConfig | None:
    """What transformers reads; None where it refuses."""
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    try:
        return AutoConfig.from_pretrained(directory)
    except StrictDataclassError:
        return None


def assert_same_positions(ours: ModelProfile, known_names: PreTrainedConfig) -> None:
    rope, attention = known_names.rope_parameters, ours.attention
    assert attention.rope_type == rope["rope_type"]
    scaled = rope["rope_type"] in ("linear", "yarn", "llama3")
    assert (attention.rope_scaling and attention.rope_scaling.factor) == (rope["factor"] if scaled else None)
    if known_names.model_type != "dbrx":  # transformers does not look for the base where DBRX has it
        assert attention.rope_theta == rope["rope_theta"]
    if known_names.model_type == "glm4_moe":  # the others turn whole heads whatever it says
        assert attention.rotary_share == rope["partial_rotary_factor"]


def assert_same_windows(ours: ModelProfile, known_names: PreTrainedConfig) -> None:
    window = (
        None
        if known_names.model_type not in (*WINDOWED, "qwen2_moe", "gpt_oss")
        else known_names.sliding_window or None
    )
    layers = [True] * LAYERS
    if known_names.model_type in ("qwen2_moe", "gpt_oss"):
        layers = [kind == "sliding_attention" for kind in known_names.layer_types]
    marked = ours.attention.window_layers or [True] * LAYERS
    assert [ours.attention.window if mark else None for mark in marked] == [window if mark else None for mark in layers]


@pytest.mark.peer
@pytest.mark.parametrize("name", CASES)
def test_two_keys_for_one_thing_mean_what_they_mean_to_transformers(name: str, tmp_path: Path) -> None:
    for family in CONFIGS:
        check_keys(name, family, tmp_path)


def check_keys(name: str, family: str, tmp_path: Path) -> None:
    changes, refused = CASES[name]
    values = {"model_type": family, **CONFIGS[family], **changes}
    if family in refused:
        with pytest.raises(ConfigError) as caught:
            read(values)
        message = str(caught.value)
        assert message.startswith("config.json: ") and "\n" not in message
        assert any(key in message for key in changes)
        return
    known_names = theirs(values, tmp_path)
    if known_names is None:
        return
    ours = read(values)
    assert_same_positions(ours, known_names)
    assert_same_windows(ours, known_names)
    assert ours.dtype == (str(known_names.dtype or FAMILIES[family].dtype)).removeprefix("torch.")
    assert (ours.max_positions, ours.tie_embeddings) == (
        known_names.max_position_embeddings,
        known_names.tie_word_embeddings,
    )
    top_k = known_names.ffn_config.moe_top_k if family == "dbrx" else known_names.num_experts_per_tok
    assert ours.router.top_k == top_k
    if name in SIZES and (family, name) not in BUILT_ONLY:
        try:
            parameters, buffers = on_meta(values)
        except TypeError:  # transformers reads it and cannot build it
            return
        shapes = {**parameters, **{key: shape for key, shape in buffers.items() if key != "lm_head.weight"}}
        assert_same_tensors(ours, shapes)


@pytest.mark.parametrize("usual", USUAL)
def test_two_names_of_one_key_of_dbrx_must_agree(usual: str) -> None:
    values = {"model_type": "dbrx", **CONFIGS["dbrx"], "max_seq_len": 77}
    with pytest.raises(ConfigError, match=f"{usual} {USUAL[usual]} and .* are two names of one thing and differ"):
        read({**values, usual: USUAL[usual]})
    original = FAMILIES["dbrx"].keys[usual]
    assert read({**values, usual: values[original]}) == read(values)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_whatever_says_quantised_is_refused_in_one_line(key: str) -> None:
    hostile: list[object] = [{"quant_method": "x\ny" * 9999}, {"quant_method": "awq\x1b[2J"}, {"bits": 10**400}]
    mild: list[object] = [{}, {"quant_method": None}, {"quant_method": ["gptq"] * 1000}, [], [[[]]], "gptq", ""]
    for value in [*hostile, *mild, 0, False, True, 1e308]:
        with pytest.raises(ConfigError) as caught:
            read(tiny_config("mixtral", **{key: value}))
        message = str(caught.value)
        assert message.startswith(f"config.json: {key} says that the weights are quantised")
        assert message.endswith("use the checkpoint that is not quantised")
        assert message.isprintable() and len(message) < 400


@pytest.mark.parametrize("command", [["inspect"], ["optimize", "--hw", "t4", "--model"], ["generate", "x", "--model"]])
def test_no_command_takes_a_quantised_checkpoint_for_another(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised = tiny_config("qwen3_moe", quantization_config={"quant_method": "exl3", "bits": 4})
    (tmp_path / "config.json").write_text(json.dumps(quantised), encoding="utf-8")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n', encoding="utf-8")
    output = ["-o", str(tmp_path / "out.jsonl")] if command[0] == "generate" else []
    inputs = [str(prompts) if word == "x" else word for word in command]
    assert main([*inputs, str(tmp_path), *output]) == 2
    message = capsys.readouterr().err.strip()
    but = f"by none of the methods read ({', '.join(METHODS)})"
    assert message.endswith(
        f"quantization_config says that the weights are quantised 'exl3', {but}; "
        "use the checkpoint that is not quantised"
    )
    assert "\n" not in message
