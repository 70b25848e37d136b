"""Named models: their real sizes, their short names, and what happens to a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moelight.core.dtypes import BFLOAT16
from moelight.core.errors import CheckpointError, ConfigError
from moelight.hrm.costs import page_bytes
from moelight.profiles.files import profile_names, read_yaml
from moelight.profiles.model_files import load_model_profile, model_config
from moelight.profiles.tensor_list import dense_tensors, pages
from tests.tiny import tiny_config

# As published on the model cards, rounded as there; without layers that only predict further tokens ahead.
BILLIONS = {
    "dbrx": 131.6,
    "deepseek-moe-16b": 16.4,
    "deepseek-v2": 235.7,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671.0,
    "glm-4.5-air": 106.9,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
    "mixtral-8x22b": 140.6,
    "mixtral-8x7b": 46.7,
    "olmoe-1b-7b": 6.9,
    "phi-3.5-moe": 41.9,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen2-57b-a14b": 57.4,
    "qwen3-235b-a22b": 235.1,
    "qwen3-30b-a3b": 30.5,
}


def test_these_models_are_shipped() -> None:
    assert list(profile_names("model")) == sorted(BILLIONS)


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_shipped_models_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    model = load_model_profile(name)
    experts = len(pages(model)) * page_bytes(model, BFLOAT16) // BFLOAT16.itemsize
    parameters = experts + sum(tensor.elements for tensor in dense_tensors(model))
    assert model.name == name
    assert model.dtype == "bfloat16"
    assert round(parameters / 1e9, 1) == billions


def test_every_shipped_model_can_be_read_and_says_where_it_was_read() -> None:
    for name, path in profile_names("model").items():
        source = read_yaml(path).entries()["source"].text()
        assert source.startswith("https://huggingface.co/") and source.endswith("/config.json")
        assert load_model_profile(name).model_type == model_config(name)["model_type"]


def test_the_short_name_is_the_long_one() -> None:
    assert load_model_profile("mixtral") == load_model_profile("mixtral-8x7b")


def test_a_directory_needs_only_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tiny_config("olmoe")
    directory = tmp_path / "some-model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    assert model_config(str(directory)) == values
    monkeypatch.chdir(tmp_path)
    assert load_model_profile("some-model") == load_model_profile(str(directory))


def test_a_bare_name_is_a_named_model_before_it_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mixtral-8x7b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_model_profile("mixtral-8x7b").num_layers == 32
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model_profile("./mixtral-8x7b")


@pytest.mark.parametrize("name", ["mixtrl", "no/such/place", "gone.yaml", "", "a\0b"])
def test_a_wrong_name_is_one_clear_error(name: str) -> None:
    with pytest.raises(ConfigError):
        load_model_profile(name)


def test_a_misspelt_key_of_the_config_is_an_error_not_a_default(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nconfig:\n  model_type: mixtral\n  num_local_expert: 4\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"mine\.yaml:4: unknown key 'num_local_expert'.*did you mean 'num_local_experts'"
    ):
        load_model_profile(str(path))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "  rope_scaling: {type: yarn, factr: 40}",
            "unknown key 'factr' in config.rope_scaling (did you mean 'factor'",
        ),
        ("  attn_config: {kv_n_head: 8}", "unknown key 'kv_n_head' in config.attn_config (did you mean 'kv_n_heads'"),
        (
            "  ffn_config: {ffn_act_fn: {nam: silu}}",
            "unknown key 'nam' in config.ffn_config.ffn_act_fn (did you mean 'name'",
        ),
        ("  rope_parameters: {factor: 1, factor: 2}", "'factor' is given twice"),
    ],
)
def test_nested_keys_are_as_strict(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\nconfig:\n  model_type: dbrx\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_model_profile(str(path))
    assert "mine.yaml:4: " in str(caught.value)
    assert says in str(caught.value)


def test_a_nested_key_may_be_null(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    shipped = profile_names("model")["mixtral-8x7b"].read_text(encoding="utf-8")
    path.write_text(f"{shipped}  rope_scaling: null\n", encoding="utf-8")
    assert load_model_profile(str(path)) == load_model_profile("mixtral-8x7b")
