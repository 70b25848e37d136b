"""Ids and text against transformers' AutoTokenizer; eos ids; damaged and missing files; stop strings."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from moelight.core.errors import CheckpointError, InputError
from moelight.engine.detokenizer import StopMatcher, cut_at_stop
from moelight.engine.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "def add(a, b):\n    return a + b\n",
    "数える 一 二 三",
]
UNK = {"__type": "AddedToken", "content": "<unk>", "lstrip": False, "rstrip": False, "normalized": False}
TEXTS = [
    "The fox sleeps.",
    "  leading and trailing  ",
    "",
    " ",
    "\n\n\tindented\n",
    "Grüße, 世界! 🦊🦊",
    "special <|im_start|>user inside<|im_end|>",
    "</s> and <s>",
    "a" * 300,
    "e\u0301 \u200d \x00 \x7f",
]


def byte_level(directory: Path, **settings: Any) -> Path:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return save(directory, inner, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **settings})


def sentence_piece_like(directory: Path, **settings: Any) -> Path:
    """Llama's and Mixtral's kind: spaces as ▁, bytes for what is unknown, <s> put in front."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocabulary += sorted({character for text in CORPUS for character in text if character not in " \n"})
    inner = Inner(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary)},
            merges=[],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return save(directory, inner, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": UNK, **settings})


def save(directory: Path, inner: Inner, settings: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


KINDS = {
    "byte level": byte_level,
    "byte level, bos named and wanted": lambda d: byte_level(d, bos_token="<|endoftext|>", add_bos_token=True),
    "an eos that tokenizer.json calls a plain token": lambda d: byte_level(d, eos_token="fox"),
    "more special tokens": lambda d: byte_level(d, additional_special_tokens=["<|im_start|>", "<a>"]),
    "sentence piece": sentence_piece_like,
    "sentence piece, the config against tokenizer.json": lambda d: sentence_piece_like(
        d, add_bos_token=False, add_eos_token=True
    ),
    "a token only the config knows": lambda d: byte_level(
        d,
        added_tokens_decoder={"403": {"content": "<think>", "special": False, "normalized": False}},
        sep_token="<|sep|>",
    ),
    "extra special tokens as an object": lambda d: byte_level(
        d, extra_special_tokens={"image_token": "<img>"}, additional_special_tokens=["<b>"]
    ),
    "extra special tokens as a list of objects": lambda d: byte_level(
        d, extra_special_tokens=[{**UNK, "content": "<b>"}]
    ),
    "a role of the model's own": lambda d: byte_level(d, image_token="<img>", additional_special_tokens=["<b>"]),
    "the class of another kind": lambda d: byte_level(d, tokenizer_class="LlamaTokenizerFast"),
    "the older files": lambda d: older_files(byte_level(d)),
    "the older files beside a list by number": lambda d: older_files(
        byte_level(d, added_tokens_decoder={"403": {"content": "<think>", "special": True}})
    ),
}


# transformers 5 forgets that these name special tokens, and shows them in answers.
NOT_SPECIAL_THERE = {"extra special tokens as a list of objects", "the older files"}


def older_files(directory: Path) -> Path:
    """The spellings of transformers 3 and 4: special_tokens_map.json and added_tokens.json."""
    values = {"pad_token": {"content": "<img>", "lstrip": False}, "additional_special_tokens": ["<b>", "<|im_start|>"]}
    (directory / "special_tokens_map.json").write_text(json.dumps(values), encoding="utf-8")
    (directory / "added_tokens.json").write_text('{"<think>": 404, "<b>": 403}', encoding="utf-8")
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_transformers(kind: str, tmp_path: Path) -> None:
    directory = KINDS[kind](tmp_path)
    ours, theirs = Tokenizer.from_dir(directory), AutoTokenizer.from_pretrained(directory)
    for text in [*CORPUS, *TEXTS, "<think>x</think><|sep|><a>", "a<img>b<b>c <b>"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        if "<b>" not in text or kind not in NOT_SPECIAL_THERE:
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_a_template_that_writes_bos_gives_one(tmp_path: Path) -> None:
    directory = sentence_piece_like(tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}")
    ours, theirs = Tokenizer.from_dir(directory), AutoTokenizer.from_pretrained(directory)
    talk = [{"role": "user", "content": "The fox"}]
    assert ours.render(talk) == theirs.apply_chat_template(talk, return_dict=False)
    assert ours.render(talk).count(1) == ours.encode("The fox").count(1) == 1


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    byte_level(tmp_path)
    inner = Inner.from_file(str(tmp_path / "tokenizer.json"))
    inner.enable_truncation(max_length=4)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    text = CORPUS[0]
    assert Tokenizer.from_dir(tmp_path).decode(Tokenizer.from_dir(tmp_path).encode(text)) == text


def test_special_tokens_of_the_older_file_count(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "lazy"}}', encoding="utf-8")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a lazy dog")) == "a  dog"


def test_half_a_surrogate_pair_is_the_inputs_fault(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="surrogate") as refusal:
        Tokenizer.from_dir(byte_level(tmp_path)).encode("a\ud800b")
    assert refusal.value.code == "invalid_text"


def test_a_text_far_beyond_the_context_is_not_encoded_whole(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path))
    full, longest = tokenizer._inner, []

    class Watched:
        def encode(self, text: str, **options: Any) -> Any:
            longest.append(len(text))
            return full.encode(text, **options)

    tokenizer._inner = Watched()  # type: ignore[assignment]
    with pytest.raises(InputError, match="200,000 letters") as refusal:
        tokenizer.encode("a \u00e9" * 50_000 + "bc" * 25_000, max_tokens=50)
    assert refusal.value.code == "context_length_exceeded"
    assert max(longest) < 1000
    text = (CORPUS[0] + " ") * 40
    longest.clear()
    assert tokenizer.encode(text, max_tokens=4000) == tokenizer.encode(text)
    assert longest == [len(text)] * 2, "one that may fit is encoded once"
    assert tokenizer.encode(text, max_tokens=len(tokenizer.encode(text)) - 1), (
        "whether it fits is told of all its tokens"
    )


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ('{"eos_token_id": [7, 9]}', '{"eos_token_id": 3}', {3, 7, 9}),
        ('{"eos_token_id": 7}', '{"eos_token_id": 3}', {3, 7}),
        ('{"eos_token_id": 0}', '{"eos_token_id": 3}', {0, 3}),
        ('{"eos_token_id": null}', '{"eos_token_id": [3]}', {3}),
        ("{}", '{"eos_token_id": 3}', {3}),
        (None, '{"eos_token_id": 3}', {3}),
        (None, '{"text_config": {"eos_token_id": [3, 4]}}', {3, 4}),
        (None, "{}", set()),
        (None, None, set()),
    ],
)
def test_eos_ids(generation: str | None, config: str | None, expected: set[int], tmp_path: Path) -> None:
    byte_level(tmp_path)
    for name, text in (("generation_config.json", generation), ("config.json", config)):
        if text is not None:
            (tmp_path / name).write_text(text, encoding="utf-8")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.eos_token_ids == {*expected, tokenizer.token_id("eos_token")}, "the tokenizer's ends too"


