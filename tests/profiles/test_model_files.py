"""Named models: their real sizes, their short names, and what happens to a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moelight.core.dtypes import BFLOAT16
from moelight.core.errors import CheckpointError, ConfigError
from moelight.hrm.costs import page_bytes
from moelight.profiles.files import profile_names
from moelight.profiles.model_files import load_model_profile, model_config
from moelight.profiles.stored import dense_tensors, pages
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral-8x7b", 46.703), ("qwen3-30b-a3b", 30.532), ("olmoe-1b-7b", 6.919)]
)
def test_shipped_models_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    model = load_model_profile(name)
    experts = len(pages(model)) * page_bytes(model, BFLOAT16) // BFLOAT16.itemsize
    parameters = experts + sum(tensor.elements for tensor in dense_tensors(model))
    assert model.name == name
    assert model.dtype == "bfloat16"
    assert round(parameters / 1e9, 3) == billions


@pytest.mark.parametrize("name", profile_names("model"))
def test_every_shipped_model_can_be_read(name: str) -> None:
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
