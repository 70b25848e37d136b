#!/usr/bin/env bash
# transformers 5: the published config.json of DBRX states the base of its rotary embeddings as attn_config.rope_theta
# (500000). DbrxConfig keeps that number where it is, gives rope_parameters the class's default, 10000, and the model
# takes the latter: no warning, and other positions than those that the weights were trained with. Files that state
# rope_parameters are read as they say. Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.24.0'
"$folder/venv/bin/python" - "$folder" <<'PY'
import json
import pathlib
import sys

import torch
import transformers

directory = pathlib.Path(sys.argv[1])
published = {  # the keys of databricks/dbrx-instruct, in tiny sizes
    "model_type": "dbrx",
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 1,
    "vocab_size": 64,
    "max_seq_len": 32768,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "model_type": "", "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "model_type": ""},
}


def base_of(config):
    """The base that the frequencies of the model have."""
    (directory / "config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_config(read)
    (frequencies,) = {tuple(part.inv_freq.tolist()) for part in model.modules() if hasattr(part, "inv_freq")}
    return read, round(frequencies[1] ** -len(frequencies))


print("transformers", transformers.__version__)
config, base = base_of(published)
print("attn_config.rope_theta", config.attn_config.rope_theta, "rope_parameters", config.rope_parameters, "base", base)
assert config.attn_config.rope_theta == 500000
assert base == 10000, "the base of attn_config is used now"
_, stated = base_of({**published, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
print("with rope_parameters in the file: base", stated)
assert stated == 500000
PY
