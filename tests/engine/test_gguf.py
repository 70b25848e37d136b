"""GGUF files run: their tokens are those of the model that transformers saves with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moelight.cli.main import main
from moelight.cli.planning_options import load_model
from moelight.core.errors import BudgetError, CheckpointError
from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.core.schedule import Page
from moelight.core.units import align_up
from moelight.engine.engine import Engine
from moelight.formats.format import PAGE_ALIGNMENT
from moelight.models.checkpoints import NativeSource, open_model
from moelight.profiles.gguf import read_gguf
from tests.cases import thorough
from tests.tiny import save_byte_tokenizer
from tests.weights.gguf_files import CONFIGS, save_numbers, write_gguf

HOW = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = [[3, 5, 7, 9], [11, 2], list(range(20, 50))]
OURS = {"llama", "qwen3moe", "olmoe"}  # the others run as module graphs
IN_FLOAT32 = {"weight_dtype": "float32"}


def tokens(model: Path, homes: Shares, device: str = "cpu", **policy_keys: Any) -> list[list[int]]:
    sizes = {"batch_size": 3, "micro_batch_size": 2, "micro_batch_tokens": 16, "kv_tokens": 256}
    experts: Any = "cpu" if device == "cpu" else "gpu"
    policy = Policy(model=str(model), **sizes, weights=homes, ffn_device=experts, **policy_keys)
    with Engine(policy, device=device) as engine:
        return [list(item.token_ids) for item in engine.generate(PROMPTS, HOW)]


@pytest.mark.parametrize(
    ("architecture", "experts"),
    [
        *thorough(
            [
                *((item, "MXFP4" if item == "gpt-oss" else "Q4_0") for item in CONFIGS),
                ("llama", "Q8_0"),
                ("llama", "BF16"),
                ("gpt-oss", "BF16"),
            ],
            but=[("llama", "BF16"), ("gpt-oss", "MXFP4"), ("deepseek2", "Q4_0")],
        ),
        *(
            pytest.param(architecture, experts, marks=pytest.mark.thorough)
            for architecture in CONFIGS
            for experts in ("Q5_0", "Q5_1")
        ),
    ],
)
def test_tokens_are_those_of_the_model_that_transformers_saves_with_the_numbers(
    architecture: str, experts: str, tmp_path: Path
) -> None:
    """In float32 those of graphs, which do not round stored numbers to bfloat16."""
    path, values = tmp_path / "tiny.gguf", tmp_path / "numbers"
    write_gguf(path, architecture, experts=experts, vocab=True)
    ours = architecture in OURS
    save_numbers(values, architecture, experts=experts, dtype=torch.bfloat16 if ours else torch.float32)
    save_byte_tokenizer(values)
    assert isinstance(open_model(str(path)).source, NativeSource) == ours
    wanted, keys = tokens(values, Shares(host=1.0)), {} if ours else IN_FLOAT32
    for homes in (Shares(host=1.0), Shares(disk=1.0)):
        assert tokens(path, homes, **keys) == wanted


# As in files of 1 to 3 bits, which vary types from matrix to matrix: gate and up, down, and others of each layer.
FEW_BITS = (("IQ1_S", "IQ1_M", "TQ1_0"), ("IQ2_XXS", "IQ3_XXS", "IQ2_XS"), ("IQ2_S", "IQ3_S", "TQ2_0"))
OF_FEW_BITS: dict[str, Any] = {
    "types": {
        f"blk.{layer}.{matrix}.": name
        for layer, (first, down, other) in enumerate(FEW_BITS)
        for matrix, name in {
            **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), first),
            "ffn_down_exps": down,
            **dict.fromkeys(("attn_v", "attn_output"), other),
        }.items()
    }
    | {"token_embd": "IQ2_S", "output.": "IQ3_S"},
    "sizes": {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64},
}


# A "dynamic" file: gate, up and down of a layer in three types, and layers in others.
DYNAMIC: dict[str, Any] = {
    "types": {
        "blk.0.ffn_gate_exps": "IQ2_XXS",
        "blk.0.ffn_up_exps": "IQ2_XS",
        "blk.0.ffn_down_exps": "IQ3_XXS",
        "blk.1.ffn_gate_exps": "IQ2_XXS",
        "blk.1.ffn_up_exps": "Q4_K",
        "blk.1.ffn_down_exps": "Q6_K",
        **{f"blk.2.ffn_{matrix}_exps": "Q4_K" for matrix in ("gate", "up", "down")},
    },
    "sizes": {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64},
}


@pytest.mark.parametrize("architecture", thorough(["qwen3moe", "qwen2moe"], but=["qwen3moe"]))
def test_a_dynamic_mix_of_types_runs_in_pages_of_its_own_bytes(architecture: str, tmp_path: Path) -> None:
    path, values = tmp_path / "tiny.gguf", tmp_path / "values"
    write_gguf(path, architecture, vocab=True, **DYNAMIC)
    save_numbers(values, architecture, dtype=torch.float32, **DYNAMIC)
    save_byte_tokenizer(values)
    wanted = tokens(values, Shares(disk=1.0))
    for homes in (Shares(host=1.0), Shares(disk=1.0)):
        assert tokens(path, homes, **IN_FLOAT32) == wanted
    tensors = read_gguf(path).tensors
    opened = open_model(str(path))
    stored = opened.profile.stored
    assert stored is not None and stored.mixed, "of which torch computes the products on a GPU, in memory of its own"
    assert stored.without_integers is None and not stored.exact and "IQ2_XXS" in str(stored.cpu_integers)
    for layer in range(3):
        names = [f"blk.{layer}.ffn_{matrix}_exps.weight" for matrix in ("gate", "up", "down")]
        of_layer = sum(tensors[name].nbytes for name in names)
        experts = opened.profile.experts.num_experts
        assert of_layer // experts <= stored.pages[layer] < of_layer // experts + 3 * PAGE_ALIGNMENT
        pieces = opened.weight_map.experts.pieces[Page(layer=layer, expert=1)]
        assert sum(info.nbytes for info in pieces) == of_layer // experts


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A file of `DYNAMIC`, of 8 experts and four layers, and the tokens of its numbers in float32."""
    directory = tmp_path_factory.mktemp("dynamic")
    path, values = directory / "tiny.gguf", directory / "values"
    last = {f"blk.3.ffn_{matrix}_exps": "IQ2_XXS" for matrix in ("gate", "up", "down")}
    sizes = {**DYNAMIC["sizes"], "num_experts": 8, "num_hidden_layers": 4}
    shape = {"types": DYNAMIC["types"] | last, "sizes": sizes}
    write_gguf(path, "qwen3moe", vocab=True, **shape)
    save_numbers(values, "qwen3moe", dtype=torch.float32, **shape)
    save_byte_tokenizer(values)
    return path, tokens(values, Shares(host=1.0))


