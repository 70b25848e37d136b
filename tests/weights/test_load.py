"""What reaches memory is bit for bit what transformers loads, from every layout, in every dtype, by any thread."""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moelight.core.dtypes import BFLOAT16, FLOAT32
from moelight.core.errors import CheckpointError
from moelight.core.schedule import Page
from moelight.core.units import MiB
from moelight.hrm.costs import dense_bytes, page_bytes
from moelight.kernels.matrices import Stack, floats_of
from moelight.kernels.reads import FileReader, ReadPart
from moelight.models.pages import PagedExperts
from moelight.profiles.families import profile_from_dir
from moelight.profiles.model import ModelProfile
from moelight.profiles.tensor_list import pages
from moelight.weights import load
from moelight.weights.load import LayerWeights, ModelWeights, PageReader, load_dense, page_files
from moelight.weights.source import Checkpoint
from moelight.weights.tensor_map import WeightMap, locate
from moelight.weights.torch_dtypes import from_torch
from tests.fuzz import fuzz
from tests.hostile.checkpoints import rename, stored
from tests.process import descriptors
from tests.tiny import FAMILIES, hf_model, save_tiny

LAYOUTS = {
    "single": {},
    "sharded": {"sharded": True},
    "fused": {"fused": True},
    "fused and sharded": {"fused": True, "sharded": True},
    "tied": {"tie": True},
    "bfloat16": {"dtype": "bfloat16"},
}
State = dict[str, torch.Tensor]


def opened(directory: Path) -> tuple[WeightMap, ModelProfile]:
    model = profile_from_dir(directory)
    return locate(Checkpoint.open(directory), model), model


def loaded(weight_map: WeightMap, model: ModelProfile, dtype: torch.dtype) -> ModelWeights:
    arena = torch.full((dense_bytes(model, from_torch(dtype)),), 0xFF, dtype=torch.uint8)
    return load_dense(weight_map, model, arena, dtype)


def expected_layer(state: State, layer: int, biases: bool) -> dict[str, torch.Tensor | None]:
    """The fields of `LayerWeights` out of a state dict of transformers 5 (experts fused, router in ``mlp.gate``)."""
    at = f"model.layers.{layer}."
    attention = at + "self_attn."
    gate = state.get(at + "mlp.gate_proj.weight")
    return {
        "input_norm": state[at + "input_layernorm.weight"],
        "qkv": torch.cat([state[f"{attention}{name}_proj.weight"] for name in "qkv"]),
        "qkv_bias": torch.cat([state[f"{attention}{name}_proj.bias"] for name in "qkv"]) if biases else None,
        "q_norm": state.get(attention + "q_norm.weight"),
        "k_norm": state.get(attention + "k_norm.weight"),
        "o": state[attention + "o_proj.weight"],
        "o_bias": state.get(attention + "o_proj.bias"),
        "post_norm": state[at + "post_attention_layernorm.weight"],
        "router": state.get(at + "mlp.gate.weight"),
        "dense_gate_up": None if gate is None else torch.cat([gate, state[at + "mlp.up_proj.weight"]]),
        "dense_down": state.get(at + "mlp.down_proj.weight"),
    }


def read_into(reader: PageReader, page: Page, dest: torch.Tensor, begin: int = 0) -> None:
    if (reading := reader.start(page, dest, begin)) is not None:
        reading.wait()


def floats(weight: torch.Tensor | Stack) -> torch.Tensor:
    result = weight if isinstance(weight, torch.Tensor) else floats_of(weight)
    assert result is not None
    return result


def check_layer(weights: LayerWeights, expected: dict[str, torch.Tensor | None], dtype: torch.dtype) -> None:
    for field in fields(LayerWeights):
        ours, theirs = getattr(weights, field.name), expected[field.name]
        assert (ours is None) == (theirs is None), field.name
        if theirs is not None:
            assert torch.equal(floats(ours), theirs.to(dtype)), field.name


