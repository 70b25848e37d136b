"""Linear layers and experts on the CPU, over weights as the checkpoint stores them.

Native where the extension is built, else `reference.py`. Tensors are in CPU memory, contiguous beyond the first
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
from moelight.kernels import arguments, native, reference
from moelight.kernels.activations import Activation, activation_of
from moelight.kernels.arguments import FLOATS, as_dlpack, check_tensor, lend, lend_given, stored
from moelight.kernels.caching_allocator import RESULTS
from moelight.kernels.integers import check_integers
from moelight.kernels.quantized import lend_matrix, parts_checked

Tensors = Sequence[Tensor | None]
Weights = Sequence[Tensor | Matrix[Tensor] | None]
_BIASES = ("gate_up_bias", "up_bias", "down_bias")


def cpu_linear(
    x: Tensor,
    weight: Tensor | Matrix[Tensor],
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
    activations auto, or int8: of a quantised matrix whose codes are whole numbers; see `integers`
    out         [T, N], dtype of x; must not overlap x
    """
    threads = arguments.check_threads(threads)
    extension = native.extension()
    if extension is None:
        tokens, inputs = check_tensor("x", x, FLOATS, (None, None))
        shaped = _stand_in("weight", weight)
        outputs, _ = check_tensor("weight", shaped, FLOATS, (None, None))
        _check_weight(("weight", "bias"), (shaped, bias), (outputs, inputs), shaped.dtype, FLOATS)
        check_integers("weight", activations, weight)
        if out is not None:
            check_tensor("out", out, x.dtype, (tokens, outputs))
        return stored(reference.linear(x, weight, bias, activations=activations), out)
    if out is None:
        out = RESULTS.empty((_rows("x", x), _rows("weight", weight)), x.dtype)
    lent = [as_dlpack("x", x), _lend("weight", weight), *lend_given(bias=bias)]
    extension.linear(*lent, activations, *lend(out=out), threads)
    return out


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
    up            E tensors [I, H], if apart; floats, or quantised as ``gate_up`` is
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
        (wide, second, narrow), both = _stand_ins(weights, offsets, by_side), act.gated and up is None
        cuts = _check_experts(x, wide, narrow, offsets, {"up": second} | biases, out, both=both)
        options: dict[str, Any] = {"activation": act, "interleaved": interleaved} | biases
        return stored(reference.expert_ffn(x, gate_up, down, cuts, up=up, activations=by_side, **options), out)
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
    threads: int | None = None,
) -> int:
    """Bytes that `cpu_expert_ffn` keeps, see `cpu_linear_workspace`; ``tokens``: rows of x, all experts together;
    ``transposed``: weights are."""
    types = _check_sizes(dtype, weight_dtype, tokens=tokens, hidden=hidden, intermediate=intermediate, experts=experts)
    threads, extension = arguments.check_threads(threads), native.extension()
    if extension is None:
        return 0
    how = activations == "int8", transposed
    return int(extension.expert_ffn_workspace(*types, *how, tokens, hidden, intermediate, experts, threads))


def _lend(name: str, weight: Tensor | Matrix[Tensor]) -> object:
    return lend_matrix(name, weight) if isinstance(weight, Matrix) else as_dlpack(name, weight)


def _stand_in(name: str, weight: Any) -> Any:
    """``weight``, or instead of a quantised one, whose parts are checked, a tensor of its shape, which nobody reads."""
    if not isinstance(weight, Matrix):
        return weight
    return torch.empty(parts_checked(name, weight).shape, dtype=torch.bfloat16)


def _stand_ins(weights: Mapping[str, Weights | None], offsets: Tensor, activations: tuple[str, str]) -> list[Any]:
    """Lists of weights as lists of tensors, where experts without rows have none; the quantised ones of ``gate_up`` and
    ``up`` share one format, and those of ``down``, which the ``activations`` of their side can multiply."""
    check_tensor("offsets", offsets, torch.int32, (None,))
    busy = (offsets.diff() > 0).tolist()
    stand_ins: list[Any] = []
    forms: set[object] = set()
    for name, matrices in weights.items():
        check_integers(name, activations[name == "down"], *(matrices if isinstance(matrices, (list, tuple)) else ()))
        if not isinstance(matrices, (list, tuple)) or not any(isinstance(weight, Matrix) for weight in matrices):
            stand_ins.append(matrices)
            continue
        some = [weight if here else None for weight, here in zip(matrices, busy, strict=False)]
        forms = forms if name == "up" else set()
        forms |= {w.stored if isinstance(w, Matrix) else None for w in some if w is not None}
        if len(forms) > 1:
            raise ValueError(f"{name}: its matrices must have one format")
        stand_ins.append([_stand_in(name, w) for w in some] + [None] * (len(matrices) - len(some)))
    return stand_ins


