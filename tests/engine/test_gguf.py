"""GGUF files run: their numbers are those of transformers' parameters, and tokens those of a checkpoint of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moelight.cli.main import main
from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine.checkpoints import open_model
from moelight.engine.engine import Engine
from moelight.profiles.gguf_models import open_gguf
from moelight.weights.gguf_checkpoint import gguf_checkpoint
from moelight.weights.load import dequantised
from moelight.weights.quantized_checkpoint import QuantizedInfo
from tests.tiny import save_byte_tokenizer
from tests.weights.gguf_files import as_written, tiny, write_gguf

RUN = {"llama": "mixtral", "qwen3moe": "qwen3_moe", "olmoe": "olmoe", "qwen2moe": "qwen2_moe"}
HOW = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = [[3, 5, 7, 9], [11, 2], list(range(20, 50))]


def numbers_of(path: Path) -> dict[str, Tensor]:
    """The numbers of all tensors by transformers' names, in bfloat16; those of a family with both have the second
    spelling of shared experts."""
    found = {}
    for name, info in gguf_checkpoint(open_gguf(path), lambda name: "shared_experts" not in name).tensors.items():
        assert isinstance(info, QuantizedInfo)
        matrix = info.stored()
        numbers = dequantised(matrix, torch.empty((matrix.rows, matrix.columns), dtype=torch.bfloat16))
        found[name] = numbers.view(info.shape)
    return found


def checkpoint_of(path: Path, directory: Path) -> Path:
    directory.mkdir()
    save_file(numbers_of(path), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(dict(open_gguf(path).config.values)))
    save_byte_tokenizer(directory)
    return directory


def tokens(model: Path, homes: Shares) -> list[list[int]]:
    policy = Policy(
        model=str(model), batch_size=3, micro_batch_size=2, micro_batch_tokens=16, kv_tokens=256, weights=homes
    )
    with Engine(policy, device="cpu") as engine:
        return [list(each.token_ids) for each in engine.generate(PROMPTS, HOW)]


@pytest.mark.parametrize("experts", ["Q4_0", "Q8_0", "BF16"])
@pytest.mark.parametrize("architecture", RUN)
def test_tokens_are_those_of_a_checkpoint_of_the_numbers(architecture: str, experts: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture, experts=experts, vocab=True)
    opened = open_model(str(path))
    assert (opened.graph is None) == (architecture != "qwen2moe")
    wanted = tokens(checkpoint_of(path, tmp_path / "numbers"), Shares(host=1.0))
    for homes in (Shares(host=1.0), Shares(disk=1.0)):
        assert tokens(path, homes) == wanted


@pytest.mark.parametrize("architecture", RUN)
def test_numbers_are_those_of_transformers_parameters(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture)
    found, state = numbers_of(path), tiny(architecture)[0].state_dict()
    for name in found.keys() & state.keys():
        stored = "Q8_0" if state[name].ndim > 1 and not name.endswith("mlp.gate.weight") else "F32"
        assert torch.equal(found[name], as_written(state[name], stored).bfloat16()), name
    assert {name for name in state if name not in found} == {name for name in state if ".mlp.experts." in name} | {
        name for name in state if architecture == "llama" and name.endswith("mlp.gate.weight")
    }


def test_a_split_file_runs(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", "qwen3moe", vocab=True)
    write_gguf(tmp_path / "split.gguf", "qwen3moe", vocab=True, shard=9)
    first = next(tmp_path.glob("split-00001-of-*.gguf"))
    assert tokens(first, Shares(disk=1.0)) == tokens(tmp_path / "whole.gguf", Shares(disk=1.0))


@pytest.mark.parametrize("architecture", ["deepseek2", "gpt-oss"])
def test_what_is_stored_otherwise_is_refused_by_tensor(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture)
    with pytest.raises(ConfigError, match=r"tensor 'blk\.0\..*' is no single tensor of"):
        open_model(str(path))


def test_generate_takes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "tiny.gguf", tmp_path / "out.jsonl"
    write_gguf(path, "llama", vocab=True)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc", "max_tokens": 4}\n{"prompt": "de", "max_tokens": 3}\n')
    assert main(["generate", str(prompts), "--model", str(path), "-o", str(out)]) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2
