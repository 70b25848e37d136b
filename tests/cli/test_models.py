"""``moelight models``: which models run here, how, and what was tested."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

import transformers

from moelight.cli import models
from moelight.models.graph import family_table, support
from moelight.models.graph.family_table import Table
from moelight.models.graph.self_test import tiny
from moelight.profiles.gguf_config import ARCHITECTURES
from moelight.profiles.gguf_families import GRAPH_ARCHITECTURES
from tests.cli.program import moelight_inside as run
from tests.models.graph.measured import config_of

newest = pytest.mark.skipif(
    transformers.__version__ != Table.read().transformers, reason="the table is of another version"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOELIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def saved(model_type: str, directory: Path, **changes: Any) -> Path:
    directory.mkdir()
    tiny(config_of(model_type, **changes)).save_pretrained(directory)
    return directory


def answer(*words: str | Path, code: int = 0) -> Any:
    done = run("models", *words, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@newest
def test_the_list_is_the_table(tmp_path: Path) -> None:
    rows = {item["name"]: item for item in answer()["families"]}
    assert set(rows) == {family.name for family in Table.read().families}
    assert (rows["mixtral"]["how"], rows["gpt_oss"]["how"], rows["deepseek_v32"]["how"]) == (
        "native",
        "graph",
        "opaque",
    )
    assert rows["gpt_oss"]["greedy_same"] == rows["gpt_oss"]["greedy_prompts"] == 32
    assert rows["doge"]["how"] is None
    assert "other tokens" in rows["doge"]["reason"]
    assert rows["granitemoe"]["self_test"] is None
    answer(saved("granitemoe", tmp_path / "it"))
    rows = {item["name"]: item for item in answer()["families"]}
    assert 0 < rows["granitemoe"]["self_test"] < 1e-4  # that was kept
    lines = run("models").stdout.splitlines()
    count = sum(row["how"] is not None for row in rows.values())
    assert f"{count} of {len(rows)} families run (3 native, " in lines[0]
    assert any(line.startswith("gpt_oss ") and "graph" in line and "32/32" in line for line in lines)


@newest
def test_the_list_has_the_architectures_of_gguf_files() -> None:
    tests = {item["name"]: item for item in answer()["gguf"]}
    assert {*ARCHITECTURES, *GRAPH_ARCHITECTURES} == {name.partition(" (")[0] for name in tests} | {"nemotron_h"}
    assert tests["qwen3next"]["model_type"] == "qwen3_next"
    assert (tests["gemma3"]["equal"], tests["gemma3"]["tokens"]) == (24, 24)
    lines = run("models").stdout.splitlines()
    assert any(line.split()[:3] == ["qwen3next", "qwen3_next", "24/24"] for line in lines)


def test_a_version_without_a_table_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Other versions have no measured errors; what dry runs found is kept for them."""
    versions = ("99.0", "1.0", "0.1")
    monkeypatch.setattr(family_table, "versions", lambda: versions)
    monkeypatch.setattr(support, "moe_families", lambda: {"granitemoe": "granitemoe", "nllb_moe": "nllb-moe"})
    done = run("models")
    assert "looking at the families of transformers 99.0" in done.stderr
    assert "transformers 99.0: 1 of 2 families run (0 native, 1 graph, 0 opaque)" in done.stdout
    monkeypatch.setattr(support, "moe_families", dict)
    again = run("models")
    assert (again.stdout, again.stderr) == (done.stdout, "")


def test_one_model(tmp_path: Path) -> None:
    result = answer(saved("qwen3_next", tmp_path / "it") / "config.json")
    assert (result["model_type"], result["how"], result["mixers"]) == (
        "qwen3_next",
        "graph",
        ["recurrent", "attention"],
    )
    assert result["state_bytes"] > 0
    assert any("prefixes" in item for item in result["refused"])
    assert result["self_test"]["passed"]
    lines = run("models", tmp_path / "it").stdout
    for message in ("graph: transformers' module graph", "4 with 8 experts, 2 for each token", "for each sequence"):
        assert message in " ".join(lines.split()), message
    assert "self-test passed" in lines


def test_a_named_model_that_is_native() -> None:
    result = answer("mixtral-8x7b")
    assert (result["how"], result["experts_per_layer"], result["self_test"]) == ("native", 8, None)


def test_a_named_model_that_transformers_does_not_have_is_refused_in_one_short_line() -> None:
    done = run("models", "deepseek-moe-16b")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"deepseek-moe-16b: transformers {transformers.__version__} has no family 'deepseek'" in line
    assert len(line) < 200


@pytest.mark.parametrize(
    ("model_type", "changes", "says"),
    [
        ("doge", {}, "depends on the other tokens of its pass"),
        ("granitemoe", {"quantization_config": {"quant_method": "hqq"}}, "the weights are quantised 'hqq'"),
    ],
)
def test_a_model_that_does_not_run(model_type: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    directory = saved(model_type, tmp_path / "it", **changes)
    result = answer(directory, code=1)
    assert (result["how"], result["self_test"]) == (None, None)
    assert says in result["reason"]
    done = run("models", directory)
    assert done.returncode == 1
    assert f"does not run: {result['reason']}" in " ".join(done.stdout.split())


def test_a_model_whose_self_test_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    from moelight.models.graph import self_test

    experts = self_test.serve_experts
    monkeypatch.setattr(self_test, "serve_experts", lambda *inputs: experts(*inputs) * 1.01)
    result = answer(saved("granitemoe", tmp_path / "it"), code=1)
    assert not result["self_test"]["passed"]
    assert "GraniteMoe" in result["self_test"]["differs"]
    assert not list(cache.rglob("*.txt"))


@pytest.mark.parametrize(("model", "says"), [("gpt_osss", "did you mean 'gpt_oss'"), ("/no/config.json", "/no/config")])
def test_what_is_no_model(model: str, says: str) -> None:
    done = run("models", model)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_transformers_that_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "transformers":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(family_table.importlib.metadata, "version", version)
    done = run("models")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'moelight[graph]'" in done.stderr


def test_every_way_to_run_has_words() -> None:
    assert {family.how for family in Table.read().families} <= set(models._HOW)
