"""Tokenizers out of the metadata of GGUF files encode as the tokenizers that were written there, and as llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from moelight.core.errors import CheckpointError
from moelight.engine.tokenizer import Tokenizer as Ours
from moelight.profiles.pre_tokenizers import PRE_TOKENIZERS
from tests.engine import gguf_tokenizers

TEXTS = ["Hello world", "  two blanks\n", "naïve café 世界 🦊", "x1234567y", "It's we'll", "<|im_start|>user"]
# Of Qwen2, whose name files state as their pre-tokenizer.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """Byte-level merges of these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|im_start|>", "<|end|>"])
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def write(path: Path, tokenizer: Tokenizer, **changes: Any) -> None:
    inner = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(inner["vocab"], key=inner["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in inner["merges"]]
    specials = {token: number for number, token in enumerate(tokens) if token.startswith("<|")}
    writer = gguf.GGUFWriter(path, "qwen3moe")
    values: dict[str, Any] = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "qwen2",
        "token_list": tokens,
        "token_types": [3 if token in specials else 1 for token in tokens],
        "token_merges": merges,
        "eos_token_id": specials["<|end|>"],
        "bos_token_id": specials["<|im_start|>"],
        "add_bos_token": False,
        "chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|end|>{% endfor %}",
    }
    for name, value in {**values, **changes}.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    writer.add_tensor("x", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("begins", [False, True])
def test_texts_have_the_ids_of_the_tokenizer_that_was_written(trained: Tokenizer, begins: bool, tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    write(path, trained, add_bos_token=begins)
    result = Ours.from_gguf(path)
    start = [trained.token_to_id("<|im_start|>")] if begins else []
    for text in TEXTS:
        ids = result.encode(text)
        assert ids == start + trained.encode(text).ids
        assert result.decode(ids[len(start) :], skip_special_tokens=False) == text
    assert result.eos_token_ids == {trained.token_to_id("<|end|>")}
    assert result.token_id("bos_token") == trained.token_to_id("<|im_start|>")
    rendered = result.render([{"role": "user", "content": "Hello"}])
    assert rendered == trained.encode("<|im_start|>Hello<|end|>").ids


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_list": None}, "tokenizer.ggml.tokens must be a list of texts"),
        ({"tokenizer_model": "bert"}, "tokenizer.ggml.model is 'bert'; moelight reads gpt2, llama, gemma4"),
        ({"tokenizer_pre": "lama-bpe"}, "tokenizer.ggml.pre 'lama-bpe' is no pre-tokenizer that moelight has (did you"),
        ({"token_merges": None}, "tokenizer.ggml.merges is missing"),
        ({"token_merges": ["a"]}, "tokenizer.ggml.merges has 'a', no pair of texts"),
        ({"token_merges": ["never there"]}, "tokenizer.ggml.merges has 'never there', but 'never' is no token"),
        ({"token_list": ["a", "b", "a"], "token_types": [1, 1, 1]}, "tokenizer.ggml.tokens has 'a' twice, at 0 and 2"),
        ({"token_types": [1]}, "tokenizer.ggml.token_type has 1 values for"),
        ({"tokenizer_model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_one_line(
    trained: Tokenizer, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "some.gguf"
    write(path, trained, **changes)
    with pytest.raises(CheckpointError) as caught:
        Ours.from_gguf(path)
    assert str(caught.value).startswith(f"{path}: its vocabulary is no usable tokenizer: {reason}")
    assert "\n" not in str(caught.value)


def byte_level(
    path: Path, pre: str, added: list[tuple[str, int]], merges: list[str], *, lacks: str = "", **values: Any
) -> list[str]:
    """Write a vocabulary of all bytes but those that it ``lacks``, the results of ``merges`` and ``added`` tokens with
    types; return its tokens."""
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(lacks))
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges)]
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *(text for text, _ in added)])
    writer.add_token_types([*[1] * len(tokens), *(kind for _, kind in added)])
    writer.add_token_merges(merges)
    tokens += [text for text, _ in added]
    for name, value in values.items():
        getattr(writer, f"add_{name}")(tokens.index(value) if isinstance(value, str) else value)
    writer.add_tensor("x", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


def test_tokens_outside_of_the_byte_alphabet_are_matched_whole_and_no_token_is_added(tmp_path: Path) -> None:
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    added = [(begin, 3), (end, 3), ("<｜User｜>", 4), ("    ", 4), ("[PAD9]", 5)]
    merges = ["1 2", "3 4", "12 34", "5 6", "1234 56", "Ċ Ċ"]
    path = tmp_path / "some.gguf"
    tokens = byte_level(path, "deepseek-v3", added, merges, bos_token_id=begin, eos_token_id=end, add_bos_token=True)
    tokenizer = Ours.from_gguf(path)

    def cut(text: str) -> list[str]:
        return [tokens[number] for number in tokenizer.encode(text)]

    assert cut("<｜User｜>hi") == [begin, "<｜User｜>", "h", "i"]
    assert cut("123456") == [begin, "12", "3", "4", "56"]
    assert cut("x);\n\ny") == [begin, "x", ")", ";", "ĊĊ", "y"]
    assert cut("    hi") == [begin, "    ", "h", "i"]
    assert cut("a<|endoftext|>")[:3] == [begin, "a", "<"]
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.special_ids == {tokens.index(begin), tokens.index(end)}
    assert tokenizer.decode(tokenizer.encode("<｜User｜>    世\n\n1")) == "<｜User｜>    世\n\n1"


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("falcon", "a  \x0b  ", ["a", "ĠĠ", "ĠĠ"]),
        ("falcon", "a    ", ["a", "ĠĠĠĠ"]),
        ("falcon", "\x0b\x0b\x00", []),
        ("smollm", "a\x00b ab\x0b", ["a", "b", "Ġ", "ab"]),
    ],
)
def test_bytes_that_no_token_has_are_dropped_and_nothing_is_merged_across_them(
    pre: str, text: str, expected: list[str], tmp_path: Path
) -> None:
    """As llama.cpp does it; the vocabularies of Falcon, MPT, StarCoder and SmolLM2 lack 13 to 28 bytes."""
    path = tmp_path / "some.gguf"
    tokens = byte_level(path, pre, [], ["Ġ Ġ", "ĠĠ ĠĠ", "a b"], lacks="ċĀ")
    assert [tokens[number] for number in Ours.from_gguf(path).encode(text)] == expected


