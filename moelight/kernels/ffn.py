"""Linear layers and experts on the CPU, over weights as the checkpoint stores them.

Native where the extension is built, else `quantized.py`. Tensors are in CPU memory, contiguous beyond the first
dimension. Every wrong argument is a ValueError that names it. ``threads`` None stands for torch.get_num_threads().

Weights are float32, bfloat16 or float16, or a `Matrix[Tensor]` of any format: the product is that with its numbers
rounded to the dtype of the tokens, to the bit. Nothing is repacked, and sums are float32.

A token's result is bit for bit independent of the other tokens, its position in the batch and the number of threads; it
differs between instruction sets by rounding.

Legend: T tokens, N outputs, K inputs, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moelight.formats.format import Format
from moelight.formats.matrix import Matrix
from moelight.kernels import arguments, native, quantized
from moelight.kernels.activations import Activation, activation_of
from moelight.kernels.arguments import FLOATS, as_dlpack, check_tensor, lend, stored
from moelight.kernels.caching_allocator import RESULTS
from moelight.kernels.matrices import (
    Weight,
    Weights,
    as_matrix,
    check_integers,
    floats_of,
    lend_weight,
    multiply,
    parts_checked,
)

Tensors = Sequence[Tensor | None]
_BIASES = ("gate_up_bias", "up_bias", "down_bias")


def cpu_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    activations: str = "auto",
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """x weight^T + bias -> `out`, or a new [T, N]; the GIL is released.

    x           [T, K]: float32, bfloat16 or float16
    weight      [N, K]: float32, bfloat16, float16 or quantised
    bias        [N], of any float
    activations auto, or int8: of a quantised matrix whose codes are whole numbers; see `quantized`
    out         [T, N], dtype of x; must not overlap x
    """
    if native.available():
        return multiply(x, weight, bias, activations=activations, out=out, threads=threads)
    arguments.check_threads(threads)
    tokens, inputs = check_tensor("x", x, FLOATS, (None, None))
    matrix = _check_weight("weight", weight, (None, inputs))
    if (floats := floats_of((matrix,))) is not None:
        check_tensor("weight", floats, FLOATS, matrix.shape)
    if bias is not None:
        check_tensor("bias", bias, FLOATS, (matrix.rows,))
    check_integers("weight", activations, weight)
    if out is not None:
        check_tensor("out", out, x.dtype, (tokens, matrix.rows))
    return stored(quantized.linear(x, weight, bias, activations=activations), out)


def cpu_expert_ffn(
    x: Tensor,
    gate_up: Weights,
    down: Weights,
    offsets: Tensor,
    *,
    up: Weights | None = None,
    activation: str | Activation = "silu",
    interleaved: bool = False,
    gate_up_bias: Tensors | None = None,
    up_bias: Tensors | None = None,
    down_bias: Tensors | None = None,
    activations: str | tuple[str, str] = "auto",
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """down(activation(gate(x), up(x))) of every expert over its own rows of x -> `out` (may be x), or a new [T, H].

    x, out        [T, H] of one dtype, sorted by expert: float32, bfloat16 or float16
    gate_up       E tensors [2I, H], gate rows before up rows, at any address. Beside ``up`` the gate [I, H] alone; with
                  an activation that is not gated up alone
    down          E tensors [H, I]
    up            E tensors [I, H], if apart; they may be stored otherwise than ``gate_up``
    offsets       int32 [E + 1]: expert e has rows offsets[e] to offsets[e + 1]
    activation    or a name: silu, gelu_tanh (gelu(gate) up), swiglu_oai (gpt-oss's, clamped at 7)
    interleaved   rows of gate and up alternate in ``gate_up``, and in its bias
    gate_up_bias, up_bias, down_bias  E tensors of one float, one number a row
    activations   auto; int8: rows of x, and what the activation gives, are rounded; or one for (gate and up, down)

    Lists of weights may hold quantised matrices of one format instead. Floats may be transposed: the tensor of a matrix
    is then the transpose of contiguous rows. All entries of an expert without rows may be None. The tensors of a list
    share their shape, dtype and order. The activation is rounded to the dtype of x. The GIL is released.
    """
    threads = arguments.check_threads(threads)
    by_side = (activations, activations) if isinstance(activations, str) else activations
    act = _check_form(activation, up, gate_up_bias, up_bias, interleaved=interleaved)
    biases = dict(zip(_BIASES, (gate_up_bias, up_bias, down_bias), strict=True))
    weights = {"gate_up": gate_up, "up": up, "down": down}
    extension = native.extension()
    if extension is None:
        cuts = _check_experts(x, weights, biases, offsets, out, both=act.gated and up is None)
        for name, matrices in weights.items():
            check_integers(name, by_side[name == "down"], *(matrices or ()))
        options: dict[str, Any] = {"activation": act, "interleaved": interleaved} | biases
        return stored(quantized.expert_ffn(x, gate_up, down, cuts, up=up, activations=by_side, **options), out)
    rows = as_dlpack("x", x)
    if out is None:
        out = RESULTS.empty(x.shape, x.dtype)
    wide, second, narrow = (None if tensors is None else export(name, tensors) for name, tensors in weights.items())
    rest: list[object] = [None if tensors is None else export(name, tensors) for name, tensors in biases.items()]
    bounds, into = lend(offsets=offsets, out=out)
    by = (act.curve, act.alpha, act.limit, act.shift, act.late)
    pairing = "interleaved" if interleaved else "joined" if act.gated else "ungated"
    extension.expert_ffn(rows, wide, second, narrow, bounds, by, pairing, *rest, by_side, into, threads)
    return out


def _check_form(
    activation: str | Activation, up: object, gate_up_bias: object, up_bias: object, *, interleaved: bool
) -> Activation:
    """Check that parts of experts are given where their form has them."""
    act = activation_of(activation)
    if interleaved and (up is not None or not act.gated):
        raise ValueError("interleaved: gate and up must be one matrix, gate_up")
    if up is not None and not act.gated:
        raise ValueError("up: without a gate, up is given as gate_up")
    if (up_bias is None) != (up is None or gate_up_bias is None):
        raise ValueError("up_bias: must be given beside up where gate_up_bias is, and only there")
    return act


def cpu_linear_workspace(
    tokens: int,
    outputs: int,
    inputs: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | Format = torch.bfloat16,
    activations: str = "auto",
    threads: int | None = None,
) -> int:
    """Bytes that `cpu_linear` with up to these sizes keeps per calling thread; 0 without the extension.
    ``weight_dtype`` is the format of quantised weights.

    All products and experts of a thread share one workspace, as large as the largest of them needs.
    """
    types = _check_sizes(dtype, weight_dtype, tokens=tokens, outputs=outputs, inputs=inputs)
    threads, extension = arguments.check_threads(threads), native.extension()
    return (
        0
        if extension is None
        else int(extension.linear_workspace(*types, activations == "int8", tokens, outputs, inputs, threads))
    )


def cpu_expert_ffn_workspace(
    tokens: int,
    hidden: int,
    intermediate: int,
    *,
    experts: int,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | Format = torch.bfloat16,
    activations: str = "auto",
    transposed: bool = False,
    twice: bool = False,
    threads: int | None = None,
) -> int:
    """Bytes that `cpu_expert_ffn` keeps, see `cpu_linear_workspace`; ``tokens``: rows of x, all experts together;
    ``transposed``: weights are; ``twice``: gate and up are stored in two formats, for each of which int8 activations
    are rounded by themselves."""
    types = _check_sizes(dtype, weight_dtype, tokens=tokens, hidden=hidden, intermediate=intermediate, experts=experts)
    threads, extension = arguments.check_threads(threads), native.extension()
    if extension is None:
        return 0
    how = activations == "int8", transposed, twice
    return int(extension.expert_ffn_workspace(*types, *how, tokens, hidden, intermediate, experts, threads))


def export(name: str, tensors: Weights) -> list[object]:
    """The weights of every expert, lent to the extension; None for None. Raises ValueError."""
    if not isinstance(tensors, (list, tuple)):
        raise ValueError(f"{name}: must be a list with one tensor per expert, is {type(tensors).__name__}")
    return [None if tensor is None else lend_weight(name, tensor) for tensor in tensors]


def _check_sizes(dtype: torch.dtype, weight_dtype: torch.dtype | Format, **sizes: object) -> tuple[int, int]:
    """Check the sizes of a workspace; return the extension's numbers of the dtypes of tokens and weights."""
    quantised = weight_dtype not in FLOATS
    for name, value, allowed in (("dtype", dtype, FLOATS), ("weight_dtype", weight_dtype, FLOATS)):
        if value not in allowed and not (name == "weight_dtype" and isinstance(value, Format)):
            raise ValueError(f"{name}: must be one of {', '.join(map(str, allowed))}, is {value}")
    for name, size in sizes.items():
        arguments.check_integer(name, size, 0 if name == "tokens" else 1, (1 << 31) - 1)
    return FLOATS.index(dtype), len(FLOATS) if quantised else FLOATS.index(weight_dtype)


def _check_experts(
    x: Tensor,
    weights: Mapping[str, Weights | None],
    biases: Mapping[str, Tensors | None],
    offsets: Tensor,
    out: Tensor | None,
    *,
    both: bool,
) -> list[int]:
    """Check the arguments of `cpu_expert_ffn`, where ``both`` are in ``gate_up``; return the offsets."""
    tokens, hidden = check_tensor("x", x, FLOATS, (None, None))
    check_tensor("offsets", offsets, torch.int32, (None,))
    cuts = arguments.check_offsets("offsets", offsets, tokens)
    busy = [expert for expert, (first, last) in enumerate(pairwise(cuts)) if last > first]
    if out is not None:
        check_tensor("out", out, x.dtype, x.shape)
    lists = {name: items for name, items in {**weights, **biases}.items() if items is not None}
    for name, items in lists.items():
        export(name, items)
        if len(items) != len(cuts) - 1:
            raise ValueError(f"{name}: has {len(items)} entries, offsets is for {len(cuts) - 1} experts")
    if not busy:
        return cuts
    rows = as_matrix("gate_up", lists["gate_up"][busy[0]]).rows
    if both and rows % 2:
        raise ValueError(f"gate_up: must have an even number of rows, has {rows}")
    inner = rows // 2 if both else rows
    for name, shape in (("gate_up", (rows, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        forms: set[Format] = set()
        bias_dtypes: tuple[torch.dtype, ...] = FLOATS
        for expert in busy if name in lists else ():
            forms.add(_check_weight(name, lists[name][expert], shape).stored)
            if (tensors := biases[f"{name}_bias"]) is not None:
                bias = arguments.check_dense(f"{name}_bias", tensors[expert])
                check_tensor(f"{name}_bias", bias, bias_dtypes, shape[:1])
                bias_dtypes = (bias.dtype,)
        if len(forms) > 1:
            raise ValueError(f"{name}: its matrices must have one format")
    return cuts


def _check_weight(name: str, weight: object, shape: tuple[int | None, int]) -> Matrix[Tensor]:
    """Check one weight, where ``shape`` is (outputs, inputs)."""
    matrix = as_matrix(name, weight)
    if 0 in matrix.shape:
        raise ValueError(f"{name}: is empty: {matrix.shape}")
    if any(size not in (None, actual) for size, actual in zip(shape, matrix.shape, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: must have shape [{sizes}], has {list(matrix.shape)}")
    return parts_checked(name, matrix)
