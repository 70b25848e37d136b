"""Quantised files that were mutated: each is one clear line or a model whose experts compute, and none ends the process
(`make sanitize ARGS='tests/weights/test_mutated.py -m thorough'`)."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moelight.core.errors import BudgetError, InputError, UserError
from moelight.core.policy import Policy
from moelight.core.request import SamplingParams
from moelight.core.schedule import Page
from moelight.engine.engine import Engine
from moelight.formats.ggml import GGML_FORMATS
from moelight.hrm.costs import dense_bytes
from moelight.kernels.ffn import cpu_expert_ffn
from moelight.models.checkpoints import open_model
from moelight.models.expert import expert_arguments
from moelight.models.pages import PagedExperts
from moelight.profiles.gguf_models import open_gguf
from moelight.weights.boxes import AssembledInfo
from moelight.weights.gguf_checkpoint import gguf_checkpoint
from moelight.weights.load import PageReader, dequantised, load_dense
from moelight.weights.tensor_info import TensorInfo
from moelight.weights.tensor_map import OpenCheckpoint
from moelight.weights.torch_dtypes import from_torch
from tests.tiny import save_tiny
from tests.weights.gguf_files import add_vocabulary, blocks_of, write_gguf
from tests.weights.quantised import METHODS, TORCHAO, quantise

DTYPE = torch.bfloat16
ROWS = 3
HIDDEN, HEAD, EXPERTS, VOCABULARY = 256, 64, 2, 64
GRAPHS = (
    "deepseek2",
    "deepseek2 softmax",
    "gpt-oss",
)  # no decoder of ours, and transformers takes seconds to start one
# Dense architectures, and the norms that each layer of them has.
DENSE = {
    "gemma3": ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"),
    "llama": ("attn_norm", "ffn_norm"),
    "qwen3": ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"),
}
DENSE_LAYERS, DENSE_VOCABULARY = 4, 320
GGUF_PARTS = ("metadata", "tensor infos", "numbers", "end")
SHARDS = 10  # pytest's processes may share the attempts
WEIGHTS = "model.safetensors"


def write_blocks(path: Path, kind: str) -> None:
    """A model of one layer whose matrices are random bytes of the ggml type ``kind``."""
    draw, writer = np.random.default_rng(1), gguf.GGUFWriter(path, "qwen3moe")
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    _metadata(writer, layers=1)
    writer.add_vocab_size(VOCABULARY)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(HIDDEN)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(HIDDEN, np.float32))
    for name in ("attn_q_norm", "attn_k_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(HEAD, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((EXPERTS, HIDDEN), np.float32))
    shapes = {f"blk.0.ffn_{matrix}_exps": (EXPERTS, HIDDEN, HIDDEN) for matrix in ("gate", "up", "down")}
    shapes |= {f"blk.0.attn_{matrix}": (HIDDEN, HIDDEN) for matrix in ("q", "k", "v", "output")}
    for name, shape in {**shapes, "token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN)}.items():
        bits = draw.integers(0, 256, (*shape[:-1], shape[-1] // block * size), dtype=np.uint8)
        writer.add_tensor(f"{name}.weight", bits, raw_dtype=number)
    _finish(writer)


def write_dense(path: Path, architecture: str) -> None:
    """A dense model of ``architecture`` with a vocabulary, whose matrices have all ggml types in turn, and numbers of a
    sensible size."""
    draw, writer, kinds = np.random.default_rng(1), gguf.GGUFWriter(path, architecture), cycle(GGML_FORMATS)
    _metadata(writer, layers=DENSE_LAYERS)
    add_vocabulary(writer, DENSE_VOCABULARY)
    if architecture == "gemma3":
        writer.add_sliding_window(16)
    layers = range(DENSE_LAYERS)
    norms = [f"blk.{layer}.{name}" for layer in layers for name in DENSE[architecture]]
    for name in [*norms, "output_norm"]:
        size = HEAD if name.endswith(("q_norm", "k_norm")) else HIDDEN
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    rows_of = {f"blk.{layer}.{name}": HIDDEN for layer in layers for name in matrices}
    rows_of["token_embd"] = DENSE_VOCABULARY
    if architecture != "gemma3":  # which is tied
        rows_of["output"] = DENSE_VOCABULARY
    for name, rows in rows_of.items():
        number = gguf.GGMLQuantizationType[next(kinds)]
        values = draw.normal(scale=0.05, size=(rows, HIDDEN)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", blocks_of(values, number), raw_dtype=number)
    _finish(writer)


def _metadata(writer: gguf.GGUFWriter, layers: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sound files of every format by name: GGUF files, and directories."""
    directory, paths = tmp_path_factory.mktemp("seeds"), dict[str, Path]()
    for kind in GGML_FORMATS:
        paths[kind] = directory / f"{kind}.gguf"
        write_blocks(paths[kind], kind)
    for architecture in GRAPHS:
        paths[architecture] = directory / f"{architecture}.gguf"
        write_gguf(paths[architecture], architecture, experts="MXFP4")
    for architecture in DENSE:
        path = directory / f"dense {architecture}.gguf"
        write_dense(path, architecture)
        paths |= {f"dense {architecture} {activations}": path for activations in ("auto", "int8")}
    sizes = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    plain = save_tiny(
        directory / "plain", "mixtral", num_hidden_layers=1, hidden_size=64, intermediate_size=96, **sizes
    )
    for method, how in {**METHODS, "torchao int8": TORCHAO}.items():
        paths[method] = quantise(plain, directory / method, how)[0]
    return paths


