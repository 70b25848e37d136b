"""Tokenizers of GGUF files beside llama.cpp's own: the ids of 2,000 texts for every pre-tokenizer that llama.cpp has.

    python -m tests.engine.gguf_tokenizers --source DIR [--files FILE ...] [--jobs 2] [--update] [--names NAME ...]

Needs the package llama-cpp-python, of which DIR is the unpacked source; `make tokenizers` fetches and builds both.
FILES are further GGUF files with vocabularies of their own; those of the source are compared in any case. --update
writes the tables of docs/reference/tokenizers.md and the sample that test_gguf_tokenizer.py reads.

The vocabulary is trained on uncut texts, so its merges cross the borders of words, numbers and punctuation: a text that
is cut elsewhere has other ids.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import re
import struct
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, trainers

from moelight.engine.tokenizer import Tokenizer
from moelight.profiles import gguf as headers
from moelight.profiles.gguf_vocabulary import BYTE_LEVEL, GEMMA4, SENTENCEPIECE
from moelight.profiles.pre_tokenizers import PRE_TOKENIZERS

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).with_name("gguf_tokenizers.json")
TABLE = ROOT / "docs" / "reference" / "tokenizers.md"
MARK = "<!-- measured by `make tokenizers` -->"
TEXTS = 2000
SAMPLED = 40
_MERGES = 1500
_LONGEST = 160
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# Behind all others. Letters outside of the byte alphabet, runs of blanks, tokens that end a generation by their text.
ADDED = (
    ("<｜begin▁of▁sentence｜>", _CONTROL),
    ("<｜User｜>", _USER_DEFINED),
    ("<|im_start|>", _CONTROL),
    ("<|im_end|>", _CONTROL),
    ("<think>", _USER_DEFINED),
    ("    ", _USER_DEFINED),
    ("  ", _USER_DEFINED),
    ("<unk>", _UNKNOWN),
    ("<|endoftext|>", _NORMAL),
    ("[PAD0]", _UNUSED),
)
_SPECIALS = [text for text, _ in ADDED if text.strip()]
# SentencePiece vocabularies, which have no pre-tokenizer: with a blank before a text, and without.
NOT_READ = ("bert",)  # vocabularies of embedding models
SENTENCEPIECE_NAMES = ("llama", "llama, add_space_prefix false")


def texts(count: int = TEXTS, seed: int = 32) -> list[str]:
    """Code, prose, numbers, scripts, emoji, blanks and special tokens, in equal measure but for code."""
    draw = random.Random(seed)
    kinds = [
        _code,
        _code,
        _prose,
        _numbers,
        _east_asian,
        _emoji,
        _blanks,
        _scripts,
        _words,
        _with_specials,
        _any_letters,
    ]
    return [kinds[n % len(kinds)](draw)[:_LONGEST] for n in range(count)]


def _lines(draw: random.Random, names: Sequence[str]) -> str:
    lines = (Path(os.__file__).parent / draw.choice(names)).read_text(encoding="utf-8").splitlines(keepends=True)
    start = draw.randrange(len(lines))
    return "".join(lines[start : start + draw.randint(1, 6)])


def _code(draw: random.Random) -> str:
    return _lines(draw, ("ast.py", "argparse.py", "json/encoder.py", "socket.py", "typing.py", "html/entities.py"))


def _prose(draw: random.Random) -> str:
    return _lines(
        draw, ("LICENSE.txt", "pydoc_data/topics.py", "this.py") if _has_licence() else ("pydoc_data/topics.py",)
    )


def _has_licence() -> bool:
    return (Path(os.__file__).parent / "LICENSE.txt").exists()


def _numbers(draw: random.Random) -> str:
    digits = draw.choice(["0123456789", "0123456789", "٠١٢٣٤٥٦٧٨٩", "０１２３４５６７８９", "²³¹½¼Ⅷ①〇一二三"])
    parts = ["".join(draw.choices(digits, k=draw.randint(1, 9))) for _ in range(draw.randint(2, 9))]
    return "".join(
        part + draw.choice(["", " ", "  ", ".", ",", "-", ":", "/", "e", "%", " + ", "\n", "\n\n", "x", "年"])
        for part in parts
    )


def _run(draw: random.Random, ranges: Sequence[tuple[int, int]], maximum: int = 12) -> str:
    low, high = draw.choice(ranges)
    letters = [
        chr(point) for point in range(low, high + 1) if unicodedata.category(chr(point)) not in ("Cn", "Cs", "Co")
    ]
    return "".join(draw.choices(letters, k=draw.randint(1, maximum)))


_EAST_ASIAN = [
    (0x4E00, 0x4E80),
    (0x4E00, 0x9FA5),
    (0x3041, 0x3096),
    (0x30A1, 0x30FA),
    (0xAC00, 0xAC80),
    (0x3105, 0x312F),
]
_EAST_ASIAN += [
    (0x3000, 0x3011),
    (0x3400, 0x3450),
    (0x20000, 0x20040),
    (0xFF01, 0xFF5E),
    (0xFF66, 0xFF9D),
    (0x3131, 0x3163),
]


def _east_asian(draw: random.Random) -> str:
    joins = ["", "", " ", "，", "。", "、", "！\n", "abc", "12", "　", "“", "”", "—", "…"]
    return "".join(_run(draw, _EAST_ASIAN) + draw.choice(joins) for _ in range(draw.randint(1, 6)))


def _emoji(draw: random.Random) -> str:
    marks = ["😀", "🦊", "👍🏽", "👩‍💻", "👨‍👩‍👧‍👦", "🇩🇪", "❤️", "✔", "⌚", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "1️⃣", "♻︎", "☕"]
    joins = ["", "", " ", "  ", "!", " ok ", "\n", ":", "a", "9"]
    return "".join(draw.choice(marks) + draw.choice(joins) for _ in range(draw.randint(1, 12)))


def _blanks(draw: random.Random) -> str:
    blanks = [
        " ",
        " ",
        " ",
        "  ",
        "    ",
        "\t",
        "\n",
        "\n",
        "\r\n",
        "\r",
        "\u00a0",
        "\u3000",
        "\u2003",
        "\u2028",
        "\x0b",
        "\x85",
    ]
    words = ["a", "Hello", "x1", "12", "=", "//", "é", "世", "'s", "", ""]
    return "".join(
        draw.choice(blanks) * draw.choice([1, 1, 2, 3]) + draw.choice(words) for _ in range(draw.randint(1, 12))
    )


_SCRIPTS = [
    (0x410, 0x44F),
    (0x391, 0x3C9),
    (0x5D0, 0x5EA),
    (0x621, 0x652),
    (0x905, 0x94D),
    (0xE01, 0xE4E),
    (0xB85, 0xBCD),
]
_SCRIPTS += [(0xC0, 0x17F), (0x1E00, 0x1EF9), (0x531, 0x587), (0x10D0, 0x10FA), (0x1780, 0x17D3), (0x1000, 0x1049)]


def _scripts(draw: random.Random) -> str:
    joins = [" ", " ", ", ", ".", "-", "'", "’", "\n", " 3", "\u0301", ""]
    return "".join(_run(draw, _SCRIPTS) + draw.choice(joins) for _ in range(draw.randint(1, 6)))


def _words(draw: random.Random) -> str:
    words = [
        "It's",
        "WE'LL",
        "I'm",
        "they'RE",
        "'tis",
        "don’t",
        "HTTPServer",
        "camelCase",
        "snake_case",
        "ÉCOLE",
        "éCole",
        "İzmir",
    ]
    words += [
        "x.y",
        "f(x)",
        "a=b",
        "C++",
        "#include",
        "<b>",
        "e.g.",
        "naïve",
        "Straße",
        "ſ's",
        "Türkiye'nin",
        "U.S.A.",
        "§3",
        "$9",
    ]
    joins = [" ", " ", " ", "", ", ", "  ", ";\n", "\n", "/", "'", '"']
    return "".join(draw.choice(words) + draw.choice(joins) for _ in range(draw.randint(2, 10)))


def _with_specials(draw: random.Random) -> str:
    kinds = [_code, _numbers, _east_asian, _blanks, _words, lambda _: ""]
    return "".join(
        draw.choice(kinds)(draw)[:30] + draw.choice(_SPECIALS) + draw.choice(["", " ", "\n", "  "])
        for _ in range(draw.randint(1, 4))
    )


def _any_letters(draw: random.Random) -> str:
    """Of the basic plane, without what newer versions of Unicode added."""
    letters: list[str] = []
    while len(letters) < 16:
        letter = chr(draw.randrange(0x20, 0x10000))
        if unicodedata.ucd_3_2_0.category(letter) not in ("Cn", "Cs", "Co"):
            letters.append(letter + draw.choice(["", "", " ", "a", "1"]))
    return "".join(letters)


def trained(samples: Sequence[str]) -> dict[str, list[list[str]]]:
    """The merges of a byte-level vocabulary, and those of one of letters with ``▁`` for a blank."""
    samples = [re.sub("|".join(map(re.escape, _SPECIALS)), "", text) for text in samples]
    raw = Library(models.BPE())
    raw.normalizer = normalizers.Replace(" ", "▁")
    byte_level = Library(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges = {}
    for name, library, options in (
        ("byte_level", byte_level, {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}),
        ("raw", raw, {"limit_alphabet": 400}),
    ):
        size = _MERGES + (256 if name == "byte_level" else 400)
        library.train_from_iterator(samples, trainers.BpeTrainer(vocab_size=size, show_progress=False, **options))
        merges[name] = json.loads(library.to_str())["model"]["merges"]
    return merges


def vocabulary(merges: Sequence[Sequence[str]], *, byte_level: bool) -> tuple[list[str], list[int]]:
    """Tokens and their types."""
    pairs = [tuple(pair) for pair in merges]
    if byte_level:
        first, kinds = sorted(pre_tokenizers.ByteLevel.alphabet()), [_NORMAL] * 256
    else:
        letters = sorted({letter for pair in pairs for part in pair for letter in part})
        first = [f"<0x{byte:02X}>" for byte in range(256)] + letters
        kinds = [_BYTE] * 256 + [_NORMAL] * len(letters)
    tokens = list(dict.fromkeys([*first, *("".join(pair) for pair in pairs)]))
    kinds += [_NORMAL] * (len(tokens) - len(first))
    return tokens + [text for text, _ in ADDED], kinds + [kind for _, kind in ADDED]


def write(path: Path, name: str, merges: dict[str, list[list[str]]]) -> None:
    """A GGUF file with the vocabulary under the pre-tokenizer ``name``, or one of `SENTENCEPIECE_NAMES`."""
    sentencepiece = name in SENTENCEPIECE_NAMES
    byte_level = not sentencepiece and PRE_TOKENIZERS[name].byte_level
    pairs = merges["byte_level" if byte_level else "raw"]
    tokens, kinds = vocabulary(pairs, byte_level=byte_level)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(SENTENCEPIECE if sentencepiece else GEMMA4 if name == "gemma4" else BYTE_LEVEL)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(tokens.index("<｜begin▁of▁sentence｜>"))
    writer.add_eos_token_id(tokens.index("<|endoftext|>"))
    if sentencepiece:
        rank = {"".join(pair): float(-number) for number, pair in reversed(list(enumerate(pairs, 1)))}
        writer.add_token_scores([rank.get(token, -1e6) for token in tokens])
        if name != SENTENCEPIECE:
            writer.add_add_space_prefix(False)
    else:
        writer.add_tokenizer_pre(name)
        writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_tensor("x", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaVocabulary:
    """The vocabulary of a GGUF file in llama.cpp."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self._library = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise ValueError(f"{path}: llama.cpp does not read it")
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.size = int(llama_cpp.llama_vocab_n_tokens(self._vocabulary))

    def close(self) -> None:
        self._library.llama_model_free(self._model)

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        ids = (self._library.llama_token * (len(data) + 16))()
        count = self._library.llama_tokenize(self._vocabulary, data, len(data), ids, len(ids), True, True)
        return list(ids[:count])

    def end_token_ids(self) -> set[int]:
        return {number for number in range(self.size) if self._library.llama_vocab_is_eog(self._vocabulary, number)}


