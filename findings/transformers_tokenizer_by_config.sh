#!/usr/bin/env bash
# transformers 5.24.0: the ids that AutoTokenizer gives for one tokenizer.json depend on config.json beside it.
#
# One would expect tokenizer.json to say how texts are split: it holds normalizer, pre-tokenizer and model, and until
# transformers 4 (4.57.3) the fast GPT-2 tokenizer was read from it as it is, beside any config.json. In 5.24 the class builds
# its own pipeline around the vocabulary and merges of the file. Here tokenizer.json is SentencePiece-style and
# tokenizer_config.json names GPT2TokenizerFast or Qwen2TokenizerFast, as some conversions leave it:
#   - without config.json, or with `model_type` llama, the class wins: no blank begins the text, and "ab a" has other ids;
#   - with `model_type` mixtral, for which AutoTokenizer's table names the plain TokenizersBackend, the file wins, and the
#     ids are those of the tokenizers library.
# So a folder with tokenizer files alone is read otherwise than the checkpoint they were copied from.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'END'
import json
import sys
from pathlib import Path

import tokenizers
import transformers
from tokenizers import Tokenizer, models, normalizers

TEXT = "ab a"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
MERGES = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]

transformers.logging.set_verbosity_error()
vocabulary = {piece: number for number, piece in enumerate(PIECES)}
inner = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def ids(name, model_type):
    """Of the text, by AutoTokenizer, from a folder with that class and, if one is given, a config.json."""
    directory = Path(sys.argv[1], f"{name}-{model_type}")
    directory.mkdir()
    inner.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": name, "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type:
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return type(tokenizer).__name__, tokenizer(TEXT)["input_ids"]


print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
expected = inner.encode(TEXT).ids
print("tokenizer.json by the tokenizers library:", expected, inner.encode(TEXT).tokens)
equal = {}
for name in ("GPT2TokenizerFast", "Qwen2TokenizerFast", "LlamaTokenizerFast"):
    for model_type in (None, "llama", "mixtral"):
        read_as, result = ids(name, model_type)
        equal[name, model_type] = result == expected
        beside = f"config.json of {model_type}" if model_type else "no config.json"
        print(f"tokenizer_class {name}, {beside}: {read_as} {result}")
wrong = {key for key, same in equal.items() if not same}
if wrong != {(name, kind) for name in ("GPT2TokenizerFast", "Qwen2TokenizerFast") for kind in (None, "llama")}:
    raise SystemExit("it has changed")
END
