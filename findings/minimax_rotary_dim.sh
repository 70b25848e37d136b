#!/usr/bin/env bash
# transformers 5.24 beside llama.cpp's converter (as llama-cpp-python 0.3.36 has it): MiniMax-Text-01's config.json states
# `rotary_dim` (64 of heads of 128), which the converter writes as rope.dimension_count and llama.cpp rotates. transformers
# keeps the field in the config of its family `minimax` and rotates the whole of each head: logits are the same to the bit
# with and without it, and half a head is no choice, since cos and sin have the width of all. Exits non-zero if that
# changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.24.0' numpy
"$folder/venv/bin/pip" download -q --no-deps --no-binary llama-cpp-python --dest "$folder" llama-cpp-python==0.3.36
tar -xzf "$folder/llama_cpp_python-0.3.36.tar.gz" -C "$folder"
grep -n 'add_rope_dimension_count(self.hparams\["rotary_dim"\])' \
  "$folder/llama_cpp_python-0.3.36/vendor/llama.cpp/conversion/minimax.py"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
import torch
import transformers
from transformers import MiniMaxConfig, MiniMaxForCausalLM

sizes = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=4,
    layer_types=["full_attention"] * 2,
)
logits = []
for more in ({}, {"rotary_dim": 8}):
    config = MiniMaxConfig(**sizes, **more)
    torch.manual_seed(0)
    model = MiniMaxForCausalLM(config).eval()
    with torch.inference_mode():
        logits.append(model(torch.arange(1, 41)[None], use_cache=False).logits)
        cos, _ = model.model.rotary_emb(torch.zeros(1, 1, 16), torch.arange(3)[None])
    print("transformers", transformers.__version__, "rotary_dim", getattr(config, "rotary_dim", None), "rotates", cos.shape[-1])
    assert cos.shape[-1] == sizes["head_dim"]
assert config.rotary_dim == 8 and torch.equal(*logits)
print("the same logits")
PY