HALF = {"cpu": Shares(host=0.5, disk=0.5), "twin": Shares(device=0.35, host=0.35, disk=0.3)}


@pytest.mark.parametrize(
    ("device", "keys"),
    thorough(
        [
            *(("cpu", {"schedule": schedule}) for schedule in ("cgopipe", "serial", "flexgen", "module")),
            ("cpu", {"schedule": "module", "ring_pages": 3}),
            ("twin", {"host_pages": "pinned"}),
            ("twin", {"host_pages": "staged", "schedule": "module"}),
            ("cpu", {"residents": "learned"}),
            ("twin", {"residents": "learned"}),
        ],
        but=[("twin", {"host_pages": "pinned"})],
    ),
)
def test_a_dynamic_mix_gives_the_tokens_of_its_numbers_in_every_order(
    device: str, keys: dict[str, Any], dynamic: tuple[Path, list[list[int]]]
) -> None:
    path, wanted = dynamic
    assert tokens(path, HALF[device], device, **IN_FLOAT32, **keys) == wanted


@pytest.mark.parametrize("device", thorough(["cpu", "twin"], but=["twin"]))
def test_on_demand_passes_of_a_dynamic_mix_keep_pages_in_slots_of_their_size(
    device: str, dynamic: tuple[Path, list[list[int]]]
) -> None:
    """One sequence at a time, so that routed pages alone move and some of them stay."""
    path, wanted = dynamic
    sizes = {"batch_size": 1, "micro_batch_size": 1, "micro_batch_tokens": 40, "kv_tokens": 64, **IN_FLOAT32}
    experts: Any = "cpu" if device == "cpu" else "gpu"
    policy = Policy(model=str(path), weights=HALF[device], ffn_device=experts, residents="learned", **sizes)
    with Engine(policy, device=device) as engine:
        assert [list(item.token_ids) for item in engine.generate(PROMPTS, HOW)] == wanted
        model = engine._passes.model  # type: ignore[union-attr]
        store, sizes_of = model.pages, model.profile.stored.pages
        assert model.pager is not None and model.pager.stats.pages + model.pager.stats.found > 20
        here = np.argwhere(store.table >= 0).tolist()
        assert len({sizes_of[layer] for layer, _ in here}) > 1
        slots = [min(align_up(sizes_of[layer], 4096), max(sizes_of)) for layer, _ in here]
        assert [store.resident[store.table[layer, expert]].page.numel() for layer, expert in here] == slots
        assert sum(slots) < 0.8 * len(here) * max(sizes_of)


