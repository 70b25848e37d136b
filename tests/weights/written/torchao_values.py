"""Linear layers quantised by torchao, in the tensors in which its subclasses are saved, and what it makes of them in
bfloat16 (``pip install torchao==0.18.0``, then ``python torchao_values.py torchao.safetensors``)."""

import sys
from typing import Any

import torch
from safetensors.torch import save_file
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
    quantize_,
)

CONFIGS = {
    "int8": Int8WeightOnlyConfig(),
    "fp8": Float8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(
        weight_dtype=torch.int4,  # type: ignore[attr-defined]
        granularity=PerGroup(32),
        mapping_type=MappingType.ASYMMETRIC,
    ),
}
torch.manual_seed(4)
tensors = {}
for name, config in CONFIGS.items():
    layer = torch.nn.Linear(64, 4, bias=False, dtype=torch.bfloat16)
    quantize_(layer, config)
    weight: Any = layer.weight
    parts = (*weight.tensor_data_names, *getattr(layer.weight, "optional_tensor_data_names", ()))
    for part in parts:
        if getattr(layer.weight, part) is not None:
            tensors[f"{name}._weight_{part}"] = getattr(layer.weight, part)
    tensors[f"{name}.values"] = layer.weight.dequantize().bfloat16()
save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, sys.argv[1])
