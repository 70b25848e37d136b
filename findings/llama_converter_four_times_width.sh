#!/usr/bin/env bash
# llama.cpp's converter (as llama-cpp-python 0.3.36 has it) writes 4 x the width of the embedding as the
# feed_forward_length of GPT-2 and Phi-2, whatever config.json says (n_inner, intermediate_size), beside matrices of the
# width that it does say. One would expect the key to be that of the config; in such a file only the shapes of tensors
# are right. Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.24.0' 'sentencepiece==0.2.1' numpy pyyaml
"$folder/venv/bin/pip" download -q --no-deps --no-binary llama-cpp-python --dest "$folder" llama-cpp-python==0.3.36
tar -xzf "$folder/llama_cpp_python-0.3.36.tar.gz" -C "$folder"
cd "$folder/llama_cpp_python-0.3.36/vendor/llama.cpp"
HF_HUB_OFFLINE=1 PYTHONPATH=gguf-py:. "$folder/venv/bin/python" - "$folder" <<'PY'
import logging
import sys
from pathlib import Path

import gguf
import transformers
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

logging.disable(logging.WARNING)
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
models = {
    "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, n_inner=48, n_ctx=64)),
    "phi": transformers.PhiForCausalLM(transformers.PhiConfig(**sizes, intermediate_size=48)),
}
for name, model in models.items():
    out = Path(sys.argv[1]) / name
    model.save_pretrained(out)
    kind = get_model_class(get_model_architecture(ModelBase.load_hparams(out, False), ModelType.TEXT))
    kind.set_vocab = lambda self: None
    kind(out, gguf.LlamaFileType.ALL_F32, out / "model.gguf").write()
    file = gguf.GGUFReader(out / "model.gguf")
    architecture = file.fields["general.architecture"].contents()
    stated = file.fields[f"{architecture}.feed_forward_length"].contents()
    stored = next(tensor.shape.tolist() for tensor in file.tensors if tensor.name == "blk.0.ffn_up.weight")
    print(f"transformers {transformers.__version__}, {architecture}: config 48, key {stated}, ffn_up {stored}")
    assert stated == 4 * 32 and sorted(stored) == [32, 48]
PY