def compute(path: Path, name: str) -> None:
    """Open ``path``, load it, dequantise it and multiply by an expert, as a run does; a dense model answers."""
    if name.startswith("dense "):
        answer(path, name.rpartition(" ")[2])
        return
    if name in GRAPHS:
        for info in gguf_checkpoint(open_gguf(path)).tensors.values():
            for part in _stored_parts(info):
                for matrix in part.matrices:
                    dequantised(matrix, torch.empty(matrix.shape, dtype=DTYPE))
        return
    opened = open_model(str(path))
    profile, weight_map = opened.profile, opened.weight_map
    arena = torch.empty(dense_bytes(profile, from_torch(DTYPE)), dtype=torch.uint8)
    load_dense(weight_map, profile, arena, DTYPE)
    if weight_map.experts.dtype is None:
        for layer in sorted({page.layer for page in weight_map.experts.layout_ids}):
            for experts in (weight_map.experts, weight_map.experts.repacked()):
                _multiply(replace(opened, weight_map=replace(weight_map, experts=experts)), layer)


def answer(path: Path, activations: str) -> None:
    """Generate two tokens with the model ``path``."""
    sizes = {"batch_size": 1, "micro_batch_size": 1, "micro_batch_tokens": 16, "kv_tokens": 64}
    with Engine(Policy(model=str(path), activations=activations, **sizes), device="cpu") as engine:
        (completion,) = engine.generate([[3, 5, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(completion.token_ids) == 2 or completion.error_code == "not_finite", completion


def _stored_parts(info: TensorInfo) -> Iterator[TensorInfo]:
    if isinstance(info, AssembledInfo):
        for part in {id(box.info): box.info for box in info.tiled.boxes}.values():
            yield from _stored_parts(part)
    else:
        assert info.matrices
        yield info


def _multiply(opened: OpenCheckpoint, layer: int) -> None:
    weight_map, profile = opened.weight_map, opened.profile
    slots = torch.empty((profile.experts.num_experts, weight_map.experts.nbytes), dtype=torch.uint8)
    with PageReader(weight_map, DTYPE) as reader:
        for expert, slot in enumerate(slots):
            reader.start(Page(layer=layer, expert=expert), slot)
    result = PagedExperts(weight_map.experts).of_layer(layer, list(slots))
    x, offsets = torch.randn(ROWS, profile.hidden_size).to(DTYPE), torch.tensor((0, ROWS), dtype=torch.int32)
    for number, expert in enumerate(result):  # one of them may lack what others have
        assert cpu_expert_ffn(x, offsets=offsets, **expert_arguments([expert])).shape == x.shape, number


def outcome(path: Path, name: str) -> str:
    """The line of the refusal; empty for a model."""
    try:
        compute(path, name)
    except UserError as error:
        line = str(error)
        assert str(path) in line or isinstance(error, BudgetError | InputError), line
        assert line.isprintable() and len(line) < 1000, line
        return line
    return ""


def overwrite(data: bytearray, at: int, draw: random.Random, *, inserts: bool = False) -> None:
    """Put a few bytes over those of ``data`` that begin ``at``, or before them."""
    change = draw.choice(
        (
            bytes([draw.randrange(256)]),
            draw.randbytes(8),
            struct.pack("<Q", draw.choice((0, 1, 1 << 31, 1 << 33, (1 << 63) - 1))),
            struct.pack("<e", draw.choice((0.0, float("inf"), float("nan"), -1e-7))),
        )
    )
    data[at : at + (0 if inserts else len(change))] = change


def mutated(data: bytes, draw: random.Random, header: int) -> bytes:
    """``data``, mostly its first ``header`` bytes, with a few bytes changed, put in or left out, or cut short."""
    result = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(header if draw.random() < 0.7 else len(result))
        overwrite(result, at, draw, inserts=draw.random() < 1 / 3)
    if draw.random() < 0.15:
        del result[draw.randrange(len(result)) :]
    return bytes(result)


def header_bytes(path: Path) -> int:
    """Bytes of ``path`` before its numbers, about."""
    data = path.read_bytes()
    return 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else min(len(data), 4000)


def mutate(source: Path, out: Path, draw: random.Random) -> Path:
    """A mutated copy of the model ``source`` in ``out``: of a file its bytes, of a directory those of its weights, and
    now and then a number of its quantization_config."""
    if source.is_file():
        path = out / "mutated.gguf"
        path.write_bytes(mutated(source.read_bytes(), draw, header_bytes(source)))
        return path
    path = out / "mutated"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(source, path)
    weights, config = path / WEIGHTS, path / "config.json"
    if draw.random() < 0.3:
        text = config.read_text()
        begin = text.index("quantization_config")
        digits = [at for at in range(begin, len(text)) if text[at].isdigit()]
        at = draw.choice(digits)
        config.write_text(text[:at] + draw.choice(("0", "3", "64", "-1", "1e9", "9" * 20)) + text[at + 1 :])
    else:
        weights.write_bytes(mutated(weights.read_bytes(), draw, header_bytes(weights)))
    return path


def mutate_gguf(source: Path, path: Path, part: str, draw: random.Random) -> Path:
    """A copy ``path`` of a GGUF file whose ``part`` is mutated: up to three fields of its metadata, or of what it says
    of a tensor, with bytes changed or put in; a few of its numbers; or its end, which is missing."""
    reader, result = gguf.GGUFReader(source), bytearray(source.read_bytes())
    fields = {"metadata": [*reader.fields.values()], "tensor infos": [tensor.field for tensor in reader.tensors]}
    if part == "end":
        del result[draw.randrange(len(result)) :]
    elif part == "numbers":
        for _ in range(draw.randrange(1, 200)):
            overwrite(result, draw.randrange(reader.data_offset, len(result) - 8), draw)
    else:
        for field in draw.sample(fields[part], draw.randrange(1, 4)):
            at = field.offset + draw.randrange(sum(values.nbytes for values in field.parts))
            overwrite(result, at, draw, inserts=draw.random() < 0.2)
    path.write_bytes(result)
    return path


def test_seeds_are_sound(seeds: dict[str, Path]) -> None:
    assert {name: outcome(path, name) for name, path in seeds.items()} == dict.fromkeys(seeds, "")


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("attempts", [60, pytest.param(500, marks=pytest.mark.thorough)])
def test_a_mutated_file_is_a_line_or_a_model(attempts: int, shard: int, seeds: dict[str, Path], tmp_path: Path) -> None:
    names, refused = sorted(seeds), 0
    for attempt in range(shard, attempts, SHARDS):
        name, draw = names[attempt % len(names)], random.Random(attempt)
        refused += bool(outcome(mutate(seeds[name], tmp_path, draw), name))
    assert refused


@pytest.mark.parametrize("part", GGUF_PARTS)
@pytest.mark.parametrize("attempts", [12, pytest.param(125, marks=pytest.mark.thorough)])
def test_a_gguf_file_of_which_a_part_is_mutated(
    attempts: int, part: str, seeds: dict[str, Path], tmp_path: Path
) -> None:
    """Numbers are whatever they are: such a file is a model. One that ends early is none."""
    names, refused = sorted(name for name, path in seeds.items() if path.is_file()), 0
    for attempt in range(attempts):
        name, draw = names[attempt * 7 % len(names)], random.Random(f"{part} {attempt}")
        refused += bool(outcome(mutate_gguf(seeds[name], tmp_path / "mutated.gguf", part, draw), name))
    assert refused == {"numbers": 0, "end": attempts}.get(part, refused) and (refused or part == "numbers")


UP = "model.layers.0.block_sparse_moe.experts.1.w3"
Lie = Callable[[torch.Tensor], torch.Tensor]
LIES: dict[str, Lie] = {
    "a row short": lambda part: part[:-1].contiguous(),
    "twice as wide": lambda part: torch.cat((part.view(torch.uint8), part.view(torch.uint8)), -1).view(part.dtype),
    "of another dtype": lambda part: torch.zeros(part.shape, dtype=torch.int16),
}


@pytest.mark.parametrize("lie", [*LIES, "missing"])
@pytest.mark.parametrize("method", METHODS)
def test_a_lie_about_scales_zero_points_or_codes_names_the_tensor(
    method: str, lie: str, seeds: dict[str, Path], tmp_path: Path
) -> None:
    full = load_file(seeds[method] / WEIGHTS)
    for name in [item for item in full if item.startswith(UP) and full[item].ndim]:
        path = tmp_path / name
        shutil.copytree(seeds[method], path)
        tensors = dict(full)
        part = tensors.pop(name)
        if lie != "missing":
            tensors[name] = LIES[lie](part)
        save_file(tensors, path / WEIGHTS, {"format": "pt"})
        refusal = outcome(path, method)
        # Without desc_act columns are in the order of their groups, whether a tensor says so or none.
        assert UP in refusal or (lie == "missing" and name.endswith("g_idx") and not refusal), (name, lie)


def dimensions(data: bytes, name: str) -> int:
    """Where the sizes of tensor ``name`` begin in a GGUF file."""
    return data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + 4


@pytest.mark.parametrize("kind", GGML_FORMATS)
def test_a_lie_about_blocks_names_the_tensor(kind: str, seeds: dict[str, Path], tmp_path: Path) -> None:
    data, path, name = seeds[kind].read_bytes(), tmp_path / "lies.gguf", "blk.0.ffn_up_exps.weight"
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    at = dimensions(data, name)
    for position, size in ((0, HIDDEN + 1), (0, HIDDEN + block), (1, HIDDEN - 1), (2, EXPERTS + 1), (2, 1 << 40)):
        lying = bytearray(data)
        struct.pack_into("<Q", lying, at + 8 * position, size)
        path.write_bytes(lying)
        assert "tensor '" in outcome(path, kind) and "blk.0." in outcome(path, kind)
    path.write_bytes(data[:-1])
    assert "tensor 'output.weight'" in outcome(path, kind) and "cut short" in outcome(path, kind)
