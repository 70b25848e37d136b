#!/bin/sh
# transformers' conversion of a GGUF vocabulary, beside llama.cpp's own table of pre-tokenizers.
#
# Packages  transformers 5.24.0, tokenizers 0.23.3
# Expected  A pre-tokenizer whose name the conversion has no expressions for is refused, as llama.cpp refuses a name it
#           does not have; control and user-defined tokens are matched whole; the vocabulary has the file's tokens.
# Seen      convert_gguf_tokenizer knows 23 of llama.cpp's 91 names and cuts texts as GPT-2 does for all others, without
#           a word: "deepseek-v3", "glm4", "smollm" and an invented name give the same pieces, so a number of four digits
#           or more can become other tokens. A token of letters outside of the byte alphabet ("<｜User｜>", as every
#           DeepSeek model has) is cut into bytes, though the file marks it. And <|endoftext|> is added behind the
#           last id where the file does not have it.
# Exit code 0: all as described; 1: something changed.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.3
"$work/venv/bin/python" -W ignore - <<'PROGRAM'
import sys
import tokenizers, transformers
from tokenizers import pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

merges = ["1 2", "3 4", "12 34", "5 6", "1234 56"]
tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges] + ["<｜User｜>"]
types = [1] * (len(tokens) - 1) + [4]

def tokenizer(pre):
    values = {"tokenizer_type": "gpt2", "pre_tokenizer_type": pre, "tokens": tokens, "token_type": types, "merges": merges}
    return convert_gguf_tokenizer("deepseek2", values)[0]

def pieces(pre, text):
    return tokenizer(pre).encode(text).tokens

print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
print("names with expressions:", len(GGUF_PRE_TOKENIZER_SPLITS))
for pre in ("llama-bpe", "deepseek-v3", "glm4", "smollm", "no such name"):
    print(f"{pre:14} 123456 -> {pieces(pre, '123456')}")
print("<｜User｜> ->", pieces("deepseek-v3", "<｜User｜>"))
size = tokenizer("deepseek-v3").get_vocab_size()
print("tokens of the file:", len(tokens), "of the tokenizer:", size)
as_described = (
    len(GGUF_PRE_TOKENIZER_SPLITS) == 23
    and pieces("llama-bpe", "123456") == ["12", "3", "4", "56"]
    and all(pieces(pre, "123456") == ["123456"] for pre in ("deepseek-v3", "glm4", "smollm", "no such name"))
    and len(pieces("deepseek-v3", "<｜User｜>")) > 1
    and size == len(tokens) + 1
)
print("as described" if as_described else "CHANGED")
sys.exit(not as_described)
PROGRAM
