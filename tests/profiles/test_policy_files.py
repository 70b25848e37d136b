"""Policy files: what is written is read back, and what is wrong is refused with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.core.policy import KV_BLOCK_SIZES, Policy, Shares
from moelight.profiles.policy_files import load_policy, policy_text
from tests.shapes import examples

SPLIT = Policy(
    model="mixtral",
    batch_size=1088,
    micro_batch_size=68,
    micro_batch_tokens=2048,
    kv_tokens=100_000,
    attention_device="gpu",
    ffn_device="split",
    weights=Shares(device=1 / 18, host=15 / 18, disk=2 / 18),
    cpu_experts=0.1,
    kv=Shares(device=1 / 3, host=2 / 3),
    weight_dtype="int4",
    kv_dtype="int8",
    schedule="serial",
    kv_block_size=64,
)


def write(directory: Path, text: str) -> Path:
    path = directory / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_policy_comes_back_unrounded(tmp_path: Path) -> None:
    assert load_policy(write(tmp_path, policy_text(SPLIT))) == SPLIT
    assert load_policy(str(tmp_path / "policy.yaml")) == SPLIT


@examples(150)
@given(
    model=st.text(min_size=1, max_size=40).filter(lambda text: text.strip()),
    sizes=st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)),
    share=st.floats(0, 1),
    block=st.sampled_from(KV_BLOCK_SIZES),
)
def test_any_policy_comes_back(
    tmp_path_factory: pytest.TempPathFactory, model: str, sizes: tuple[int, int], share: float, block: int
) -> None:
    policy = Policy(
        model=model,
        batch_size=sizes[0],
        micro_batch_size=sizes[1],
        micro_batch_tokens=sizes[1],
        weights=Shares(device=share, host=1 - share),
        kv_block_size=block,
    )
    text = policy_text(policy, comments=[model, "why: #"])
    assert load_policy(write(tmp_path_factory.mktemp("policy"), text)) == policy


def test_only_the_model_is_required(tmp_path: Path) -> None:
    assert load_policy(write(tmp_path, "model: demo\n")) == Policy(model="demo")


def test_the_text_is_for_people_too(tmp_path: Path) -> None:
    text = policy_text(SPLIT, comments=["word " * 60, "line\nbreak\x1b[31m"])
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert max(map(len, head)) <= 102 and "# line break [31m" in head
    assert "# N, the most sequences running in one pass" in text
    assert yaml.safe_load(text)["num_micro_batches"] == 16
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("batch_size: 4\n", 1, ["lacks the key 'model'"]),
        ("model: demo\nbatchsize: 4\n", 2, ["unknown key 'batchsize'", "did you mean 'batch_size'"]),
        ("model: demo\nweights: {gpu: 1}\n", 2, ["unknown key 'gpu' in weights", "device"]),
        ("model: demo\nkv: {disk: 1}\n", 2, ["unknown key 'disk' in kv"]),
        ("model: demo\n\nbatch_size: many\n", 3, ["batch_size", "whole number"]),
        ("model: demo\nbatch_size: 0\n", 2, ["batch_size", "at least 1"]),
        ("model: demo\nweights: {device: 0.5, host: 0.6}\n", 2, ["weights", "sum to 1"]),
        ("model: demo\nweights: {device: yes}\n", 2, ["weights.device", "0 to 1"]),
        ("model: demo\nkv: {host: .nan}\n", 2, ["finite"]),
        ("model: [demo]\n", 1, ["model", "single value"]),
        ("model: demo\nmodel: demo\n", 2, ["given twice"]),
        (
            "model: demo\nbatch_size: 9\nmicro_batch_size: 4\nnum_micro_batches: 2\n",
            4,
            ["num_micro_batches is 2", "batch_size 9", "4", "gives 3"],
        ),
        ("- model\n", 1, ["mapping"]),
        ("", 1, ["empty"]),
    ],
)
def test_what_is_wrong_is_refused_where_it_stands(tmp_path: Path, text: str, line: int, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_policy(path)
    assert str(refused.value).startswith(f"{path}:{line}: ")
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: demo\nattention_device: npu\n", ["attention_device", "npu"]),
        ("model: demo\nweight_dtype: bfloat61\n", ["bfloat61", "did you mean 'bfloat16'"]),
        ("model: demo\ncpu_experts: 0.5\n", ["cpu_experts", "split"]),
        ("model: demo\nkv_block_size: 20\n", ["kv_block_size"]),
        ("model: demo\nmicro_batch_tokens: 8\n", ["micro_batch_tokens"]),
    ],
)
def test_an_impossible_policy_is_refused_with_its_file(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_policy(path)
    assert str(refused.value).startswith(f"{path}: ")
    for word in words:
        assert word in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_policy(tmp_path / "none.yaml")