def ends(path: Path, texts: list[str], **values: Any) -> set[str]:
    tokens = byte_level(path, "qwen2", [(text, 3) for text in texts], ["x y"], **values)
    return {tokens[number] for number in Ours.from_gguf(path).eos_token_ids}


@pytest.mark.parametrize(
    ("texts", "ending"),
    [
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"<|endoftext|>", "<|im_end|>"}),
        (["<s>", "</s>", "<|im_end|>", "<|file_sep|>"], {"</s>", "<|im_end|>", "<|file_sep|>"}),
        (["<|start|>", "<|end|>", "<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),
        (["<|start|>", "<|end|>", "<|flush|>", "<|calls|>"], {"<|flush|>", "<|calls|>"}),
        (["<|user|>", "<|end|>"], {"<|end|>"}),
        (["<turn|>", "</s>", "<|tool_response>"], {"<turn|>", "<|tool_response>"}),
        (["<｜end▁of▁sentence｜>", "<｜User｜>"], {"<｜end▁of▁sentence｜>"}),
    ],
)
def test_a_generation_ends_at_the_tokens_that_llama_cpp_collects(
    texts: list[str], ending: set[str], tmp_path: Path
) -> None:
    assert ends(tmp_path / "some.gguf", texts) == ending


def test_a_generation_ends_at_the_tokens_that_the_file_names(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    named = ends(path, ["<a>", "<b>", "<c>", "<d>"], eos_token_id="<a>", eot_token_id="<b>", eom_token_id="<c>")
    assert named == {"<a>", "<b>", "<c>"}


@pytest.mark.parametrize(
    ("pre", "values", "begins"),
    [
        ("llama-bpe", {}, True),
        ("tekken", {}, True),
        ("chameleon", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_a_text_begins_with_bos_as_in_llama_cpp(
    pre: str, values: dict[str, bool], begins: bool, tmp_path: Path
) -> None:
    path = tmp_path / "some.gguf"
    tokens = byte_level(path, pre, [("<s>", 3)], ["x y"], bos_token_id="<s>", **values)
    assert (tokens[Ours.from_gguf(path).encode("a")[0]] == "<s>") is begins


def test_a_text_ends_with_eos_where_the_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    tokens = byte_level(path, "qwen2", [("</s>", 3)], ["x y"], eos_token_id="</s>", add_eos_token=True)
    assert [tokens[number] for number in Ours.from_gguf(path).encode("a")] == ["a", "</s>"]


@pytest.mark.parametrize(("pre", "tokens"), [("llama-bpe", ["abc"]), ("dbrx", ["a", "bc"])])
def test_a_piece_that_is_a_token_needs_no_merges_where_the_pre_tokenizer_says_so(
    pre: str, tokens: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "some.gguf"
    texts = byte_level(path, pre, [("abc", 1)], ["b c"])
    assert [texts[number] for number in Ours.from_gguf(path).encode("abc")] == tokens


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Callable[..., tuple[Ours, list[str]]]:
    def write_pieces(**values: Any) -> tuple[Ours, list[str]]:
        pieces = ["▁", "a", "b", "▁a", "ab", "▁▁"]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "[INST]"]
        writer = gguf.GGUFWriter(tmp_path / "some.gguf", "llama")
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([*[0.0] * 259, *[-10.0] * 3, -1.0, -2.0, -3.0, 0.0])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(pieces), 4])
        for name, value in values.items():
            getattr(writer, f"add_{name}")(value)
        writer.add_tensor("x", np.zeros(4, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Ours.from_gguf(tmp_path / "some.gguf"), tokens

    return write_pieces


@pytest.mark.parametrize(
    ("text", "prefixed", "plain"),
    [
        ("a", ["▁a"], ["a"]),
        (" a", ["▁", "▁a"], ["▁a"]),
        ("  b", ["▁▁", "▁", "b"], ["▁▁", "b"]),
        ("ab", ["▁a", "b"], ["ab"]),
        ("[INST]a</s>b", ["[INST]", "▁a", "</s>", "▁", "b"], ["[INST]", "a", "</s>", "b"]),
        ("é<unk>", ["▁", "<0xC3>", "<0xA9>", "<unk>"], ["<0xC3>", "<0xA9>", "<unk>"]),
    ],
)
def test_sentencepiece_texts_begin_with_a_blank_of_their_own(
    text: str, prefixed: list[str], plain: list[str], sentencepiece: Callable[..., tuple[Ours, list[str]]]
) -> None:
    for values, expected in (({}, prefixed), ({"add_space_prefix": False}, plain)):
        tokenizer, tokens = sentencepiece(**values)
        ids = tokenizer.encode(text)
        assert [tokens[number] for number in ids] == ["<s>", *expected]  # the default ids of bos, eos and unknown
        assert tokenizer.eos_token_ids == {tokens.index("</s>")}
        if "[" not in text:
            assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text


SAMPLE = json.loads(gguf_tokenizers.SAMPLE.read_text(encoding="utf-8"))


def test_the_sample_has_every_pre_tokenizer() -> None:
    names = [name for row in SAMPLE["expected"] for name in row["names"]]
    assert sorted(names) == sorted([*PRE_TOKENIZERS, *gguf_tokenizers.SENTENCEPIECE_NAMES])


@pytest.mark.parametrize("row", SAMPLE["expected"], ids=lambda row: row["names"][0])
def test_texts_have_the_ids_of_llama_cpp(row: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    for name in row["names"]:
        gguf_tokenizers.write(path, name, SAMPLE["merges"])
        tokenizer = Ours.from_gguf(path)
        for text, ids in zip(SAMPLE["texts"], row["ids"], strict=True):
            assert tokenizer.encode(text) == ids, (name, text)