def test_the_older_file_may_name_the_end(tmp_path: Path) -> None:
    byte_level(tmp_path, eos_token=None)
    assert Tokenizer.from_dir(tmp_path).eos_token_ids == frozenset()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}', encoding="utf-8")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.decode(list(tokenizer.eos_token_ids), skip_special_tokens=False) == "<|im_end|>"


CHAT = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def test_a_turn_that_ends_nothing_is_noticed(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path, eos_token="<|endoftext|>", chat_template=CHAT))
    (closing,) = tokenizer.encode("<|im_end|>")
    assert tokenizer.unended_turn() == closing
    assert tokenizer.unended_turn([closing]) is None, "the job's own stop tokens end it"
    for settings in (
        {"chat_template": CHAT},
        {"eos_token": "<|endoftext|>"},
        {"chat_template": "{{ messages[0].content }}"},
    ):
        assert Tokenizer.from_dir(byte_level(tmp_path, **settings)).unended_turn() is None
    refusing = "{{ raise_exception('no') }}"
    assert Tokenizer.from_dir(byte_level(tmp_path, chat_template=refusing)).unended_turn() is None


DAMAGE = {
    "no tokenizer.json": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
    "half a tokenizer.json": (lambda d: (d / "tokenizer.json").write_text('{"version": '), "tokenizer.json"),
    "not a tokenizer": (lambda d: (d / "tokenizer.json").write_text('{"model": 1}'), "tokenizer.json"),
    "not text": (lambda d: (d / "tokenizer.json").write_bytes(b"\xff\xfe\x00"), "tokenizer.json"),
    "config is no JSON": (lambda d: (d / "tokenizer_config.json").write_text("{"), "tokenizer_config.json"),
    "config is a list": (lambda d: (d / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json"),
    "eos is a word": (lambda d: (d / "config.json").write_text('{"eos_token_id": "</s>"}'), "config.json"),
    "template is a number": (
        lambda d: (d / "tokenizer_config.json").write_text('{"chat_template": 5}'),
        "tokenizer_config.json",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_clear_line(kind: str, tmp_path: Path) -> None:
    damage, named = DAMAGE[kind]
    damage(byte_level(tmp_path))
    with pytest.raises(CheckpointError) as refusal:
        Tokenizer.from_dir(tmp_path)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


def spoilt(directory: Path, **parts: Any) -> Path:
    """A tokenizer with ``parts`` of its tokenizer.json changed."""
    path = byte_level(directory) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **parts}), encoding="utf-8")
    return directory


# What makes the library panic: while it reads the file, or at the first text.
PANICS: dict[str, dict[str, Any]] = {
    "a charsmap that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a charsmap that is cut short": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAEAAAABAAAAAAAA"}
    },
    "no entry of the post-processor": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {},
        }
    },
    "a pattern that tries for ever": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(?:[a-z]+[a-z ]+)+[0-9]"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
}