@pytest.mark.thorough
def test_a_dynamic_mix_runs_in_the_memory_that_it_is_planned_for(dynamic: tuple[Path, list[list[int]]]) -> None:
    """With room for some pages beyond the least, which are counted by their own sizes."""
    path, wanted = dynamic
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "batch_size": 3}
    with pytest.raises(BudgetError) as refused:
        Engine.from_pretrained(str(path), **options, host_memory=1 << 20)
    stored = open_model(str(path)).profile.stored
    assert stored is not None
    limit = refused.value.needed_bytes + 3 * stored.total_bytes
    with Engine.from_pretrained(str(path), **options, host_memory=limit) as engine:
        planned = engine.plan.use_of("host").total_bytes  # type: ignore[union-attr]
        assert limit - 3 * stored.page_bytes < planned <= limit
        assert engine.policy.weights.disk > 0
        assert [list(item.token_ids) for item in engine.generate(PROMPTS, HOW)] == wanted


@pytest.mark.parametrize("device", ["cpu", pytest.param("twin", marks=pytest.mark.thorough)])
def test_types_of_few_bits_run_in_one_file(device: str, tmp_path: Path) -> None:
    path, values = tmp_path / "tiny.gguf", tmp_path / "numbers"
    write_gguf(path, "qwen3moe", vocab=True, **OF_FEW_BITS)
    save_numbers(values, "qwen3moe", **OF_FEW_BITS)
    save_byte_tokenizer(values)
    wanted = tokens(values, Shares(disk=1.0), device)
    assert len({tuple(ids) for ids in wanted}) == len(wanted)
    for homes in (Shares(host=1.0), Shares(disk=1.0))[device != "cpu" :]:
        assert tokens(path, homes, device) == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["llama", "deepseek2", "gpt-oss"])
def test_tokens_are_the_same_beside_a_device(architecture: str, tmp_path: Path) -> None:
    path, values = tmp_path / "tiny.gguf", tmp_path / "numbers"
    write_gguf(path, architecture, vocab=True)
    save_numbers(values, architecture)
    save_byte_tokenizer(values)
    assert tokens(path, Shares(disk=1.0), "twin") == tokens(values, Shares(disk=1.0), "twin")


@pytest.mark.thorough
def test_older_files_with_whole_keys_and_values_run(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", "deepseek2", halves=False, vocab=True)
    save_numbers(tmp_path / "numbers", "deepseek2", halves=False, dtype=torch.float32)
    save_byte_tokenizer(tmp_path / "numbers")
    expected = tokens(tmp_path / "numbers", Shares(disk=1.0))
    assert tokens(tmp_path / "whole.gguf", Shares(disk=1.0), **IN_FLOAT32) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["llama", "qwen2moe", "deepseek2"])
