"""Matrices quantised by MLX: ``mlx.core.quantize`` in every number of bits, and what ``mlx.core.dequantize`` makes of
them in float32 (``pip install 'mlx[cpu]==0.32.4'``, then ``python written_mlx.py mlx.safetensors``)."""

import sys

import mlx.core as mx

ROWS, COLUMNS = 2, 128
mx.random.seed(7)
tensors = {}
dtypes = {32: mx.bfloat16, 64: mx.float16, 128: mx.float32}
for bits, group in ((2, 64), (3, 32), (4, 64), (4, 128), (5, 128), (6, 64), (8, 32)):
    weight = (mx.random.normal((ROWS, COLUMNS)) * 0.2).astype(dtypes[group])
    codes, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
    name = f"{bits}.{group}"
    tensors |= {f"{name}.weight": codes, f"{name}.scales": scales, f"{name}.biases": biases}
    wide = (scales.astype(mx.float32), biases.astype(mx.float32))
    tensors[f"{name}.values"] = mx.dequantize(codes, *wide, group_size=group, bits=bits)
mx.save_safetensors(sys.argv[1], tensors)
