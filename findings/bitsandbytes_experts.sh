#!/usr/bin/env bash
# transformers and bitsandbytes, MoE checkpoints: version 4 quantises the linear layers of experts, and the routers with
# them, which are linear layers there, in 4 bits too. Version 5 does not read what version 4 wrote: of a 4-bit checkpoint it
# refuses the shapes of experts and routers; an 8-bit one loads, its experts listed as unexpected and left unread, and the
# first forward fails on int8 matrices. And what version 5 writes itself has plain experts, under the same
# quantization_config. One would expect a checkpoint with bitsandbytes' tensors to mean the same under either version.
# Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==4.57.6' 'bitsandbytes==0.50.2' 'accelerate==1.15.0' \
    'safetensors==0.8.0'
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
cd "$folder"
venv/bin/python - <<'PY'
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MixtralConfig

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
config = MixtralConfig(vocab_size=64, num_local_experts=4, sliding_window=None, **sizes)
AutoModelForCausalLM.from_config(config).save_pretrained("plain")
for bits in (4, 8):
    how = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = AutoModelForCausalLM.from_pretrained("plain", quantization_config=how, device_map="cpu")
    assert model(torch.arange(8)[None]).logits.isfinite().all()
    model.save_pretrained(f"bits{bits}")
    with safe_open(f"bits{bits}/model.safetensors", "pt") as file:
        block = "model.layers.0.block_sparse_moe"
        names = (f"{block}.experts.0.w1.weight", f"{block}.gate.weight")
        stored = {name: file.get_slice(name).get_dtype() for name in names}
    print(f"transformers {transformers.__version__}, {bits} bits: {stored}")
    assert [stored[name] for name in names[:2]] == ["U8" if bits == 4 else "I8"] * 2
PY
venv/bin/pip install -q 'transformers==5.24.0'
venv/bin/python - <<'PY'
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

for bits in (4, 8):
    try:
        model, info = AutoModelForCausalLM.from_pretrained(f"bits{bits}", device_map="cpu", output_loading_info=True)
        unread = sorted(key for key in info["unexpected_keys"] if ".experts." in key)
        print(f"transformers {transformers.__version__}, {bits} bits: loaded, {len(unread)} tensors of experts unread")
        assert bits == 8 and len(unread) == 12
        model(torch.arange(8)[None])
        raise SystemExit(f"{bits} bits of transformers 4 are computed now")
    except RuntimeError as error:
        print(f"transformers {transformers.__version__}, {bits} bits: RuntimeError: {str(error).splitlines()[0][:100]}")
how = BitsAndBytesConfig(load_in_4bit=True)
AutoModelForCausalLM.from_pretrained("plain", quantization_config=how, device_map="cpu").save_pretrained("five")
with safe_open("five/model.safetensors", "pt") as file:
    names = [name for name in file.keys() if "w1" in name or name.endswith(("q_proj.weight", "gate.weight"))]
    stored = {name: file.get_slice(name).get_dtype() for name in sorted(names)}
print(f"written by {transformers.__version__}: {stored}")
assert stored["model.layers.0.self_attn.q_proj.weight"] == "U8"
assert all(dtype in ("F32", "F16", "BF16") for name, dtype in stored.items() if "w1" in name or "gate" in name)
PY