def test_fused_tensors_are_those_apart(architecture: str, tmp_path: Path) -> None:
    """As ``--fuse-gate-up-exps`` and ``--fuse-qkv`` write them; rows of q and k by halves of heads, and biases, too."""
    apart, fused = tmp_path / "apart.gguf", tmp_path / "fused.gguf"
    write_gguf(apart, architecture, vocab=True)
    written = write_gguf(fused, architecture, vocab=True, fused=True)
    assert "blk.1.ffn_gate_up_exps.weight" in written
    assert ("blk.1.attn_qkv.weight" in written) == (architecture != "deepseek2")
    assert ("blk.1.attn_qkv.bias" in written) == (architecture == "qwen2moe")
    assert open_model(str(fused)).profile.stored == open_model(str(apart)).profile.stored
    for homes in (Shares(host=1.0), Shares(disk=1.0)):
        assert tokens(fused, homes) == tokens(apart, homes)


@pytest.mark.thorough
def test_a_missing_scale_of_experts_scales_by_nothing(tmp_path: Path) -> None:
    """As in llama.cpp; transformers' default would be 2.5."""
    key = "deepseek2.expert_weights_scale"
    result = []
    for name, value in (("missing", None), ("none", 1.0), ("more", 2.5)):
        write_gguf(tmp_path / f"{name}.gguf", "deepseek2", vocab=True, metadata={key: value})
        result.append(tokens(tmp_path / f"{name}.gguf", Shares(host=1.0)))
    assert result[0] == result[1] != result[2]


def test_fused_experts_of_gpt_oss_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "fused.gguf", "gpt-oss", vocab=True, experts="BF16", fused=True)
    with pytest.raises(CheckpointError, match=r"\(ffn_gate_up_exps\) are not read; .* without --fuse-gate-up-exps"):
        open_model(str(tmp_path / "fused.gguf"))


def test_a_split_file_runs(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", "qwen3moe", vocab=True)
    write_gguf(tmp_path / "split.gguf", "qwen3moe", vocab=True, shard=9)
    first = next(tmp_path.glob("split-00001-of-*.gguf"))
    assert tokens(first, Shares(disk=1.0)) == tokens(tmp_path / "whole.gguf", Shares(disk=1.0))


@pytest.mark.thorough
def test_generate_takes_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """By its path, or by a tag behind its directory."""
    path, out = tmp_path / "tiny-Q8_0.gguf", tmp_path / "out.jsonl"
    write_gguf(path, "llama", vocab=True)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc", "max_tokens": 4}\n{"prompt": "de", "max_tokens": 3}\n')
    assert main(["generate", str(prompts), "--model", str(path), "-o", str(out)]) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2
    write_gguf(tmp_path / "tiny-BF16.gguf", "qwen3moe")
    (tmp_path / "mmproj-F16.gguf").touch()
    again, tagged = tmp_path / "again.jsonl", f"{tmp_path}:q8_0"
    assert main(["generate", str(prompts), "--model", tagged, "-o", str(again)]) == 0
    assert again.read_bytes() == out.read_bytes()
    assert caplog.text.count("mmproj-F16.gguf beside it is not read") == 1
    assert load_model(tagged).model_type == "mixtral" and load_model(f"{tmp_path}:bf16").model_type == "qwen3_moe"


@pytest.mark.thorough
def test_compare_takes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the model that is measured: the model with the same numbers predicts what it predicts."""
    path, values, prompts = tmp_path / "tiny.gguf", tmp_path / "numbers", tmp_path / "prompts.jsonl"
    write_gguf(path, "llama", experts="Q8_0", vocab=True)
    save_numbers(values, "llama", experts="Q8_0")
    save_byte_tokenizer(values)
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": PROMPTS[2]}}
    prompts.write_text(json.dumps(row) + "\n")
    assert main(["compare", str(path), str(prompts), "--against", str(values), "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["kl"]["value"] == pytest.approx(0.0, abs=1e-4)
