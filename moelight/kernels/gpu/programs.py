"""The grouped product in Triton for the matrices of a table: its arguments, and its constants, one object for each of
how matrices are stored, how they are multiplied, and the activation. Imported only where Triton is installed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moelight.formats.format import Format
from moelight.kernels.activations import Activation
from moelight.kernels.device import on_host
from moelight.kernels.gpu import grouped_triton, integers_triton, tiles
from moelight.kernels.gpu.integers import RoundedRows
from moelight.kernels.gpu.pages import MATRICES, TENSORS, ExpertTable, MatrixForm
from moelight.kernels.gpu.serving import triton_dtype
from moelight.kernels.gpu.unpackers import UNPACKERS

_SCATTERED = 32  # inputs at a time, where codes are loaded one by one and their addresses fill registers
_CURVES = {
    "silu": grouped_triton.silu,
    "gelu": grouped_triton.gelu,
    "gelu_tanh": grouped_triton.gelu_tanh,
    "relu2": grouped_triton.relu2,
}


class _Constant:
    """A constant of a program. Triton 3.6 passes no attribute that is text, and takes none in a tuple."""

    __slots__ = ()

    @property
    def cache_key(self) -> str:
        """Return the key of compiled programs for Triton: the values, and the sources of the functions."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return " ".join(f"{name}={getattr(value, 'cache_key', value)}" for name, value in values)


