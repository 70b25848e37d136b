#!/usr/bin/env bash
# transformers 5: PhimoeRotaryEmbedding asks for its frequencies without the length of the sequence, so a model with
# longrope (Phi-3.5-MoE) has the factors of short sequences at any length; only the scale (long_mscale) changes at
# original_max_position_embeddings. Phi3 with the same constants changes both. Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.24.0'
"$folder/venv/bin/python" - <<'PY'
import torch
import transformers
from transformers import AutoConfig
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

short, long = [1.0] * 8, [8.0] * 8
rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long}
sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
phimoe = AutoConfig.for_model(
    "phimoe",
    **sizes,
    rope_parameters={**rope, "short_mscale": 1.0, "long_mscale": 1.0, "original_max_position_embeddings": 64},
)
phi3 = AutoConfig.for_model("phi3", **sizes, original_max_position_embeddings=64, rope_parameters=rope)
print("transformers", transformers.__version__)


def angle(module, scale, length):
    """Of position 1 in the first dimension, in a forward of so many positions."""
    cos, sin = module(torch.zeros(1), torch.arange(length)[None])
    return float(torch.atan2(sin[0, 1, 0], cos[0, 1, 0]))


one, other = PhimoeRotaryEmbedding(phimoe), Phi3RotaryEmbedding(phi3)
found = {name: (angle(m, 1, 64), angle(m, 1, 65)) for name, m in (("phimoe", one), ("phi3", other))}
for name, (below, above) in found.items():
    print(f"{name}: position 1 is turned by {below:.4f} in 64 positions, by {above:.4f} in 65 (long factor: {1 / 8})")
assert abs(found["phi3"][0] - 1) < 1e-4 and abs(found["phi3"][1] - 1 / 8) < 1e-4
assert found["phimoe"][0] == found["phimoe"][1], "phimoe takes the long factors now"
PY
