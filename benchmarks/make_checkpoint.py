"""Writes a random-weight checkpoint with a tokenizer, of any model profile, at any size: for machines without a hub.

    python benchmarks/make_checkpoint.py OUT --model mixtral-8x7b --hidden 1024 --intermediate 3584 --layers 10

The files are what a download would be (Hugging Face names, safetensors shards under an index, ``config.json``,
byte-level BPE tokenizer with a chat template), and transformers loads them. Written shard by shard and piece by piece,
so 100 GB take no more memory than 1 GB. The same arguments give the same bytes, whatever the number of cores.
``--dynamic`` writes a GGUF file instead, in which the types of experts differ (`runner/dynamic_file.py`). The last line
of the output is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import statistics
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moelight.core.dtypes import DTYPES, DType, dtype_named
from moelight.core.errors import ConfigError, UserError
from moelight.core.units import format_bytes, parse_bytes
from moelight.profiles.families import FAMILIES, profile_from_config
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile, not_computed
from moelight.profiles.model_files import model_config
from moelight.profiles.tensor_list import StoredTensor, dense_tensors, page_shapes

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>")
LEAST_VOCABULARY = 256 + len(SPECIALS)
FAMILY_PROFILES = {"qwen3_moe": "qwen3-30b-a3b", "olmoe": "olmoe-1b-7b"}
# The models of the benchmarks: of 0.9 billion parameters, few large experts and many small ones, one of them with norms
# over all heads; and two with Mixtral's proportions for disks, of 6.6 GB and, in few large layers, of 6.2 GB.
_SIZES = ("layers", "hidden", "intermediate", "experts", "top_k", "heads", "kv_heads", "head_dim", "vocab")
SHAPES = {
    "mixtral-0p9b": ("mixtral-8x7b", (10, 1024, 3584, 8, 2, 16, 4, 64, 8192)),
    "qwen3moe-0p9b": ("qwen3-30b-a3b", (11, 1024, 384, 64, 8, 16, 4, 128, 8192)),
    "olmoe-0p9b": ("olmoe-1b-7b", (11, 1024, 384, 64, 8, 16, 16, 64, 8192)),
    "mixtral-6g": ("mixtral-8x7b", (16, 1536, 5376, 8, 2, 12, 3, 128, 16000)),
    "mixtral-6g-9l": ("mixtral-8x7b", (9, 2048, 6656, 8, 2, 16, 4, 128, 16000)),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_PIECE = 1 << 22
_LEVELS = 1 << 16
_MERGED_VOCABULARY = 8192
_TRAINING_FILES = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomTensor:
    """A tensor to be written: normal with deviation ``std`` around 0, or all ones where ``std`` is None.

    A ``hole`` takes no room on the disk and reads as zeros.
    """

    name: str
    shape: tuple[int, ...]
    std: float | None
    hole: bool = False

    @property
    def elements(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What `make_checkpoint` wrote; ``bytes`` counts the weights."""

    out: str
    model_type: str
    dtype: str
    parameters: int
    bytes: int
    shards: int
    wall_s: float


def make_checkpoint(
    out: Path,
    config: dict[str, Any],
    *,
    dtype: str = "bfloat16",
    fused: bool = False,
    shard_size: int = 500_000_000,
    seed: int = 0,
    hollow: bool = False,
) -> Written:
    """Write a random checkpoint of the model that ``config`` (raw ``config.json`` values) describes into ``out``.

    Args:
        out: a directory that is not there yet, or holds no weights.
        fused: store the experts of a layer as one tensor each, under transformers 5's names.
        shard_size: bytes of weights in one file, at most (a larger tensor has a file of its own).
        hollow: leave the experts out: holes that take no room and read as zeros, where the file system knows them.

    Raises:
        ConfigError: the config is not that of a known family, the vocabulary is too small, or ``out`` is in use.
    """
    start = time.perf_counter()
    config = {**config, "torch_dtype": dtype, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config.pop("dtype", None)
    model = profile_from_config(HFConfig(config, where="make_checkpoint"), name=out.name)
    if model.vocab_size < LEAST_VOCABULARY:
        raise ConfigError(f"vocab_size {model.vocab_size} is too small for a byte-level vocabulary: {LEAST_VOCABULARY}")
    if out.exists() and (not out.is_dir() or any(out.glob("*.safetensors*"))):
        raise ConfigError(f"{out} is in use; name a new directory")
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {key: config[key] for key in config if key.endswith("_token_id")})
    write_tokenizer(out, model.vocab_size)
    tensors = list(_tensors(model, fused=fused, hollow=hollow))
    format_ = dtype_named(dtype)
    shards = write_weights(out, tensors, format_, shard_size=shard_size, seed=seed)
    parameters = sum(tensor.elements for tensor in tensors)
    return Written(
        out=str(out),
        model_type=model.model_type,
        dtype=dtype,
        parameters=parameters,
        bytes=parameters * format_.itemsize,
        shards=shards,
        wall_s=round(time.perf_counter() - start, 3),
    )


