"""Metadata of GGUF files that lie: each value of each key that an architecture reads is one clear line or a model.

Headers are those that llama.cpp's converter wrote (`gguf_architectures`); no numbers are read.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from moelight.core.errors import CheckpointError, ConfigError, MoelightError
from moelight.models.graph.gguf import config_values_of, graph_checkpoint
from moelight.models.graph.model import GraphModel, config_of, on_meta
from moelight.models.graph.profile import profile_of
from moelight.models.graph.weights import weights_in
from moelight.profiles.gguf import GGMLTensor, GGUFFile
from moelight.profiles.gguf_config import Metadata
from moelight.profiles.gguf_families import FIELDS, GRAPH_ARCHITECTURES, GraphArchitecture, architecture_of
from tests.engine import gguf_architectures as architectures
from tests.engine.test_gguf_architectures import HEADERS

LIES: tuple[Any, ...] = (0, 1, -1, 3, 7, 255, 2**31 - 1, 2**32 - 1, 2**63, 0.0, -1.0, 1e-30, 1e30, math.nan, math.inf)
LIES += ("", "yarn", "\x1b[31m", True, False, [], [0], [True, False], [1] * 64, ["a"], [math.nan] * 4)
# Without tensors whose numbers are part of the config, and by a graph.
NAMES = sorted(
    name
    for name, header in HEADERS.items()
    if architectures.architecture(name) in GRAPH_ARCHITECTURES
    and not any(tensor.startswith("rope_f") for tensor in header["tensors"])
    and name != "llama (experts)"
)


def tensors_of(header: dict[str, Any]) -> dict[str, GGMLTensor]:
    offset, tensors = 0, dict[str, GGMLTensor]()
    for tensor, shape in header["tensors"].items():
        nbytes = 4 * math.prod(shape)
        tensors[tensor] = GGMLTensor(
            name=tensor, file=Path("lies.gguf"), type="F32", shape=tuple(shape), offset=offset, nbytes=nbytes
        )
        offset += nbytes
    return tensors


def opened(name: str, changes: dict[str, Any]) -> None:
    """Read a file of the entry ``name`` whose keys have the values ``changes``; raises what its reader raises."""
    header, architecture = HEADERS[name], architectures.architecture(name)
    path, tensors = Path("lies.gguf"), tensors_of(header)
    keys = {**header["keys"], "vocab_size": 320, **changes}
    metadata = {"general.architecture": architecture, **{f"{architecture}.{key}": keys[key] for key in keys}}
    file = GGUFFile(path=path, metadata=metadata, tensors=tensors)
    _, row = architecture_of(file)
    assert isinstance(row, GraphArchitecture)
    model = GraphModel(on_meta(config_of(config_values_of(file, architecture, row), where=str(path))))
    profile_of(model, name="lies", where=str(path))
    weights_in(graph_checkpoint(file, architecture, row, model), model)


def attempt(draw: random.Random) -> str:
    """One lie; empty, or how it is no clear line."""
    name = draw.choice(NAMES)
    keys = HEADERS[name]["keys"]
    changes = {draw.choice(sorted(keys)): draw.choice(LIES) for _ in range(draw.choice((1, 1, 2)))}
    try:
        opened(name, changes)
    except (CheckpointError, ConfigError) as error:
        if "\n" in str(error) or len(str(error)) > 2000 or "\x1b" in str(error):
            return f"{name} {changes}: {error}"
    except MoelightError as error:
        return f"{name} {changes}: {type(error).__name__} {error}"
    return ""


def test_a_field_of_another_kind_is_named() -> None:
    """Families whose configs check no types, of which Kimi Linear is one, would compute with it."""
    keys, row = HEADERS["kimi-linear"]["keys"], GRAPH_ARCHITECTURES["kimi-linear"]
    for key in sorted((FIELDS.keys() & keys.keys()).difference(row.keys)):
        with pytest.raises(ConfigError, match=rf"lies\.gguf: kimi-linear\.{key} is 'a'"):
            opened("kimi-linear", {key: ["a"] if key == "context_length" else "a"})


@pytest.mark.parametrize("name", ["glm5-next", "hy_v4"])
def test_activations_without_a_limit(name: str) -> None:
    """llama.cpp takes 0 for none, which is what a file without the key has."""
    row, header = GRAPH_ARCHITECTURES[name], HEADERS[name]
    metadata = {f"{name}.{key}": value for key, value in header["keys"].items() if not key.startswith("swiglu_clamp")}
    tensors = tensors_of(header)
    file = GGUFFile(path=Path("none.gguf"), metadata={**metadata, f"{name}.vocab_size": 320}, tensors=tensors)
    assert row.more(Metadata(file, name))["swiglu_limit"] == math.inf


def test_an_error_within_transformers_names_the_file() -> None:
    """Its config of DeepSeek-V4 divides by the original context."""
    with pytest.raises(ConfigError, match=r"lies\.gguf: transformers .* cannot read it: float division by zero"):
        opened("deepseek4", {"rope.scaling.original_context_length": 0.0})


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("count", [pytest.param(12, id="usual"), pytest.param(500, marks=pytest.mark.thorough)])
def test_a_lie_is_one_line_or_a_model(count: int) -> None:
    draw = random.Random(count)
    assert not [complaint for complaint in (attempt(draw) for _ in range(count)) if complaint]
