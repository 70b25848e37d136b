"""Checkpoints that are damaged, contradictory or malicious: a good tiny one, and one mutation each.

`HOSTILE` is the whole list; `Hostile.build` makes one. Every one must end in one clear error before any generation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelight.profiles.model import MOST_EXPERTS, MOST_LAYERS
from tests.tiny import save_tiny

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"
ROUTER = "model.layers.1.block_sparse_moe.gate.weight"
W1 = "model.layers.2.block_sparse_moe.experts.4.w1.weight"

Header = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hostile:
    """``mutate`` spoils the good checkpoint of ``layout`` in a directory; the error must contain each of ``says``."""

    name: str
    mutate: Callable[[Path], None]
    says: tuple[str, ...]
    layout: str = "single"

    def build(self, directory: Path) -> Path:
        """Write the good checkpoint into ``directory`` and spoil it."""
        save_tiny(
            directory,
            "mixtral",
            fused=self.layout == "fused",
            sharded=self.layout == "sharded",
            tie=self.layout == "tied",
        )
        self.mutate(directory)
        return directory


def read_raw(file: Path) -> tuple[Header, bytes]:
    """The header of a good safetensors file, and the bytes after it."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_raw(file: Path, header: object, data: bytes) -> None:
    """Write a safetensors file with ``header``, good or not: an object to be dumped, or the bytes themselves."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def whole_file(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A mutation of all bytes of the weights file."""

    def mutate(directory: Path) -> None:
        file = directory / SINGLE
        file.write_bytes(change(file.read_bytes()))

    return mutate


def header_is(text: bytes) -> Callable[[Path], None]:
    """A mutation that puts ``text`` in place of the header."""
    return lambda directory: write_raw(directory / SINGLE, text, read_raw(directory / SINGLE)[1])


def header(change: Callable[[Header], None], *, more: bytes = b"") -> Callable[[Path], None]:
    """A mutation of the header; ``more`` bytes are put after the data."""

    def mutate(directory: Path) -> None:
        values, data = read_raw(directory / SINGLE)
        change(values)
        write_raw(directory / SINGLE, values, data + more)

    return mutate


def entry(name: str, **changes: Any) -> Callable[[Path], None]:
    """A mutation of one tensor's entry."""
    return header(lambda values: values[name].update(changes))


def stored(change: Callable[[dict[str, tuple[str, list[int], bytes]]], None]) -> Callable[[Path], None]:
    """A mutation of the tensors themselves, name to (dtype, shape, bytes); the file stays a valid one."""

    def mutate(directory: Path) -> None:
        values, data = read_raw(directory / SINGLE)
        values.pop("__metadata__", None)
        tensors = {n: (v["dtype"], v["shape"], data[slice(*v["data_offsets"])]) for n, v in values.items()}
        change(tensors)
        entries, body = {}, b""
        for name, (dtype, shape, content) in tensors.items():
            end = len(body) + len(content)
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), end]}
            body += content
        write_raw(directory / SINGLE, entries, body)

    return mutate


def config(**changes: Any) -> Callable[[Path], None]:
    """A mutation of ``config.json``."""
    return lambda directory: edit_json(directory / "config.json", lambda values: values.update(changes))


def index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A mutation of the index's ``weight_map``."""
    return lambda directory: edit_json(directory / INDEX, lambda values: change(values["weight_map"]))


def index_is(text: bytes) -> Callable[[Path], None]:
    """A mutation that puts ``text`` in place of the index."""
    return lambda directory: void((directory / INDEX).write_bytes(text))


