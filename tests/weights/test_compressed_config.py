"""Configs of compressed-tensors are read by a process that ends, once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from moelight.core.confined import ConfinedProcess, EndedError
from moelight.core.errors import ConfigError
from moelight.core.paths import CACHE_VARIABLE
from moelight.formats.compressed_tensors import Rounding, rounding_config
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.quantization import Quantization, read_quantization
from tests.tiny import save_tiny
from tests.weights.quantised import METHODS, quantise

SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
OPEN = """
import sys
from moelight.models.checkpoints import open_model
opened = open_model(sys.argv[1])
assert opened.weight_map.experts.dtype is None
heavy = {"compressed_tensors", "accelerate", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.fixture(autouse=True)
def _unimported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported the package, with an empty cache."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "compressed_tensors.quantization")


def read(values: dict[str, Any]) -> Quantization:
    result = read_quantization(HFConfig({"quantization_config": values}, where="config.json"))
    assert result is not None
    return result


@pytest.mark.thorough
def test_the_package_is_imported_by_a_child_process_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(tmp_path / "model", "mixtral", intermediate_size=96, **SHAPE)
    quantised, _ = quantise(model, tmp_path, METHODS["int4"])
    result = read(METHODS["int4"].config)
    assert "compressed_tensors.quantization" not in sys.modules
    (cached,) = (tmp_path / "cache" / "compressed-tensors").iterdir()
    subprocess.run([sys.executable, "-c", OPEN, quantised], check=True)
    asked: list[Any] = []

    def answer(_: ConfinedProcess, question: Any) -> list[Any]:
        asked.append(question)
        return [json.loads(full), None]

    full = cached.read_text()
    monkeypatch.setattr(ConfinedProcess, "ask", answer)
    assert read(METHODS["int4"].config) == result and not asked
    cached.write_text(full[:-9])
    assert read(METHODS["int4"].config) == result and len(asked) == 1 and cached.read_text() == full
    monkeypatch.setattr(metadata, "version", lambda _: "0.0.1")
    assert read(METHODS["int4"].config) == result and len(asked) == 2


def test_a_child_that_fails_or_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: Any) -> None:
        raise EndedError(-signal.SIGKILL)

    def refused(message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            read(METHODS["int4"].config)
        assert str(caught.value).isprintable()

    monkeypatch.setattr(ConfinedProcess, "ask", ended)
    refused(r"compressed-tensors does not survive it \(it ended with SIGKILL\)")
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "compressed_tensors.quantization")
    monkeypatch.setattr(metadata, "version", missing)
    refused(r"not installed: pip install 'moelight\[quant\]'")
    with pytest.raises(ConfigError, match=r"is written as compressed-tensors, .*pip install"):
        rounding_config([(Rounding("int8", 0), ["Linear"])], [])


def missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)
