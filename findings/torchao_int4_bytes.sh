#!/usr/bin/env bash
# torchao: IntxWeightOnlyConfig(weight_dtype=torch.int4) makes a checkpoint larger than int8's: each 4-bit code is stored in
# a byte of its own (UNPACKED_TO_INT8, the default packing), with a bfloat16 scale and a zero point, all zeros in the
# symmetric mapping, for each group. One would expect half of int8. Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'torchao==0.18.0' numpy
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import torch
import torchao
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

bits = {}
for name, config in {
    "int8": Int8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
}.items():
    layer = torch.nn.Linear(1024, 512, bias=False, dtype=torch.bfloat16)
    quantize_(layer, config)
    weight = layer.weight
    names = (*weight.tensor_data_names, *getattr(weight, "optional_tensor_data_names", ()))
    parts = {part: getattr(weight, part) for part in names if getattr(weight, part) is not None}
    bits[name] = 8 * sum(part.nbytes for part in parts.values()) / (1024 * 512)
    shown = {part: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for part, tensor in parts.items()}
    print(f"torchao {torchao.__version__}, {name}: {bits[name]:.2f} bits a weight, codes from", end=" ")
    print(int(weight.qdata.min()), "to", int(weight.qdata.max()), shown)
    if name == "int4":
        assert weight.qdata.dtype == torch.int8 and weight.qdata.shape == (512, 1024)
        assert int(weight.qdata.min()) >= -8 and int(weight.qdata.max()) <= 7 and not weight.zero_point.any()
assert bits["int4"] > bits["int8"], bits
PY
