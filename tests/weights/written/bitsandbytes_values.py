"""Matrices quantised by bitsandbytes, as its linear layers save them, and what it makes of them in float32: of the
first one, whose scales are in two blocks, the last rows (``pip install bitsandbytes==0.50.2``, then ``python
bitsandbytes_values.py bitsandbytes.safetensors``)."""

import sys

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from safetensors.torch import save_file

torch.manual_seed(3)
tensors = {}
for code_type, rows, columns, nested in (("nf4", 130, 128, True), ("fp4", 6, 96, False)):
    layer = Linear4bit(columns, rows, bias=False, quant_type=code_type, compress_statistics=nested).to("cpu")
    layer.weight = type(layer.weight)(
        torch.randn(rows, columns) * 0.2, requires_grad=False, quant_type=code_type, compress_statistics=nested
    ).to("cpu")
    tensors |= {f"{code_type}.{name}": tensor for name, tensor in layer.state_dict().items()}
    tensors[f"{code_type}.values"] = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)[-6:]
eight = Linear8bitLt(64, 4, bias=False, has_fp16_weights=False)
eight.load_state_dict({"weight": torch.randn(4, 64) * 0.2})
eight = eight.to("cpu")
tensors |= {f"int8.{name}": tensor for name, tensor in eight.state_dict().items()}
tensors["int8.values"] = functional.int8_vectorwise_dequant(tensors["int8.weight"], tensors["int8.SCB"])
save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, sys.argv[1])
