r"""Pre-tokenizers of byte-level BPE vocabularies by the names that GGUF files give them (``tokenizer.ggml.pre``).

A pre-tokenizer cuts a text into the pieces within which tokens are merged, by regular expressions one after the other:
each cuts the pieces of those before it, and what it does not match stays a piece. The expressions are those of the
models' own tokenizers as llama.cpp applies them, in the syntax of the tokenizers library. llama.cpp knows the general
categories of Unicode alone, so ``\p{Lu}``, ``\p{Ll}`` and the other kinds of letters are any letter there; in the
rows that depend on it, the expressions here say what it computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moelight.core.errors import did_you_mean, quoted

_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"  # of English words, in either case
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n]*|{_BLANKS}"
_QWEN2 = rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_PUNCTUATION}[\r\n]*|{_BLANKS}"
_QWEN35 = rf"{_SUFFIX}|{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LINES = r"[^\n]+|[\n]+"
_THREE_DIGITS = r"\p{N}{1,3}"
# Digits in threes from the right. What stands before a number stays with its first group.
_DIGITS_FROM_THE_RIGHT = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*+(?!\p{N}))"
_JAPANESE_AND_CHINESE = "[一-龥぀-ゟ゠-ヿ]+"
_EAST_ASIAN = r"[[一-龥ࠀ-一가-퟿]&&\S]+"
_HAN = "一-鿿㐀-䶿\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
# Letters of scripts with two cases, as DeepSeek's first tokenizers list them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _by_case(capital: str, small: str, *, suffix: str = "", digits: str) -> str:
    """Words whose capitals precede their small letters; the classes are those of llama.cpp, where a letter outside of
    ASCII is both."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}{capital}*{small}+{suffix}|{start}{capital}+{small}*{suffix}"
        rf"|{digits}|{_PUNCTUATION}[\r\n/]*|{_BLANKS}"
    )


_CAPITAL, _SMALL = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_GPT4O = _by_case(_CAPITAL, _SMALL, suffix=f"{_SUFFIX}?", digits=_THREE_DIGITS)
_COHERE = rf"{_MARKED_WORD}{_SUFFIX}?|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n/]*|{_BLANKS}"
_KIMI = (
    rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_SUFFIX}?"
    rf"|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n]*|{_BLANKS}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreTokenizer:
    """The expressions ``splits``, applied in order, and what else llama.cpp derives from the name.

    ``byte_level``: tokens spell bytes by the printable characters of GPT-2; otherwise they are plain text with ``▁``
    for a blank, and bytes are ``<0xNN>``. ``ignore_merges``: a piece that is a token is
    that token, whatever its merges. ``adds_bos``: whether a text begins with the BOS token where the file does not say;
    ``always_adds_bos``: even where the file says otherwise. ``mask_takes_blanks``: blanks before ``<mask>`` belong to
    it.
    """

    splits: tuple[str, ...]
    byte_level: bool = True
    ignore_merges: bool = False
    adds_bos: bool = False
    always_adds_bos: bool = False
    mask_takes_blanks: bool = False