def check_all(directory: Path, dtype: torch.dtype, *, biases: bool = False) -> None:
    state = hf_model(directory).state_dict()
    weight_map, model = opened(directory)
    weights = loaded(weight_map, model, dtype)
    assert torch.equal(floats(weights.embed), state["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(floats(weights.head), state["lm_head.weight"].to(dtype))
    assert torch.equal(weights.final_norm, state["model.norm.weight"].to(dtype))
    for layer, layer_weights in enumerate(weights.layers):
        check_layer(layer_weights, expected_layer(state, layer, biases), dtype)
    assert tuple(weight_map.experts.pieces) == pages(model)
    slot = torch.empty(page_bytes(model, from_torch(dtype)), dtype=torch.uint8)
    paged = PagedExperts(weight_map.experts.read_as(from_torch(dtype).safetensors))
    with PageReader(weight_map, dtype) as reader:
        for page in weight_map.experts.pieces:
            read_into(reader, page, slot)
            (expert,) = paged.of_layout(0, [slot])
            experts = f"model.layers.{page.layer}.mlp.experts."
            assert torch.equal(expert.gate_up, state[experts + "gate_up_proj"][page.expert].to(dtype))
            assert torch.equal(expert.down, state[experts + "down_proj"][page.expert].to(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_gives_what_transformers_loads(family: str, layout: str, tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, family, **LAYOUTS[layout])
    weight_map, _ = opened(directory)
    check_all(directory, torch.bfloat16 if weight_map.dtype == BFLOAT16 else torch.float32)


@pytest.mark.parametrize("on_disk", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_are_rounded_as_torch_rounds(on_disk: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check_all(save_tiny(tmp_path, "mixtral", dtype=on_disk), dtype)


def test_float16_over_bfloat16_keeps_the_bytes_of_pages_and_names_what_it_does_not_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit for bit the file's pages, read past the cache; dense tensors rounded, but one that float16 does not hold."""
    path = save_tiny(tmp_path, "mixtral", dtype="bfloat16", num_hidden_layers=3) / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}
    expert = "model.layers.1.block_sparse_moe.experts.4.w2.weight"
    state[expert][3, 5], state["model.layers.2.self_attn.o_proj.weight"][0, 0] = -1e5, 7e4
    save_file(state, path, metadata={"format": "pt"})
    weight_map, model = opened(tmp_path)
    weights = loaded(weight_map, model, torch.float16)
    assert floats(weights.layers[2].o).dtype == torch.bfloat16
    assert torch.equal(floats(weights.layers[2].o), state["model.layers.2.self_attn.o_proj.weight"])
    assert torch.equal(floats(weights.layers[1].o), state["model.layers.1.self_attn.o_proj.weight"].half())
    assert torch.equal(floats(weights.embed), state["model.embed_tokens.weight"].half())
    with FileReader(page_files(weight_map)) as files:
        direct = PageReader(
            weight_map,
            torch.bfloat16,
            lambda parts: files.submit([ReadPart(*part) for part in parts]),
            mixed=True,
        )
        with direct as reader:
            for number, page in enumerate([*weight_map.experts.pieces, *weight_map.experts.pieces]):
                result = b"".join(
                    state[info.name].view(torch.int16).numpy().tobytes() for info in weight_map.experts.pieces[page]
                )
                assert read_page(reader, page).numpy().tobytes() == result
                assert reader.wide_layers == ({1} if number >= 6 + 4 else set())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("'model.layers.2.self_attn.o_proj.weight': beyond the range of float16")
    assert expert in told[1]


@pytest.mark.parametrize(
    ("largest", "beyond"),
    [
        (65280.0, False),
        (65536.0, True),
        (math.inf, True),
        (math.nan, True),
        (2.0**-14, False),
        (2.0**-15, True),
        (0.0, False),
    ],
)
def test_the_range_of_float16_is_told_by_the_largest_number(largest: float, beyond: bool) -> None:
    values = torch.zeros(70_001, dtype=torch.bfloat16)
    for position, sign in ((0, 1), (40_000, -1), (70_000, 1)):
        values[position] = sign * largest
        assert load.exceeds_float16(values) == beyond
        values[position] = 0
    assert not load.exceeds_float16(values[:0])


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_biases_are_stacked_like_their_matrices(family: str, tmp_path: Path) -> None:
    check_all(save_tiny(tmp_path, family, attention_bias=True), torch.float32, biases=True)


def test_a_bounce_much_smaller_than_a_tensor_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "BOUNCE_BYTES", 64)
    check_all(save_tiny(tmp_path, "mixtral", num_hidden_layers=1), torch.bfloat16)


def test_weights_lie_in_the_arena_aligned_and_without_overlap(tmp_path: Path) -> None:
    weight_map, model = opened(save_tiny(tmp_path, "qwen3_moe", attention_bias=True))
    arena = torch.empty(dense_bytes(model, FLOAT32) + 100, dtype=torch.uint8)
    arena[-100:] = 0x5A
    weights = load_dense(weight_map, model, arena, torch.float32)
    items = [weights.embed, weights.head, weights.final_norm]
    for layer in weights.layers:
        items += [item for field in fields(layer) if (item := getattr(layer, field.name)) is not None]
    tensors = [floats(item) for item in items]
    spans = sorted((t.data_ptr() - arena.data_ptr(), t.nbytes) for t in tensors)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(start + size <= later for (start, size), (later, _) in itertools.pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= dense_bytes(model, FLOAT32)
    assert bool((arena[-100:] == 0x5A).all())


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    weight_map, model = opened(save_tiny(tmp_path, "mixtral", tie=True))
    weights = loaded(weight_map, model, torch.float32)
    assert weights.head is weights.embed


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}),
        lambda tensors: rename(tensors, "model.embed_tokens.weight", "lm_head.weight"),
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": ("I64", [1], bytes(8))}),
    ],
    ids=["stored twice", "stored as the head", "old rotary buffers"],
)
def test_harmless_habits_of_old_saves_are_read(change: Callable[[dict[str, object]], None], tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "mixtral", tie=True)
    before = loaded(*opened(directory), torch.float32)
    stored(change)(directory)
    after = loaded(*opened(directory), torch.float32)
    assert torch.equal(floats(after.embed), floats(before.embed))


@pytest.fixture
def reader(tmp_path: Path) -> PageReader:
    weight_map, _ = opened(save_tiny(tmp_path, "mixtral", num_hidden_layers=1))
    with PageReader(weight_map, torch.bfloat16) as reader:
        yield reader


def read_page(reader: PageReader, page: Page) -> torch.Tensor:
    slot = torch.empty(reader.page_bytes, dtype=torch.uint8)
    read_into(reader, page, slot)
    return slot


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("small"), "mixtral", num_hidden_layers=1)