def _rows(name: str, tensor: object) -> int:
    if isinstance(tensor, Matrix):
        return tensor.rows
    if not isinstance(tensor, Tensor) or tensor.ndim != 2:
        raise ValueError(f"{name}: must be a tensor of two dimensions")
    return tensor.shape[0]


def export(name: str, tensors: Weights) -> list[object]:
    """The weights of every expert, lent to the extension; None for None. Raises ValueError."""
    if not isinstance(tensors, (list, tuple)):
        raise ValueError(f"{name}: must be a list with one tensor per expert, is {type(tensors).__name__}")
    return [None if tensor is None else _lend(name, tensor) for tensor in tensors]


def _check_sizes(dtype: torch.dtype, weight_dtype: torch.dtype | Format, **sizes: object) -> tuple[int, int]:
    """Check the sizes of a workspace; return the extension's numbers of the dtypes of tokens and weights."""
    quantized = isinstance(weight_dtype, Format)
    for name, value, allowed in (("dtype", dtype, FLOATS), ("weight_dtype", weight_dtype, FLOATS)):
        if value not in allowed and not (name == "weight_dtype" and quantized):
            raise ValueError(f"{name}: must be one of {', '.join(map(str, allowed))}, is {value}")
    for name, size in sizes.items():
        arguments.check_integer(name, size, 0 if name == "tokens" else 1, (1 << 31) - 1)
    return FLOATS.index(dtype), len(FLOATS) if isinstance(weight_dtype, Format) else FLOATS.index(weight_dtype)


def _check_experts(
    x: Tensor,
    gate_up: Tensors,
    down: Tensors,
    offsets: Tensor,
    optional: Mapping[str, Tensors | None],
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
    lists = {"gate_up": gate_up, "down": down} | {name: value for name, value in optional.items() if value is not None}
    for name, tensors in lists.items():
        if not isinstance(tensors, (list, tuple)):
            raise ValueError(f"{name}: must be a list with one tensor per expert, is {type(tensors).__name__}")
        if len(tensors) != len(cuts) - 1:
            raise ValueError(f"{name}: has {len(tensors)} entries, offsets is for {len(cuts) - 1} experts")
        for expert, tensor in enumerate(tensors):
            if tensor is not None or expert in busy:
                arguments.check_dense(name, tensor)
    if not busy:
        return cuts
    wide = _upright("gate_up", gate_up[busy[0]])
    rows, _ = check_tensor("gate_up", wide, FLOATS, (None, None))
    rows = rows if wide is gate_up[busy[0]] else wide.shape[1]
    if both and rows % 2:
        raise ValueError(f"gate_up: must have an even number of rows, has {rows}")
    inner = rows // 2 if both else rows
    for name, shape in (("gate_up", (rows, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        if name not in lists:
            continue
        names = (name, f"{name}_bias")
        dtype = arguments.check_dense(name, lists[name][busy[0]]).dtype
        bias_dtypes: tuple[torch.dtype, ...] = FLOATS
        for expert in busy:
            weight, bias = (lists[part][expert] if part in lists else None for part in names)
            _check_weight(names, (weight, bias), shape, dtype, bias_dtypes)
            bias_dtypes = bias_dtypes if bias is None else (bias.dtype,)
    return cuts


def _upright(name: str, weight: Tensor | None) -> Tensor:
    """``weight``, or its transpose if that has the contiguous rows."""
    weight = arguments.check_dense(name, weight)
    transposed = weight.ndim == 2 and weight.shape[1] > 1 and weight.stride(1) != 1 and weight.stride(0) == 1
    return weight.t() if transposed else weight


def _check_weight(
    names: tuple[str, str],
    tensors: tuple[Tensor | None, Tensor | None],
    shape: tuple[int, int],
    dtype: torch.dtype,
    bias_dtypes: tuple[torch.dtype, ...],
) -> None:
    """Check one weight and its bias (`names`, ``tensors``), where ``shape`` is (outputs, inputs)."""
    (weight, bias), (rows, depth) = tensors, shape
    if rows < 1 or depth < 1:
        raise ValueError(f"{names[0]}: is empty: {shape}")
    upright = _upright(names[0], weight)
    sizes = (rows, depth) if upright is weight else (depth, rows)
    check_tensor(names[0], upright, dtype if dtype in FLOATS else FLOATS, sizes)
    if bias is not None:
        check_tensor(names[1], bias, bias_dtypes, (rows,))