_gpt2 = PreTokenizer(splits=(_GPT2,))
_digits_gpt2 = PreTokenizer(splits=(r"\p{N}", _GPT2))
_llama3 = PreTokenizer(splits=(_LLAMA3,))
_llama3_bos = replace(_llama3, ignore_merges=True, adds_bos=True)
_qwen2 = PreTokenizer(splits=(_QWEN2,))
_deepseek3 = PreTokenizer(splits=(_THREE_DIGITS, _JAPANESE_AND_CHINESE, _DEEPSEEK3))
_gpt4o = PreTokenizer(splits=(_GPT4O,))
_bloom = PreTokenizer(splits=(_BLOOM,))
_cohere = PreTokenizer(splits=(_DIGITS_FROM_THE_RIGHT, _COHERE))
_bailing = PreTokenizer(
    splits=(
        rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_PUNCTUATION}[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_sentencepiece = PreTokenizer(splits=(_LINES,), byte_level=False)
_gemma4 = replace(_sentencepiece, adds_bos=True, always_adds_bos=True)

DEFAULT_PRE_TOKENIZER = PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

# By name, as in the llama.cpp of llama-cpp-python 0.3.36 (0c1e57098), but for `whitespace`: it belongs to a tokenizer
# model of that name, of embedding models.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": DEFAULT_PRE_TOKENIZER,
    **dict.fromkeys(
        [
            "gpt-2",
            "phi-2",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "roberta-bpe",
        ],
        _gpt2,
    ),
    **dict.fromkeys(("jina-v2-es", "jina-v2-de", "jina-v2-code"), replace(_gpt2, mask_takes_blanks=True)),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _digits_gpt2
    ),
    "falcon": PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        _llama3_bos,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _llama3),
    **dict.fromkeys(("glm4", "glm5"), replace(_llama3, ignore_merges=True)),
    "jais-2": PreTokenizer(
        splits=(
            rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n]*|\s*[\r\n]+"
            + "".join(rf"|\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
            + r"|\s{1}",
        )
    ),
    "minicpm5": PreTokenizer(
        splits=(_THREE_DIGITS, rf"{_SUFFIX}|{_WORD}|\p{{N}}+|{_PUNCTUATION}[\r\n]*|{_BLANKS}"), ignore_merges=True
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        _qwen2,
    ),
    "qwen35": PreTokenizer(splits=(_QWEN35,)),
    "laguna": PreTokenizer(splits=(_LINES, _QWEN2)),
    "ufakzeka": PreTokenizer(splits=(rf"{_WORD}|\p{{N}}|{_PUNCTUATION}[\r\n]*|{_BLANKS}",)),
    "seed-coder": PreTokenizer(splits=(rf"{_SUFFIX}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)),
    "deepseek-llm": PreTokenizer(
        splits=(
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
            r"\s+$",
            _EAST_ASIAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _deepseek3),
    "spark2_5": PreTokenizer(
        splits=(
            _THREE_DIGITS,
            _JAPANESE_AND_CHINESE,
            _DEEPSEEK3.replace(r"[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+", r"[\p{P}\p{S}]+|[\r\n]"),
            r"\p{N}",
        )
    ),
    "youtu": PreTokenizer(
        splits=(
            f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_JAPANESE_AND_CHINESE}",
            rf"{_MARKED_WORD}{_SUFFIX}?|\p{{N}}|{_PUNCTUATION}[\r\n/]*|{_BLANKS}",
        ),
        ignore_merges=True,
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _bloom),
    "viking": replace(_bloom, splits=(_BLOOM, r"\p{N}")),
    "tekken": PreTokenizer(splits=(_by_case(_CAPITAL, _SMALL, digits=r"\p{N}"),), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _gpt4o),
    "granite-embed-multi-97m": PreTokenizer(
        splits=(
            _by_case(
                r"[[\p{L}\p{M}]&&[^a-z]]",
                r"[[\p{L}\p{M}]&&[^A-Z]]",
                suffix=f"{_SUFFIX}?",
                digits=_THREE_DIGITS,
            ),
        ),
        ignore_merges=True,
    ),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _cohere),
    "chameleon": PreTokenizer(
        splits=(
            r"<sentinel:[0-9]+>",
            r"IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    "kimi-k2": PreTokenizer(splits=(_KIMI,)),
    "superbpe": PreTokenizer(splits=(r"\p{N}+", r"(?=(?:[0-9]{3})+(?![0-9]))")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _bailing),
    "afmoe": PreTokenizer(
        splits=(
            _DIGITS_FROM_THE_RIGHT,
            "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
            _DEEPSEEK3,
        )
    ),
    "exaone-moe": PreTokenizer(
        splits=(
            rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_PUNCTUATION}[\r\n/]?"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _gemma4),
    "sarvam-moe": _sentencepiece,
}


def pre_tokenizer(name: object) -> PreTokenizer:
    """The pre-tokenizer called ``name``, or llama.cpp's default where a file names none; else raises ValueError."""
    if name is None or name == "":
        return DEFAULT_PRE_TOKENIZER
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        near = did_you_mean(name, PRE_TOKENIZERS) if isinstance(name, str) else ""
        raise ValueError(
            f"tokenizer.ggml.pre {quoted(name)} is no pre-tokenizer that moelight has{near}; use the checkpoint in "
            "safetensors, whose tokenizer.json holds its expressions"
        )
    return PRE_TOKENIZERS[name]