def compare(path: Path, samples: Sequence[str]) -> dict[str, Any]:
    """How many of ``samples`` have llama.cpp's ids, its size and its ends, and the first that has others."""
    theirs, ours = LlamaVocabulary(path), Tokenizer.from_gguf(path)
    expected = [theirs.encode(text) for text in samples]
    differing = [(text, ids) for text, ids in zip(samples, expected, strict=True) if ours.encode(text) != ids]
    result = {
        "texts": len(samples),
        "equal": len(samples) - len(differing),
        "tokens": theirs.size,
        "size": ours.vocab_size == theirs.size,
        "ends": ours.eos_token_ids == theirs.end_token_ids(),
        "expected": expected,
        "first": (differing[0][0], ours.encode(differing[0][0]), differing[0][1]) if differing else None,
    }
    theirs.close()
    return result


def names_in(source: Path) -> list[str]:
    """The pre-tokenizers that llama.cpp's source knows."""
    text = (source / "vendor" / "llama.cpp" / "src" / "llama-vocab.cpp").read_text(encoding="utf-8")
    return sorted(set(re.findall(r'tokenizer_pre == "([^"]+)"', text)) - {"whitespace"})  # a tokenizer model of its own


def with_a_tensor(path: Path, scratch: Path) -> Path:
    """A copy of a vocabulary file that holds a tensor, as the file of a model does; ``path`` itself if it has some."""
    data = path.read_bytes()
    if int.from_bytes(data[8:16], "little"):
        return path
    with open(path, "rb") as file:
        header = headers._Header(file, path, len(data))
        header.read()
    info = struct.pack("<Q1sIQIQ", 1, b"x", 1, 4, 0, 0)  # its name, dimensions, type F32 and place
    head = data[:8] + struct.pack("<Q", 1) + data[16 : header._position] + info
    copy = scratch / path.name
    copy.write_bytes(head + bytes(-len(head) % 32 + 16))
    return copy


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("x", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _row_of_name(name: str, merges: dict[str, list[list[str]]], samples: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "some.gguf"
        write(path, name, merges)
        return compare(path, samples)


def _row_of_file(file: Path, samples: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        return compare(with_a_tensor(file, Path(temporary)), samples)


def main() -> int:
    args = _arguments()
    names = names_in(args.source)
    if names != sorted(PRE_TOKENIZERS):
        raise SystemExit(f"other names: {sorted(set(names) ^ PRE_TOKENIZERS.keys())}")
    samples = texts()
    merges = trained(samples)
    sought = args.names or [*names, *SENTENCEPIECE_NAMES]
    files = [] if args.names else sorted((args.source / "vendor" / "llama.cpp" / "models").glob("ggml-vocab-*.gguf"))
    files = [file for file in [*files, *args.files] if not any(part in file.name for part in NOT_READ)]
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        tables = pool.map(_row_of_name, sought, [merges] * len(sought), [samples] * len(sought))
        rows = {name: _shown(name, row) for name, row in zip(sought, tables, strict=True)}
        tables = pool.map(_row_of_file, files, [samples] * len(files))
        real = {file.name: _shown(file.name, row) for file, row in zip(files, tables, strict=True)}
    if args.update:
        _write_sample(rows, samples, merges, _chosen(rows, samples))
        _write_table(rows, real, version("llama-cpp-python"))
    return not all(
        row["equal"] == row["texts"] and row["size"] and row["ends"] for row in (*rows.values(), *real.values())
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--files", type=Path, nargs="*", default=[])
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    if args.update and args.names:
        parser.error("--update writes all names; leave out --names")
    return args


def _shown(name: str, row: dict[str, Any]) -> dict[str, Any]:
    parts = [f"{row['equal']} of {row['texts']} texts"]
    parts += [f"{key} differ" for key in ("size", "ends") if not row[key]]
    print(f"{name}: {', '.join(parts)}", flush=True)
    if row["first"]:
        text, ours, theirs = row["first"]
        print(f"  {text!r}\n  moelight {ours}\n  llama.cpp {theirs}", flush=True)
    return row


def _chosen(rows: dict[str, dict[str, Any]], samples: Sequence[str]) -> list[int]:
    """Places of texts that tell most names apart, one after the other; of equal ones the shortest."""
    kinds = [_numbered(tuple(row["expected"][position]) for row in rows.values()) for position in range(len(samples))]
    chosen: list[int] = []
    apart = [0] * len(rows)
    for _ in range(SAMPLED):
        rest = [position for position in range(len(samples)) if position not in chosen]
        counts = {position: len(set(zip(apart, kinds[position], strict=True))) for position in rest}
        chosen.append(max(rest, key=lambda position: (counts[position], -len(samples[position]))))
        apart = _numbered(zip(apart, kinds[chosen[-1]], strict=True))
    return chosen


def _numbered(values: Iterable[Any]) -> list[int]:
    """Numbers that are equal where values are."""
    array: dict[Any, int] = {}
    return [array.setdefault(value, len(array)) for value in values]


def _write_sample(
    rows: dict[str, dict[str, Any]], samples: Sequence[str], merges: dict[str, list[list[str]]], chosen: list[int]
) -> None:
    """The ``chosen`` texts and llama.cpp's ids for every name; those of names with equal ids together."""
    groups: dict[str, list[str]] = {}
    for name, row in rows.items():
        expected = [row["expected"][position] for position in chosen]
        groups.setdefault(json.dumps(expected, separators=(",", ":")), []).append(name)
    sets = [f'{{"names": {json.dumps(names)}, "ids": {ids}}}' for ids, names in groups.items()]
    lines = [
        f'"texts": {json.dumps([samples[position] for position in chosen])}',
        f'"merges": {json.dumps(merges, separators=(",", ":"))}',
        '"expected": [\n' + ",\n".join(sets) + "\n]",
    ]
    SAMPLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _write_table(rows: dict[str, dict[str, Any]], real: dict[str, dict[str, Any]], release: str) -> None:
    """The table between the marks of `TABLE`."""
    groups: dict[tuple[Any, int, bool], list[str]] = {}
    for name, row in rows.items():
        cuts = PRE_TOKENIZERS.get(name, name)
        groups.setdefault((cuts, row["equal"], row["ends"] and row["size"]), []).append(name)
    lines = [
        f"llama-cpp-python {release}; {len(PRE_TOKENIZERS)} names, {next(iter(rows.values()))['texts']:,} texts each.",
        "",
    ]
    lines += ["| names | texts with llama.cpp's ids | size and ends |", "|---|--:|---|"]
    for (_, equal, others), names in sorted(groups.items(), key=lambda group: group[1][0]):
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {equal:,} | {'equal' if others else 'differ'} |")
    lines += ["", "| vocabulary | tokens | texts with llama.cpp's ids | size and ends |", "|---|--:|--:|---|"]
    for name, row in real.items():
        others = "equal" if row["ends"] and row["size"] else "differ"
        lines.append(f"| `{name}` | {row['tokens']:,} | {row['equal']:,} | {others} |")
    before, mark, rest = TABLE.read_text(encoding="utf-8").partition(MARK)
    after = rest.partition(MARK)[2]
    TABLE.write_text(f"{before}{mark}\n\n" + "\n".join(lines) + f"\n\n{mark}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
