"""Tokenizers out of the metadata of GGUF files encode as the tokenizers that were written there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from moelight.core.errors import CheckpointError
from moelight.engine.tokenizer import Tokenizer as Ours

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
    import json

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
    found = Ours.from_gguf(path)
    start = [trained.token_to_id("<|im_start|>")] if begins else []
    for text in TEXTS:
        ids = found.encode(text)
        assert ids == start + trained.encode(text).ids
        assert found.decode(ids[len(start) :], skip_special_tokens=False) == text
    assert found.eos_token_ids == {trained.token_to_id("<|end|>")}
    assert found.token_id("bos_token") == trained.token_to_id("<|im_start|>")
    rendered = found.render([{"role": "user", "content": "Hello"}])
    assert rendered == trained.encode("<|im_start|>Hello<|end|>").ids


@pytest.mark.parametrize(
    "changes",
    [
        {"token_list": None},
        {"tokenizer_model": "bert"},
        {"token_merges": ["a"]},
        {"token_merges": ["never there"]},
        {"token_list": ["a", "b"]},
    ],
)
def test_a_vocabulary_that_cannot_be_converted_is_one_line(
    trained: Tokenizer, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "some.gguf"
    write(path, trained, **changes)
    with pytest.raises(CheckpointError) as caught:
        Ours.from_gguf(path)
    assert str(caught.value).startswith(f"{path}: its vocabulary is no usable tokenizer")
    assert "\n" not in str(caught.value)
