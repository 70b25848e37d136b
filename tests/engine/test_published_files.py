"""Quantised checkpoints as other tools publish them: with tensors that nobody reads, matrices that are not quantised,
and names of their own. Their tokens are those of the dequantised checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from moelight.core.errors import CheckpointError
from moelight.core.policy import Shares
from moelight.core.schedule import Page
from moelight.kernels import native
from moelight.models.checkpoints import open_model
from moelight.models.graph.self_test import tiny as shrunk
from moelight.weights.load import PageReader
from tests.cases import thorough
from tests.engine.graphs import STREAMED, VOCABULARY, greedy, prompts, tokens
from tests.engines import Tiny
from tests.tiny import save_byte_tokenizer
from tests.weights.quantised import GROUP, METHODS, Method, quantise

SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
# DeepSeek publishes no list of modules that are plain.
FP8 = METHODS["fp8 blocks"]
BUT_LATENTS = replace(FP8, config=FP8.config | {"modules_to_not_convert": ["self_attn"]})
WEIGHTS = "model.safetensors"


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object], **config: Any) -> Path:
    """Change the tensors and the config of ``directory``."""
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


def reasons(directory: Path) -> dict[str, str]:
    return {item.info.name: item.reason for item in open_model(str(directory)).ignored}


@pytest.fixture(scope="module")
def deepseek(checkpoints: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """DeepSeek-V3 in FP8 and its numbers."""
    return quantise(checkpoints("deepseek_v3")[0], tmp_path_factory.mktemp("deepseek"), BUT_LATENTS)


def prediction_layer(tensors: dict[str, Tensor], layer: int) -> set[str]:
    """Add a layer of multi-token prediction, as released: FP8 matrices beside plain ones."""
    hidden = tensors["model.norm.weight"].shape[0]
    prefix = f"model.layers.{layer}."
    extra = {
        "eh_proj.weight": torch.zeros(hidden, 2 * hidden, dtype=torch.bfloat16),
        "shared_head.head.weight": torch.zeros(320, hidden, dtype=torch.bfloat16),
        "enorm.weight": torch.zeros(hidden),
        "self_attn.o_proj.weight": torch.zeros(hidden, hidden).to(torch.float8_e4m3fn),
        "self_attn.o_proj.weight_scale_inv": torch.ones(2, 2),
    }
    tensors.update({prefix + name: tensor for name, tensor in extra.items()})
    return {prefix + name for name in extra}


@pytest.mark.parametrize("layer", thorough([61, 2], but=[61]))
def test_prediction_layers_are_not_read_at_any_depth(layer: int, deepseek: tuple[Path, Path], tmp_path: Path) -> None:
    """Of DeepSeek-V3 and R1, and of a pruned one."""
    quantised, values = deepseek
    layers = json.loads((quantised / "config.json").read_text())["num_hidden_layers"]
    copy = replaced(quantised, tmp_path)
    added: set[str] = set()
    number = layers if layer == 2 else layer
    edit(copy, lambda state: added.update(prediction_layer(state, number)), num_nextn_predict_layers=1)
    assert set(reasons(copy)) == added
    assert all("multi-token prediction" in reason for reason in reasons(copy).values())
    if layer == 61:
        assert tokens(copy, weights=STREAMED) == tokens(values, weights=STREAMED)


def replaced(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target / "copy"))


@pytest.fixture
def mixtral(tiny: Tiny) -> Path:
    return tiny("mixtral", intermediate_size=96, **SHAPE)


def plain_matrix(source: Path) -> Callable[[dict[str, Tensor]], object]:
    """Store one matrix as the ``source`` has it, without a scale."""
    name = "model.layers.1.self_attn.o_proj.weight"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(f"{name}_scale_inv", None)
        tensors[name] = load_file(source / WEIGHTS)[name]

    return change


def test_a_matrix_without_a_scale_is_plain(mixtral: Path, tmp_path: Path) -> None:
    quantised, values = quantise(mixtral, tmp_path, FP8)
    for directory in (quantised, values):
        edit(directory, plain_matrix(mixtral))
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)


def test_fp8_codes_without_their_scale_are_refused(mixtral: Path, tmp_path: Path) -> None:
    quantised, _ = quantise(mixtral, tmp_path, FP8)
    scale = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    edit(quantised, lambda state: state.pop(scale))
    with pytest.raises(CheckpointError, match=rf"{scale}' .* is missing, though .*o_proj.weight' is there"):
        open_model(str(quantised))


@pytest.mark.thorough
def test_scales_of_activations_and_cache_are_not_read(
    mixtral: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    method = METHODS["fp8 channels"]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    announced: Method = replace(method, config=method.config | {"kv_cache_scheme": scheme})
    quantised, values = quantise(mixtral, tmp_path, announced)
    block = "model.layers.0.self_attn"
    names = [f"{block}.k_scale", f"{block}.v_scale", f"{block}.q_proj.input_scale"]
    edit(quantised, lambda state: state.update({name: torch.ones(1) for name in names}))
    result = tokens(quantised, weights=STREAMED)
    assert "'model.layers.0.self_attn.k_scale' and 2 more scales are not used" in caplog.text
    assert result == tokens(values, weights=STREAMED)
    assert {name: reason.split(";")[0] for name, reason in reasons(quantised).items()} == {
        names[0]: "a scale of a quantised key-value cache",
        names[1]: "a scale of a quantised key-value cache",
        names[2]: "a scale of quantised activations",
    }
    edit(values, lambda state: state.update({names[0]: torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"k_scale' \[1\] has no place"):
        open_model(str(values))


GATED = ("gate", "up")
GRANITE = "model.layers.{layer}.block_sparse_moe.experts"
GPT_OSS = "model.layers.{layer}.mlp.experts"


def one_by_one(tensors: dict[str, Tensor], stack: str, into: str, *, transposed: bool, interleaved: bool) -> None:
    """Store the experts of ``stack`` (`{layer}`, `{matrix}`) as matrices ``into`` of their own, biases too."""
    for layer in range(8):
        for matrix, names in (("gate_up", GATED), ("down", ("down",))):
            for kind, suffix in (("weight", ""), ("bias", "_bias")):
                full = tensors.pop(stack.format(layer=layer, matrix=matrix) + suffix, None)
                for expert, one in enumerate(() if full is None else full):
                    upright = one.T if transposed and kind == "weight" else one
                    parts = [upright[0::2], upright[1::2]] if interleaved else upright.chunk(2)
                    for name, part in zip(names, parts if len(names) > 1 else [upright], strict=True):
                        target = f"{into.format(layer=layer)}.{expert}.{name}_proj.{kind}"
                        tensors[target] = part.clone().contiguous()


def granite(tensors: dict[str, Tensor]) -> None:
    """As tools that quantise write it: the hub has stacks ``input_linear`` and ``output_linear``."""
    for layer in range(8):
        for old, matrix in (("input_linear", "gate_up"), ("output_linear", "down")):
            if (full := tensors.pop(f"model.layers.{layer}.block_sparse_moe.{old}.weight", None)) is not None:
                tensors[f"{layer}.{matrix}"] = full
    one_by_one(tensors, "{layer}.{matrix}", GRANITE, transposed=False, interleaved=False)


def gpt_oss(tensors: dict[str, Tensor]) -> None:
    one_by_one(tensors, GPT_OSS + ".{matrix}_proj", GPT_OSS, transposed=True, interleaved=True)


@pytest.mark.parametrize(
    ("family", "change"), thorough([("granitemoe", granite), ("gpt_oss", gpt_oss)], but=[("gpt_oss", gpt_oss)])
)
def test_experts_one_by_one_where_a_family_keeps_stacks(
    family: str, change: Callable[[dict[str, Tensor]], None], checkpoints: Any, tmp_path: Path
) -> None:
    source, expected = checkpoints(family)
    copy = edit(replaced(source, tmp_path), change)
    assert any(name.endswith(".0.gate_proj.weight") for name in load_file(copy / WEIGHTS))
    assert tokens(copy, weights=STREAMED) == expected


@pytest.mark.thorough
def test_quantised_experts_one_by_one(checkpoints: Any, tmp_path: Path) -> None:
    """In compressed-tensors; an expert that lacks a matrix is named."""
    loose = edit(replaced(checkpoints("granitemoe")[0], tmp_path), granite)
    method = METHODS["int4"]
    method = replace(method, config=method.config | {"ignore": ["lm_head", "re:.*router.*", "re:.*self_attn.*"]})
    quantised, values = quantise(loose, tmp_path, method)
    assert open_model(str(quantised)).weight_map.experts.dtype is None
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)
    edit(values, lambda state: state.pop(f"{GRANITE.format(layer=0)}.2.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model.layers.0: the up of expert 2 is missing, though"):
        open_model(str(values))


@pytest.mark.thorough
@pytest.mark.parametrize("rules", [{}, {"dynamic": {"-:.*mtp.*": {}}}], ids=["unsaid", "in dynamic"])
def test_gptq_beside_plain_prediction_layers(rules: dict[str, Any], checkpoints: Any, tmp_path: Path) -> None:
    """Qwen3.5's, listed or not; and matrices of the linear attention whose rows do not fit the format are plain."""
    how = METHODS["gptq int4"]
    quantised, values = quantise(checkpoints("qwen3_5_moe_text")[0], tmp_path, replace(how, config=how.config | rules))
    hidden = load_file(quantised / WEIGHTS)["model.norm.weight"].shape[0]
    extra = {
        "mtp.fc.weight": torch.zeros(hidden, 2 * hidden),
        "mtp.norm.weight": torch.zeros(hidden),
        "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(hidden, hidden),
    }
    edit(quantised, lambda state: state.update(extra))
    assert "model.layers.0.linear_attn.in_proj_b.weight" in load_file(quantised / WEIGHTS)
    assert set(reasons(quantised)) == set(extra)
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)