@fuzz(40)
@given(data=st.data())
@pytest.mark.parametrize("way", ["past the cache", "through the cache", "converted"])
def test_any_part_of_a_page_is_that_part(small: Path, way: str, data: st.DataObject) -> None:
    weight_map, model = opened(small)
    dtype = torch.bfloat16 if way == "converted" else torch.float32
    with FileReader(page_files(weight_map)) as files, PageReader(weight_map, dtype) as plain:
        past = PageReader(weight_map, dtype, lambda parts: files.submit([ReadPart(*part) for part in parts]))
        with past:
            reader = plain if way == "through the cache" else past
            page = Page(layer=0, expert=data.draw(st.integers(0, model.experts.num_experts - 1)))
            full, values = read_page(plain, page), reader.page_bytes // dtype.itemsize
            begin = data.draw(st.integers(0, values - 1)) * dtype.itemsize
            end = data.draw(st.integers(begin // dtype.itemsize + 1, values)) * dtype.itemsize
            part = torch.zeros(end - begin, dtype=torch.uint8)
            read_into(reader, page, part, begin)
            assert torch.equal(part, full[begin:end])


def test_a_page_past_the_cache_that_cannot_be_read_names_file_and_tensor(tmp_path: Path) -> None:
    weight_map, _ = opened(save_tiny(tmp_path, "mixtral", num_hidden_layers=1))
    with FileReader(page_files(weight_map)) as files:
        reader = PageReader(weight_map, torch.float32, lambda parts: files.submit([ReadPart(*part) for part in parts]))
        os.truncate(tmp_path / "model.safetensors", 1000)
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors: tensor '.*experts.*' cannot be read .*ends early"
        ):
            read_page(reader, Page(layer=0, expert=0))
        reader.close()


def test_threads_read_at_the_same_time(reader: PageReader) -> None:
    wanted = [Page(layer=0, expert=expert) for expert in range(6)]
    alone = [read_page(reader, page) for page in wanted]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            together = list(pool.map(lambda page: read_page(reader, page), wanted))
            assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_short_reads_are_continued(reader: PageReader, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(layer=0, expert=3)
    full = read_page(reader, page)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:999]], offset))
    assert torch.equal(read_page(reader, page), full)