@pytest.mark.parametrize("kind", PANICS)
def test_a_panic_of_the_library_is_one_clear_line(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a usable tokenizer \(.+\)$") as refusal:
        Tokenizer.from_dir(spoilt(tmp_path, **PANICS[kind]))
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr().err == ""


def test_a_sentence_piece_file_alone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model.*SentencePiece.*pip install transformers"):
        Tokenizer.from_dir(tmp_path)


@pytest.fixture
def chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose tokenizer is a SentencePiece file only, and a library that can read it."""
    converted = sentence_piece_like(tmp_path / "converted")
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "tokenizer.model").write_bytes(b"\n\x0e")

    inner = Inner.from_file(str(converted / "tokenizer.json"))

    def from_pretrained(directory: str, **options: object) -> object:
        assert options == {"local_files_only": True, "trust_remote_code": False, "use_fast": True}
        if not (Path(directory) / "tokenizer_config.json").exists():
            raise ValueError("unknown\nkind")
        return SimpleNamespace(backend_tokenizer=inner)

    class Model:
        shift = 0

        def __init__(self, model_proto: bytes) -> None:
            assert model_proto == b"\n\x0e"

        def encode(self, text: str) -> list[int]:
            return [self.shift + token for token in inner.encode(text, add_special_tokens=False).ids]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "sentencepiece", SimpleNamespace(SentencePieceProcessor=Model))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    return tmp_path / "pieces"


def test_a_sentence_piece_file_is_converted_by_transformers(chunks: Path) -> None:
    (chunks / "tokenizer_config.json").write_text('{"bos_token": "<s>"}', encoding="utf-8")
    ours, theirs = Tokenizer.from_dir(chunks), Tokenizer.from_dir(chunks.parent / "converted")
    assert [ours.encode(text) for text in CORPUS] == [theirs.encode(text) for text in CORPUS]
    sys.modules["sentencepiece"].SentencePieceProcessor.shift = 1
    with pytest.raises(CheckpointError, match="otherwise than SentencePiece"):
        Tokenizer.from_dir(chunks)


def test_what_transformers_cannot_convert_is_one_line(chunks: Path) -> None:
    with pytest.raises(CheckpointError, match=r"transformers cannot convert it \(unknown\)"):
        Tokenizer.from_dir(chunks)


def test_a_trained_sentence_piece_model_gives_its_own_ids(tmp_path: Path) -> None:
    trained = pytest.importorskip("sentencepiece")
    trained.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    settings: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    settings |= {"legacy": False, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}', encoding="utf-8")
    tokenizer = Tokenizer.from_dir(tmp_path)
    model = trained.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in CORPUS:
        assert tokenizer.encode(text) == [1, *model.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], ("one ", "two")),
        ("one two three", ["three", "two"], ("one ", "two")),
        ("aaa", ["aa"], ("", "aa")),
        ("one", ["two"], ("one", None)),
        ("one", [], ("one", None)),
        ("", ["x"], ("", None)),
        ("x\n\ny", ["\n\n", "\n"], ("x", "\n\n")),
    ],
)
def test_cut_at_stop(text: str, stops: list[str], expected: tuple[str, str | None]) -> None:
    assert cut_at_stop(text, stops) == expected


STOPS = [["fox"], ["x ju"], ["dog,"], ["🦊"], ["界!", "zzz"], ["ß"], ["\n    return"], ["lazy dog, and the d"], ["."]]


@pytest.mark.parametrize("make", [byte_level, sentence_piece_like])
def test_the_matcher_finds_a_stop_at_the_token_that_completes_it(make: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(make(tmp_path))
    for stops, text in itertools.product(STOPS, [*CORPUS, *TEXTS]):
        ids = tokenizer.encode(text)
        matcher = StopMatcher(tokenizer.decode, stops)
        for count in range(1, len(ids) + 1):
            expected = cut_at_stop(tokenizer.decode(ids[:count]), stops)[1] is not None
            assert matcher.matches(ids[count - 1]) == expected, (text, count)
            if expected:
                break


def test_the_matcher_decodes_a_few_tokens_at_a_time(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path))
    longest = 0

    def decode(ids: Any) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    matcher = StopMatcher(decode, ["never"])
    ids = tokenizer.encode(CORPUS[0] * 20) + [tokenizer.encode("世")[0]] * 50
    for count in range(1, len(ids) + 1):
        assert not matcher.matches(ids[count - 1])
    assert longest <= 8
