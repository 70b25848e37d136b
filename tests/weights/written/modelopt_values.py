"""A matrix in NVFP4 by ModelOpt, and what it makes of it in float32 (``pip install nvidia-modelopt==0.47.0``, then
``python modelopt_values.py modelopt.safetensors``)."""

import sys

import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import save_file

BLOCK = 16
torch.manual_seed(1)
matrix, scale, number = NVFP4QTensor.quantize((torch.randn(4, 64) * 0.3).bfloat16(), BLOCK)
values = matrix.dequantize(torch.float32, scale=scale, double_scale=number, block_sizes={-1: BLOCK})
tensors = {"weight": matrix._quantized_data, "weight_scale": scale, "weight_scale_2": number, "values": values}
save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, sys.argv[1])