def test_an_input_output_error_names_file_and_tensor(reader: PageReader, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor '.*experts\.2\.w1\.weight'.*Input/output error"
    ):
        read_page(reader, Page(layer=0, expert=2))


def test_a_file_cut_after_it_was_opened_is_told(reader: PageReader, tmp_path: Path) -> None:
    os.truncate(tmp_path / "model.safetensors", 1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor '.*' ends early"):
        read_page(reader, Page(layer=0, expert=0))


def test_a_file_gone_before_it_is_opened_is_told(tmp_path: Path) -> None:
    weight_map, _ = opened(save_tiny(tmp_path, "mixtral"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be opened"):
        PageReader(weight_map, torch.float32)


def test_a_reader_keeps_one_descriptor_a_file_and_closes_it(tmp_path: Path) -> None:
    weight_map, _ = opened(save_tiny(tmp_path, "mixtral", sharded=True))
    files = {extent.file for extents in weight_map.experts.pieces.values() for extent in extents}
    with PageReader(weight_map, torch.float32):
        opened_files = [file for file in descriptors().values() if file.parent == tmp_path]
        assert len(opened_files) == len(files) > 1
    assert not [file for file in descriptors().values() if file.parent == tmp_path]


@pytest.mark.parametrize(
    "arena", [torch.empty(10, dtype=torch.uint8), torch.empty(10**6), torch.empty(2 * 10**6, dtype=torch.uint8)[::2]]
)
def test_memory_that_does_not_fit_is_refused(arena: torch.Tensor, tmp_path: Path) -> None:
    weight_map, model = opened(save_tiny(tmp_path, "mixtral"))
    with pytest.raises(ValueError, match="must be contiguous uint8"):
        load_dense(weight_map, model, arena, torch.float32)


def resident_bytes(which: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise AssertionError(which)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 60 MB in bfloat16, almost all of it in two matrices."""
    sizes = {"vocab_size": 40_000, "hidden_size": 384, "head_dim": 64, "num_hidden_layers": 1}
    return save_tiny(tmp_path_factory.mktemp("wide"), "mixtral", dtype="bfloat16", **sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loading_never_holds_two_copies(dtype: torch.dtype, wide: Path) -> None:
    weight_map, model = opened(wide)
    arena = torch.zeros(dense_bytes(model, from_torch(dtype)), dtype=torch.uint8)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pytest.skip("this kernel does not let the peak be reset")
    before = resident_bytes("VmRSS")
    load_dense(weight_map, model, arena, dtype)
    assert arena.numel() > 55 * MiB
    assert resident_bytes("VmHWM") - before < 12 * MiB
