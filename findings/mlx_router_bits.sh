#!/usr/bin/env bash
# mlx-lm: `convert -q` keeps the routers of Qwen3-MoE in 8 bits and says so in config.json, but rounds Mixtral's routers to
# the bits of all other matrices, 4, without an entry: whether a router is spared depends on the family's code, not on its
# being one. Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'mlx[cpu]==0.32.4' 'mlx-lm==0.32.2' 'transformers==5.24.0' 'safetensors==0.8.0' numpy
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PY'
import json
import pathlib
import sys

import numpy as np
from mlx_lm import convert
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

root = pathlib.Path(sys.argv[1])
H, I, E, V = 64, 64, 4, 64
common = dict(
    hidden_size=H, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=V, rms_norm_eps=1e-6,
    num_experts_per_tok=2, max_position_embeddings=128, rope_theta=10000.0, tie_word_embeddings=False,
)
FAMILIES = {
    "mixtral": (dict(intermediate_size=I, num_local_experts=E), "block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": (
        dict(
            intermediate_size=I, moe_intermediate_size=I, num_experts=E, head_dim=32, norm_topk_prob=True,
            decoder_sparse_step=1, mlp_only_layers=[],
        ),
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
    ),
}


def converted(family):
    """The entries of config.json about routers, and the bits of the first router, in files of ``family``."""
    fields, block, names = FAMILIES[family]
    source, target = root / family, root / f"{family}-mlx"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": family, **common, **fields}))
    draw = np.random.default_rng(0)

    def matrix(rows, columns):
        return draw.standard_normal((rows, columns)).astype(np.float32)

    layer, ones = "model.layers.0", np.ones(H, np.float32)
    tensors = {"model.embed_tokens.weight": matrix(V, H), "lm_head.weight": matrix(V, H), "model.norm.weight": ones}
    tensors |= {f"{layer}.{norm}.weight": ones for norm in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {f"{layer}.self_attn.{name}_proj.weight": matrix(H, H) for name in "qkvo"}
    if family == "qwen3_moe":
        tensors |= {f"{layer}.self_attn.{name}_norm.weight": np.ones(32, np.float32) for name in "qk"}
    tensors[f"{layer}.{block}.gate.weight"] = matrix(E, H)
    tensors |= {f"{layer}.{block}.experts.{e}.{name}.weight": matrix(H, I) for e in range(E) for name in names}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(V)}, "t0")).save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    convert(str(source), str(target), quantize=True, q_bits=4, q_group_size=32)
    said = json.loads((target / "config.json").read_text())["quantization"]
    with safe_open(target / "model.safetensors", "numpy") as file:
        words = file.get_slice(f"{layer}.{block}.gate.weight").get_shape()[1]
    return {name: entry for name, entry in said.items() if isinstance(entry, dict)}, 32 * words // H


for family, bits in (("qwen3_moe", 8), ("mixtral", 4)):
    entries, found = converted(family)
    print(f"{family}: router in {found} bits; modules of their own in config.json: {entries}")
    assert found == bits, f"the router of {family} has {found} bits now"
    assert bool(entries) == (bits == 8)
PY
