#!/usr/bin/env bash
# llama.cpp's converter (as llama-cpp-python 0.3.36 has it) beside transformers 5: no GPT-NeoX or Pythia checkpoint is
# converted, whether config.json states `rotary_pct`, as published ones do, or rope_parameters.partial_rotary_factor, as
# transformers 5 saves it. The converter reads the config through AutoConfig, which turns the first into the second, and
# then asks for the first: KeyError 'rotary_pct'. Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.24.0' 'sentencepiece==0.2.1' numpy pyyaml
"$folder/venv/bin/pip" download -q --no-deps --no-binary llama-cpp-python --dest "$folder" llama-cpp-python==0.3.36
tar -xzf "$folder/llama_cpp_python-0.3.36.tar.gz" -C "$folder"
cd "$folder/llama_cpp_python-0.3.36/vendor/llama.cpp"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/model" <<'PY'
import json
import subprocess
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

out = Path(sys.argv[1])
sizes = dict(vocab_size=257, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, rotary_pct=0.25)).save_pretrained(out)
words = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0]).save_pretrained(out)
saved = json.loads((out / "config.json").read_text())
print("transformers", transformers.__version__, "rotary_pct", saved.get("rotary_pct"), saved["rope_parameters"])


def convert():
    command = [sys.executable, "convert_hf_to_gguf.py", str(out), "--vocab-only", "--outfile", str(out) + ".gguf"]
    return subprocess.run(command, capture_output=True, text=True)


first = convert()
print("as saved: exit", first.returncode, first.stderr.strip().splitlines()[-1])
published = {key: value for key, value in saved.items() if key != "rope_parameters"} | {"rotary_pct": 0.25}
(out / "config.json").write_text(json.dumps(published))
second = convert()
print("as published: exit", second.returncode, second.stderr.strip().splitlines()[-1])
assert "rotary_pct" not in saved and saved["rope_parameters"]["partial_rotary_factor"] == 0.25
assert all(run.returncode != 0 and "KeyError: 'rotary_pct'" in run.stderr for run in (first, second))
PY
