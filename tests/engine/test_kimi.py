"""Kimi K2 as published: ``model_type`` kimi_k2 with code of its own, and a vocabulary in tiktoken's format."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers, trainers

from moelight.core.errors import CheckpointError
from moelight.engine.model import LazyModel
from moelight.engine.tiktoken_file import TIKTOKEN
from moelight.engine.tokenizer import Tokenizer
from tests.engine.graphs import made, tokens

TEXT = (
    "The quick brown fox doesn't jump over 12345 lazy dogs, isn't it?\n\n  def f(x):\r\n\treturn x ** 2  # Ünïcode é\n"
    "中文字符和 English混在一起,ひらがな カタカナ 한국어 हिन्दी ไทย 🦊🦊 HTTPServer fooBar ÀÉÎ  …  "
)
CLASS = "tokenization_kimi.TikTokenTokenizer"
LEARNT = 60  # tokens beside the bytes
SPLIT = regex.compile(  # of tokenization_kimi.py
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    regex.V1,
)


def ranks() -> dict[bytes, int]:
    """The bytes, in an order of their own, and tokens that were learnt from `TEXT`."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + LEARNT, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([TEXT] * 3, trainer)
    of = {character: byte for byte, character in bytes_to_characters().items()}
    learnt = [bytes(of[c] for c in token) for token, _ in sorted(inner.get_vocab().items(), key=lambda item: item[1])]
    singles = [bytes([(37 * n + 11) % 256]) for n in range(256)]
    return {token: rank for rank, token in enumerate([*singles, *(token for token in learnt if len(token) > 1)])}


def bytes_to_characters() -> dict[int, str]:
    """As in GPT-2."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


def merged(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's rule: of all adjacent pairs that make a token, the one of lowest rank first."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def publish(directory: Path, **config: Any) -> int:
    """Write tokenizer files as the hub has them into ``directory``; returns the first special id."""
    vocabulary = ranks()
    (directory / TIKTOKEN).write_text("".join(f"{base64.b64encode(t).decode()} {n}\n" for t, n in vocabulary.items()))
    first = len(vocabulary)
    texts = [("[BOS]", True), ("[EOS]", True), ("<|im_end|>", True), ("<|tool_calls_section_begin|>", False)]
    added = {str(first + n): {"content": text, "special": flag} for n, (text, flag) in enumerate(texts)}
    values = {
        "auto_map": {"AutoTokenizer": [CLASS, None]},
        "tokenizer_class": "TikTokenTokenizer",
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": "{{ messages[-1].content }}<|im_end|>{# <|tool_calls_section_begin|> #}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps({**values, **config}))
    return first


def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    first, vocabulary = publish(tmp_path), ranks()
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.vocab_size == first + 256
    for text in (TEXT, TEXT[::-1], TEXT.upper(), "a", " ", "\n\n \t", "١٢٣٤٥ ½", "ǅ ǆ", "e\u0301 'S I'Ll"):
        expected = [token for piece in SPLIT.findall(text) for token in merged(piece.encode(), vocabulary)]
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == text
    assert max(tokenizer.encode(TEXT)) >= 256  # something was merged
    marked = tokenizer.encode("a[EOS]<|im_end|><|tool_calls_section_begin|><|reserved_token_400|>")
    assert marked[1:] == [first + 1, first + 2, first + 3, 400]
    assert tokenizer.decode(marked) == "a<|tool_calls_section_begin|>"
    assert tokenizer.eos_token_ids == {first + 1}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("AAA=", "line 317 is no token in base64 and its rank 316"),
        ("YWFhYWFhYQ== 5", "line 317 is no token in base64 and its rank 316"),
        ("A$== 316", "line 317"),
    ],
)
def test_a_damaged_vocabulary_is_refused(damage: str, message: str, tmp_path: Path) -> None:
    publish(tmp_path)
    with (tmp_path / TIKTOKEN).open("a") as file:
        file.write(damage)
    with pytest.raises(CheckpointError, match=regex.escape(message)):
        Tokenizer.from_dir(tmp_path)


def test_what_else_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, auto_map={"AutoTokenizer": ["tokenization_other.Words", None]})
    with pytest.raises(CheckpointError, match=r"tokenization_other.Words.*never run; put a tokenizer.json beside it"):
        Tokenizer.from_dir(tmp_path)
    publish(tmp_path, added_tokens_decoder={"7": {"content": "[BOS]"}})
    with pytest.raises(CheckpointError, match=r"added_tokens_decoder 7 is no text with an id from 316 to 571"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / TIKTOKEN).write_text("YQ== 0\n")
    with pytest.raises(CheckpointError, match="not every byte"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.thorough
def test_a_checkpoint_as_published_has_the_tokens_of_its_family(tmp_path: Path) -> None:
    directory, expected = made(tmp_path, "deepseek_v3", vocabulary=256 + LEARNT + 256)
    (directory / "tokenizer.json").unlink()
    first = publish(directory)
    config = json.loads((directory / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model"}
    config |= {
        "model_type": "kimi_k2",
        "eos_token_id": first + 1,
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": code,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": first + 2}))
    assert tokens(directory) == expected
    model = LazyModel(str(directory))
    assert model.profile.model_type == "deepseek_v3" and model.tool_format == "kimi"
    assert model.tokenizer.eos_token_ids == {first + 1, first + 2}
