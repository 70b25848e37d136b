"""What makes two jobs the same: every file and setting that changes rows, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moelight.batch.fingerprint import digest_of_file, number_facts, sampling_facts
from moelight.core.errors import CheckpointError
from moelight.core.policy import Policy
from moelight.core.request import SamplingParams, StructuredOutputs
from moelight.engine.model import model_facts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "README.md"):
        (tmp_path / name).write_text(name)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(40 << 20)
    return tmp_path


def put(name: str, offset: int, data: bytes = b"x") -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / name
        path.touch()
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    return change


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (put("config.json", 0), "config"),
        (put("generation_config.json", 0), "config"),
        (put("tokenizer.json", 3), "tokenizer"),
        (put("tokenizer.model", 0), "tokenizer"),
        (put("spiece.model", 0), "tokenizer"),
        (put("added_tokens.json", 0), "tokenizer"),
        (put("chat_template.jinja", 0), "tokenizer"),
        (put("model.safetensors", 0), "weights"),
        (put("model.safetensors", 20 << 20, b"x" * (2 << 20)), "weights"),
        (put("model.safetensors", (40 << 20) - 1), "weights"),
        (put("model.safetensors", 40 << 20), "weights"),
        (put("model-00002.safetensors", 0), "weights"),
    ],
)
def test_another_file_is_another_model(change: Callable[[Path], None], fact: str, model: Path) -> None:
    before = model_facts(model)
    change(model)
    now = model_facts(model)
    assert {name for name in now if now[name] != before[name]} == {fact}


def test_what_changes_no_row_is_no_fact(model: Path, tmp_path: Path) -> None:
    before = model_facts(model)
    put("README.md", 0)(model)
    put("pytorch_model.bin", 0)(model)
    (model / "model.safetensors").touch()
    assert model_facts(model) == before
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in model.glob("*.*"):
        path.rename(moved / path.name)
    assert model_facts(moved) == before


def test_a_file_that_cannot_be_read_is_named(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        model_facts(model)


def test_sampling_is_plain_and_whole() -> None:
    inputs = SamplingParams(
        stop=("a", "b"),
        logit_bias={5: 1.0},
        structured_outputs=StructuredOutputs(json={"type": "object"}),
    )
    facts = sampling_facts(inputs)
    assert set(facts) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["stop"], facts["logit_bias"]) == (["a", "b"], {"5": 1.0})
    assert facts["structured_outputs"] == {"json": {"type": "object"}}


def test_of_a_policy_only_number_formats_count() -> None:
    policy = Policy(model="a", weight_dtype="float32")
    other = Policy(model="b", weight_dtype="float32", batch_size=7, schedule="serial", kv_block_size=16)
    assert number_facts(policy) == number_facts(other) == {"weight_dtype": "float32", "kv_dtype": "auto"}
    assert number_facts(None) == {"weight_dtype": "auto", "kv_dtype": "auto"}
    assert number_facts(None, dtype="float32") == number_facts(policy)


def test_a_small_file(tmp_path: Path) -> None:
    path = tmp_path / "template"
    path.write_text("a")
    first = digest_of_file(path)
    path.write_text("b")
    assert first != digest_of_file(path) and digest_of_file(None) is None
