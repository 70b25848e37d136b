#!/usr/bin/env bash
# transformers 5.24 beside llama.cpp's converter (as llama-cpp-python 0.3.36 has it): a DeepSeek-V4 or Hy4 checkpoint that
# save_pretrained wrote is not converted. Saving turns the rules of loading round, and those of these families do not lead
# back: the norm of keys and values is `attn.norm` (published: `attn.kv_norm`), hyper-connections of Hy4 are
# `hc_pre.hc_attn_layer` (published: `hc_attn_layer.hc_pre`), and gates `mlp.linear_gate`. transformers itself loads them
# again. Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.24.0' 'sentencepiece==0.2.1' numpy pyyaml
"$folder/venv/bin/pip" download -q --no-deps --no-binary llama-cpp-python --dest "$folder" llama-cpp-python==0.3.36
tar -xzf "$folder/llama_cpp_python-0.3.36.tar.gz" -C "$folder"
cd "$folder/llama_cpp_python-0.3.36/vendor/llama.cpp"
HF_HUB_OFFLINE=1 PYTHONPATH=gguf-py "$folder/venv/bin/python" - "$folder" <<'PY'
import sys
from pathlib import Path

import gguf
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

sizes = dict(
    vocab_size=320,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    q_lora_rank=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    pad_token_id=0,
)
more = {
    "deepseek_v4": dict(head_dim=16, o_groups=2, o_lora_rank=16, layer_types=["sliding_attention"] * 2),
    "hy_v4": dict(kv_lora_rank=16, intermediate_size=64, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),
}
strange = {
    "deepseek_v4": ("model.layers.0.attn.norm.weight",),
    "hy_v4": ("model.layers.0.hc_pre.hc_attn_layer.hc_fn", "model.layers.0.mlp.linear_gate.weight"),
}
# DeepSeek-V4's converter has a list of its own, Hy4's asks the map of gguf-py.
own = Path("conversion/deepseek.py").read_text()
assert '"attn.kv_norm.weight"' in own
mapped = gguf.get_tensor_name_map(gguf.MODEL_ARCH.HY_V4, sizes["num_hidden_layers"])
assert mapped.get_name("model.layers.0.hc_attn_layer.hc_pre.hc_fn") is not None


def known(family, name):
    if family == "hy_v4":
        return mapped.get_name(name, try_suffixes=(".weight", ".bias")) is not None
    return '"' + name.removeprefix("model.layers.0.") + '"' in own


for family, names in strange.items():
    out = Path(sys.argv[1]) / family
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **more[family]))
    model.save_pretrained(out)
    with safe_open(out / "model.safetensors", "pt") as file:
        saved = set(file.keys())
    for name in names:
        print(f"transformers {transformers.__version__} {family} saves {name}: the converter knows it:", known(family, name))
        assert name in saved and not known(family, name)
    again, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"], report
    print(f"{family} is loaded again, without missing tensors")
PY