@dataclass(frozen=True, kw_only=True, slots=True)
class TileForm(_Constant):
    """A stored format as the programs know it.

    Attributes:
        by: the functions of the format, a `gpu.unpackers.Unpacker`.
        codes_type, scale_type, bias_type: the dtypes as which tensors are loaded.
        biased: there are biases.
        transposed: columns of floats are contiguous, not rows.
        bits, group_rows, zero_bias, order: as in `Format`.
        block_bytes: bytes of a block of ggml.
        group: inputs with one scale, 0 for all; numbers of a block of ggml.
        shared: inputs of a tile that surely have one scale, a power of two.
        zeros: there are zero points.
        exponent: scales are E8M0.
        minima: a block, or each of its parts, has a minimum.
    """

    by: Any
    codes_type: Any
    scale_type: Any
    bias_type: Any
    biased: bool
    transposed: bool
    bits: int
    block_bytes: int
    group: int
    group_rows: int
    shared: int
    zeros: bool
    zero_bias: int
    order: bool
    exponent: bool
    minima: bool

    @staticmethod
    def of(form: MatrixForm, depth: int) -> TileForm:
        """How matrices of ``form`` are unpacked in tiles of ``depth`` inputs, a power of two."""
        stored = form.stored
        assert stored.unpacker is not None
        return TileForm(
            by=UNPACKERS[stored.unpacker],
            codes_type=triton_dtype(form.dtype_of(0)),
            scale_type=triton_dtype(form.dtype_of(1)),
            bias_type=triton_dtype(form.bias or torch.float32),
            biased=form.bias is not None,
            transposed=form.transposed,
            bits=stored.bits,
            block_bytes=stored.block_bytes,
            group=stored.block if stored.block_bytes else stored.group,
            group_rows=stored.group_rows,
            shared=stored.shared_columns(depth),
            zeros=stored.zero_points,
            zero_bias=stored.zero_bias,
            order=stored.order,
            exponent=len(stored.names) > 1 and form.dtype_of(1) == torch.uint8,
            minima=stored.minima,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductForm(_Constant):
    """How rows are multiplied.

    Attributes:
        step: a step of the product, `grouped_triton.values_step` or one of `integers_triton`.
        rows, columns, depth, band: of a `tiles.Tile`.
        inputs: of a step.
        group, piece: of rows in int8, the inputs that share a scale, and those that are multiplied at a time.
        even: the inputs are whole steps.
        values: the dtype to which values are rounded.
        product: the dtype of products, which is float32 where the interpreter has no bfloat16.
        in_parts: products of float32 are those of three parts.
        gathered: rows are those that the tokens name.
        factor: by which the activation, or else the product, is multiplied.
        by_hand: bfloat16 is rounded by its bits.
    """

    step: Any
    rows: int
    columns: int
    depth: int
    band: int
    inputs: int
    group: int
    piece: int
    even: bool
    values: Any
    product: Any
    in_parts: bool
    gathered: bool
    factor: float
    by_hand: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationForm(_Constant):
    """`kernels.activations.Activation` after a product; ``active``: there is one. ``limited``: it has a limit."""

    active: bool
    gated: bool
    curve: Any
    alpha: float
    shift: float
    limited: bool
    late: bool


def arguments_of(
    pages: ExpertTable,
    part: str,
    x: Tensor | RoundedRows,
    out: Tensor,
    slots: Tensor,
    tokens: Tensor | None,
    tile: tiles.Tile,
    activation: Activation,
    factor: float = 1.0,
    *,
    wide: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and constants of `grouped_triton.grouped`: the product of ``x`` with the matrices ``part`` -> ``out``.

    ``factor`` multiplies the activation, which follows the product with ``gate_up``, and the sums of ``down``.
    """
    form, columns, active = pages.forms[part], out.shape[1], part == "gate_up"
    values, scales, sums = (x.values, x.scales, x.sums) if isinstance(x, RoundedRows) else (x, x, x)
    depth = x.columns if isinstance(x, RoundedRows) else x.shape[1]
    joined = active and activation.gated and "up" not in pages.forms
    row_step, up_row = (2, 1) if joined and pages.interleaved else (1, columns if joined else 0)
    arguments = (
        *(values, scales, sums, values if tokens is None else tokens, out, slots, pages.table),
        *(pages.table.stride(0), values.shape[0], values.stride(0), depth, columns),
        *(form.rows, row_step, up_row, form.stored.groups(depth), slots.shape[0], activation.limit),
    )
    by_hand = on_host(out) and out.dtype == torch.bfloat16
    return arguments, {
        "GATE": MATRICES.index(part) * len(TENSORS),
        "UP": MATRICES.index("up" if active else part) * len(TENSORS),
        "FORM": TileForm.of(form, tile.depth),
        "HOW": ProductForm(
            rows=tile.rows,
            columns=tile.columns,
            depth=tile.depth,
            band=tile.band,
            in_parts=tile.precision == "tf32x3",
            gathered=tokens is not None,
            factor=factor,
            by_hand=by_hand,
            **_steps(x, depth, tile, form.stored, by_hand=by_hand, wide=wide),
        ),
        "ACT": ActivationForm(
            active=active,
            gated=active and activation.gated,
            curve=_CURVES[activation.curve],
            alpha=activation.alpha,
            shift=activation.shift,
            limited=activation.limit < math.inf,
            late=activation.late,
        ),
    }


def _steps(
    x: Tensor | RoundedRows, depth: int, tile: tiles.Tile, stored: Format, *, by_hand: bool, wide: bool
) -> dict[str, Any]:
    """Those attributes of `ProductForm` that say what a step is, of rows of ``depth`` inputs with matrices of
    ``stored``."""
    if isinstance(x, RoundedRows):
        step = integers_triton.least_step if stored.minima else integers_triton.groups_step
        step = integers_triton.block_step if x.group > tiles.INTEGER_STEP else step
        inputs, piece = max(x.group, tile.depth), _SCATTERED if stored.scattered else x.group
        steps = {"step": step, "inputs": inputs, "group": x.group, "piece": piece, "values": tl.int8}
        return steps | {"product": tl.int8, "even": depth % inputs == 0}
    values = tl.float32 if wide else triton_dtype(x.dtype)
    steps = {"step": grouped_triton.values_step, "inputs": tile.depth, "group": 0, "piece": 0, "values": values}
    return steps | {"product": tl.float32 if by_hand else values, "even": depth % tile.depth == 0}
