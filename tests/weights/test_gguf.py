"""GGUF files written by the ``gguf`` package: their config, tensors and bytes; and files that are damaged or lie."""

from __future__ import annotations

import random
import shutil
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from moelight.core.errors import CheckpointError, ConfigError
from moelight.hrm.inventory import inventory
from moelight.profiles.families import profile_from_config
from moelight.profiles.gguf import GGML_TYPES, gguf_parts, metadata_numbers, read_gguf
from moelight.profiles.gguf_config import hf_rows
from moelight.profiles.gguf_models import open_gguf
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.stored import StoredWeights
from moelight.weights.stored_matrix import ggml_matrix, gguf_expert_matrix
from tests.weights.gguf_files import CONFIGS, as_written, tiny, write_gguf
from tests.weights.packers import dequantized


def test_types_and_their_sizes_are_those_of_the_package() -> None:
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGML_QUANT_SIZES}
    assert theirs == GGML_TYPES


def test_float_numbers_of_the_metadata_have_places(tmp_path: Path) -> None:
    """As parameters that files have as metadata (Apertus)."""
    path, written = tmp_path / "tiny.gguf", {"xielu.beta": [0.5, -0.25, 3.0], "xielu.eps": [-1e-6]}
    writer = gguf.GGUFWriter(path, "apertus")
    writer.add_array("general.tags", ["first"])
    writer.add_array("xielu.beta", written["xielu.beta"])
    writer.add_uint32("apertus.block_count", 3)
    writer.add_float32("xielu.eps", written["xielu.eps"][0])
    writer.add_tensor("output_norm.weight", torch.ones(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = metadata_numbers(path)
    assert result.keys() == written.keys()
    for key, tensor in result.items():
        values = struct.unpack_from(f"<{tensor.shape[0]}f", path.read_bytes(), tensor.offset)
        assert list(values) == pytest.approx(written[key])


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_file_is_the_model_that_was_written(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    written = write_gguf(path, architecture)
    result = open_gguf(path)
    _, config = tiny(architecture)
    meant = profile_from_config(HFConfig(config, where="config.json"), name="tiny")
    assert replace(result.profile, stored=None) == meant
    assert load_model_profile(str(path)) == result.profile

    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert theirs.keys() == result.file.tensors.keys() == written.keys()
    for name, tensor in result.file.tensors.items():
        assert (tensor.offset, tensor.nbytes) == (theirs[name].data_offset, theirs[name].n_bytes)
        assert (tensor.shape, tensor.type) == (tuple(theirs[name].shape.tolist()[::-1]), theirs[name].tensor_type.name)
    assert len(result.tensors) == len(theirs)

    total = sum(tensor.n_bytes for tensor in theirs.values())
    parts = inventory(result.profile)
    assert parts.total_bytes == total
    experts = sum(int(tensor.n_bytes) for name, tensor in theirs.items() if "_exps." in name)
    assert parts.bytes["experts"] == experts
    sparse = result.profile.num_moe_layers
    assert parts.page_bytes * sparse * result.profile.experts.num_experts == experts  # layers are alike here

    layer = result.profile.num_layers - 1
    for name, stem in (("up", "ffn_up_exps"), ("down", "ffn_down_exps")):
        stack, tensor = written[f"blk.{layer}.{stem}.weight"], result.tensors[name, layer]
        matrix = gguf_expert_matrix(result, layer, name, 2)
        assert torch.equal(dequantized(matrix, max_rows=7), as_written(stack, tensor.type)[2])


@pytest.mark.parametrize("name", ["q", "k"])
def test_rows_of_q_and_k_come_back_to_transformers_order(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama")
    result, (model, _) = open_gguf(path), tiny("llama")
    meant = model.get_parameter(f"model.layers.1.self_attn.{name}_proj.weight").detach()
    matrix = ggml_matrix(result.tensors[name, 1])
    heads = result.heads_of(name)
    assert heads == (4 if name == "q" else 2) and result.heads_of("v") == 0
    assert torch.equal(dequantized(matrix)[hf_rows(matrix.rows, heads)], as_written(meant, "Q8_0"))


def test_older_files_keep_deepseek_kv_b_whole(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "deepseek2", halves=False)
    result = open_gguf(path)
    assert ("kv_b", 0) in result.tensors and ("k_b", 0) not in result.tensors
    assert inventory(result.profile).total_bytes == sum(tensor.nbytes for tensor in result.file.tensors.values())


def test_parts_of_a_file_are_one_model(tmp_path: Path) -> None:
    full, split = tmp_path / "whole.gguf", tmp_path / "split.gguf"
    write_gguf(full, "qwen3moe")
    write_gguf(split, "qwen3moe", shard=12)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) > 2
    for part in (parts[0], parts[-1]):
        result = open_gguf(part)
        assert result.profile.stored == open_gguf(full).profile.stored
        assert {tensor.file for tensor in result.file.tensors.values()} == set(parts)
    parts[1].rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=rf"{parts[1].name}: no such file"):
        open_gguf(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match="says that it is part 2 of"):
        open_gguf(parts[0])


def test_parts_with_other_names_are_known_by_their_numbers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "split.gguf", "qwen3moe", shard=24)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    tensors = {name: tensor.nbytes for name, tensor in open_gguf(parts[0]).file.tensors.items()}
    first = parts[0].rename(tmp_path / "spare")
    parts[1].rename(parts[0])
    first.rename(parts[1])  # two names are exchanged
    assert {name: tensor.nbytes for name, tensor in open_gguf(parts[0]).file.tensors.items()} == tensors
    renamed = [part.rename(tmp_path / f"{letter}.gguf") for letter, part in zip("zyxwvu", parts, strict=False)]
    write_gguf(tmp_path / "other.gguf", "qwen3moe")
    for part in renamed:
        result = open_gguf(part)
        assert {name: tensor.nbytes for name, tensor in result.file.tensors.items()} == tensors
        assert gguf_parts(part) == [renamed[1], renamed[0], *renamed[2:]]
    copy = shutil.copy(renamed[0], tmp_path / "copy.gguf")
    with pytest.raises(CheckpointError, match=r"copy.gguf and z.gguf both say that they are part 1"):
        open_gguf(renamed[1])
    copy.unlink()
    renamed[1].unlink()
    with pytest.raises(CheckpointError, match=rf"one of {len(parts)} parts, of which number 1 is not beside it"):
        open_gguf(renamed[0])


@pytest.mark.parametrize(
    ("kind", "meaning"), [("imatrix", "importance matrix"), ("adapter", "LoRA"), ("mmproj", "encoder of images")]
)
def test_a_file_of_another_kind_is_no_model(kind: str, meaning: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3moe", metadata={"general.type": kind})
    with pytest.raises(CheckpointError, match=meaning):
        open_gguf(path)


def test_experts_of_layers_may_have_several_types(tmp_path: Path) -> None:
    """Counted exactly, and planned for at the largest."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama")
    result = open_gguf(path)
    stored = result.profile.stored
    assert stored is not None and stored.name == "GGUF Q4_0"
    count, page = result.profile.experts.num_experts, stored.page_bytes
    mixed = StoredWeights.of("mixed", "mixed", [[page] * count, [2 * page] * count, [page] * count], 64, stored.dense)
    assert mixed.page_bytes == 2 * page and mixed.mean_page_bytes == -(-4 * page // 3)
    parts = inventory(replace(result.profile, stored=mixed))
    assert parts.bytes["experts"] == inventory(result.profile).bytes["experts"] * 4 // 3


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, "qwen3moe", vocab=True)
    return path.read_bytes()


@pytest.mark.parametrize("attempts", [60, pytest.param(2000, marks=pytest.mark.thorough)])
def test_a_damaged_header_is_a_line_and_allocates_little(attempts: int, small: bytes, tmp_path: Path) -> None:
    path, draw, header = tmp_path / "damaged.gguf", random.Random(7), 8000
    refused = 0
    tracemalloc.start()
    for attempt in range(attempts):
        data = bytearray(small)
        if attempt % 3 == 0:
            del data[draw.randrange(len(data)) :]
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(min(header, max(1, len(data) - 8)))
            change = draw.choice((bytes([draw.randrange(256)]), struct.pack("<Q", draw.choice((1 << 62, 1 << 33, 0)))))
            data[at : at + len(change)] = change
        path.write_bytes(data)
        try:
            open_gguf(path)
        except (CheckpointError, ConfigError) as error:
            refused += 1
            assert str(error).startswith(str(path)) and str(error).isprintable() and len(str(error)) < 600
    _, maximum = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > attempts // 2
    assert maximum < 40 * len(small) + (8 << 20)


@pytest.mark.parametrize(
    ("at", "value", "complaint"),
    [
        (0, b"GGML", "does not begin as a GGUF file does"),
        (4, struct.pack("<I", 1), "GGUF version 1 is not read"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "claims 1152921504606846976 tensors"),
        (16, struct.pack("<Q", 1 << 60), "damaged"),
        (24, struct.pack("<Q", 1 << 60), "claims a text of 1152921504606846976 bytes"),
    ],
)
def test_claims_of_the_header_are_refused(small: bytes, tmp_path: Path, at: int, value: bytes, complaint: str) -> None:
    path = tmp_path / "lies.gguf"
    path.write_bytes(small[:at] + value + small[at + len(value) :])
    with pytest.raises(CheckpointError, match=complaint):
        read_gguf(path)


def entry(data: bytes, name: str) -> int:
    """Where the entry of tensor ``name`` begins behind its name."""
    return data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({0: struct.pack("<I", 9)}, "has 9 dimensions"),
        ({4: struct.pack("<Q", 33)}, "rows of 33 numbers are no blocks of 32"),
        ({4: struct.pack("<Q", 1 << 50)}, "has the sizes"),
        ({4: struct.pack("<Q", 32)}, r"has shape \[64, 32\], and the metadata asks for \[64, 64\]|overlaps|asks for"),
        ({20: struct.pack("<I", 99)}, "has the ggml type 99, which moelight does not know"),
        ({20: struct.pack("<I", 16)}, "rows of 64 numbers are no blocks of 256"),
        ({20: struct.pack("<I", 26)}, "numbers of the ggml type I32 are not read|overlaps|cut short"),
        ({24: struct.pack("<Q", 7)}, "no multiple of 32"),
        ({24: struct.pack("<Q", 0)}, "overlaps"),
        ({24: struct.pack("<Q", 1 << 40)}, "cut short"),
    ],
)
def test_lies_about_a_tensor_name_it(small: bytes, tmp_path: Path, change: dict[int, bytes], complaint: str) -> None:
    name, path = "blk.1.attn_output.weight", tmp_path / "lies.gguf"
    data, start = bytearray(small), entry(small, name)
    for at, value in change.items():
        data[start + at : start + at + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value) and "tensor '" in str(caught.value)


def test_a_tensor_that_is_missing_or_left_over_is_named(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lies.gguf"
    path.write_bytes(small.replace(b"blk.1.attn_k.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(CheckpointError, match=r"tensor 'blk.1.attn_x.weight' .* has no place"):
        open_gguf(path)
    path.write_bytes(small.replace(b"blk.1.attn_k.weight", b"blk.9.attn_k.weight"))
    with pytest.raises(CheckpointError, match=r"tensor 'blk.9.attn_k.weight' .* with 3 layers"):
        open_gguf(path)
    path.write_bytes(small.replace(b"blk.1.attn_k.weight", b"blk.0.attn_k.weight"))
    with pytest.raises(CheckpointError, match="listed twice"):
        open_gguf(path)
    path.write_bytes(small.replace(b"blk.1.attn_k.weight", b"blk.1.ffn_up.weight"))
    with pytest.raises(CheckpointError, match=r"the tensor blk.1.attn_k.weight \[32, 64\] is missing"):
        open_gguf(path)


@pytest.mark.parametrize("name", ["blk.1.attn_k.weight", "qwen3moe.rope.freq_base"])
@pytest.mark.parametrize("byte", [b"\xff", b"\x1b", b"\n"])
def test_a_name_that_is_no_text_is_refused_as_escapes(small: bytes, tmp_path: Path, name: str, byte: bytes) -> None:
    path = tmp_path / "lies.gguf"
    path.write_bytes(small.replace(name.encode(), byte + name.encode()[1:]))
    with pytest.raises(CheckpointError, match="names a key or tensor") as caught:
        open_gguf(path)
    assert str(caught.value).isprintable()


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "plamo9")
    writer.add_tensor("x", torch.zeros(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"'plamo9' is not read; `moelight models` lists the architectures that are"):
        open_gguf(path)
