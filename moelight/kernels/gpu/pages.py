"""Addresses of expert matrices for the grouped kernels: one table of all pages in device memory, which never changes,
and beside it the page of each expert of a layer, which changes from pass to pass. And what a launch needs beside them:
its tile, and which rows each block has.

The kernels read both where they run, so nothing waits for either. Whoever writes an index does so on the stream of the
kernels that read it. Every wrong argument is a ValueError that names it.

Legend: P pages, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moelight.formats.experts import MATRICES
from moelight.formats.format import Format
from moelight.formats.matrix import Matrix
from moelight.kernels.activations import SILU, Activation
from moelight.kernels.arguments import FLOATS, check_tensor
from moelight.kernels.device import compute_capability, on_host
from moelight.kernels.formats.ggml import points_on
from moelight.kernels.gpu import tiles
from moelight.kernels.matrices import INT8, Weights, as_matrix, is_rounded, parts_checked, upright

# Rows of a matrix in the table of addresses; in place of scales a format may have a codebook.
TENSORS = ("codes", "scales", "zero points", "order", "bias")
ALIGNMENT_BYTES = 16
_MAP_NUMBERS = 4096
_MAX_BYTES = 2**31 - 1  # of a tensor: kernels count in 32 bits
# As which the kernels load the bytes of narrow floats.
_LOADED_AS = {torch.float8_e4m3fn: torch.uint8, torch.float8_e8m0fnu: torch.uint8}

Biases = Sequence[Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixForm:
    """The properties shared by the matrices of all pages: its format, ``rows``, ``columns``, and the dtypes of its
    tensors by suffix; ``bias``: that of its bias, None without one; ``transposed``: the columns of its only tensor are
    contiguous, not the rows."""

    stored: Format
    rows: int
    columns: int
    dtypes: tuple[tuple[str, torch.dtype], ...]
    bias: torch.dtype | None = None
    transposed: bool = False

    @property
    def floats(self) -> torch.dtype | None:
        """The dtype of floats; None for a quantised format."""
        return None if self.stored.is_quantised else self.dtype_of(0)

    def dtype_of(self, index: int) -> torch.dtype:
        """The dtype as which kernels load the codes (0) or scales (1); that of the codes if there are none."""
        names, dtypes = self.stored.names, dict(self.dtypes)
        dtype = dtypes.get(names[index] if index < len(names) else "", dtypes[names[0]])
        return _LOADED_AS.get(dtype, dtype)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertTable:
    """Addresses of the matrices of P pages, of which E experts choose; the pages may change their bytes. Created by
    `of`, which checks.

    ``table`` int64 [3 * 5, P + 1]: addresses of `TENSORS` of each of `MATRICES`, 0 for absent ones; where gate and up
    are one matrix, up's are those of gate_up; the last column is the page of experts without one. ``index`` int32 [E]:
    the page of each expert; any other number: none, because another processor computes the expert. ``parts`` has for
    each matrix and bias a tuple of P, or an empty tuple. ``forms``: of gate_up and down, and of up if it is apart.
    ``activation``: between gate_up and down. ``activations`` of (gate_up and up, down): ``int8`` where the rows that
    they multiply are rounded (`kernels.quantized`), else ``auto``.
    """

    hidden: int
    width: int
    parts: dict[str, tuple[Any, ...]]
    table: Tensor
    index: Tensor
    forms: Mapping[str, MatrixForm]
    activation: Activation = SILU
    interleaved: bool = False
    activations: tuple[str, str] = ("auto", "auto")

    @property
    def experts(self) -> int:
        return self.index.numel()

    @property
    def pages(self) -> int:
        return self.table.shape[1] - 1

    @property
    def floats(self) -> torch.dtype | None:
        """The dtype of all matrices if they are stored as floats of one; else None: their values are rounded to the
        dtype of the rows."""
        dtypes = {form.floats for form in self.forms.values()}
        return dtypes.pop() if len(dtypes) == 1 else None

    @property
    def plain(self) -> bool:
        """True if all matrices are floats of one dtype, rows of the gate, then of up, are one matrix, and all rows are
        contiguous."""
        joined = self.activation.gated and not self.interleaved and "up" not in self.forms
        return joined and self.floats is not None and not any(form.transposed for form in self.forms.values())

    def rounds(self, part: str) -> bool:
        """True if the rows that the matrices ``part`` multiply are rounded to int8."""
        return self.activations[part == "down"] == INT8

    def chosen_by(self, index: Tensor, activation: Activation | None = None) -> ExpertTable:
        """Return this table for the experts of ``index`` int32 [E], on the same device; E at least 1. The numbers are
        read when kernels run. ``activation``: of these experts, if another."""
        check_tensor("index", index, torch.int32, (None,), device=self.table.device, gap=False)
        if not index.numel():
            raise ValueError("index: names the page of no expert")
        return replace(self, index=index, activation=activation or self.activation)

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
    ) -> ExpertTable:
        """Table of one matrix per page, at any addresses of one device, where expert e has page e; None for an expert
        computed elsewhere. Waits for its copy to the device: tables are made at loading.

        gate_up   [2I, H], gate rows first; [I, H] with ``up``, or without a gate. `Matrix[Tensor]`, all in one format;
                  or tensors of floats in one dtype, contiguous or transposes of what is
        up, down  the same, [I, H] in the format of gate_up and [H, I]
        *_bias    of as many numbers as rows: float32, bfloat16 or float16
        interleaved, activations  as in `cpu_expert_ffn`; columns of GPTQ are then in the order of their groups,
                  unchecked

        Tensors begin at multiples of 16 bytes.
        """
        weights = {"gate_up": gate_up, "down": down} | ({} if up is None else {"up": up})
        biases = {"gate_up": gate_up_bias or (), "up": up_bias or (), "down": down_bias or ()}
        matrices = {name: _matrices(name, tensors) for name, tensors in weights.items()}
        biased = any(biases.values())
        gates = [matrix is not None for matrix in matrices["gate_up"]]
        forms = {name: _form(name, matrices[name], biases[name], gates, biased) for name in matrices}
        sides = (activations, activations) if isinstance(activations, str) else activations
        width = _check_forms(forms, activation, sides)
        device = next(iter(next(matrix for matrix in matrices["gate_up"] if matrix).tensors.values())).device
        addresses = {name: _addresses(matrices[name], biases[name]) for name in forms}
        rows = [row for name in MATRICES for row in addresses.get(name, addresses["gate_up"])]
        parts: dict[str, tuple[Any, ...]] = {name: tuple(values) for name, values in weights.items()}
        return ExpertTable(
            hidden=forms["gate_up"].columns,
            width=width,
            parts=parts | {f"{name}_bias": tuple(values) for name, values in biases.items()},
            table=torch.tensor(rows, dtype=torch.int64).to(device),
            index=torch.arange(len(gate_up), dtype=torch.int32, device=device),
            forms=forms,
            activation=activation,
            interleaved=interleaved,
            activations=sides,
        )

    @staticmethod
    def of_matrix(matrix: Matrix[Tensor], bias: Tensor | None = None) -> ExpertTable:
        """Table of one page with one matrix [H, I], ``down``, and its bias [H]."""
        biases = () if bias is None else (bias,)
        form = _form("weight", [_matrix("weight", matrix)], biases, [True], bias is not None)
        device = next(iter(matrix.tensors.values())).device
        rows = [*_addresses([matrix], biases)] * len(MATRICES)
        return ExpertTable(
            hidden=matrix.rows,
            width=matrix.columns,
            parts={"down": (matrix,), "down_bias": biases},
            table=torch.tensor(rows, dtype=torch.int64).to(device),
            index=torch.zeros(1, dtype=torch.int32, device=device),
            forms={"down": form},
        )


def tile_of(
    pages: ExpertTable, part: str, x: Tensor, activation: Activation, mean_rows: float, *, wide: bool = False
) -> tiles.Tile:
    """The tile of the product of ``x`` with the matrices ``part``, of ``mean_rows`` rows an expert."""
    card = tiles.UNITS_SINCE if on_host(x) else compute_capability(x.device.index)
    matrices = 2 if part == "gate_up" and activation.gated else 1
    stored = pages.forms[part].stored
    if pages.rounds(part):
        group, _ = stored.integer_groups(x.shape[1])
        scattered = stored.scattered
        return tiles.choose_integers(card, group=group, mean_rows=mean_rows, matrices=matrices, scattered=scattered)
    itemsize = torch.float32.itemsize if wide else x.element_size()
    unpacks = pages.floats is None
    return tiles.choose(card, itemsize=itemsize, mean_rows=mean_rows, matrices=matrices, unpacks=unpacks)


def row_slots(offsets: Tensor, pages: ExpertTable, rows: int, height: int) -> Tensor:
    """Blocks of at most ``height`` rows of one expert: int32 [n, 3] (page, first row, row after the expert's last).

    In order of rows, then unused ones with page -1; n is the most that ``rows`` rows can need.
    """
    from moelight.kernels.gpu import grouped_triton

    count = (rows + min(rows, pages.experts) * (height - 1)) // height
    slots = torch.empty((count, 3), dtype=torch.int32, device=offsets.device)
    padded = 1 << (pages.experts - 1).bit_length()
    step = max(1, min(64, _MAP_NUMBERS // padded))
    grouped_triton.map_slots[(-(-count // step),)](
        offsets, pages.index, slots, pages.experts, pages.pages, rows, count, BM=height, PADDED=padded, SLOTS=step
    )
    return slots


def _check_forms(forms: Mapping[str, MatrixForm], activation: Activation, sides: tuple[str, str]) -> int:
    """Check that matrices of these forms are those of an expert; return its width."""
    first, down = forms["gate_up"], forms["down"]
    if forms.get("up", first) != first:
        raise ValueError("up: must be stored as gate_up is")
    for name, rounded in zip(("gate_up", "down"), sides, strict=True):
        if (reason := forms[name].stored.gpu_int8_reason if is_rounded(rounded) else None) is not None:
            raise ValueError(f"{name}: {reason}")
        if forms[name].stored.unpacker is None:
            raise ValueError(f"{name}: is {forms[name].stored.cpu_reason}")
    halves = 2 if activation.gated and "up" not in forms else 1
    if first.rows % halves or not first.rows * first.columns:
        raise ValueError(f"gate_up: must have shape [2I, inputs], has [{first.rows}, {first.columns}]")
    hidden, width = first.columns, first.rows // halves
    if (down.rows, down.columns) != (hidden, width):
        raise ValueError(f"down: must have shape [{hidden}, {width}], has [{down.rows}, {down.columns}]")
    if first.floats and down.floats and first.floats != down.floats:
        raise ValueError(f"down: must have the dtype of gate_up, {first.stored.name}, has {down.stored.name}")
    return width


def _matrices(name: str, weights: Any) -> list[Matrix[Tensor] | None]:
    """``weights``, floats as matrices of a plain format; all checked."""
    if not isinstance(weights, (list, tuple)):
        raise ValueError(f"{name}: must be a list of matrices, is {type(weights).__name__}")
    return [None if weight is None else _matrix(f"{name}: entry {e}", weight) for e, weight in enumerate(weights)]


def _matrix(name: str, weight: Any) -> Matrix[Tensor]:
    matrix = parts_checked(name, as_matrix(name, weight, None, gap=False), None)
    for part, tensor in matrix.tensors.items():
        if tensor.data_ptr() % ALIGNMENT_BYTES or tensor.nbytes > _MAX_BYTES:
            raise ValueError(
                f"{name}: {part} must begin at a multiple of {ALIGNMENT_BYTES} bytes, and have at most {_MAX_BYTES} of "
                "them"
            )
    return matrix


def _form(
    name: str, matrices: Sequence[Matrix[Tensor] | None], biases: Biases, gates: Sequence[bool], biased: bool
) -> MatrixForm:
    """The form that all ``matrices`` have, which are there where ``gates`` are."""
    pages = len(gates)
    if [matrix is not None for matrix in matrices] != list(gates):
        raise ValueError(f"{name}: must have {pages} entries, each there where that of gate_up is, and only there")
    if len(biases) != (pages if biased else 0):
        raise ValueError(f"{name}_bias: must have {pages} entries, as all matrices have biases or none")
    forms = set()
    for e, (matrix, bias) in enumerate(zip(matrices, biases or [None] * pages, strict=True)):
        if biased and (matrix is None) != (bias is None):
            raise ValueError(f"{name}_bias: entry {e} must be there where its matrix is, and only there")
        if matrix is None:
            continue
        if bias is not None:
            check_tensor(f"{name}_bias: entry {e}", bias, FLOATS, (matrix.rows,), device=None, gap=False)
        dtypes = tuple((part, tensor.dtype) for part, tensor in matrix.tensors.items() if part in matrix.stored.names)
        first = matrix.tensors[matrix.stored.names[0]]
        form = MatrixForm(
            stored=matrix.stored,
            rows=matrix.rows,
            columns=matrix.columns,
            dtypes=dtypes,
            bias=None if bias is None else bias.dtype,
            transposed=upright(first) is not first,
        )
        forms.add(form)
    if len(forms) != 1:
        raise ValueError(f"{name}: must be of one format, size and order, and some page must have it")
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
