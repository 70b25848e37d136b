"""Addresses of expert matrices: one table of all pages in device memory, which never changes, and beside it the page of
each expert of a layer, which changes from pass to pass.

The kernels read both where they run, so nothing waits for either. Whoever writes an index does so on the stream of the
kernels that read it. Every wrong argument is a ValueError that names it.

Legend: P pages, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moelight.kernels.activations import SILU, Activation
from moelight.kernels.arguments import FLOATS, check_tensor

PARTS = ("gate_up", "down", "gate_up_bias", "down_bias")
ALIGNMENT_BYTES = 16

Parts = Sequence[Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Numbers from one to another in the matrices of every page: ``row`` and ``column`` of a matrix, ``up``: from a
    gate's number to its up's; ``bias`` and ``up_bias`` the same of biases."""

    row: int
    column: int = 1
    up: int = 0
    bias: int = 1
    up_bias: int = 0

    @property
    def plain(self) -> bool:
        """True if rows are contiguous, and those of up follow those of the gate."""
        return self.column == self.bias == 1 and self.up == self.up_bias * self.row


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertTable:
    """Addresses of the matrices of P pages, of which E experts choose; the pages may change their bytes.

    ``table`` int64 [tensors of a page, P + 1]: addresses, 0 for absent ones; the last column is the page of experts
    without one. ``index`` int32 [E]: the page of each expert; any other number: none, because another processor
    computes the expert. ``parts`` has for each part a tuple of P matrices, biases or None, or an empty tuple.
    ``activation``: between gate_up and down.
    """

    hidden: int
    width: int
    parts: dict[str, tuple[Any, ...]]
    table: Tensor
    index: Tensor
    activation: Activation = SILU
    interleaved: bool = False

    @property
    def experts(self) -> int:
        return self.index.numel()

    @property
    def pages(self) -> int:
        return self.table.shape[1] - 1

    def chosen_by(self, index: Tensor, activation: Activation | None = None) -> ExpertTable:
        """Return this table for the experts of ``index`` int32 [E], on the same device; E at least 1. The numbers are
        read when kernels run. ``activation``: of these experts, if another."""
        check_tensor("index", index, torch.int32, (None,), device=self.table.device, gap=False)
        if not index.numel():
            raise ValueError("index: names the page of no expert")
        return replace(self, index=index, activation=activation or self.activation)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageTable(ExpertTable):
    """Matrices of floats. Created by `of`, which checks.

    ``table``: in the order of PARTS. ``steps``: within gate_up and down.
    """

    stored: torch.dtype
    steps: dict[str, Steps]

    @property
    def plain(self) -> bool:
        """True if rows of the gate, then of up, are one matrix, and all rows are contiguous."""
        return self.activation.gated and all(steps.plain for steps in self.steps.values())

    @property
    def biased(self) -> bool:
        return bool(self.parts["gate_up_bias"])

    def dtype_of(self, part: str) -> torch.dtype:
        """Dtype of a part's tensors; float32 if there are none."""
        return next((tensor.dtype for tensor in self.parts[part] if tensor is not None), torch.float32)

    @staticmethod
    def of(
        gate_up: Parts,
        down: Parts,
        *,
        up: Parts | None = None,
        gate_up_bias: Parts | None = None,
        up_bias: Parts | None = None,
        down_bias: Parts | None = None,
        activation: Activation = SILU,
        interleaved: bool = False,
    ) -> PageTable:
        """Table of one tensor per page, at any addresses of one device, where expert e has page e; None for an expert
        computed elsewhere. Waits for its copy to the device: tables are made at loading.

        gate_up   [2I, H], gate rows first: float32, bfloat16 or float16
        down      [H, I], dtype of gate_up
        *_bias    [2I] and [H]: float32, bfloat16 or float16
        up, up_bias, interleaved  as in `cpu_expert_ffn`; up as far behind its gate in every page

        Contiguous, or transposes of what is; matrices begin at multiples of 16 bytes.
        """
        lists = (gate_up, down, gate_up_bias, down_bias)
        parts = {name: _tuple(name, tensors) for name, tensors in zip(PARTS, lists, strict=True)}
        others = {"up": _tuple("up", up), "up_bias": _tuple("up_bias", up_bias)}
        first = next((tensor for tensor in parts["gate_up"] if tensor is not None), None)
        if first is None:
            raise ValueError("gate_up: no expert has weights")
        check_tensor("gate_up", _upright(first), FLOATS, (None, None), device=None, gap=False)
        halves = 2 if activation.gated and up is None else 1
        hidden, width = first.shape[1], first.shape[0] // halves
        if first.shape[0] % halves or not first.numel():
            raise ValueError(f"gate_up: must have shape [2I, inputs], has {list(first.shape)}")
        _check_presence(parts)
        sizes = {"gate_up": (halves * width, hidden), "down": (hidden, width)}
        steps = {name: _steps_of(name, parts, size, first) for name, size in sizes.items()}
        if activation.gated:
            steps["gate_up"] = _steps_to_up(steps["gate_up"], parts | others, width, first, interleaved=interleaved)
        addresses = [[*(map(_address, tensors) if tensors else [0] * len(gate_up)), 0] for tensors in parts.values()]
        return PageTable(
            hidden=hidden,
            width=width,
            stored=first.dtype,
            parts=parts | {name: tensors for name, tensors in others.items() if tensors},
            steps=steps,
            activation=activation,
            interleaved=interleaved,
            table=torch.tensor(addresses, dtype=torch.int64).to(first.device),
            index=torch.arange(len(gate_up), dtype=torch.int32, device=first.device),
        )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _steps_of(name: str, parts: dict[str, tuple[Tensor | None, ...]], size: tuple[int, int], first: Tensor) -> Steps:
    """Check the matrices ``name`` of ``size`` and their biases."""
    rows, inputs = size
    _check_tensors(name, parts[name], size, first, matrix=True)
    _check_tensors(f"{name}_bias", parts[f"{name}_bias"], (rows,), first)
    transposed = {_upright(tensor) is not tensor for tensor in parts[name] if tensor is not None}
    if len(transposed) > 1:
        raise ValueError(f"{name}: its tensors must lie one way: rows contiguous, or columns")
    return Steps(row=1, column=rows) if True in transposed else Steps(row=inputs)