def test_a_matrix_that_does_not_fit_the_format_and_has_codes_is_refused(checkpoints: Any, tmp_path: Path) -> None:
    quantised, _ = quantise(checkpoints("qwen3_5_moe_text")[0], tmp_path, METHODS["gptq int4"])
    module = "model.layers.0.linear_attn.in_proj_b"

    def codes(state: dict[str, Tensor]) -> None:
        rows, columns = state.pop(f"{module}.weight").shape
        state[f"{module}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        state[f"{module}.scales"] = torch.ones(columns // GROUP, rows).half()

    with pytest.raises(CheckpointError, match=rf"{module}.*multiple of 8 rows"):
        open_model(str(edit(quantised, codes)))


@pytest.mark.parametrize(
    ("method", "codes"), [("gptq int4", "qweight"), ("fp8 blocks", "weight"), ("int4", "weight_packed")]
)
def test_codes_that_are_missing_beside_scales_are_named(method: str, codes: str, mixtral: Path, tmp_path: Path) -> None:
    quantised, _ = quantise(mixtral, tmp_path, METHODS[method])
    names = [f"model.layers.0.block_sparse_moe.experts.{expert}.w2.{codes}" for expert in (1, 2)]
    edit(quantised, lambda state: [state.pop(name) for name in names])
    with pytest.raises(CheckpointError) as caught:
        open_model(str(quantised))
    message = str(caught.value)
    assert f"tensor '{names[0]}' is missing, though '{names[0].removesuffix(codes)}" in message
    assert "as are the codes of 1 more matrix" in message and "fetch the whole checkpoint" in message


FOUR = METHODS["int4"].config["config_groups"]["group_0"]["weights"]
EIGHT = METHODS["int8"].config["config_groups"]["group_0"]["weights"]
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32], "symmetric": True}


