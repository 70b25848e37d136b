"""What a ``quantization_config`` says of each module, and the bytes that a model has by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moelight.cli.main import main
from moelight.core.errors import ConfigError
from moelight.formats.awq import awq
from moelight.formats.bitsandbytes import LLMInt8Format, bitsandbytes
from moelight.formats.format import Format
from moelight.formats.fp8 import fp8
from moelight.formats.ggml import GGML_FORMATS
from moelight.formats.gptq import gptq
from moelight.formats.int8 import Int8Format
from moelight.formats.mlx import mlx
from moelight.formats.mxfp4 import mxfp4
from moelight.formats.nvfp4 import nvfp4
from moelight.formats.registry import similar_format
from moelight.formats.rules import TORCHAO_NAMES
from moelight.hrm import costs
from moelight.hrm.inventory import inventory
from moelight.optimizer.optimize import make_plan
from moelight.optimizer.options import PlanOptions
from moelight.profiles.families import profile_from_config
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile
from moelight.profiles.model_files import load_model_profile, model_config
from moelight.profiles.quantization import Quantization, read_quantization
from moelight.profiles.workload import load_workload

QWEN3 = "qwen3-30b-a3b"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def read(quantization: dict[str, Any]) -> Quantization:
    result = read_quantization(HFConfig({"quantization_config": quantization}, where="config.json"))
    assert result is not None
    return result


def profile(name: str, quantization: dict[str, Any] | None) -> ModelProfile:
    config = {**model_config(name), "quantization_config": quantization}
    return profile_from_config(HFConfig(config, where="config.json"), name=name)


def released(stem: str) -> str:
    from moelight.profiles.files import profile_names

    return next(name for name in profile_names("model") if stem in name)


@pytest.mark.parametrize(
    ("quantization", "stored"),
    [
        (GPTQ, gptq(bits=4, group=128, in_order=True)),
        ({**GPTQ, "desc_act": None}, gptq(bits=4, group=128)),
        ({**GPTQ, "bits": 8, "group_size": -1, "desc_act": True}, gptq(bits=8, group=0)),
        (AWQ, awq(group=128)),
        (FP8, fp8(block=(128, 128), scale="F32")),
        ({**FP8, "scale_fmt": "ue8m0"}, fp8(block=(128, 128), scale="F8_E8M0")),
        ({"quant_method": "fp8"}, fp8(block=(0, 0), scale="F32", suffix=".weight_scale")),
        ({"quant_method": "fbgemm_fp8"}, fp8(block=(1, 0), scale="F32", suffix=".weight_scale")),
    ],
)
def test_a_model_has_the_bytes_of_its_tensors(quantization: dict[str, Any], stored: Format) -> None:
    """Counted here from the shapes in the config; experts, attention and the rest apart."""
    name = released("qwen3-30b")
    original, result = profile(name, None), profile(name, quantization)
    hidden, width, experts = original.hidden_size, original.experts.intermediate_size, original.experts.num_experts
    page = 2 * stored.paged_bytes(width, hidden) + stored.paged_bytes(hidden, width)
    assert result.stored is not None and result.stored.page_bytes == page
    spec = original.attention
    attention = stored.bytes_for(spec.q_dim, hidden) + stored.bytes_for(hidden, spec.q_dim)
    attention += 2 * stored.bytes_for(spec.kv_dim, hidden)
    others = 2 * (experts * hidden + 2 * hidden + 2 * spec.head_dim)  # router and norms, in bfloat16
    ends = 2 * (2 * original.vocab_size * hidden + hidden)
    parts = inventory(result)
    assert parts.bytes["experts"] == original.num_layers * experts * page
    assert parts.total_bytes == original.num_layers * (experts * page + attention + others) + ends
    assert parts.dtype == stored.name and parts.parameters == inventory(original).parameters
    pages = costs.page_dtype(result, result.stored.dtype)
    assert costs.page_bytes(result, pages) == page == pages.bytes_for(costs.page_elements(result))
    assert costs.page_bytes(result, costs.page_dtype(result, pages, "int8")) < costs.page_bytes(
        original, formats_of(original)
    )


def formats_of(original: ModelProfile) -> Any:
    from moelight.core.dtypes import dtype_named

    return dtype_named(original.dtype)


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}


def test_modules_of_auto_round() -> None:
    """The config of auto-round 0.16.1: a regular expression leaves the router out."""
    packing = {"packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers"}
    plain = {".*model\\.layers\\.0\\.mlp\\.gate.*": {"bits": 16, "data_type": "float"}}
    wide = {"model.layers.1.mlp.gate_proj": {"bits": 8, "group_size": 32}, "lm_head": {}}
    result = read({**AUTO_ROUND, **packing, "extra_config": plain | wide})
    assert result.format_of("model.layers.0.mlp.gate") is None and result.format_of("model.embed_tokens") is None
    assert result.format_of("model.layers.0.mlp.experts.3.up_proj") == gptq(bits=4, group=128, in_order=True)
    assert result.format_of("model.layers.1.mlp.gate_proj") == gptq(bits=8, group=32, in_order=True)
    assert result.format_of("lm_head") == gptq(bits=4, group=128, in_order=True)
    assert read({**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}).format_of("x") == awq(group=128)
    compressed = {**AUTO_ROUND, "packing_format": "auto_round:llm_compressor", "data_type": "mx_fp", "group_size": 32}
    assert read(compressed).format_of("x") == mxfp4((".weight_packed", ".weight_scale"))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"packing_format": "auto_round:fp8"}, "of packing_format only auto_round:auto_gptq, "),
        ({"bits": 3}, "bits there must be 2, 4 or 8"),
        ({"bits": 2, "packing_format": "auto_round:auto_awq"}, "bits there must be 4 where packing_format"),
        ({"data_type": "int_asym_dq"}, "of the data_type of auto_round:auto_gptq only int is read"),
        ({"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp"}, "group_size there must be 32"),
        ({"rotation_config": {"block_size": 32}}, "rotations of weights"),
        ({"extra_config": {"(a+)+b": {"bits": 8}}}, "no regular expression"),
        ({"extra_config": ["lm_head"]}, "extra_config there must be an object"),
    ],
)
def test_auto_round_that_is_not_read_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read({**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", **change})
    assert complaint in str(caught.value) and str(caught.value).isprintable()


MLX = {"group_size": 64, "bits": 4, "mode": "affine"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0.self_attn*"]}


def test_modules_of_mlx() -> None:
    """A config names no method; modules that have no scales are plain."""
    stack = "model.layers.0.mlp.switch_mlp.down_proj"
    result = read({**MLX, stack: {"group_size": 32, "bits": 8}, "lm_head": False, "model.norm": True})
    assert result.format_of("lm_head") is None
    assert result.format_of("model.layers.0.mlp.experts.7.down_proj") == mlx(bits=8, group=32)
    assert result.format_of("model.layers.0.mlp.experts.7.up_proj") == mlx(bits=4, group=64)
    assert (
        result.format_of("model.embed_tokens") == result.format_of("model.layers.0.mlp.gate") == mlx(bits=4, group=64)
    )


def test_modules_of_modelopt() -> None:
    result = read(MODELOPT)
    assert result.format_of("model.layers.0.self_attn.q_proj") is None and result.format_of("lm_head") is None
    assert result.format_of("model.layers.0.mlp.experts.7.up_proj") == nvfp4(divides=False)
    tensor = fp8(block=(0, 0), scale="F32", suffix=".weight_scale")
    assert read({**MODELOPT, "quant_algo": "FP8"}).format_of("x") == tensor


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({**MLX, "mode": "mxfp4"}, "of mode only affine is read"),
        ({**MLX, "bits": 7}, "bits there must be one of 2, 3, 4, 5, 6, 8"),
        ({**MLX, "group_size": 48}, "group_size there must be one of 32, 64, 128"),
        ({**MLX, "lm_head": {"bits": 9}}, "bits there must be one of"),
        ({**MODELOPT, "quant_algo": "NVFP4_AWQ"}, "of quant_algo only nvfp4, w4a16_nvfp4, fp8 is read"),
        ({**MODELOPT, "ignore": ["*a*b*c*d*e"]}, "a pattern there is too long a one"),
    ],
)
def test_mlx_and_modelopt_that_are_not_read_are_refused(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(config)
    assert complaint in str(caught.value) and str(caught.value).isprintable()


def test_mxfp4_of_gpt_oss_is_that_of_its_experts() -> None:
    name = released("gpt-oss-20b")
    original, result = (
        profile(name, None),
        profile(name, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
    )
    hidden, width = original.hidden_size, original.experts.intermediate_size
    assert result.stored is not None and result.stored.dense == ()
    assert result.stored.page_bytes == 3 * hidden * width * 17 // 32 + 2 * (2 * width + hidden)
    assert 12.5e9 < inventory(result).total_bytes < 14e9  # the released one takes 13.8 GB


def test_modules_of_gptq() -> None:
    result = read(GPTQ)
    assert result.format_of("lm_head") is None and result.format_of("model.embed_tokens") is None
    assert result.format_of("model.layers.0.mlp.gate") is None
    assert result.format_of("model.layers.0.mlp.shared_expert_gate") is None
    assert result.format_of("model.layers.0.mlp.gate_proj") == gptq(bits=4, group=128, in_order=True)
    assert read({**GPTQ, "lm_head": True}).format_of("lm_head") is not None
    second = read({**GPTQ, "checkpoint_format": "gptq_v2"}).format_of("x")
    assert second == gptq(bits=4, group=128, in_order=True, zero_bias=0)
    changed = read({**GPTQ, "dynamic": {"-:.*self_attn": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 32}}})
    assert changed.format_of("model.layers.1.self_attn.q_proj") is None
    assert changed.format_of("model.layers.1.mlp.experts.3.down_proj") == gptq(bits=8, group=32, in_order=True)
    assert changed.format_of("model.layers.1.mlp.experts.3.up_proj") == gptq(bits=4, group=128, in_order=True)
    some = read({**GPTQ, "modules_in_block_to_quantize": [["mlp.experts.0.up_proj"], ["self_attn.o_proj"]]})
    assert some.format_of("model.layers.1.self_attn.o_proj") is not None
    assert some.format_of("model.layers.1.self_attn.q_proj") is None


def test_modules_that_are_not_converted() -> None:
    result = read({**AWQ, "modules_to_not_convert": ["gate", "self_attn.q_proj", "model.layers.1"]})
    assert result.format_of("model.layers.0.block_sparse_moe.gate") is None
    assert result.format_of("model.layers.0.self_attn.q_proj") is None
    assert result.format_of("model.layers.1.mlp.up_proj") is None
    assert result.format_of("model.layers.10.mlp.up_proj") is not None
    assert result.format_of("model.layers.0.mlp.gate_proj") is not None
    some = read({**FP8, "ignored_layers": ["model.layers.*.self_attn"]})
    assert some.format_of("model.layers.3.self_attn.q_proj") is None
    assert some.format_of("model.layers.3.mlp.up_proj") is not None


def torchao(kind: str, version: int = 2, **values: Any) -> dict[str, Any]:
    config = {"_type": kind, "_version": version, "_data": values}
    return {"quant_method": "torchao", "quant_type": {"default": config}}


def test_modules_of_torchao() -> None:
    """Experts and routers are parameters, and plain; embeddings and heads only where the config includes them."""
    result = read({**torchao("Int8DynamicActivationInt8WeightConfig"), "modules_to_not_convert": ["self_attn.o_proj"]})
    query, up = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.3.up_proj"
    assert result.format_of(query) == Int8Format(
        name="torchao int8 per channel", scale="F32", zero_points=True, names=TORCHAO_NAMES
    )
    plain = (up, "model.layers.0.mlp.gate", "model.layers.0.self_attn.o_proj", "lm_head", "model.embed_tokens")
    assert [result.format_of(module) for module in plain] == [None] * len(plain)
    ends = read({**torchao("Float8WeightOnlyConfig"), "include_input_output_embeddings": True})
    assert ends.format_of("lm_head") == ends.format_of(query) is not None and ends.format_of(up) is None


INTX = {
    "granularity": {"_type": "PerAxis", "_data": {"axis": 0}},
    "intx_packing_format": {"_data": "UNPACKED_TO_INT8"},
    "weight_dtype": {"_data": "int4"},
}


@pytest.mark.parametrize(
    ("quantization", "complaint"),
    [
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "quant_type there must be an object"),
        (torchao("Int4WeightOnlyConfig"), "the config Int4WeightOnlyConfig of torchao is not read; known: Int8Weight"),
        (torchao("FqnToConfig"), "the config FqnToConfig of torchao is not read"),
        (torchao("Int8WeightOnlyConfig", 1), "configs of torchao are read in version 2 only"),
        (torchao("Int8WeightOnlyConfig", granularity={"_type": "PerTensor"}), "of granularity only PerRow is read"),
        (torchao("Float8WeightOnlyConfig", weight_dtype={"_data": "float8_e5m2"}), "of weight_dtype only float8_e4m3"),
        (torchao("IntxWeightOnlyConfig", **{**INTX, "weight_dtype": {"_data": "uint4"}}), "only int1 to int8 is read"),
        (torchao("IntxWeightOnlyConfig", **{**INTX, "intx_packing_format": None}), "only UNPACKED_TO_INT8 is read"),
        (torchao("IntxWeightOnlyConfig", **{**INTX, "granularity": None}), "only PerGroup and PerAxis 0 are read"),
    ],
)
def test_torchao_that_is_not_read_is_refused(quantization: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(quantization)
    assert complaint in str(caught.value) and str(caught.value).isprintable()


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def test_modules_of_bitsandbytes() -> None:
    """Of transformers 4, where routers and experts are linear layers, and of 5, where experts are parameters."""
    up, skipped = "model.layers.0.mlp.experts.3.up_proj", ["self_attn.o_proj"]
    four, five = (
        read_quantization(HFConfig({"quantization_config": NF4, "transformers_version": version}, where="config.json"))
        for version in ("4.57.6", "5.24.0")
    )
    assert four is not None and five is not None
    assert four.format_of(up) == bitsandbytes("nf4") and five.format_of(up) is None
    for result in (four, five):
        assert result.format_of("model.layers.0.mlp.shared_experts.up_proj") == bitsandbytes("nf4")
        assert result.format_of("model.layers.0.mlp.gate") == bitsandbytes("nf4")
        assert result.format_of("lm_head") is None and result.format_of("model.embed_tokens") is None
    some = read({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": skipped})
    assert some.format_of("model.layers.0.self_attn.o_proj") is None
    assert some.format_of("lm_head") == some.format_of(up) == LLMInt8Format()
    assert read({"quant_method": "bitsandbytes", "load_in_4bit": True}).format_of(up) == bitsandbytes("fp4")


@pytest.mark.parametrize(
    ("quantization", "complaint"),
    [
        ({"quant_method": "gptqq"}, "did you mean 'gptq'"),
        ({"quant_method": "quark", "global_quant_config": {}}, "'quark', by none of the methods read"),
        ({"quant_method": "hqq"}, "by none of the methods read (gptq, awq, fp8"),
        ({"quant_method": "bitsandbytes"}, "either load_in_4bit or load_in_8bit there must be true"),
        ({**NF4, "load_in_8bit": True}, "either load_in_4bit or load_in_8bit there must be true"),
        ({**NF4, "bnb_4bit_quant_type": "nf3"}, "of bnb_4bit_quant_type only fp4, nf4 is read"),
        ({**NF4, "llm_int8_skip_modules": "lm_head"}, "a list of names"),
        ({**GPTQ, "bits": 3}, "bits there must be 2, 4 or 8"),
        ({**GPTQ, "bits": True}, "bits there must be"),
        ({**GPTQ, "group_size": 0}, "group_size there must be -1 or a size"),
        ({**GPTQ, "group_size": 1 << 70}, "group_size there must be"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "of checkpoint_format only gptq, gptq_v2 is read"),
        ({**GPTQ, "dynamic": {"(x+)+": {}}}, "no regular expression"),
        ({**GPTQ, "dynamic": [1]}, "dynamic there must be an object"),
        ({**AWQ, "version": "gemv"}, "of version only gemm is read"),
        ({**AWQ, "zero_point": False}, "of zero_point only True is read"),
        ({**AWQ, "bits": 8}, "bits there must be 4"),
        ({**AWQ, "modules_to_not_convert": "gate"}, "a list of names"),
        ({**AWQ, "modules_to_not_convert": ["x" * 1000]}, "no regular expression"),
        ({**FP8, "weight_block_size": [128]}, "a list of two sizes"),
        ({**FP8, "weight_block_size": [0, 128]}, "a list of two sizes"),
        ({**FP8, "fmt": "e5m2"}, "of fmt only e4m3"),
        ({**FP8, "expert_dtype": "fp6"}, "of expert_dtype only fp8, fp4"),
        ({"quant_method": "fp8", "ignored_layers": ["a"] * 20_000}, "has 20,003 rules"),
    ],
)
def test_unknown_settings_are_refused_by_name(quantization: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(quantization)
    message = str(caught.value)
    assert complaint in message and message.isprintable() and len(message) < 400
    assert message.startswith("config.json: quantization_config says that the weights are quantised")


def test_sizes_that_do_not_fit_the_format_name_the_matrix() -> None:
    name = released("qwen3-30b")
    config = {**model_config(name), "moe_intermediate_size": 760, "quantization_config": AWQ}
    with pytest.raises(ConfigError, match=r"down_proj: AWQ int4 in groups of 128 needs a multiple of 128 columns"):
        profile_from_config(HFConfig(config, where="config.json"), name=name)


@pytest.mark.parametrize("columns", [256, 130])
@pytest.mark.parametrize(
    "stored",
    [
        gptq(bits=4, group=128),
        awq(group=128),
        fp8(block=(128, 128), scale="F32"),
        mxfp4(("_blocks", "_scales")),
        *GGML_FORMATS.values(),
    ],
)
def test_bits_a_weight_count_every_byte(stored: Format, columns: int) -> None:
    try:
        size = stored.bytes_for(64, columns)
    except ConfigError as error:
        assert "needs a multiple of" in str(error) and columns == 130
        return
    assert stored.bits_per_weight(64, columns) == 8 * size / (64 * columns)
    assert size == sum(part.nbytes for part in stored.tensors(64, columns))


def test_commands_count_what_nothing_runs_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = released("qwen3-30b")
    (tmp_path / "config.json").write_text(json.dumps({**model_config(name), "quantization_config": GPTQ}))
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"] == inventory(load_model_profile(str(tmp_path))).total_bytes < 18e9
    assert result["dtype"] == "GPTQ int4 in groups of 128"


def test_a_plan_reckons_with_stored_bytes() -> None:
    """On a T4, where the link binds: 4.2 bits instead of 16."""
    hardware, work = load_hardware_profile("t4"), load_workload("mtbench")
    fixed = {"schedule": "cgopipe", "attention_device": "gpu", "ffn_device": "gpu", "batch_size": 64}
    options = PlanOptions(fix=fixed, cache=False, proof=False)
    plans = [
        make_plan(hardware, profile(released("qwen3-30b"), inputs), work, options, name="x") for inputs in (None, GPTQ)
    ]
    original, stored = plans
    assert original.why_not == stored.why_not == ()
    assert stored.estimate.tokens_per_s > 2 * original.estimate.tokens_per_s


def test_the_name_of_another_format_is_no_misspelling() -> None:
    assert [similar_format(name, ("fp8", "mxfp4", "int4")) for name in ("nvfp4", "mxfp8", "int5")] == [""] * 3
    assert similar_format("mfxp4", ("fp8", "mxfp4")) == " (did you mean 'mxfp4'?)"
