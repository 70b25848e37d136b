#!/usr/bin/env bash
# transformers 5: a rotary embedding with rope_type dynamic remembers the longest sequence that it has seen, and forgets it
# only for one of fewer than max_position_embeddings tokens: a sequence of just as many, or of fewer than were seen before,
# is turned by the frequencies of the earlier one. So generate() gives other tokens for the same prompt, depending on what
# the model has generated before. Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.24.0'
"$folder/venv/bin/python" - <<'PY'
import torch
import transformers
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

config = AutoConfig.for_model(
    "llama",
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
)
print("transformers", transformers.__version__)


def cosines(module, length):
    return module(torch.zeros(1), torch.arange(length)[None])[0]


for length in (63, 64, 65):
    fresh, used = LlamaRotaryEmbedding(config), LlamaRotaryEmbedding(config)
    cosines(used, 80)
    same = torch.equal(cosines(fresh, length), cosines(used, length))
    print(f"{length} positions after a sequence of 80: {'the same as' if same else 'other than'} without it")
    assert same == (length == 63)
PY