def groups(stored_as: str, *rules: tuple[str, dict[str, Any], str]) -> Method:
    """Groups of modules by regular expressions, none of them ``Linear``."""
    named = {
        f"group_{n}": {"targets": [target], "weights": weights, "format": form}
        for n, (target, weights, form) in enumerate(rules)
    }
    config = {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": named, "ignore": ["lm_head"]}
    return Method(config, METHODS["int4"].pack)


def as_weight_scale(weight: Tensor) -> dict[str, Tensor]:
    """FP8 in blocks as compressed-tensors names its scales."""
    parts = FP8.pack(weight)
    return {".weight": parts[".weight"], ".weight_scale": parts[".weight_scale_inv"]}


def as_packed_int8(weight: Tensor) -> dict[str, Tensor]:
    """Packed integers of 8 bits with a scale for each row."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**EIGHT))
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    parts = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return {f".{suffix}": part.contiguous() for suffix, part in parts.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "others"),
    [
        (
            groups(
                "pack-quantized",
                ("re:.*experts.*w[13]$", FOUR, "pack-quantized"),
                ("re:.*(self_attn|experts).*", EIGHT, "pack-quantized"),
            ),
            as_packed_int8,
        ),
        (
            groups(
                "mixed-precision",
                ("re:.*experts.*", FOUR, "pack-quantized"),
                ("re:.*self_attn.*", BLOCKS, "float-quantized"),
            ),
            as_weight_scale,
        ),
    ],
    ids=["the first that matches", "mixed precision"],
)
def test_groups_by_regular_expressions(
    method: Method, others: Callable[[Tensor], dict[str, Tensor]], mixtral: Path, tmp_path: Path
) -> None:
    four = re.compile(method.config["config_groups"]["group_0"]["targets"][0].removeprefix("re:"))
    quantised, values = quantise(
        mixtral, tmp_path, method, lambda module: method.pack if four.fullmatch(module) else others
    )
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)


def test_names_of_fused_modules_in_ignore_mean_no_other_module(mixtral: Path, tmp_path: Path) -> None:
    """As vLLM's own exports list them."""
    fused = ["model.layers.0.self_attn.qkv_proj", "model.layers.0.block_sparse_moe.experts.w13", "re:.*gate_up_proj$"]
    how = METHODS["int4"]
    quantised, values = quantise(
        mixtral, tmp_path, replace(how, config=how.config | {"ignore": [*how.config["ignore"], *fused]})
    )
    stored = load_file(quantised / WEIGHTS)
    for module in ("self_attn.q_proj", "block_sparse_moe.experts.0.w1"):
        assert f"model.layers.0.{module}.weight_packed" in stored
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)


