#!/usr/bin/env bash
# llama.cpp's converter (as llama-cpp-python 0.3.36 has it) leaves out llama_4_scaling_beta of Mistral 4, by which
# queries grow with their position: 1 + beta log(1 + floor(position / original length)), from position 8192 on
# with the values that transformers' config has by default. The same key of Ministral 3 is written (attention.temperature_scale), and llama.cpp's graph of
# Mistral 4 would read it. So a file of Mistral 4 computes other numbers than the model beyond 8192 tokens, and nothing
# in it says so. Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.24.0' 'sentencepiece==0.2.1' numpy pyyaml
"$folder/venv/bin/pip" download -q --no-deps --no-binary llama-cpp-python --dest "$folder" llama-cpp-python==0.3.36
tar -xzf "$folder/llama_cpp_python-0.3.36.tar.gz" -C "$folder"
cd "$folder/llama_cpp_python-0.3.36/vendor/llama.cpp"
HF_HUB_OFFLINE=1 PYTHONPATH=gguf-py:. "$folder/venv/bin/python" - "$folder" <<'PY'
import json
import logging
import sys
from pathlib import Path

import gguf
import torch
import transformers
from conversion import ModelBase, ModelType, TextModel, get_model_architecture, get_model_class
from conversion.deepseek import DeepseekV2Model
from conversion.llama import LlamaModel

logging.disable(logging.WARNING)
for kind in (TextModel, DeepseekV2Model, LlamaModel):
    kind.set_vocab = lambda self: None
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
latent = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, intermediate_size=48)
models = {
    "mistral4": transformers.Mistral4ForCausalLM(transformers.Mistral4Config(**sizes, **latent, **experts)),
    "ministral3": transformers.Ministral3ForCausalLM(
        transformers.Ministral3Config(**sizes, head_dim=16, intermediate_size=48)
    ),
}
written = {}
for name, model in models.items():
    out = Path(sys.argv[1]) / name
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"architectures": ["Ministral3ForCausalLM"]}))
    kind = get_model_class(get_model_architecture(ModelBase.load_hparams(out, False), ModelType.TEXT))
    kind(out, gguf.LlamaFileType.ALL_F32, out / "model.gguf").write()
    file = gguf.GGUFReader(out / "model.gguf")
    architecture = file.fields["general.architecture"].contents()
    field = file.fields.get(f"{architecture}.attention.temperature_scale")
    written[architecture] = None if field is None else field.contents()
    beta = model.config.rope_parameters["llama_4_scaling_beta"]
    print(f"transformers {transformers.__version__}, {architecture}: beta {beta}, in the file {written[architecture]}")
assert written["mistral4"] is None and written["mistral3"] is not None
PY