def _upright(matrix: object) -> object:
    """``matrix``, or its transpose where that is what is contiguous."""
    if not isinstance(matrix, Tensor):
        return matrix
    transposed = matrix.ndim == 2 and matrix.shape[1] > 1 and matrix.stride(0) == 1
    return matrix.t() if transposed and matrix.stride(1) != 1 else matrix


def _steps_to_up(
    steps: Steps, parts: dict[str, tuple[Tensor | None, ...]], width: int, first: Tensor, *, interleaved: bool
) -> Steps:
    """``steps`` of the gate, with those to up: interleaved, after the gate's ``width`` rows, or as far as ``up`` is."""
    if not parts["up"]:
        if interleaved:
            return Steps(row=2 * steps.row, column=steps.column, up=steps.row, bias=2, up_bias=1)
        return replace(steps, up=width * steps.row, up_bias=width)
    shape = (width, first.shape[1])
    _check_tensors("up", parts["up"], shape, first, matrix=True)
    distances = [_distances("up", parts["gate_up"], parts["up"]), {0}]
    if parts["gate_up_bias"]:
        _check_tensors("up_bias", parts["up_bias"], shape[:1], first)
        distances[1] = _distances("up_bias", parts["gate_up_bias"], parts["up_bias"])
    if any(len(values) > 1 for values in distances):
        raise ValueError("up: must be as far behind gate_up in every page")
    return replace(steps, up=distances[0].pop(), up_bias=distances[1].pop())


def _distances(name: str, gates: Sequence[Tensor | None], ups: Sequence[Tensor | None]) -> set[int]:
    """Numbers from each gate to its up."""
    if len(gates) != len(ups) or any((gate is None) != (up is None) for gate, up in zip(gates, ups, strict=True)):
        raise ValueError(f"{name}: must have the entries of the gate")
    pairs = ((gate, up) for gate, up in zip(gates, ups, strict=True) if gate is not None and up is not None)
    return {(up.data_ptr() - gate.data_ptr()) // up.element_size() for gate, up in pairs}


def _tuple(name: str, tensors: object) -> tuple[Tensor | None, ...]:
    if tensors is None and name not in {"gate_up", "down"}:
        return ()
    if not isinstance(tensors, (list, tuple)):
        raise ValueError(f"{name}: must be a list of tensors, is {type(tensors).__name__}")
    return tuple(tensors)


def _check_presence(parts: dict[str, tuple[Tensor | None, ...]]) -> None:
    gate_up = parts["gate_up"]
    for name, tensors in parts.items():
        needed = name in {"gate_up", "down"} or bool(parts["gate_up_bias"] or parts["down_bias"])
        if needed and len(tensors) != len(gate_up):
            raise ValueError(f"{name}: must have {len(gate_up)} entries, one for each of gate_up, has {len(tensors)}")
        for e, (tensor, other) in enumerate(zip(tensors, gate_up, strict=True) if tensors else ()):
            if (tensor is None) != (other is None):
                raise ValueError(f"{name}: entry {e} must be there where gate_up's is, and only there")


def _check_tensors(
    name: str, tensors: Sequence[Tensor | None], shape: tuple[int, ...], like: Tensor, *, matrix: bool = False
) -> None:
    dtypes = (like.dtype,) if matrix else FLOATS
    for e, tensor in enumerate(tensors):
        if tensor is not None:
            upright = _upright(tensor) if matrix else tensor
            sizes = shape if upright is tensor else shape[::-1]
            check_tensor(f"{name}: entry {e}", upright, dtypes, sizes, device=like.device, gap=False)
            dtypes = (tensor.dtype,)
            if matrix and tensor.data_ptr() % ALIGNMENT_BYTES:
                raise ValueError(f"{name}: entry {e} must begin at a multiple of {ALIGNMENT_BYTES} bytes")