def renamed(block: str) -> Callable[[dict[str, Tensor]], None]:
    """Mixtral's names as tools write them that quantise what transformers 5 has loaded."""
    matrices = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            new = name.replace("block_sparse_moe", block)
            for old, usual in matrices.items():
                new = new.replace(f".{old}.", f".{usual}.")
            tensors[new] = tensors.pop(name)

    return change


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("block", "method", "rules"),
    [
        ("mlp", "gptq int4", {"dynamic": {r"-:.*block_sparse_moe\.experts\.0\.w2": {}}}),
        ("block_sparse_moe", "int4", {"ignore": ["lm_head", "re:.*gate$", r"re:.*mlp\.experts\.0\.down_proj"]}),
    ],
)
def test_mixtral_under_the_names_of_today(
    block: str, method: str, rules: dict[str, Any], mixtral: Path, tmp_path: Path
) -> None:
    """gptqmodel 7.7 and llm-compressor 0.14: in either spelling, and rules under the other one."""
    how = METHODS[method]
    quantised, values = quantise(mixtral, tmp_path, replace(how, config=how.config | rules))
    edit(quantised, renamed(block))
    names = set(load_file(quantised / WEIGHTS))
    assert f"model.layers.0.{block}.experts.0.down_proj.weight" in names
    assert f"model.layers.0.{block}.experts.1.down_proj.weight" not in names
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)


@pytest.mark.parametrize("source", thorough(["bfloat16", "float32"], but=["bfloat16"]))
def test_plain_tensors_say_the_dtype_where_the_config_does_not(source: str, tiny: Tiny, tmp_path: Path) -> None:
    """auto-round's exports in GPTQ and AWQ say float16 over the tensors of a bfloat16 or float32 model; scales may be
    of two dtypes."""
    plain = tiny("mixtral", intermediate_size=96, dtype=source, **SHAPE)
    quantised, values = quantise(plain, tmp_path, METHODS["awq"])

    def widen(tensors: dict[str, Tensor]) -> None:
        scales = [name for name in tensors if name.endswith(".scales") and "self_attn" in name]
        tensors.update({name: tensors[name].float() for name in scales})

    edit(quantised, widen, dtype="float16", torch_dtype="float16")
    opened = open_model(str(quantised))
    assert opened.weight_map.dtype.name == opened.profile.dtype == source
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)


def test_a_norm_of_another_dtype_is_cast(mixtral: Path, tmp_path: Path) -> None:
    name = "model.norm.weight"
    copy = edit(replaced(mixtral, tmp_path), lambda state: state.update({name: state[name].bfloat16()}))
    wanted = replaced(mixtral, tmp_path / "wanted")
    edit(wanted, lambda state: state.update({name: state[name].bfloat16().float()}))
    assert tokens(copy, weights=STREAMED) == tokens(wanted, weights=STREAMED)


