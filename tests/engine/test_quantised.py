"""Quantised checkpoints give the tokens of the checkpoint of their numbers, whatever holds the pages."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moelight.cli.main import main
from moelight.core.errors import CheckpointError, ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Page
from moelight.engine.engine import Engine
from moelight.kernels import native
from moelight.kernels.gpu import serving
from moelight.models.checkpoints import open_model
from moelight.models.moe import table_of
from moelight.runtime import moe_ops, warm_up
from moelight.weights.expert_pages import ExpertPages
from moelight.weights.load import PageReader
from tests.cases import exhaustive, thorough
from tests.engine.graphs import HOW, ORDERS_BY_NAME, SIZES, STREAMED, few_tokens, prompts, tokens
from tests.engines import Tiny
from tests.weights.quantised import (
    BY_ROWS,
    METHODS,
    OF_EACH_FORMAT,
    TORCHAO,
    Method,
    pack_mlx,
    quantise,
    quantise_stacks,
)

SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
RESIDENT = Shares(host=1.0)
IGNORED = ["lm_head", "re:.*gate$"]
# Latent projections of the tiny models are too narrow for groups of 32 columns.
BUT_ATTENTION = {
    "int4": {"ignore": ["lm_head", "re:.*gate$", "re:.*self_attn.*"]},
    "fp8 blocks": {"modules_to_not_convert": ["self_attn"]},
}
Pair = tuple[Path, Path]
# The experts of the last layer are plain numbers.
MIXED = replace(
    METHODS["fp8 blocks"],
    config=METHODS["fp8 blocks"].config | {"modules_to_not_convert": ["layers.2.block_sparse_moe"]},
)


@pytest.fixture
def mixtral(tiny: Tiny) -> Path:
    return tiny("mixtral", intermediate_size=96, **SHAPE)


@pytest.mark.parametrize("name", thorough(METHODS, but=OF_EACH_FORMAT))
def test_tokens_are_those_of_the_numbers(name: str, mixtral: Path, tmp_path: Path) -> None:
    quantised, values = quantise(mixtral, tmp_path, METHODS[name])
    opened, wanted = open_model(str(quantised)), tokens(values, weights=RESIDENT)
    assert opened.weight_map.experts.dtype is None
    stored = sum(info.nbytes for info in next(iter(opened.weight_map.experts.pieces.values())))
    assert opened.weight_map.experts.nbytes == opened.profile.stored.page_bytes >= stored  # type: ignore[union-attr]
    assert tokens(quantised, weights=RESIDENT) == wanted
    assert tokens(quantised, weights=STREAMED) == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gptq int4", "fp8 blocks"])
def test_the_dtype_that_is_asked_for_is_that_of_the_computation(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """Over a checkpoint in bfloat16: in float32 nothing is rounded."""
    source = tiny("mixtral", intermediate_size=96, dtype="bfloat16", **SHAPE)
    wide = Path(shutil.copytree(source, tmp_path / "wide"))
    path, weights = wide / "config.json", wide / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}))
    save_file({key: tensor.float() for key, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    quantised, _ = quantise(source, tmp_path / "narrow", METHODS[name])
    _, values = quantise(wide, tmp_path / "exact", METHODS[name])
    answers = []
    for model in (quantised, values):
        with Engine.from_pretrained(model, dtype="float32", device="cpu", batch_size=4) as engine:
            answers.append([item.token_ids for item in engine.generate(prompts(), HOW)])
    assert answers[0] == answers[1]


def scores(directory: Path, **policy: Any) -> list[Any]:
    """Tokens and the log-probabilities of all of the vocabulary."""
    with Engine(Policy(model=str(directory), **{**SIZES, **policy}), device="cpu") as engine:
        result = engine.generate(prompts(), replace(HOW, logprobs=-1))
    return [(item.token_ids, item.logprobs) for item in result]


@pytest.mark.skipif(not native.available(), reason="the extension is not built")
@pytest.mark.parametrize("activations", ["auto", pytest.param("int8", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", thorough(BY_ROWS, but=["awq"]))
def test_pages_of_columns_are_those_of_rows_once_they_are_there(
    name: str, activations: str, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, resident and streamed: as packed integers of the same numbers, and as before they were turned."""
    by_columns, _ = quantise(mixtral, tmp_path / "columns", METHODS[name])
    by_rows, _ = quantise(mixtral, tmp_path / "rows", BY_ROWS[name])
    how = {"weights": RESIDENT, "activations": activations}
    wanted = scores(by_rows, **how)
    turned: list[ExpertPages] = []
    repacked = ExpertPages.repacked
    monkeypatch.setattr(ExpertPages, "repacked", lambda pages: turned.append(repacked(pages)) or turned[-1])
    assert scores(by_columns, **how) == wanted
    assert {matrix.stored.key for layout in turned[0].layouts for matrix in layout.parts.values()} == {"packed"}
    assert scores(by_columns, **{**how, "weights": STREAMED}) == wanted
    assert scores(by_columns, **{**how, "weights": Shares(host=0.4, disk=0.6), "residents": "learned"}) == wanted
    monkeypatch.setattr(ExpertPages, "repacked", lambda pages: pages)
    assert scores(by_columns, **how) == wanted


