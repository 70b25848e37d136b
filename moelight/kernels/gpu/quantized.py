"""Experts whose matrices are quantised, for the grouped kernels of a GPU: addresses of the stored tensors of all pages.

`grouped.expert_ffn` computes with them as with a `PageTable`. Every wrong argument is a ValueError that names it.

Legend: P pages, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moelight.formats.codebook import CODEBOOKS
from moelight.formats.format import Format
from moelight.formats.matrix import Matrix
from moelight.formats.plain import plain
from moelight.kernels.activations import SILU, Activation
from moelight.kernels.arguments import FLOATS, check_tensor
from moelight.kernels.gpu import tiles
from moelight.kernels.gpu.pages import ALIGNMENT_BYTES, ExpertTable
from moelight.kernels.quantized import INT8, is_rounded, parts_checked

MATRICES = ("gate_up", "up", "down")
# Rows of a matrix in the table of addresses; in place of scales a format may have a codebook.
TENSORS = ("codes", "scales", "zero points", "order", "bias")
_MOST_BYTES = 2**31 - 1  # of a tensor: kernels count in 32 bits
_PLAIN = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# As which the kernels load the bytes of narrow floats.
_LOADED_AS = {torch.float8_e4m3fn: torch.uint8, torch.float8_e8m0fnu: torch.uint8}

Weights = Sequence[Matrix[Tensor] | Tensor | None]
Biases = Sequence[Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TileForm:
    """A stored format as the programs of `quantized_triton` know it: one constant of theirs.

    Attributes:
        by: the functions of the format, a `gpu.unpackers.Unpacker`.
        bits, group_rows, zero_bias, order: as in `Format`.
        block_bytes: bytes of a block of ggml.
        group: inputs with one scale, 0 for all; numbers of a block of ggml.
        shared: inputs of a tile that surely have one scale, a power of two.
        zeros: there are zero points.
        exponent: scales are E8M0.
        minima: parts of a block have a minimum.
    """

    by: Any
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

    @property
    def cache_key(self) -> str:
        """Return the key of compiled programs for Triton: the numbers, and the sources of the functions."""
        values = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "by"]
        return f"{values} {self.by.cache_key}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixForm:
    """The properties shared by the matrices of all pages: its format, ``rows``, ``columns``, and the dtypes of its
    tensors by suffix; ``bias``: that of its bias, None without one."""

    stored: Format
    rows: int
    columns: int
    dtypes: tuple[tuple[str, torch.dtype], ...]
    bias: torch.dtype | None

    def tile(self, depth: int) -> TileForm:
        """Return how the matrix is unpacked in tiles of ``depth`` inputs, a power of two."""
        from moelight.kernels.gpu.unpackers import UNPACKERS

        stored = self.stored
        return TileForm(
            by=UNPACKERS[stored.unpacker],
            bits=stored.bits,
            block_bytes=stored.block_bytes,
            group=stored.block if stored.block_bytes else stored.group,
            group_rows=stored.group_rows,
            shared=stored.shared_columns(depth),
            zeros=stored.zero_points,
            zero_bias=stored.zero_bias,
            order=stored.order,
            exponent=len(stored.names) > 1 and self.dtype_of(1) == torch.uint8,
            minima=stored.token_sums == "parts",
        )

    def dtype_of(self, index: int) -> torch.dtype:
        """The dtype as which kernels load the codes (0) or scales (1); that of the codes if there are none."""
        names, dtypes = self.stored.names, dict(self.dtypes)
        dtype = dtypes.get(names[index] if index < len(names) else "", dtypes[names[0]])
        return _LOADED_AS.get(dtype, dtype)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedTable(ExpertTable):
    """Quantised matrices of P pages, of which E experts choose. Created by `of`, which checks.

    ``table`` int64 [3 * 5, P + 1]: addresses of `TENSORS` of each of `MATRICES`; where gate and up are one matrix, up's
    are those of gate_up. ``forms``: of gate_up and down. ``activations`` of (gate_up and up, down): ``int8`` where the
    rows that they multiply are rounded (`kernels.quantized`), else ``auto``.
    """

    forms: Mapping[str, MatrixForm]
    activations: tuple[str, str] = ("auto", "auto")

    def rounds(self, part: str) -> bool:
        """True if the rows that the matrices ``part`` multiply are rounded to int8."""
        return self.activations[part == "down"] == INT8

    @staticmethod
    def of(
        gate_up: Weights,
        down: Weights,
        *,
        up: Weights | None = None,
        gate_up_bias: Biases | None = None,
        up_bias: Biases | None = None,
        down_bias: Biases | None = None,
        activation: Activation = SILU,
        interleaved: bool = False,
        activations: str | tuple[str, str] = "auto",
    ) -> QuantizedTable:
        """Table of one matrix per page, at any addresses of one device; None for an expert computed elsewhere. Waits
        for its copy to the device: tables are made at loading.

        gate_up, up, down  as in `cpu_expert_ffn`: `Matrix[Tensor]`, each list in one format, that of ``up`` being
                           gate_up's; or plain matrices (floats), contiguous
        *_bias             float32, bfloat16 or float16
        activations        as in `cpu_expert_ffn`; columns of GPTQ are then in the order of their groups, unchecked

        Tensors begin at multiples of 16 bytes.
        """
        weights = {"gate_up": gate_up, "up": up or (), "down": down}
        biases = {"gate_up": gate_up_bias or (), "up": up_bias or (), "down": down_bias or ()}
        matrices = {name: _matrices(name, tensors) for name, tensors in weights.items()}
        by_side = (activations, activations) if isinstance(activations, str) else activations
        forms = {
            name: _form(name, listed, biases[name], len(gate_up), bool(down_bias))
            for name, listed in matrices.items()
            if name != "up" or up is not None
        }
        if up is not None and forms["up"] != forms["gate_up"]:
            raise ValueError("up: must be stored as gate_up is")
        for name, rounded in zip(("gate_up", "down"), by_side, strict=True):
            if (reason := forms[name].stored.int8_reason if is_rounded(rounded) else None) is not None:
                raise ValueError(f"{name}: {reason}")
        halves = 2 if activation.gated and up is None else 1
        width, hidden = forms["gate_up"].rows // halves, forms["gate_up"].columns
        if forms["gate_up"].rows % halves or (forms["down"].rows, forms["down"].columns) != (hidden, width):
            shape = f"[{forms['down'].rows}, {forms['down'].columns}]"
            raise ValueError(f"down: must have shape [{hidden}, {width}], has {shape}")
        device = next(
            iter(next(listed for listed in matrices["gate_up"] if listed is not None).tensors.values())
        ).device
        addresses = {name: _addresses(matrices[name], biases[name]) for name in forms}
        rows = [row for name in MATRICES for row in addresses.get(name, addresses["gate_up"])]
        parts: dict[str, tuple[Any, ...]] = {name: tuple(values) for name, values in weights.items()}
        return QuantizedTable(
            hidden=hidden,
            width=width,
            parts=parts | {f"{name}_bias": tuple(values) for name, values in biases.items()},
            table=torch.tensor(rows, dtype=torch.int64).to(device),
            index=torch.arange(len(gate_up), dtype=torch.int32, device=device),
            activation=activation,
            interleaved=interleaved,
            forms=forms,
            activations=by_side,
        )


def _matrices(name: str, weights: Any) -> list[Matrix[Tensor] | None]:
    """``weights``, plain numbers as matrices of a plain format; all checked."""
    if not isinstance(weights, (list, tuple)):
        raise ValueError(f"{name}: must be a list of matrices, is {type(weights).__name__}")
    matrices: list[Matrix[Tensor] | None] = []
    for e, weight in enumerate(weights):
        matrix = weight
        if isinstance(weight, Tensor):
            rows, columns = check_tensor(f"{name}: entry {e}", weight, FLOATS, (None, None), device=None, gap=False)
            stored = plain(_PLAIN[weight.dtype])
            matrix = Matrix(stored=stored, rows=rows, columns=columns, tensors={stored.names[0]: weight})
        if matrix is not None:
            if not isinstance(matrix, Matrix):
                raise ValueError(f"{name}: entry {e} must be a matrix, is {type(weight).__name__}")
            for part, tensor in parts_checked(f"{name}: entry {e}", matrix, None).tensors.items():
                if tensor.data_ptr() % ALIGNMENT_BYTES or tensor.nbytes > _MOST_BYTES:
                    raise ValueError(
                        f"{name}: entry {e}: {part} must begin at a multiple of {ALIGNMENT_BYTES} bytes, and have at "
                        f"most {_MOST_BYTES} of them"
                    )
        matrices.append(matrix)
    return matrices


def _form(name: str, matrices: Sequence[Matrix[Tensor] | None], biases: Any, pages: int, biased: bool) -> MatrixForm:
    """The form that all ``matrices`` have."""
    if len(matrices) != pages or (len(biases) != pages if biased else biases):
        raise ValueError(f"{name}: must have {pages} entries, one for each page, and as many biases if any has some")
    forms = set()
    for e, matrix in enumerate(matrices):
        bias = biases[e] if biased else None
        if matrix is None:
            continue
        if bias is not None:
            check_tensor(f"{name}_bias: entry {e}", bias, FLOATS, (matrix.rows,), device=None, gap=False)
        dtypes = tuple((part, tensor.dtype) for part, tensor in matrix.tensors.items() if part in matrix.stored.names)
        kind = None if bias is None else bias.dtype
        form = MatrixForm(stored=matrix.stored, rows=matrix.rows, columns=matrix.columns, dtypes=dtypes, bias=kind)
        forms.add(form)
    if len(forms) != 1:
        raise ValueError(f"{name}: must be of one format and size, and some page must have it")
    return forms.pop()


def _addresses(matrices: Sequence[Matrix[Tensor] | None], biases: Biases) -> list[list[int]]:
    """Return the addresses of `TENSORS`, one per page; 0 for a missing tensor."""

    def at(find: Callable[[Matrix[Tensor]], Tensor | None]) -> list[int]:
        tensors = (None if matrix is None else find(matrix) for matrix in matrices)
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors] + [0]

    def tensor_of(matrix: Matrix[Tensor], index: int) -> Tensor | None:
        names, codes = matrix.stored.names, matrix.tensors[matrix.stored.names[0]]
        if index == 1 and matrix.stored.codebook:
            return points_on(codes.device, matrix.stored.codebook)
        return matrix.tensors.get(names[index] if index < len(names) else "")

    def part(index: int) -> list[int]:
        return at(lambda matrix: tensor_of(matrix, index))

    bias = [0 if tensor is None else tensor.data_ptr() for tensor in biases or [None] * len(matrices)]
    return [*(part(index) for index in range(4)), [*bias, 0]]


@cache
def points_on(device: torch.device, codebook: str) -> Tensor:
    """The points of ``codebook``, int8 [indices, values of a point], in the memory of ``device``: once a process."""
    return torch.tensor(CODEBOOKS[codebook].points(), dtype=torch.int8).to(device)


def arguments_of(
    pages: QuantizedTable,
    part: str,
    x: Tensor,
    depth: int,
    out: Tensor,
    slots: Tensor,
    tokens: Tensor | None,
    tile: tiles.Tile,
    activation: Activation,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `quantized_triton.grouped_quantized` for the matrices ``part``, which have ``depth`` inputs, and
    those of its constants that say how they are stored."""
    form, columns = pages.forms[part], out.shape[1]
    stored = form.stored
    joined = part == "gate_up" and activation.gated and "up" not in pages.forms
    row_step, up_row = (2, 1) if joined and pages.interleaved else (1, columns if joined else 0)
    arguments = (
        x,
        x if tokens is None else tokens,
        out,
        slots,
        pages.table,
        pages.table.stride(0),
        x.shape[0],
        x.stride(0),
        depth,
        columns,
        form.rows,
        row_step,
        up_row,
        stored.groups(depth),
        slots.shape[0],
        activation.limit,
    )
    return arguments, {
        "GATE": MATRICES.index(part) * len(TENSORS),
        "UP": MATRICES.index("up" if part == "gate_up" else part) * len(TENSORS),
        "BIAS": form.bias or torch.float32,
        "BIASED": form.bias is not None,
        "CODES": form.dtype_of(0),
        "SCALE": form.dtype_of(1),
        "FORM": form.tile(tile.depth),
    }