def edit_json(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the values of a JSON file in place."""
    values = json.loads(file.read_text(encoding="utf-8"))
    change(values)
    file.write_text(json.dumps(values), encoding="utf-8")


def void(_: object) -> None:
    """Nothing: for mutations that are one expression."""


def rename(tensors: dict[str, Any], old: str, new: str) -> None:
    """Give a tensor another name."""
    tensors[new] = tensors.pop(old)


def shift_last(values: Header) -> None:
    """Leave eight bytes of nothing before the last tensor."""
    last = max((v for n, v in values.items() if n != "__metadata__"), key=lambda v: v["data_offsets"])
    last["data_offsets"] = [offset + 8 for offset in last["data_offsets"]]


def overlap(values: Header) -> None:
    """Let the last norm lie where the first one lies."""
    values[NORM]["data_offsets"] = values["model.layers.0.input_layernorm.weight"]["data_offsets"]


def copy_into_other_shard(directory: Path) -> None:
    """Store the last norm in a second shard too, and list it there only once."""
    weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
    home = directory / weight_map[NORM]
    other = next(directory / shard for shard in weight_map.values() if directory / shard != home)
    values, data = read_raw(home)
    content = data[slice(*values[NORM]["data_offsets"])]
    values, data = read_raw(other)
    values[NORM] = {"dtype": "F32", "shape": [48], "data_offsets": [len(data), len(data) + len(content)]}
    write_raw(other, values, data + content)


def shard_of(directory: Path, tensor: str) -> Path:
    """The file that the index says ``tensor`` is in."""
    return directory / json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"][tensor]


def pickle_only(directory: Path) -> None:
    """Leave a pickle that would run code, and nothing else."""
    (directory / SINGLE).unlink()
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pickle-was-opened'\ntR.")


def replace_with_pipe(directory: Path) -> None:
    """A reader that opens it waits for ever."""
    (directory / SINGLE).unlink()
    os.mkfifo(directory / SINGLE)


def wrong_shards(name: str, shard: Any) -> Hostile:
    """The index sends a reader to ``shard``."""
    return Hostile(
        name=name,
        layout="sharded",
        mutate=index(lambda weight_map: weight_map.update({NORM: shard})),
        says=(INDEX, NORM if isinstance(shard, str) else "weight_map"),
    )


def wrong_config(name: str, says: str, **changes: Any) -> Hostile:
    """``config.json`` describes another model than the weights are."""
    return Hostile(name=name, mutate=config(**changes), says=(SINGLE, says))


FILE = (
    Hostile(name="empty file", mutate=whole_file(lambda b: b""), says=(SINGLE, "0 bytes")),
    Hostile(name="seven bytes", mutate=whole_file(lambda b: b[:7]), says=(SINGLE, "7 bytes")),
    Hostile(name="cut in the header", mutate=whole_file(lambda b: b[:64]), says=(SINGLE, "cut short")),
    Hostile(name="cut in the data", mutate=whole_file(lambda b: b[:-1]), says=(SINGLE, "cut short", "tensor '")),
    Hostile(name="bytes after the data", mutate=whole_file(lambda b: b + b"x"), says=(SINGLE, "1 bytes after")),
    Hostile(name="length beyond the format", mutate=whole_file(lambda b: b"\xff" * 8 + b[8:]), says=(SINGLE, "header")),
    Hostile(name="not JSON", mutate=header_is(b"{'a': 1}"), says=(SINGLE, "not JSON")),
    Hostile(name="not UTF-8", mutate=header_is(b'{"\xff": 1}'), says=(SINGLE, "not JSON")),
    Hostile(name="endless nesting", mutate=header_is(b"[" * 200_000), says=(SINGLE, "not JSON")),
    Hostile(name="huge number", mutate=header_is(b'{"a": ' + b"9" * 5000 + b"}"), says=(SINGLE,)),
    Hostile(name="a list", mutate=header_is(b"[]"), says=(SINGLE, "JSON object")),
    Hostile(name="no tensors", mutate=lambda d: write_raw(d / SINGLE, {}, b""), says=(SINGLE, "no tensors")),
    Hostile(name="a name twice", mutate=header_is(b'{"a": 1, "a": 2}'), says=(SINGLE, "'a' twice")),
    Hostile(
        name="metadata of numbers", mutate=header(lambda h: h.update(__metadata__={"a": 1})), says=("__metadata__",)
    ),
    Hostile(name="lone surrogate", mutate=header_is(b'{"\\ud800": 1}'), says=(SINGLE, r"\ud800")),
    Hostile(name="entry is no object", mutate=header(lambda h: h.update({NORM: 3})), says=(SINGLE, NORM)),
    Hostile(name="entry lacks its dtype", mutate=header(lambda h: h[NORM].pop("dtype")), says=(SINGLE, NORM)),
    Hostile(name="entry has more", mutate=entry(NORM, code="x"), says=(SINGLE, NORM)),
    Hostile(name="unknown dtype", mutate=entry(NORM, dtype="F99"), says=(SINGLE, NORM, "F99")),
    Hostile(name="dtype is no text", mutate=entry(NORM, dtype=["F32"]), says=(SINGLE, NORM, "dtype")),
    Hostile(name="negative size", mutate=entry(NORM, shape=[-48]), says=(SINGLE, NORM, "shape")),
    Hostile(name="fractional size", mutate=entry(NORM, shape=[48.0]), says=(SINGLE, NORM, "shape")),
    Hostile(name="size is a truth", mutate=entry(NORM, shape=[48, True]), says=(SINGLE, NORM, "shape")),
    Hostile(name="endless shape", mutate=entry(NORM, shape=[1] * 10_000), says=(SINGLE, NORM, "shape")),
    Hostile(name="overflowing shape", mutate=entry(NORM, shape=[2**61, 2**61, 2**61]), says=(SINGLE, NORM)),
    Hostile(name="shape and bytes differ", mutate=entry(NORM, shape=[47]), says=(SINGLE, NORM, "bytes")),
    Hostile(name="negative offset", mutate=entry(NORM, data_offsets=[-192, 0]), says=(SINGLE, NORM, "data_offsets")),
    Hostile(name="three offsets", mutate=entry(NORM, data_offsets=[0, 1, 2]), says=(SINGLE, NORM, "data_offsets")),
    Hostile(name="backward offsets", mutate=entry(NORM, data_offsets=[192, 0]), says=(SINGLE, NORM, "data_offsets")),
    Hostile(name="offset beyond", mutate=entry(NORM, data_offsets=[2**60, 2**60 + 192]), says=(SINGLE, NORM)),
    Hostile(name="overlap", mutate=header(overlap), says=(SINGLE, NORM, "overlaps")),
    Hostile(name="hole", mutate=header(shift_last, more=b"x" * 8), says=(SINGLE, "8 bytes before", "tensor '")),
    Hostile(name="a pipe", mutate=replace_with_pipe, says=(SINGLE, "not a file")),
    Hostile(
        name="a directory", mutate=lambda d: ((d / SINGLE).unlink(), void((d / SINGLE).mkdir()))[1], says=(SINGLE,)
    ),
    Hostile(
        name="dangling link", mutate=lambda d: ((d / SINGLE).unlink(), (d / SINGLE).symlink_to("x"))[1], says=(SINGLE,)
    ),
    Hostile(name="only a pickle", mutate=pickle_only, says=("pytorch_model.bin", "never opened")),
    Hostile(name="no weights", mutate=lambda d: (d / SINGLE).unlink(), says=("no weights",)),
    Hostile(
        name="other name", mutate=lambda d: void((d / SINGLE).rename(d / "x.safetensors")), says=("x.safetensors",)
    ),
    Hostile(name="no config", mutate=lambda d: (d / "config.json").unlink(), says=("config.json",)),
)

TENSORS = (
    Hostile(name="missing norm", mutate=stored(lambda t: void(t.pop(NORM))), says=(SINGLE, NORM, "missing")),
    Hostile(
        name="missing expert", mutate=stored(lambda t: void(t.pop(W1))), says=(SINGLE, W1, "missing", "num_experts")
    ),
    Hostile(name="left over", mutate=stored(lambda t: rename(t, NORM, "model.nrm")), says=(NORM, "1 more fault")),
    Hostile(name="too many", mutate=stored(lambda t: t.update(extra=t[NORM])), says=(SINGLE, "'extra'", "no place")),
    Hostile(
        name="two spellings",
        mutate=stored(lambda t: t.update({"model.layers.1.mlp.gate.weight": t[ROUTER]})),
        says=(SINGLE, ROUTER, "model.layers.1.mlp.gate.weight", "two spellings"),
    ),
    Hostile(
        name="loose and fused",
        mutate=stored(lambda t: t.update({"model.layers.0.mlp.experts.down_proj": ("F32", [6, 48, 56], bytes(64512))})),
        says=(SINGLE, "model.layers.0.mlp.experts.down_proj", "experts.0.w2", "two spellings"),
    ),
    Hostile(
        name="wrong shape",
        mutate=stored(lambda t: t.update({W1: ("F32", [48, 56], t[W1][2])})),
        says=(SINGLE, W1, "[48, 56]", "[56, 48]", "intermediate_size"),
    ),
    Hostile(
        name="wrong rank",
        mutate=stored(lambda t: t.update({NORM: ("F32", [1, 48], t[NORM][2])})),
        says=(SINGLE, NORM, "[1, 48]", "[48]"),
    ),
    Hostile(
        name="an expert of another dtype",
        mutate=stored(lambda t: t.update({W1: ("BF16", t[W1][1], t[W1][2][: len(t[W1][2]) // 2])})),
        says=(SINGLE, W1, "BF16", "other experts F32"),
    ),
    Hostile(
        name="no numbers to compute with",
        mutate=stored(lambda t: t.update({NORM: ("I32", [48], t[NORM][2])})),
        says=(SINGLE, NORM, "I32", "supported"),
    ),
    Hostile(
        name="fused with one expert too few",
        layout="fused",
        mutate=config(num_local_experts=7),
        says=(SINGLE, "[6, 48]", "[7, 48]", "num_local_experts"),
    ),
    Hostile(
        name="tied, but stored twice and different",
        layout="tied",
        mutate=stored(lambda t: t.update({"lm_head.weight": ("F32", [307, 48], bytes(307 * 48 * 4))})),
        says=(SINGLE, "lm_head.weight", "tie_word_embeddings"),
    ),
    Hostile(
        name="not tied after all", layout="tied", mutate=config(tie_word_embeddings=False), says=("lm_head.weight",)
    ),
    wrong_config("one layer more", "model.layers.3.", num_hidden_layers=4),
    wrong_config("one layer less", "model.layers.2.", num_hidden_layers=2),
    wrong_config("the most layers", "num_hidden_layers", num_hidden_layers=MOST_LAYERS),
    wrong_config("the most experts", "num_experts", num_local_experts=MOST_EXPERTS),
    wrong_config("one expert more", "num_local_experts", num_local_experts=7),
    wrong_config("one expert less", "num_local_experts", num_local_experts=5),
    wrong_config("another width", "check hidden_size", hidden_size=64),
    wrong_config("another vocabulary", "check vocab_size", vocab_size=320),
    wrong_config("another expert width", "check intermediate_size", intermediate_size=64),
    wrong_config("other heads", "check num_attention_heads", num_attention_heads=8),
    wrong_config("other key heads", "check num_key_value_heads", num_key_value_heads=3),
)

SHARDS = (
    Hostile(
        name="missing shard",
        layout="sharded",
        mutate=lambda d: shard_of(d, W1).unlink(),
        says=("model-00", "no such file"),
    ),
    Hostile(
        name="cut shard",
        layout="sharded",
        mutate=lambda d: void(shard_of(d, W1).write_bytes(shard_of(d, W1).read_bytes()[:-1])),
        says=("model-00", "cut short"),
    ),
    Hostile(
        name="listed, not there",
        layout="sharded",
        mutate=index(lambda m: m.update(phantom=m[NORM])),
        says=("model-00", "'phantom'", "missing"),
    ),
    Hostile(
        name="there, not listed",
        layout="sharded",
        mutate=index(lambda m: m.pop(NORM)),
        says=("model-00", NORM, "not listed"),
    ),
    Hostile(
        name="listed elsewhere",
        layout="sharded",
        mutate=index(lambda m: m.update({NORM: m[EMBED]})),
        says=("model-00", NORM, "lists it in"),
    ),
    Hostile(name="in two shards", layout="sharded", mutate=copy_into_other_shard, says=("model-00", NORM, "too")),
    wrong_shards("parent directory", "../model.safetensors"),
    wrong_shards("hidden parent directory", "a/../../model.safetensors"),
    wrong_shards("absolute", "/etc/model.safetensors"),
    wrong_shards("backslashes", "..\\model.safetensors"),
    wrong_shards("not safetensors", "pytorch_model.bin"),
    wrong_shards("zero byte", "a\0b.safetensors"),
    wrong_shards("nothing", ""),
    wrong_shards("a number", 7),
    Hostile(name="map is empty", layout="sharded", mutate=index(lambda m: m.clear()), says=(INDEX, "empty")),
    Hostile(name="map is a list", layout="sharded", mutate=index_is(b'{"weight_map": []}'), says=(INDEX, "weight_map")),
    Hostile(name="index is a list", layout="sharded", mutate=index_is(b"[]"), says=(INDEX, "weight_map")),
    Hostile(name="index is no JSON", layout="sharded", mutate=index_is(b"{"), says=(INDEX, "JSON")),
    Hostile(name="index is no text", layout="sharded", mutate=index_is(b"\xff\xfe"), says=(INDEX, "JSON")),
    Hostile(name="index nests endlessly", layout="sharded", mutate=index_is(b"[" * 200_000), says=(INDEX, "JSON")),
)

HOSTILE = (*FILE, *TENSORS, *SHARDS)
