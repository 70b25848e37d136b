"""Where a model is looked for: local paths never ask the network, the hub is asked for needed files only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from moelight.core.errors import CheckpointError
from moelight.weights.source import Checkpoint, resolve_model
from tests.tiny import save_tiny


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """The hub, of which only ``owner/there`` exists; remembers what it was asked."""
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(
        model: str, *, allow_patterns: list[str] | None = None, local_files_only: bool = False, **_: Any
    ) -> str:
        if local_files_only or allow_patterns is None:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
        asked.append((model, allow_patterns))
        if model == "owner/there":
            return "/cache/owner/there"
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network here\nand a second line")

    def model_info(*_: Any, **__: Any) -> None:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return asked


def test_a_directory_is_itself(tmp_path: Path, hub: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "there").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("owner/there") == Path("owner/there")
    assert hub == []


def test_demo_is_the_bundled_model_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    bundled = resolve_model("demo")
    assert bundled.parts[-2:] == ("moelight", "demo")
    assert bundled.is_absolute()
    assert resolve_model("./demo") == Path("demo")


def test_a_hub_id_is_fetched_without_pickles(hub: list[tuple[str, list[str]]]) -> None:
    assert resolve_model("owner/there") == Path("/cache/owner/there")
    (_, patterns) = hub[0]
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(patterns)
    assert not any("bin" in pattern or pattern == "*" for pattern in patterns)


def test_what_the_hub_has_not_names_both_places_on_one_line(hub: list[Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_model("owner/not-there")
    told = str(caught.value)
    assert "owner/not-there" in told and "no such directory" in told and "no network here" in told
    assert "\n" not in told
    assert len(hub) == 1


@pytest.mark.parametrize(
    "model", ["", " ", "nonexistent", "./a/b", "/no/such/dir", "a/b/c", "../x", "a\0b", "a" * 5000]
)
def test_what_cannot_be_a_hub_id_never_asks_the_network(model: str, hub: list[Any]) -> None:
    with pytest.raises(CheckpointError):
        resolve_model(model)
    assert hub == []


def test_a_file_is_not_a_model(tmp_path: Path, hub: list[Any]) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"or a \.gguf file"):
        resolve_model(str(file))
    assert hub == []


def test_the_hub_caches_links_to_files_elsewhere(tmp_path: Path) -> None:
    good = save_tiny(tmp_path / "blobs", "mixtral", sharded=True)
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in good.iterdir():
        os.symlink(file, linked / file.name)
    assert Checkpoint.open(linked).tensors.keys() == Checkpoint.open(good).tensors.keys()


def test_a_missing_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(tmp_path / "gone")