def test_a_config_that_denies_an_order_is_refused_by_tensor(mixtral: Path, tmp_path: Path) -> None:
    quantised, values = quantise(mixtral, tmp_path, METHODS["gptq int4 ordered"])
    path = quantised / "config.json"
    path.write_text(path.read_text().replace('"desc_act": true', '"desc_act": false'))
    if native.available():
        for homes in (RESIDENT, STREAMED):
            with pytest.raises(CheckpointError, match=r"w1.g_idx.*not in the order .* says desc_act false"):
                tokens(quantised, weights=homes)
    beside = {"schedule": "serial", "attention_device": "cpu", "ffn_device": "gpu", "weights": Shares(device=1.0)}
    assert tokens(quantised, "twin", **beside) == tokens(values, "twin", **beside)


@pytest.mark.thorough
@pytest.mark.parametrize("name", thorough(BY_ROWS, but=["awq"]))
def test_both_processors_read_turned_pages(name: str, mixtral: Path, tmp_path: Path) -> None:
    quantised, values = quantise(mixtral, tmp_path, METHODS[name])
    for schedule, attention, experts, homes in (
        ("cgopipe", "cpu", "split", Shares(device=0.3, host=0.7)),
        ("serial", "gpu", "cpu", Shares(host=0.5, disk=0.5)),
    ):
        how = {"schedule": schedule, "attention_device": attention, "ffn_device": experts, "weights": homes}
        assert tokens(quantised, "twin", **how) == tokens(values, "twin", **how)


@pytest.mark.parametrize("order", thorough(ORDERS_BY_NAME, but=["cgopipe-split"]))
def test_tokens_are_the_same_in_every_order_beside_a_device(order: str, mixtral: Path, tmp_path: Path) -> None:
    schedule, attention, experts, homes = ORDERS_BY_NAME[order]
    quantised, values = quantise(mixtral, tmp_path, METHODS["gptq int4 ordered"])
    how = {"schedule": schedule, "attention_device": attention, "ffn_device": experts, "weights": homes}
    assert tokens(quantised, "twin", **how) == tokens(values, "twin", **how)


def but_attention(name: str) -> Method:
    return replace(METHODS[name], config=METHODS[name].config | BUT_ATTENTION[name])


@pytest.mark.parametrize(
    ("family", "name"),
    thorough(product(("qwen2_moe", "deepseek_v2"), BUT_ATTENTION), but=[("qwen2_moe", "int4")]),
)
def test_a_graph_runs_from_quantised_pages(family: str, name: str, checkpoints: Any, tmp_path: Path) -> None:
    quantised, values = quantise(checkpoints(family)[0], tmp_path, but_attention(name))
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)


