"""Whatever lies on disk, the answer is weights or one `CheckpointError` that names file and tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import FLOAT32
from moelight.core.errors import CheckpointError
from moelight.hrm.costs import dense_bytes
from moelight.profiles.families import profile_from_dir
from moelight.weights.load import load_dense
from moelight.weights.safetensors import read_header
from moelight.weights.source import Checkpoint
from moelight.weights.tensor_map import locate
from tests.fuzz import fuzz
from tests.hostile.checkpoints import HOSTILE, SINGLE, Hostile, read_raw
from tests.tiny import save_tiny


def load(directory: Path) -> None:
    model = profile_from_dir(directory)
    weight_map = locate(Checkpoint.open(directory), model)
    load_dense(weight_map, model, torch.empty(dense_bytes(model, FLOAT32), dtype=torch.uint8), torch.float32)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
def test_a_hostile_checkpoint_is_one_clear_error(
    hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = hostile.build(tmp_path / "model")
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    told = str(caught.value)
    assert all(text in told for text in hostile.says), told
    assert "\n" not in told
    assert len(told) < 1000
    told.encode("utf-8")
    assert not (tmp_path / "pickle-was-opened").exists()


@pytest.mark.parametrize("layout", ["single", "fused", "sharded", "tied"])
def test_without_its_mutation_the_checkpoint_is_good(layout: str, tmp_path: Path) -> None:
    load(Hostile(name="none", layout=layout, mutate=lambda directory: None, says=()).build(tmp_path))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = save_tiny(tmp_path_factory.mktemp("good"), "mixtral", num_hidden_layers=1)
    return (directory / SINGLE).read_bytes()


FUZZ = fuzz(150)


@FUZZ
@given(data=st.data())
def test_no_damage_to_the_header_escapes(data: st.DataObject, good: bytes, tmp_path: Path) -> None:
    end = 8 + int.from_bytes(good[:8], "little")
    content = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    expect_tensors_or_error(tmp_path, bytes(content))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["F32", "BF16"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["a", "b", "dtype", "shape", "data_offsets", "__metadata__"]) | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@FUZZ
@given(header=JSON, body=st.binary(max_size=32))
def test_no_header_made_of_json_escapes(header: object, body: bytes, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    expect_tensors_or_error(tmp_path, len(text).to_bytes(8, "little") + text + body)


def expect_tensors_or_error(directory: Path, content: bytes) -> None:
    """If the reader accepts ``content``, every tensor lies inside it and none shares a byte with another."""
    file = directory / "fuzz.safetensors"
    file.write_bytes(content)
    try:
        tensors = read_header(file)
    except CheckpointError as error:
        assert str(file) in str(error)
        str(error).encode("utf-8")
        return
    start = 8 + int.from_bytes(content[:8], "little")
    assert start + sum(info.nbytes for info in tensors.values()) == len(content)
    assert all(start <= info.offset <= info.offset + info.nbytes <= len(content) for info in tensors.values())


def test_read_raw_reads_what_the_reader_reads(good: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(good)
    header, data = read_raw(tmp_path / SINGLE)
    header.pop("__metadata__", None)
    tensors = read_header(tmp_path / SINGLE)
    assert tensors.keys() == header.keys()
    for name, info in tensors.items():
        assert good[info.offset : info.offset + info.nbytes] == data[slice(*header[name]["data_offsets"])]
        assert list(info.shape) == header[name]["shape"]
