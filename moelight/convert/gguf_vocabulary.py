"""A checkpoint's tokenizer as the metadata of a GGUF file, with its chat templates. What llama.cpp's tokenizers cannot
do is refused: ids of sample texts must be the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moelight.core.errors import CheckpointError, quoted
from moelight.engine.tokenizer import Tokenizer, gguf_pieces
from moelight.profiles.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_BLANK = "▁"
SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  blanks\n\n\ttab   and a trailing blank ",
    "def f(x):\n    return x**2 + 1  # it's 3.14159\n\n\nclass A:\n\tpass\n",
    "1234567890 12 345 6,789.00 2^10=1024 x1y22z333",
    "I'll we'd THEY'RE don't O'Neil 'quoted' \"text\" (a) [b] {c} <d/>",
    "Größe naïve café Ελληνικά русский текст עברית العربية हिन्दी ไทย",
    "中文分词测试，日本語のテキスト、한국어 문장입니다。",
    "🦊🚀👩‍👩‍👧‍👦 ½ ² ™ … — “x”",
    "https://example.org/a?b=c&d=%20 user@mail.com A_B-C/d\\e",
    "camelCase HTTPServer snake_case SHOUTING mixedCASEWords",
    "end\r\nof\rlines\n \n  \n",
)


def vocabulary_of(tokenizer: Tokenizer, size: int, *, where: str) -> dict[str, Any]:
    """The keys ``tokenizer.*`` for a model with embeddings of ``size`` tokens; ``where`` names the checkpoint.

    Raises:
        CheckpointError: the tokenizer is of a kind that GGUF files do not hold.
    """
    description = tokenizer.description()
    model = description["model"]
    if model.get("type") != "BPE":
        raise CheckpointError(f"{where}: its tokenizer is a {model.get('type')}, and GGUF files of BPE are written")
    tokens, types = _tokens(description, size, where)
    byte_level = "ByteLevel" in str(description.get("pre_tokenizer")) or "ByteLevel" in str(description.get("decoder"))
    keys: dict[str, Any] = {"tokens": tokens, "token_type": types}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if byte_level:
        keys |= {"model": "gpt2", "merges": merges, "pre": _pre_name(tokenizer, tokens, model, where)}
    else:
        keys |= {
            "model": "llama",
            "pre": "default",
            "scores": _scores(tokens, merges),
            "add_space_prefix": tokenizer.encode("a b", add_special_tokens=False)[:1]
            == tokenizer.encode(f"{_BLANK}a b", add_special_tokens=False)[:1],
        }
    keys |= _specials(tokenizer)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | _templates(tokenizer)
    _check(tokenizer, metadata, where)
    return metadata


def _tokens(description: Mapping[str, Any], size: int, where: str) -> tuple[list[str], list[int]]:
    """Texts and types by id."""
    texts: dict[int, str] = {number: text for text, number in description["model"]["vocab"].items()}
    added = {token["id"]: token for token in description["added_tokens"]}
    texts |= {number: token["content"] for number, token in added.items()}
    count = max(size, max(texts) + 1)
    if count > size:
        raise CheckpointError(f"{where}: its tokenizer has {count} tokens, and its embeddings {size}")
    unknown = description["model"].get("unk_token")
    tokens, types = [], []
    for number in range(size):
        text = texts.get(number)
        tokens.append(f"[PAD{number}]" if text is None else text)
        if text is None:
            types.append(_UNUSED)
        elif text == unknown:
            types.append(_UNKNOWN)
        elif number in added:
            types.append(_CONTROL if added[number]["special"] else _USER_DEFINED)
        elif _is_byte(text) and description["model"].get("byte_fallback"):
            types.append(_BYTE)
        else:
            types.append(_NORMAL)
    return tokens, types


def _is_byte(text: str) -> bool:
    return len(text) == len("<0x00>") and text.startswith("<0x") and text.endswith(">")


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Scores by which merges take place in their order: that of a token is less the later it is merged."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _pre_name(tokenizer: Tokenizer, tokens: Sequence[str], model: Mapping[str, Any], where: str) -> str:
    """The pre-tokenizer of llama.cpp that cuts the samples as ``tokenizer`` does."""
    wanted = [tokenizer.pieces(text) for text in SAMPLES]
    tried: dict[PreTokenizer, bool] = {}
    for name, pre in PRE_TOKENIZERS.items():
        if pre.byte_level and pre not in tried:
            cutter = gguf_pieces(pre, tokens)
            tried[pre] = all(
                [piece for piece, _ in cutter.pre_tokenize_str(text)] == pieces
                for text, pieces in zip(SAMPLES, wanted, strict=True)
            ) and pre.ignore_merges == bool(model.get("ignore_merges"))
        if tried.get(pre) and not pre.always_adds_bos:
            return name
    raise CheckpointError(
        f"{where}: no pre-tokenizer of llama.cpp cuts texts as its tokenizer does, so it is not written as GGUF"
    )


def _specials(tokenizer: Tokenizer) -> dict[str, Any]:
    """Ids of special tokens, and whether texts have them around."""
    ids = {name: number for role, name in _ROLES.items() if (number := tokenizer.token_id(role)) is not None}
    others = sorted(tokenizer.eos_token_ids - {ids.get("eos")})
    if "eos" not in ids and others:
        ids["eos"] = others.pop(0)
    ids |= dict(zip(("eot", "eom"), others, strict=False))
    around = tokenizer.encode("a")
    plain = tokenizer.encode("a", add_special_tokens=False)
    return {
        **{f"{name}_token_id": number for name, number in ids.items()},
        "add_bos_token": "bos" in ids and around[:1] == [ids["bos"]] and plain[:1] != around[:1],
        "add_eos_token": "eos" in ids and around[-1:] == [ids["eos"]] and plain[-1:] != around[-1:],
    }


def _templates(tokenizer: Tokenizer) -> dict[str, Any]:
    if tokenizer.template is None:
        return {}
    sources = tokenizer.template.sources
    named = sorted(name for name in sources if name != "default")
    keys: dict[str, Any] = {f"tokenizer.chat_template.{name}": sources[name] for name in named}
    if named:
        keys["tokenizer.chat_templates"] = named
    if "default" in sources:
        keys["tokenizer.chat_template"] = sources["default"]
    return keys


def _check(tokenizer: Tokenizer, metadata: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if the vocabulary that is written encodes a sample, or ends an answer, otherwise."""
    written = Tokenizer.from_metadata(metadata, where)
    for text in (*SAMPLES, *_around(tokenizer)):
        if tokenizer.encode(text) != written.encode(text):
            raise CheckpointError(
                f"{where}: llama.cpp's tokenizers have other ids for {quoted(text[:40])} than this one, so it is not "
                "written as GGUF"
            )
    if missing := tokenizer.eos_token_ids - written.eos_token_ids:
        texts = ", ".join(quoted(tokenizer.token_text(number)) for number in sorted(missing))
        raise CheckpointError(f"{where}: {texts} end answers, for which GGUF files have no key; name fewer of them")


def _around(tokenizer: Tokenizer) -> Iterator[str]:
    """Samples with special tokens in them."""
    for text in tokenizer.roles.values():
        yield f"a{text} b"