def test_stacks_of_gpt_oss_run_as_they_are_released(checkpoints: Any, tmp_path: Path) -> None:
    """MXFP4, gate and up interleaved, biases beside them."""
    quantised, values = quantise_stacks(checkpoints("gpt_oss")[0], tmp_path)
    wanted = tokens(values, weights=STREAMED)
    assert tokens(quantised, weights=STREAMED) == wanted
    how = {"schedule": "cgopipe", "attention_device": "cpu", "ffn_device": "gpu", "weights": STREAMED}
    assert tokens(quantised, "twin", **how) == tokens(values, "twin", **how)


def test_layers_may_be_stored_in_different_formats(mixtral: Path, tmp_path: Path) -> None:
    """The experts of the last layer are not quantised, so its pages are larger."""
    quantised, values = quantise(mixtral, tmp_path, MIXED)
    assert len(open_model(str(quantised)).weight_map.experts.layouts) == 2  # type: ignore[union-attr]
    for homes in (RESIDENT, STREAMED):
        assert tokens(quantised, weights=homes) == tokens(values, weights=homes)


@pytest.fixture
def by_use(mixtral: Path, tmp_path: Path) -> Pair:
    """Two experts of three, of different layers, are not quantised."""
    retained = ["re:.*\\.0\\..*experts\\.(?:0|2)\\.", "re:.*\\.2\\..*experts\\.(?:1)\\."]
    method = METHODS["int4"]
    return quantise(mixtral, tmp_path, replace(method, config=method.config | {"ignore": [*IGNORED, *retained]}))


@pytest.mark.thorough
def test_experts_of_a_layer_may_be_stored_in_different_formats(by_use: Pair) -> None:
    quantised, values = by_use
    opened = open_model(str(quantised))
    pages, stored = opened.weight_map.experts, opened.profile.stored
    assert pages is not None and stored is not None and len(pages.layouts) == 2
    sizes = [size for layer in pages.page_bytes(3) for size in layer]
    assert sorted(set(sizes)) == sorted(pages.sizes) and sizes.count(max(sizes)) == 3
    assert (stored.page_bytes, stored.total_bytes) == (max(sizes), sum(sizes))
    for homes in (RESIDENT, STREAMED, Shares(host=0.4, disk=0.6)):
        assert tokens(quantised, weights=homes) == tokens(values, weights=homes)


@pytest.mark.parametrize("order", thorough(ORDERS_BY_NAME, but=["fastdecode-gpu"]))
def test_experts_of_different_formats_in_every_order_beside_a_device(order: str, by_use: Pair) -> None:
    schedule, attention, experts, homes = ORDERS_BY_NAME[order]
    how = {"schedule": schedule, "attention_device": attention, "ffn_device": experts, "weights": homes}
    assert tokens(by_use[0], "twin", **how) == tokens(by_use[1], "twin", **how)


def test_dense_matrices_alone_may_be_quantised(mixtral: Path, tmp_path: Path) -> None:
    method = METHODS["fp8 blocks"]
    dense = replace(method, config=method.config | {"modules_to_not_convert": ["block_sparse_moe"]})
    quantised, values = quantise(mixtral, tmp_path, dense)
    assert open_model(str(quantised)).weight_map.experts.dtype is not None
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)


