"""The checkpoint maker: what it writes is a checkpoint to transformers and to us, the same every time."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from moelight.core.errors import ConfigError
from moelight.hrm.costs import page_bytes
from moelight.models.checkpoints import open_model
from moelight.profiles.families import profile_from_dir
from moelight.profiles.gguf import read_gguf
from moelight.weights.load import PageReader
from moelight.weights.source import Checkpoint
from moelight.weights.tensor_map import locate
from tests.benchmarks.scripts import ran
from tests.tiny import hf_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "make_checkpoint.py"
TINY = {
    "layers": 2,
    "hidden": 48,
    "intermediate": 40,
    "experts": 6,
    "top_k": 3,
    "heads": 6,
    "kv_heads": 2,
    "vocab": 300,
}


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_checkpoint", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module._TRAINING_FILES = 3  # type: ignore[attr-defined]
    return module


def digest(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mixtral-8x7b", {}),
        ("mixtral", {"fused": True, "dtype": "float32"}),
        ("qwen3_moe", {"tie": True, "shard_size": 40_000}),
        ("qwen3-30b-a3b", {"fused": True, "shard_size": 40_000, "head_dim": 40}),
        ("olmoe", {"dtype": "float16"}),
    ],
)
def test_transformers_loads_it_and_our_audit_finds_nothing(
    maker: ModuleType, model: str, options: dict[str, Any], tmp_path: Path
) -> None:
    writing = {key: options.pop(key) for key in ("fused", "dtype", "shard_size") if key in options}
    written = maker.make_checkpoint(tmp_path / "out", maker.scaled_config(model, **TINY, **options), **writing)
    theirs = hf_model(tmp_path / "out")
    assert theirs.dtype == getattr(torch, writing.get("dtype", "bfloat16"))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == written.parameters
    profile = profile_from_dir(tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    weight_map = locate(checkpoint, profile)
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == written.bytes
    assert (
        (written.shards > 1) == ("shard_size" in writing) == (len(list((tmp_path / "out").glob("*.safetensors"))) > 1)
    )
    slot = torch.empty(page_bytes(profile, weight_map.dtype), dtype=torch.uint8)
    with PageReader(weight_map, theirs.dtype) as reader:
        reader.start(list(weight_map.experts.pieces)[-1], slot)
    values = slot.view(theirs.dtype).float()
    assert abs(values.mean().item()) < 0.003
    assert 0.018 < values.std().item() < 0.022


@pytest.mark.parametrize("model", ["dbrx", "gpt-oss-20b", "deepseek-v2-lite"])
def test_a_model_that_cannot_be_run_is_not_made(maker: ModuleType, model: str) -> None:
    with pytest.raises(ConfigError, match=f"{model}: the native decoder does not compute"):
        maker.scaled_config(model)


def test_the_same_seed_gives_the_same_bytes_and_another_gives_others(maker: ModuleType, tmp_path: Path) -> None:
    config = maker.scaled_config("mixtral", **TINY)
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        maker.make_checkpoint(tmp_path / name, config, seed=seed)
    one, two, three = (digest(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two
    assert {name for name in one if one[name] != three[name]} == {"model.safetensors"}


def test_a_hollow_checkpoint_is_whole_but_for_its_experts(maker: ModuleType, tmp_path: Path) -> None:
    config = maker.scaled_config("mixtral", **TINY)
    written = [
        maker.make_checkpoint(tmp_path / name, config, hollow=name == "hollow", shard_size=30_000)
        for name in ("full", "hollow")
    ]
    assert written[0].bytes == written[1].bytes
    full, hollow = ({file.name: file for file in (tmp_path / name).iterdir()} for name in ("full", "hollow"))
    assert [file.stat().st_size for _, file in sorted(full.items())] == [
        file.stat().st_size for _, file in sorted(hollow.items())
    ]
    theirs = (hf_model(tmp_path / name).state_dict() for name in ("full", "hollow"))
    for (name, one), other in zip(next(theirs).items(), next(theirs).values(), strict=True):
        assert torch.equal(other, torch.zeros_like(one) if ".experts." in name else one), name


def test_bfloat16_is_the_nearest_to_float32(maker: ModuleType, tmp_path: Path) -> None:
    config = maker.scaled_config("mixtral", **TINY)
    for dtype in ("float32", "bfloat16"):
        maker.make_checkpoint(tmp_path / dtype, config, dtype=dtype)
    exact, rounded = (hf_model(tmp_path / dtype).state_dict() for dtype in ("float32", "bfloat16"))
    assert all(torch.equal(rounded[name], tensor.to(torch.bfloat16)) for name, tensor in exact.items())


def test_the_tokenizer_covers_the_vocabulary_and_knows_the_chat(maker: ModuleType, tmp_path: Path) -> None:
    maker.make_checkpoint(tmp_path / "out", maker.scaled_config("mixtral", **{**TINY, "vocab": 1000}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == 1000
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    text = "def naïve(ß): return '\u4f60\u597d \U0001f600'\n\t\x00"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert all(tokenizer.decode([token]) for token in range(3, 1000))
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "user: hi\nassistant: "


def test_different_prompts_have_different_continuations(maker: ModuleType, tmp_path: Path) -> None:
    sizes = {**TINY, "hidden": 192, "intermediate": 128}
    maker.make_checkpoint(tmp_path / "out", maker.scaled_config("mixtral", **sizes), dtype="float32")
    model = hf_model(tmp_path / "out")
    prompts = torch.arange(3, 3 + 8 * 6).view(8, 6)
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=False)
    assert len({tuple(row.tolist()) for row in out[:, 6:]}) == 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab": 200}, "vocab"),
        ({"hidden": 50}, "heads"),
        ({"top_k": 7}, "num_experts_per_tok"),
        ({"kv_heads": 4}, "heads"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_written(
    maker: ModuleType, changes: dict[str, int], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        maker.make_checkpoint(tmp_path / "out", maker.scaled_config("mixtral", **{**TINY, **changes}))
    assert not (tmp_path / "out").exists()


def test_weights_that_are_there_are_never_overwritten(maker: ModuleType, tmp_path: Path) -> None:
    config = maker.scaled_config("mixtral", **TINY)
    maker.make_checkpoint(tmp_path, config)
    before = digest(tmp_path)
    with pytest.raises(ConfigError, match="in use"):
        maker.make_checkpoint(tmp_path, config, seed=1)
    assert digest(tmp_path) == before


@pytest.mark.thorough
def test_the_command_line_ends_with_json(tmp_path: Path) -> None:
    sizes = [text for key, value in TINY.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    run = [sys.executable, str(SCRIPT), str(tmp_path / "out"), "--model"]
    done = subprocess.run([*run, "olmoe", *sizes], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["model_type"] == "olmoe"
    assert told["bytes"] == 2 * told["parameters"]
    wrong = subprocess.run([*run, "mixtrall"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "did you mean 'mixtral-8x7b'" in wrong.stderr
    assert len(wrong.stderr.splitlines()) == 1


@pytest.mark.thorough
def test_a_dynamic_file_has_layers_of_two_sizes(tmp_path: Path) -> None:
    """Its experts are those of most "dynamic" files; it opens as a model, with numbers of a model's size."""
    path, sizes = tmp_path / "tiny.gguf", {**TINY, "layers": 4, "hidden": 256, "intermediate": 256, "heads": 4}
    options = [text for name, size in sizes.items() for text in (f"--{name.replace('_', '-')}", size)]
    result = ran("make_checkpoint", path, "--model", "mixtral-8x7b", *options, "--dynamic")
    assert result["types"].keys() >= {"IQ2_XXS", "IQ2_XS", "IQ3_XXS", "Q4_K"}
    opened = open_model(str(path))
    stored = opened.profile.stored
    assert stored is not None and stored.mixed, "gate and up differ"
    assert stored.pages[0] == stored.pages[1] == stored.pages[2] < 0.6 * stored.pages[3]
    tensors = read_gguf(path).tensors
    for name in ("blk.0.ffn_gate_exps", "blk.0.ffn_up_exps", "blk.0.ffn_down_exps", "blk.3.ffn_down_exps"):
        tensor = tensors[f"{name}.weight"]
        blocks = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.nbytes,)).reshape(-1, tensor.nbytes // 6 // 256)
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[tensor.type])
        assert values.std() == pytest.approx(0.02, rel=0.05)
