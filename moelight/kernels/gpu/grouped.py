"""Experts on the GPU: rows sorted by expert, each expert's matrices at any address, three launches.

`serving.expert_kernel` selects the implementation. With kernels nothing synchronizes the device: only they read the
number of rows of an expert and its page. Every wrong argument is a ValueError that names it.

Legend: R routed rows, T rows of x, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moelight.formats.format import Format
from moelight.kernels import arguments
from moelight.kernels.activations import SHRINK, Activation, activation_of
from moelight.kernels.arguments import FLOATS, check_tensor
from moelight.kernels.device import Device, on_host
from moelight.kernels.gpu import grouped_cuda, serving, tiles
from moelight.kernels.gpu.integers import RoundedRows, round_rows
from moelight.kernels.gpu.pages import ExpertTable, row_slots, tile_of
from moelight.kernels.quantized import dense_values, integer_product
from moelight.kernels.reference import gate_and_up

_MIXED = (torch.float16, torch.bfloat16)  # dtypes of x and of the matrices in mixed precision


def expert_ffn(
    x: Tensor,
    pages: ExpertTable,
    offsets: Tensor,
    *,
    activation: str | Activation | None = None,
    tokens: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    mean_rows: float | None = None,
    wide: bool = False,
) -> Tensor:
    """down(act(gate(x)) * up(x)) of the expert of each row -> ``out``, or a new [R, H].

    x        [T, H] float32, bfloat16 or float16, contiguous within its rows; sorted by expert, unless ``tokens`` sorts
    pages    the matrices of E experts, on the same device; in x's dtype, in integers, or bfloat16 beside float16 x
             (mixed precision: rounded to float16 as they are loaded); or quantised, whose numbers are rounded to x's
             dtype as they are unpacked
    offsets  int32 [E + 1]: expert e has the rows offsets[e] to offsets[e + 1], from 0 to R
    tokens   int64 [R]: row r is x[tokens[r]]; None: R is T and row r is x[r]
    activation  or the name of one (`activations.NAMED`); None: that of ``pages``
    out      [R, H] in x's dtype, or float32 in mixed precision, which it makes of float16 x and quantised pages;
             contiguous; may be x where ``tokens`` is None
    scratch  [R, I] in x's dtype, contiguous: overwritten; None: allocated by torch
    mean_rows  expected rows of an expert that has any, by which the kernels choose their tiles; None: R / min(R, E)
    wide     float16 does not hold the bfloat16 matrices: products in float32

    Sums in float32; the activation is rounded to x's dtype, in mixed precision after it was multiplied by
    `activations.SHRINK`, which the sums undo. Rows of an expert without a page are zeros, because another processor
    computes the expert. On a device ``offsets`` and ``tokens`` are not checked, because that would synchronize it; they
    are bounded, so wrong ones make the result wrong and touch no other memory.
    """
    rows, by = _check(x, pages, offsets, tokens), pages.activation if activation is None else activation_of(activation)
    if by.gated != pages.activation.gated:
        raise ValueError("activation: must have a gate as the pages do")
    result = _result_dtype(x, pages, out)
    for name, buffer, dtype, columns in (
        ("out", out, result, pages.hidden),
        ("scratch", scratch, x.dtype, pages.width),
    ):
        if buffer is not None:
            check_tensor(name, buffer, dtype, (rows, columns), device=x.device, gap=False)
    if out is None:
        out = torch.empty((rows, pages.hidden), dtype=result, device=x.device)
    if rows == 0:
        return out
    mean_rows = rows / min(rows, pages.experts) if mean_rows is None else mean_rows
    plain = pages.plain and grouped_cuda.activation_number(by) is not None
    kernel, _ = serving.expert_kernel(x.device, torch.float32 if wide else x.dtype, mean_rows, plain=plain)
    if kernel == "torch":
        return expert_ffn_in_torch(x, pages, offsets, activation=by, tokens=tokens, out=out, wide=wide)
    with Device(x.device).context():
        active = torch.empty((rows, pages.width), dtype=x.dtype, device=x.device) if scratch is None else scratch
        if kernel == "cuda":
            _launch_cuda(x, pages, offsets, by, tokens, active, out)
        else:
            _launch(x, pages, offsets, by, tokens, active, out, mean_rows=mean_rows, wide=wide)
    return out


def _result_dtype(x: Tensor, pages: ExpertTable, out: Tensor | None) -> torch.dtype:
    """The dtype that ``out`` must have."""
    if pages.floats is not None:
        return torch.float32 if (x.dtype, pages.floats) == _MIXED else x.dtype
    mixed = x.dtype == torch.float16 and isinstance(out, Tensor) and out.dtype == torch.float32
    return torch.float32 if mixed else x.dtype


def expert_ffn_in_torch(
    x: Tensor,
    pages: ExpertTable,
    offsets: Tensor,
    *,
    activation: Activation,
    tokens: Tensor | None,
    out: Tensor,
    wide: bool = False,
) -> Tensor:
    """`expert_ffn` into ``out`` [R, H], one expert after another; reads ``offsets`` and the index of ``pages``, which
    synchronizes the device."""
    result = torch.zeros_like(out)
    source, factor = x if tokens is None else x[tokens], shrink(x.dtype, out.dtype)
    kind = torch.float32 if wide else x.dtype
    for page, (first, last) in zip(pages.index.tolist(), pairwise(offsets.tolist()), strict=True):
        if first < last and 0 <= page < pages.pages and pages.parts["gate_up"][page] is not None:
            projected = [
                _linear(source[first:last].to(kind), pages, part, page).float()
                for part in ("gate_up", "up")
                if pages.parts.get(part)
            ]
            if activation.gated and len(projected) == 1:
                projected = list(gate_and_up(projected[0], interleaved=pages.interleaved))
            active = activation(*projected)
            active = active if factor == 1 else active * factor
            result[first:last] = _linear(active.to(x.dtype).to(kind), pages, "down", page, 1 / factor)
    return out.copy_(result)


def shrink(dtype: torch.dtype, result: torch.dtype) -> float:
    """The power of two by which activations of ``dtype`` are multiplied before they are rounded, where the experts'
    outputs are ``result``."""
    return SHRINK if (dtype, result) == (torch.float16, torch.float32) else 1.0


def _linear(x: Tensor, pages: ExpertTable, part: str, page: int, factor: float = 1.0) -> Tensor:
    """x times the matrix times ``factor``, plus the bias."""
    weight, bias = (pages.parts[name][page] if pages.parts.get(name) else None for name in (part, f"{part}_bias"))
    assert weight is not None
    if pages.rounds(part):
        total = integer_product(x, weight).mul_(factor)
        return total if bias is None else total.add_(bias.float())
    dense = dense_values(weight, x.dtype).to(x.dtype)
    if factor == 1:
        return functional.linear(x, dense, None if bias is None else bias.to(x.dtype))
    total = functional.linear(x, dense).float().mul_(factor)
    return total if bias is None else total + bias.float()


def _check(x: Tensor, pages: ExpertTable, offsets: Tensor, tokens: Tensor | None) -> int:
    """Check the arguments; return R."""
    if not isinstance(pages, ExpertTable):
        raise ValueError(f"pages: must be an ExpertTable, is {type(pages).__name__}")
    device = pages.table.device
    dtypes: Any = FLOATS
    if (stored := pages.floats) is not None:
        dtypes = _MIXED if stored == _MIXED[1] else stored
    rows, _ = check_tensor("x", x, dtypes, (None, pages.hidden), device=device)
    if tokens is not None:
        check_tensor("tokens", tokens, torch.int64, (None,), device=device)
        arguments.check_indices("tokens", tokens, rows)
        if len(tokens) and not rows:
            raise ValueError("x: has no rows for tokens to name")
        rows = len(tokens)
    check_tensor("offsets", offsets, torch.int32, (pages.experts + 1,), device=device)
    if on_host(offsets):
        arguments.check_offsets("offsets", offsets, rows)
    return rows


def _launch(
    x: Tensor,
    pages: ExpertTable,
    offsets: Tensor,
    activation: Activation,
    tokens: Tensor | None,
    active: Tensor,
    out: Tensor,
    *,
    mean_rows: float,
    wide: bool,
) -> None:
    from moelight.kernels.gpu import grouped_triton, programs

    factor = shrink(x.dtype, out.dtype)
    height, slots = 0, x
    for part, source, into, index, by in (
        ("gate_up", x, active, tokens, factor),
        ("down", active, out, None, 1 / factor),
    ):
        tile = tile_of(pages, part, source, activation, mean_rows, wide=wide)
        if tile.rows != height:
            height, slots = tile.rows, row_slots(offsets, pages, len(out), tile.rows)
        inputs: Tensor | RoundedRows = source
        chosen = index
        if pages.rounds(part):
            inputs, chosen = _rounded(source, pages.forms[part].stored, index)
        arguments, constants = programs.arguments_of(
            pages, part, inputs, into, slots, chosen, tile, activation, by, wide=wide
        )
        grid = (len(slots) * -(-into.shape[1] // tile.columns),)
        grouped_triton.grouped[grid](*arguments, **constants, **tiles.launch_options(tile))


def _rounded(x: Tensor, stored: Format, tokens: Tensor | None) -> tuple[RoundedRows, Tensor | None]:
    """Rows of x, rounded once, and which of them are routed; or, if those are fewer, the routed rows alone."""
    few = tokens is not None and len(tokens) < len(x)
    return round_rows(x, stored, tokens if few else None), None if few else tokens


def _launch_cuda(
    x: Tensor,
    pages: ExpertTable,
    offsets: Tensor,
    activation: Activation,
    tokens: Tensor | None,
    active: Tensor,
    out: Tensor,
) -> None:
    height, factor = grouped_cuda.SLOT_ROWS, shrink(x.dtype, out.dtype)
    slots = row_slots(offsets, pages, out.shape[0], height)
    for part, source, into, index, by in (
        ("gate_up", x, active, tokens, factor),
        ("down", active, out, None, 1 / factor),
    ):
        call = grouped_cuda.call_of(pages, part, source, into, slots, offsets, index, height, activation, by)
        grouped_cuda.launch(*call)