def test_a_directory_of_torchao(mixtral: Path, tmp_path: Path) -> None:
    quantised, values = quantise(mixtral, tmp_path, TORCHAO)
    assert "model.layers.0.self_attn.q_proj._weight_qdata" in load_file(quantised / "model.safetensors")
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=STREAMED)


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The twin takes a card's way through experts, Triton's kernels interpreted; the tables that were made. Warmed up
    for one number of rows: `test_warm_up.py` has them all."""
    if not serving.triton_available() or not serving.interpreting():
        pytest.skip(f"triton does not interpret: {serving.triton_reason()}")
    tables: list[Any] = []

    def table(weights: Any, _: torch.dtype, activations: Any) -> Any:
        tables.append(table_of(weights, activations))
        return tables[-1]

    monkeypatch.setattr(moe_ops, "grouped_pages", table)
    monkeypatch.setattr(warm_up, "doublings", lambda limit: [limit])
    return tables


ON_A_DEVICE: dict[str, Any] = {
    "schedule": "cgopipe",
    "attention_device": "cpu",
    "ffn_device": "gpu",
    "weights": Shares(device=0.5, host=0.5),
}


@pytest.mark.thorough
def test_kernels_of_a_device_find_each_layers_format(mixtral: Path, by_triton: list[Any], tmp_path: Path) -> None:
    """Pages of a quantised and of a plain layer lie in the same slots, which have a table for each."""
    quantised, values = quantise(mixtral, tmp_path, MIXED)
    assert few_tokens(quantised, "twin", **ON_A_DEVICE) == few_tokens(values, weights=RESIDENT)
    assert [table.floats is None for table in by_triton] == [True, False]


@pytest.mark.thorough
@pytest.mark.parametrize("name", exhaustive(METHODS, but=["awq", "mxfp4"]))
def test_kernels_of_a_device_give_the_tokens_of_the_numbers(
    name: str, mixtral: Path, by_triton: list[Any], tmp_path: Path
) -> None:
    quantised, values = quantise(mixtral, tmp_path, METHODS[name])
    assert few_tokens(quantised, "twin", **ON_A_DEVICE) == few_tokens(values, weights=RESIDENT)
    assert [table.floats is None for table in by_triton] == [True]


@pytest.mark.thorough
def test_kernels_of_a_device_read_the_stacks_of_gpt_oss(checkpoints: Any, by_triton: list[Any], tmp_path: Path) -> None:
    quantised, values = quantise_stacks(checkpoints("gpt_oss")[0], tmp_path)
    assert few_tokens(quantised, "twin", **ON_A_DEVICE) == few_tokens(values, weights=RESIDENT)
    assert [table.floats is None for table in by_triton] == [True]


Change = Callable[[dict[str, Tensor]], None]
UP = "model.layers.1.block_sparse_moe.experts.3.w3"


def _cut(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.qweight"] = tensors[f"{UP}.qweight"][:-1].contiguous()


def _no_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{UP}.scales"]


def _groups(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.g_idx"][7] = 99


def _other_dtype(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.qzeros"] = tensors[f"{UP}.qzeros"].to(torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cut, UP),
        (_no_scales, rf"{UP}.scales' .* is missing"),
        (_groups, rf"{UP}.g_idx' puts a column into group 99, and there are 2"),
        (_other_dtype, rf"{UP}.qzeros' has dtype I64"),
    ],
)
def test_a_lie_is_refused_by_tensor(change: Change, message: str, mixtral: Path, tmp_path: Path) -> None:
    quantised, _ = quantise(mixtral, tmp_path, METHODS["gptq int4"])
    tensors = load_file(quantised / "model.safetensors")
    change(tensors)
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        tokens(quantised, weights=RESIDENT)


def test_auto_round_stores_gptq_without_an_order(mixtral: Path, tmp_path: Path) -> None:
    """Tokens are those of the numbers; without an order under ``desc_act`` the tensor is asked for."""
    quantised, values = quantise(mixtral, tmp_path, METHODS["gptq int4"])
    tensors = load_file(quantised / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".g_idx")}
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    path = quantised / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": config["quantization_config"] | {"desc_act": True}}))
    with pytest.raises(CheckpointError, match=r"g_idx' .* is missing"):
        tokens(quantised, weights=RESIDENT)
    written = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
    written |= {"packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers"}
    path.write_text(json.dumps(config | {"quantization_config": written}))
    for homes in (RESIDENT, STREAMED):
        assert tokens(quantised, weights=homes) == tokens(values, weights=homes)


def test_a_directory_of_mlx_lm(tiny: Tiny, tmp_path: Path) -> None:
    """Stacks of each matrix, a router in 8 bits, and a matrix that is plain because groups do not divide its rows."""
    source = tiny("mixtral", intermediate_size=48, **SHAPE)
    written = {"group_size": 32, "bits": 4, "mode": "affine", "lm_head": False}
    written["model.layers.0.block_sparse_moe.gate"] = {"group_size": 32, "bits": 8}
    for matrix in ("gate_proj", "up_proj"):
        written[f"model.layers.1.block_sparse_moe.switch_mlp.{matrix}"] = {"group_size": 64, "bits": 4}
    wide = re.compile(r"model\.layers\.1\..*\.w[13]")
    quantised, values = quantise(
        source,
        tmp_path,
        Method(written, METHODS["mlx int4"].pack),
        lambda module: partial(
            pack_mlx,
            bits=8 if module.endswith("0.block_sparse_moe.gate") else 4,
            group=64 if wide.match(module) else 32,
        ),
    )
    tensors, stacks = load_file(quantised / "model.safetensors"), dict[str, list[Tensor]]()
    for name in list(tensors):
        if match := re.fullmatch(r"(.*)\.experts\.(\d+)\.(w\d)\.(\w+)", name):
            matrix = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}[match[3]]
            stacks.setdefault(f"{match[1]}.switch_mlp.{matrix}.{match[4]}", []).append(tensors.pop(name))
    tensors |= {name: torch.stack(items) for name, items in stacks.items()}
    save_file(tensors, quantised / "model.safetensors", {"format": "mlx"})
    assert tensors["model.layers.0.block_sparse_moe.switch_mlp.down_proj.weight"].dtype == torch.float32
    for homes in (RESIDENT, STREAMED):
        assert tokens(quantised, weights=homes) == tokens(values, weights=homes)
    single = "model.layers.0.block_sparse_moe.experts.1.up_proj.scales"
    save_file(tensors | {single: torch.ones(2)}, quantised / "model.safetensors", {"format": "mlx"})
    with pytest.raises(CheckpointError, match="switch_mlp"):
        open_model(str(quantised))


def test_a_page_is_examined_until_it_passes(mixtral: Path, tmp_path: Path) -> None:
    """Whoever reads ahead drops the error, and reads again."""
    quantised, _ = quantise(mixtral, tmp_path, METHODS["gptq int4"])
    tensors = load_file(quantised / "model.safetensors")
    _groups(tensors)
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    opened = open_model(str(quantised))
    pages = opened.weight_map.experts
    assert pages is not None
    slot = torch.empty(pages.nbytes, dtype=torch.uint8)
    with PageReader(opened.weight_map, torch.float32) as reader:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="into group 99"):
                reader.start(Page(layer=1, expert=3), slot)


def test_a_method_that_is_not_known_is_refused(mixtral: Path, tmp_path: Path) -> None:
    shutil.copytree(mixtral, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "exl3"}}))
    with pytest.raises(ConfigError, match="exl3"):
        open_model(str(path.parent))


@pytest.mark.thorough
def test_commands_run_what_convert_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model in 4 bits answers, and stays near itself."""
    rounded, out, prompts = tmp_path / "rounded", tmp_path / "out.jsonl", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{a} + {a + 3} ="}) + "\n" for a in range(5, 21)))
    assert main(["convert", "demo", str(rounded), "--experts", "int4", "--group-size", "32"]) == 0
    assert main(["generate", str(prompts), "--model", str(rounded), "-o", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 16
    capsys.readouterr()
    assert main(["compare", str(rounded), str(prompts), "--against", "demo", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 < result["kl"]["value"] < 0.2 and result["top1"]["value"] > 0.5