def fp8_blocks(weight: Tensor, block: int, wide: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [R, C], scales and the numbers of a matrix that is rounded in blocks of ``block`` rows and ``wide`` columns
    (0: as many), the last of them cut short."""
    wide = wide or block
    rows, columns = -(-weight.shape[0] // block), -(-weight.shape[1] // wide)
    scale = torch.empty(rows, columns)
    codes, values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for row in range(rows):
        for column in range(columns):
            position = slice(row * block, (row + 1) * block), slice(column * wide, (column + 1) * wide)
            scale[row, column] = weight[position].abs().max() / 448
            codes[position] = (weight[position] / scale[row, column]).to(torch.float8_e4m3fn)
            values[position] = codes[position].float() * scale[row, column]
    return codes, scale, values


def test_blocks_of_two_sizes_that_are_cut_short(tiny: Tiny, tmp_path: Path) -> None:
    """24x40 over matrices of 64 rows and 56 columns."""
    source = tiny("mixtral", intermediate_size=56, **SHAPE)
    quantised, values = replaced(source, tmp_path / "quantised"), replaced(source, tmp_path / "numbers")
    stored = load_file(source / WEIGHTS)
    wanted = dict(stored)
    for name in [name for name in stored if "_proj.weight" in name or ".experts." in name]:
        stored[name], stored[f"{name}_scale_inv"], wanted[name] = fp8_blocks(stored[name], 24, 40)
    fp8 = {"quant_method": "fp8", "weight_block_size": [24, 40], "modules_to_not_convert": ["gate"]}
    edit(quantised, lambda state: state.update(stored), quantization_config=fp8)
    edit(values, lambda state: state.update(wanted))
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)


BLOCK = 16
STACKS = {
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["self_attn", "linear_attn", "shared_expert"],
}


def test_a_stack_of_experts_in_fp8_blocks(tiny: Tiny, tmp_path: Path) -> None:
    """40 rows of the gate: a block of 16 holds rows of gate and up, and the last block of an expert is cut short."""
    fused = tiny("qwen3_moe", moe_intermediate_size=40, fused=True, **SHAPE)
    quantised, values = replaced(fused, tmp_path / "quantised"), replaced(fused, tmp_path / "numbers")
    stored = load_file(fused / WEIGHTS)
    wanted = dict(stored)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        parts = [fp8_blocks(item.float(), BLOCK) for item in stored[name]]
        stored[name] = torch.stack([codes for codes, _, _ in parts])
        stored[f"{name}_scale_inv"] = torch.stack([scale for _, scale, _ in parts])
        wanted[name] = torch.stack([part for _, _, part in parts])
    edit(quantised, lambda state: state.update(stored), quantization_config=STACKS)
    edit(values, lambda state: state.update(wanted))
    opened = open_model(str(quantised))
    assert opened.weight_map.experts.dtype is None
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)
    assert tokens(quantised, weights=Shares(host=1.0)) == tokens(values, weights=Shares(host=1.0))


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@pytest.mark.thorough
def test_deepseek_v4_with_experts_in_fp4(checkpoints: Any, tmp_path: Path) -> None:
    """As released: `.weight` int8 [rows, columns / 2], two numbers a byte, the lower bits first, and `.scale` E8M0 for
    each 32 columns; other matrices FP8 with `.scale` for each block."""
    source, _ = checkpoints("deepseek_v4")
    quantised, values = replaced(source, tmp_path / "quantised"), replaced(source, tmp_path / "numbers")
    state, draw = load_file(source / WEIGHTS), torch.Generator().manual_seed(3)
    stored, wanted = dict(state), dict(state)
    for name in [name for name in state if ".ffn.experts." in name]:
        rows, columns = state[name].shape
        packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=draw)
        exponents = torch.randint(121, 124, (rows, columns // 32), dtype=torch.uint8, generator=draw)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
        scale = torch.exp2(exponents.float() - 127).repeat_interleave(32, dim=1)
        wanted[name] = torch.tensor(E2M1)[codes] * scale
        stored[name] = packed.view(torch.int8)
        stored[name.removesuffix(".weight") + ".scale"] = exponents.view(torch.float8_e8m0fnu)
    assert len(stored) > len(state), sorted(state)
    dense = next(name for name in state if name.endswith("attn.wo_b.weight"))
    codes, scale, _ = fp8_blocks(state[dense].float(), 128)
    power = torch.exp2(scale.log2().ceil())
    stored[dense] = (state[dense].float() / power[0, 0]).to(torch.float8_e4m3fn)
    stored[dense.removesuffix(".weight") + ".scale"] = power.to(torch.float8_e8m0fnu)
    wanted[dense] = stored[dense].float() * power[0, 0]
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    edit(quantised, lambda tensors: tensors.update(stored), quantization_config=fp8, expert_dtype="fp4")
    edit(values, lambda tensors: tensors.update(wanted))
    assert open_model(str(quantised)).weight_map.experts.dtype is None
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)


@pytest.fixture(scope="module")
def by_columns(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Qwen3-VL's released layout, stacks [E, H, 2 I] and [E, I, H] in FP8, with scales for each block of the stored
    matrix, some of which hold columns of gate and up, and are cut short; its numbers, and their tokens by transformers.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    made = tmp_path_factory.mktemp("by_columns")
    source = made / "source"
    torch.manual_seed(0)
    config = shrunk(AutoConfig.for_model("qwen3_vl_moe"))
    config.text_config.vocab_size, config.text_config.moe_intermediate_size = VOCABULARY, 40
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_position_embeddings": 4}
    for name, value in vision.items():
        setattr(config.vision_config, name, value)
    config.vision_config.deepstack_visual_indexes = []
    module = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    for weight in module.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, 0, 0.15)
    module.save_pretrained(source)
    save_byte_tokenizer(source)
    stored = load_file(source / WEIGHTS)
    wanted = dict(stored)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        parts = [fp8_blocks(expert.t(), BLOCK) for expert in stored[name]]
        stored[name], stored[f"{name}_scale_inv"], wanted[name] = map(torch.stack, zip(*parts, strict=True))
    fp8 = STACKS | {"modules_to_not_convert": ["self_attn", "visual", "lm_head"]}
    quantised, values = replaced(source, made / "quantised"), replaced(source, made / "numbers")
    edit(quantised, lambda state: state.update(stored), quantization_config=fp8)
    edit(values, lambda state: state.update(wanted))
    module = AutoModelForImageTextToText.from_pretrained(values, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        return quantised, [greedy(module.eval(), prompt) for prompt in prompts()]


@pytest.mark.parametrize(
    "weights", thorough([STREAMED, Shares(host=1.0)], but=[STREAMED]), ids=["streamed", "resident"]
)
def test_a_stack_by_columns_in_fp8_blocks(weights: Shares, by_columns: tuple[Path, list[list[int]]]) -> None:
    quantised, wanted = by_columns
    stored = open_model(str(quantised)).profile.stored
    assert stored is not None and 0 < stored.repacked_bytes <= stored.page_bytes
    assert tokens(quantised, weights=weights) == wanted


@pytest.mark.thorough
def test_a_stack_by_columns_in_floats(by_columns: tuple[Path, list[list[int]]]) -> None:
    values = by_columns[0].parent.parent / "numbers" / "copy"
    assert open_model(str(values)).weight_map.experts.dtype is not None
    assert tokens(values, weights=STREAMED) == by_columns[1]


@pytest.mark.thorough
def test_a_stack_by_columns_without_the_extension(
    by_columns: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "extension", lambda: None)
    assert tokens(by_columns[0], weights=STREAMED) == by_columns[1]


def test_parts_of_pages_by_columns_are_cut_from_the_whole(by_columns: tuple[Path, list[list[int]]]) -> None:
    opened, page = open_model(str(by_columns[0])), Page(layer=0, expert=1)
    quantized = opened.weight_map.experts
    assert quantized is not None
    with PageReader(opened.weight_map, torch.float32) as reader:
        full, part = (torch.zeros(quantized.bytes_of(page), dtype=torch.uint8) for _ in range(2))
        reader.start(page, full)
        for begin in range(0, len(part), 1040):
            reader.start(page, part[begin : begin + 1040], begin)
    assert torch.equal(full, part)


def test_a_stack_by_columns_with_a_scale_for_each_row_is_refused(
    by_columns: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    def per_row(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if name.endswith("_scale_inv")]:
            codes = state[name.removesuffix("_scale_inv")]
            state[name.removesuffix("_inv")] = torch.ones(*codes.shape[:2], 1)
            del state[name]

    copy = replaced(by_columns[0], tmp_path)
    fbgemm = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["self_attn", "visual", "lm_head"]}
    edit(copy, per_row, quantization_config=fbgemm)
    with pytest.raises(CheckpointError, match=r"holds experts by columns, and FP8 per channel is read by rows only"):
        open_model(str(copy))