def make_shape(name: str, directory: Path) -> Path:
    """The checkpoint ``name`` of `SHAPES`, in bfloat16, in ``directory``: made unless it is there; its place."""
    out = directory / name
    if not (out / "config.json").exists():
        unfinished = directory / f"{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        make_checkpoint(unfinished, scaled_config(name), shard_size=2_000_000_000)
        unfinished.rename(out)
    return out


def scaled_config(model: str, **changes: int | bool | None) -> dict[str, Any]:
    """The raw config of ``model`` (one of `SHAPES`, a profile, a family, a directory) with ``changes``; None leaves a
    value as it is.

    Known changes: ``layers hidden intermediate experts top_k heads kv_heads head_dim vocab tie``.

    Raises:
        ConfigError: no such model, or one the engine cannot run; or the hidden size is not divisible by the heads and
            no head size is given.
    """
    changes = {name: value for name, value in changes.items() if value is not None}
    if model in SHAPES:
        model, sizes = SHAPES[model]
        changes = {**dict(zip(_SIZES, sizes, strict=True)), **changes}
    config = model_config(FAMILY_PROFILES.get(model, model))
    if missing := ", ".join(not_computed(profile_from_config(HFConfig(config, where=model), name=model))):
        raise ConfigError(f"{model}: the native decoder does not compute {missing}")
    family = FAMILIES.get(config["model_type"])
    keys = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "intermediate": family.expert_width_key,
        "experts": "num_local_experts" if "num_local_experts" in config else "num_experts",
        "top_k": "num_experts_per_tok",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocab": "vocab_size",
        "tie": "tie_word_embeddings",
    }
    config.update({keys[name]: value for name, value in changes.items()})
    if config.get("head_dim") is None and config["hidden_size"] % config["num_attention_heads"]:
        raise ConfigError(
            f"hidden size {config['hidden_size']} is not a multiple of the {config['num_attention_heads']} heads; "
            "change --heads, or give --head-dim"
        )
    return config


def write_weights(out: Path, tensors: list[RandomTensor], dtype: DType, *, shard_size: int, seed: int) -> int:
    """Write ``tensors`` into one or more safetensors files of at most ``shard_size`` bytes; returns how many."""
    shards = list(_shards(tensors, dtype, shard_size))
    weight_map = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for index, shard in enumerate(shards):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
            with open(out / name, "wb") as file:
                file.write(_header(shard, dtype))
                for tensor in shard:
                    if tensor.hole:
                        file.truncate(file.seek(tensor.elements * dtype.itemsize, os.SEEK_CUR))
                    else:
                        _write_tensor(file, tensor, dtype, seed, pool)
            weight_map.update({tensor.name: name for tensor in shard})
    if len(shards) > 1:
        total = sum(tensor.elements for tensor in tensors) * dtype.itemsize
        index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(out / "model.safetensors.index.json", index_file)
    return len(shards)


