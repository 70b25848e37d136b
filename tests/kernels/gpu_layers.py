"""Layers of experts for the tests of the GPU's kernels, in float64 and as pages.

Without a device Triton must be told to interpret its kernels before it is first imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from moelight.kernels.activations import Activation, activation_of
from moelight.kernels.gpu.pages import ExpertTable


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Experts in float64, and the same as pages."""

    gate_up: list[Tensor]
    down: list[Tensor]
    pages: ExpertTable
    biases: tuple[list[Tensor], list[Tensor]] | None = None

    def truth(self, x: Tensor, counts: tuple[int, ...], activation: str | Activation | None = None) -> Tensor:
        out = torch.zeros(x.shape[0], self.pages.hidden, dtype=torch.float64)
        for e, (first, last) in enumerate(pairwise(accumulate(counts, initial=0))):
            wide = x[first:last].double().cpu() @ self.gate_up[e].t()
            if self.biases:
                wide = wide + self.biases[0][e]
            gate, up = wide.chunk(2, dim=-1)
            by = activation_of(activation or self.pages.activation)
            active = by(gate, up) if by.gated else by(wide)
            out[first:last] = active @ self.down[e].t()
            if self.biases:
                out[first:last] += self.biases[1][e]
        return out


def floats(
    experts: int, hidden: int, width: int, dtype: torch.dtype, device: torch.device, bias: bool = False
) -> Layer:
    gate_up = [torch.randn(2 * width, hidden).mul(hidden**-0.5).to(dtype) for _ in range(experts)]
    down = [torch.randn(hidden, width).mul(width**-0.5).to(dtype) for _ in range(experts)]
    biases = None
    if bias:
        biases = ([torch.randn(2 * width).to(dtype) for _ in gate_up], [torch.randn(hidden).to(dtype) for _ in gate_up])
    pages = ExpertTable.of(
        [w.to(device) for w in gate_up],
        [w.to(device) for w in down],
        gate_up_bias=None if biases is None else [b.to(device) for b in biases[0]],
        down_bias=None if biases is None else [b.to(device) for b in biases[1]],
    )
    doubled = None if biases is None else ([b.double() for b in biases[0]], [b.double() for b in biases[1]])
    return Layer(gate_up=[w.double() for w in gate_up], down=[w.double() for w in down], pages=pages, biases=doubled)


def transposed(weight: Tensor) -> Tensor:
    """The same matrix, its columns contiguous."""
    return weight.t().contiguous().t()


def in_form(layer: Layer, form: str, activation: Activation, device: torch.device) -> Layer:
    """``layer`` of floats, its pages "apart" (gate and up; down transposed), "transposed" or "interleaved"."""
    parts: dict[str, list[Tensor]] = {name: list(tensors) for name, tensors in layer.pages.parts.items() if tensors}
    if form == "interleaved":
        for name in ("gate_up", "gate_up_bias"):
            parts[name] = [torch.stack(item.chunk(2), 1).flatten(0, 1) for item in parts.get(name, ())]
    if form == "apart":
        for first, second in (("gate_up", "up"), ("gate_up_bias", "up_bias")):
            parts[first], parts[second] = ([item.chunk(2)[i] for item in parts.get(first, ())] for i in (0, 1))
    if form in {"apart", "transposed", "interleaved"}:
        parts["down"] = [transposed(part) for part in parts["down"]]
    if form in {"transposed", "interleaved"}:
        parts["gate_up"] = [transposed(part) for part in parts["gate_up"]]
    inputs = {name: [tensor.to(device) for tensor in tensors] for name, tensors in parts.items() if tensors}
    if form == "apart":  # views of the joined ones: as far behind in every page
        inputs |= {name: parts[name] for name in ("gate_up", "up", "gate_up_bias", "up_bias") if parts[name]}
    return replace(layer, pages=ExpertTable.of(**inputs, activation=activation, interleaved=form == "interleaved"))  # type: ignore[arg-type]


def rows_of(counts: tuple[int, ...], hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(sum(counts), hidden).to(dtype).to(device)
    return x, torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32, device=device)


def distance(result: Tensor, truth: Tensor) -> float:
    return float((result.double().cpu() - truth).abs().max() / truth.abs().max())
