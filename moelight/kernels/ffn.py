"""Linear layers and experts on the CPU, over weights as the checkpoint stores them.

Selects the implementation: the extension where it is built, else `reference_ffn.py`. Does not depend on routing or on
where weights are stored. Every wrong argument is a ValueError that names it; the extension has checks of its own,
`checks_ffn.py` checks for the reference implementations.

Weights are float32, bfloat16, float16, int8 or, as uint8, int4: two values a byte along the input dimension, the
earlier in the low four bits, 8 meaning zero. Integers have float32 scales, one per output row, or one per row and
``group_size`` inputs. Nothing is repacked, and sums are float32.

A token's result is bit for bit independent of the other tokens, its position in the batch and the number of threads; it
differs between instruction sets by rounding. With bfloat16 tokens on AVX512_BF16, int4 times its scale is rounded to
bfloat16 before it is multiplied, and tokens multiplied by int8 are 16-bit integers times a power of two; in the tiles
of AMX, int8 times its scale is rounded to bfloat16 too. Elsewhere nothing is rounded before the products.

A call uses a workspace that its thread keeps for the next call; `cpu_expert_ffn_workspace` and `cpu_linear_workspace`
return its size.

Legend: T tokens, N outputs, K inputs, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from moelight.kernels import checks, native, reference

Tensors = Sequence[Tensor | None]


def cpu_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    group_size: int | None = None,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """x weight^T + bias -> `out`, or a new [T, N].

    x           [T, K]: float32, bfloat16 or float16
    weight      [N, K], any of the stored forms above; uint8 is [N, K / 2]
    bias        [N]: float32 or the dtype of x
    scale       float32 [N], or [N, ceil(K / group_size)]: for int8 and uint8 only
    group_size  a multiple of 32; None for one scale per row
    out         [T, N], dtype of x; must not overlap x
    threads     None for torch.get_num_threads()

    CPU memory, contiguous beyond the first dimension. The GIL is released.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape or stride.
    """
    group_size, threads = checks.check_ffn_scalars(group_size, threads)
    extension = native.extension()
    if extension is None:
        checks.check_linear(x, weight, bias, scale, group_size, out)
        result = reference.linear(x, weight, bias, scale=scale, group_size=group_size)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty((_rows("x", x), _rows("weight", weight)), dtype=x.dtype)
    extension.linear(
        _view("x", x),
        _view("weight", weight),
        None if bias is None else _view("bias", bias),
        None if scale is None else _view("scale", scale),
        group_size or 0,
        _view("out", out),
        threads,
    )
    return out


def cpu_expert_ffn(
    x: Tensor,
    gate_up: Tensors,
    down: Tensors,
    offsets: Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: Tensors | None = None,
    down_bias: Tensors | None = None,
    gate_up_scale: Tensors | None = None,
    down_scale: Tensors | None = None,
    group_size: int | None = None,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """down(activation(gate(x), up(x))) of every expert over its own rows of x -> `out`, or a new [T, H].

    x             [T, H], sorted by expert: float32, bfloat16 or float16
    gate_up       E tensors [2I, H], gate rows before up rows, at any address; uint8 is [2I, H / 2]
    down          E tensors [H, I]; uint8 is [H, I / 2]
    offsets       int32 [E + 1]: expert e owns rows offsets[e] to offsets[e + 1]
    activation    silu: silu(gate) up; gelu_tanh: gelu(gate) up; swiglu_oai: gpt-oss's, clamped at 7
    gate_up_bias, down_bias    E tensors [2I] and [H]: float32 or the dtype of x
    gate_up_scale, down_scale  E tensors float32, as in `cpu_linear`: for int8 and uint8 only
    group_size    of both weights: a multiple of 32; None for one scale per row
    out           [T, H], dtype of x; may be x
    threads       None for torch.get_num_threads()

    All entries of an expert without rows may be None. The tensors of a list share their shape and dtype. CPU memory,
    contiguous beyond the first dimension. The activation is rounded to the dtype of x. The GIL is released.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride or offset.
    """
    group_size, threads = checks.check_ffn_scalars(group_size, threads)
    checks.check_activation(activation)
    optional = {
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
        "gate_up_scale": gate_up_scale,
        "down_scale": down_scale,
    }
    extension = native.extension()
    if extension is None:
        checks.check_experts(x, gate_up, down, offsets, optional, group_size, out)
        cuts = offsets.tolist()
        result = reference.expert_ffn(x, gate_up, down, cuts, activation=activation, group_size=group_size, **optional)
        return result if out is None else out.copy_(result)
    rows = _view("x", x)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    extension.expert_ffn(
        rows,
        _views("gate_up", gate_up),
        _views("down", down),
        _view("offsets", offsets),
        activation,
        *(None if tensors is None else _views(name, tensors) for name, tensors in optional.items()),
        group_size or 0,
        _view("out", out),
        threads,
    )
    return out


def cpu_linear_workspace(
    tokens: int,
    outputs: int,
    inputs: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype = torch.bfloat16,
    threads: int | None = None,
) -> int:
    """Bytes that `cpu_linear` with up to these sizes keeps per calling thread; 0 without the extension.

    All products and experts of a thread share one workspace, as large as the largest of them needs.

    Raises ValueError, naming the argument, for a size or dtype that the call rejects.
    """
    types = checks.check_types(dtype, weight_dtype)
    checks.check_sizes(tokens=tokens, outputs=outputs, inputs=inputs)
    _, threads = checks.check_ffn_scalars(None, threads)
    extension = native.extension()
    return 0 if extension is None else int(extension.linear_workspace(*types, tokens, outputs, inputs, threads))


def cpu_expert_ffn_workspace(
    tokens: int,
    hidden: int,
    intermediate: int,
    *,
    experts: int,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype = torch.bfloat16,
    threads: int | None = None,
) -> int:
    """Bytes that `cpu_expert_ffn` with up to these sizes keeps per calling thread; 0 without the extension.

    tokens   rows of x, all experts together
    experts  E

    Raises ValueError, naming the argument, for a size or dtype that the call rejects.
    """
    types = checks.check_types(dtype, weight_dtype)
    checks.check_sizes(tokens=tokens, hidden=hidden, intermediate=intermediate, experts=experts)
    _, threads = checks.check_ffn_scalars(None, threads)
    extension = native.extension()
    if extension is None:
        return 0
    return int(extension.expert_ffn_workspace(*types, tokens, hidden, intermediate, experts, threads))


def _rows(name: str, tensor: object) -> int:
    if not isinstance(tensor, Tensor) or tensor.ndim != 2:
        raise ValueError(f"{name}: must be a tensor of two dimensions")
    return tensor.shape[0]


def _view(name: str, tensor: Tensor) -> object:
    """DLPack capsule of the tensor's memory, for the extension."""
    try:
        return to_dlpack(tensor)
    except (TypeError, RuntimeError, BufferError, AttributeError) as error:
        raise ValueError(f"{name}: not a tensor in CPU memory: {error}") from error


def _views(name: str, tensors: Tensors) -> list[object]:
    if not isinstance(tensors, (list, tuple)):
        raise ValueError(f"{name}: must be a list with one tensor per expert, is {type(tensors).__name__}")
    return [None if tensor is None else _view(name, tensor) for tensor in tensors]
