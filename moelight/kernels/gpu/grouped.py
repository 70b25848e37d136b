"""Experts on the GPU: rows sorted by expert, each expert's matrices at any address, two launches.

Selects the implementation: Triton's kernels, or the reference implementation in torch. Nothing here waits for the
device: only the kernels read the number of rows of an expert.

Legend: R routed rows, T rows of x, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from moelight.kernels.gpu import checks, reference, serving, tiles
from moelight.kernels.gpu.pages import FLOATS, PageTable

ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai")
_MAP_NUMBERS = 4096


def expert_ffn(
    x: Tensor,
    pages: PageTable,
    offsets: Tensor,
    *,
    activation: str = "silu",
    clamp: float = 7.0,
    tokens: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """down(act(gate(x)) * up(x)) of the expert of each row -> ``out``, or a new [R, H].

    x        [T, H] float32, bfloat16 or float16, contiguous within its rows; sorted by expert, unless ``tokens`` sorts
    pages    the matrices of E experts, on the same device; in x's dtype or in integers
    offsets  int32 [E + 1]: expert e has the rows offsets[e] to offsets[e + 1], from 0 to R
    tokens   int64 [R]: row r is x[tokens[r]]; None: R is T and row r is x[r]
    activation  ``silu``, ``gelu_tanh``, or ``swiglu_oai`` (gpt-oss: gate at most ``clamp``, up within ±``clamp``,
                gate * sigmoid(1.702 gate) * (up + 1))
    out      [R, H] in x's dtype, contiguous; may be x where ``tokens`` is None
    scratch  [R, I] in x's dtype, contiguous: overwritten; None: allocated by torch

    Sums in float32; the activation is rounded to x's dtype. Rows of an expert that is None in ``pages`` are zeros:
    the expert is computed elsewhere, and adds nothing. On a device ``offsets`` and ``tokens`` are not checked, because
    that would synchronize it; they are bounded, so wrong ones make the result wrong and touch nothing else.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride, range or index.
    """
    rows = _check(x, pages, offsets, activation, clamp, tokens)
    if out is None:
        out = torch.empty((rows, pages.hidden), dtype=x.dtype, device=x.device)
    else:
        checks.check_tensor("out", out, (x.dtype,), 2, x.device)
        checks.check_shape("out", out, (rows, pages.hidden))
    if scratch is not None:
        checks.check_tensor("scratch", scratch, (x.dtype,), 2, x.device)
        checks.check_shape("scratch", scratch, (rows, pages.width))
    if rows == 0:
        return out
    mean_rows = rows / min(rows, pages.experts)
    if not serving.serves(x.device, x.dtype, mean_rows)[0]:
        return reference.expert_ffn(x, pages, offsets, activation=activation, clamp=clamp, tokens=tokens, out=out)
    with on_device(x.device):
        active = torch.empty((rows, pages.width), dtype=x.dtype, device=x.device) if scratch is None else scratch
        _launch(x, pages, offsets, activation, float(clamp), tokens, active, out)
    return out


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context within which launches go to ``device``."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check(
    x: Tensor, pages: PageTable, offsets: Tensor, activation: object, clamp: object, tokens: Tensor | None
) -> int:
    """Check the arguments; return R."""
    if not isinstance(pages, PageTable):
        raise ValueError(f"pages: must be Pages, is {type(pages).__name__}")
    checks.check_tensor("x", x, FLOATS, 2, pages.table.device)
    checks.check_rows("x", x)
    if x.shape[1] != pages.hidden:
        raise ValueError(f"x: must have {pages.hidden} columns, has {x.shape[1]}")
    if not pages.scaled and pages.stored != x.dtype:
        raise ValueError(f"x: must be {pages.stored} as the weights, is {x.dtype}")
    rows = x.shape[0]
    if tokens is not None:
        checks.check_tensor("tokens", tokens, (torch.int64,), 1, x.device)
        checks.check_shape("tokens", tokens, (tokens.shape[0],))
        checks.check_indices("tokens", tokens, rows)
        if tokens.shape[0] and not rows:
            raise ValueError("x: has no rows for tokens to name")
        rows = tokens.shape[0]
    checks.check_tensor("offsets", offsets, (torch.int32,), 1, x.device)
    checks.check_shape("offsets", offsets, (pages.experts + 1,))
    checks.check_offsets("offsets", offsets, rows)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: must be one of {', '.join(ACTIVATIONS)}, is {activation!r}")
    if not isinstance(clamp, (int, float)) or not math.isfinite(clamp) or clamp <= 0:
        raise ValueError(f"clamp: must be a positive number, is {clamp!r}")
    return rows


def _launch(
    x: Tensor,
    pages: PageTable,
    offsets: Tensor,
    activation: str,
    clamp: float,
    tokens: Tensor | None,
    active: Tensor,
    out: Tensor,
) -> None:
    from moelight.kernels.gpu import grouped_triton

    rows = out.shape[0]
    experts, most = pages.experts, min(rows, pages.experts)
    card = tiles.UNITS_SINCE if x.device.type == "cpu" else serving.capability(x.device.index)
    sizes = {
        matrices: tiles.choose(
            card, itemsize=x.element_size(), mean_rows=rows / most, group=pages.group, matrices=matrices
        )
        for matrices in (1, 2)
    }
    height = sizes[1].rows
    slot_count = (rows + most * (height - 1)) // height
    slots = torch.empty((slot_count, 3), dtype=torch.int32, device=x.device)
    padded = 1 << (experts - 1).bit_length()
    step = max(1, min(64, _MAP_NUMBERS // padded))
    grouped_triton.map_slots[(-(-slot_count // step),)](
        offsets, slots, experts, rows, slot_count, BM=height, PADDED=padded, SLOTS=step
    )
    for part, source, result in (("gate_up", x, active), ("down", active, out)):
        gated = part == "gate_up"
        _product(
            grouped_triton.grouped,
            pages,
            part,
            source,
            result,
            slots,
            tokens if gated else None,
            sizes[2 if gated else 1],
            activation,
            clamp,
        )


def _product(
    kernel: Any,
    pages: PageTable,
    part: str,
    x: Tensor,
    out: Tensor,
    slots: Tensor,
    tokens: Tensor | None,
    tile: tiles.Tile,
    activation: str,
    clamp: float,
) -> None:
    """Launch one product: ``out`` [R, columns] from the rows of ``x``."""
    arguments, constants = arguments_of(pages, part, x, out, slots, tokens, tile, activation, clamp)
    blocks = -(-out.shape[1] // tile.columns)
    kernel[(slots.shape[0] * blocks,)](*arguments, **constants, num_warps=tile.warps, num_stages=tile.stages)


def arguments_of(
    pages: PageTable,
    part: str,
    x: Tensor,
    out: Tensor,
    slots: Tensor,
    tokens: Tensor | None,
    tile: tiles.Tile,
    activation: str,
    clamp: float,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and constants of `grouped_triton.grouped` for the matrices ``part``."""
    depth, columns = x.shape[1], out.shape[1]
    by_hand = x.device.type == "cpu" and x.dtype == torch.bfloat16
    row = (0, 2, 4) if part == "gate_up" else (1, 3, 5)
    weights, scales, biases = (pages.table[i] for i in row)
    arguments = (
        x,
        x if tokens is None else tokens,
        out,
        slots,
        weights,
        scales,
        biases,
        x.shape[0],
        x.stride(0),
        depth,
        columns,
        depth // 2 if pages.packed else depth,
        -(-depth // pages.group) if pages.group else 1,
        slots.shape[0],
        clamp,
    )
    constants = {
        "GATED": part == "gate_up",
        "ACTIVATION": activation,
        "GATHERED": tokens is not None,
        "STORED": triton_dtype(pages.stored),
        "SCALE": triton_dtype(pages.dtype_of(f"{part}_scale")),
        "BIAS": triton_dtype(pages.dtype_of(f"{part}_bias")),
        "INT4": pages.packed,
        "SCALED": pages.scaled,
        "BIASED": pages.biased,
        "GROUP": pages.group,
        "EVEN": depth % tile.depth == 0,
        "PRODUCT": triton_dtype(torch.float32 if by_hand else x.dtype),
        "BY_HAND": by_hand,
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.depth,
        "BAND": tile.band,
    }
    return arguments, constants


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))