def write_tokenizer(out: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer of exactly ``vocab_size`` ids, with a chat template.

    Merges are learned from Python's own library; ids beyond the learned ones decode to ``<|unused N|>``.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, _MERGED_VOCABULARY),
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library = sorted(Path(os.__file__).parent.glob("*.py"))[:_TRAINING_FILES]
    tokenizer.train_from_iterator((path.read_text(encoding="utf-8") for path in library), trainer)
    learned = json.loads(tokenizer.to_str())
    vocabulary = learned["model"]["vocab"]
    vocabulary.update({f"<|unused {index}|>": index for index in range(len(vocabulary), vocab_size)})
    padded = Tokenizer.from_str(json.dumps(learned))
    padded.decoder = decoders.ByteLevel()
    padded.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIALS[PAD],
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(out / "tokenizer_config.json", settings)


def _tensors(model: ModelProfile, *, fused: bool, hollow: bool) -> Iterator[RandomTensor]:
    """Every tensor of ``model`` under its name on disk, layer by layer."""
    parts = [part for stored in dense_tensors(model) for part in stored.parts]
    last_of_layer = {part.layer: part for part in parts if part.layer >= 0}
    for part in parts:
        spellings = getattr(model.names, part.name)
        name = spellings[-1 if fused else 0].format(layer=part.layer)
        yield RandomTensor(name=name, shape=part.shape, std=_deviation(part, model))
        if part.layer >= 0 and model.moe_layers[part.layer] and part is last_of_layer[part.layer]:
            for tensor in _experts(model, part.layer, fused=fused):
                yield replace(tensor, hole=hollow)


def _experts(model: ModelProfile, layer: int, *, fused: bool) -> Iterator[RandomTensor]:
    names, shapes, count = model.names, page_shapes(model), model.experts.num_experts
    if fused:
        (width, hidden), down = shapes["gate"], shapes["down"]
        gate_up_name, down_name = names.fused_gate_up[0].format(layer=layer), names.fused_down[0].format(layer=layer)
        yield RandomTensor(name=gate_up_name, shape=(count, 2 * width, hidden), std=0.02)
        yield RandomTensor(name=down_name, shape=(count, *down), std=0.02)
        return
    for expert in range(count):
        for part, shape in shapes.items():
            name = getattr(names, part)[0].format(layer=layer, expert=expert)
            yield RandomTensor(name=name, shape=shape, std=0.02)


def _deviation(part: StoredTensor, model: ModelProfile) -> float | None:
    """Deviations at which different prompts have different continuations; norms are ones."""
    if part.name.endswith("norm"):
        return None
    if part.name == "embed":
        return 0.02 if model.tie_embeddings else 1.0
    return 0.05 if part.name in ("head", "router") else 0.02


def _shards(tensors: list[RandomTensor], dtype: DType, shard_size: int) -> Iterator[list[RandomTensor]]:
    shard: list[RandomTensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.elements * dtype.itemsize
        if shard and size + nbytes > shard_size:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += nbytes
    yield shard


def _header(shard: list[RandomTensor], dtype: DType) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        end = offset + tensor.elements * dtype.itemsize
        entries[tensor.name] = {"dtype": dtype.safetensors, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: BinaryIO, tensor: RandomTensor, dtype: DType, seed: int, pool: ThreadPoolExecutor) -> None:
    """Pieces are drawn by all cores, each from its own stream, and written in order, one batch of pieces at a time."""
    pieces = [
        (index, min(_PIECE, tensor.elements - begin)) for index, begin in enumerate(range(0, tensor.elements, _PIECE))
    ]
    levels, batch = _levels(tensor, dtype), os.cpu_count() or 1
    for first in range(0, len(pieces), batch):
        file.writelines(pool.map(lambda piece: _draw(levels, tensor, seed, *piece), pieces[first : first + batch]))


def _draw(levels: np.ndarray, tensor: RandomTensor, seed: int, piece: int, count: int) -> memoryview:
    """``count`` numbers of piece ``piece`` of ``tensor`` as they lie on disk: random picks of ``levels``."""
    stream = np.random.Generator(np.random.SFC64([seed, zlib.crc32(tensor.name.encode()), piece]))
    return levels[stream.integers(len(levels), size=count, dtype=np.uint16)].data.cast("B")


@functools.cache
def _normal_levels() -> np.ndarray:
    """65536 equally likely values of the standard normal distribution: a table is ten times faster than drawing."""
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((index + 0.5) / _LEVELS) for index in range(_LEVELS)], dtype=np.float32)


def _levels(tensor: RandomTensor, dtype: DType) -> np.ndarray:
    """What the numbers of ``tensor`` are picked from, as they lie on disk (bfloat16 as its 16 bits)."""
    ones = np.ones(_LEVELS, dtype=np.float32)
    values = ones if tensor.std is None else _normal_levels() * np.float32(tensor.std)
    if dtype.name != "bfloat16":
        return values.astype({"float32": "<f4", "float16": "<f2"}[dtype.name])
    bits = values.view(np.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)  # to the nearest bfloat16, ties to even
    return (bits >> 16).astype("<u2")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory, or with --dynamic file, to write")
    parser.add_argument(
        "--model",
        default="mixtral-8x7b",
        help="shape of the benchmarks, model profile, family, YAML file or model directory",
    )
    for name in ("layers", "hidden", "intermediate", "experts", "top-k", "heads", "kv-heads", "head-dim", "vocab"):
        parser.add_argument(f"--{name}", type=int, help="instead of the model's own")
    parser.add_argument("--tie", action="store_true", default=None, help="tie the output matrix to the embeddings")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--shard-size", default="500MB", help="bytes of weights in one file, for example 4GB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fused", action="store_true", help="one tensor for all experts of a layer")
    parser.add_argument("--hollow", action="store_true", help="leave the experts out: holes that read as zeros")
    parser.add_argument(
        "--dynamic",
        nargs="?",
        const="dynamic",
        metavar="TYPE",
        help="a GGUF file with experts of several types, or all of TYPE; of the options, sizes count",
    )
    return parser.parse_args()


def main() -> int:
    """The command line; returns its exit code."""
    options = vars(_arguments())
    out, model, dynamic = (options.pop(name) for name in ("out", "model", "dynamic"))
    writing = {name: options.pop(name) for name in ("dtype", "fused", "seed", "hollow")}
    try:
        shard_size = parse_bytes(options.pop("shard_size"), label="--shard-size")
        if dynamic:
            from runner.dynamic_file import make_dynamic

            print(json.dumps(make_dynamic(out, scaled_config(model, **options), dynamic)))
            return 0
        written = make_checkpoint(out, scaled_config(model, **options), shard_size=shard_size, **writing)
    except (UserError, OSError) as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 2
    rate = format_bytes(int(written.bytes / written.wall_s))
    print(
        f"{written.parameters / 1e9:.3f} billion parameters, {format_bytes(written.bytes)} in {written.shards} files, "
        f"{written.wall_s:.1f} s ({rate}/s): {written.out}"
    )
    print(json.dumps(asdict(written)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
