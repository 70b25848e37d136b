"""The function of the experts of a graph model: the activation that kernels take, found by its values; where none
computes it, the module's own between two products of torch.

Shapes: H hidden, I expert width, n rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moelight.kernels.activations import Activation
from moelight.kernels.reference import gate_and_up
from moelight.models.expert import Expert, product
from moelight.models.graph.families import ExpertForm

_PROBE = 65  # rows of what an activation is recognised by
_LARGE = (-1e3, -200.0, 200.0, 1e3)
_SMALL = 0.25  # within every limit
_DIGITS = 6  # of a constant that is found by its effect


def forward(form: ExpertForm, expert: Expert, x: Tensor) -> Tensor:
    """``expert`` by torch: x [n, H] -> [n, H]; gate and up may lie in another order than the module's own."""
    inward = product(x, expert.gate_up, expert.gate_up_bias)
    if not form.gated:
        activated = form.activate(inward)
    elif expert.up is not None:
        activated = _activate(form, inward, product(x, expert.up, expert.up_bias))
    elif len(form.inward) == 1 and expert.interleaved == form.interleaved:
        activated = form.activate(inward)
    else:
        activated = _activate(form, *gate_and_up(inward, interleaved=expert.interleaved))
    out = product(activated, expert.down, expert.down_bias)
    return out if form.finish is None else form.finish(out)


def recognised(form: ExpertForm) -> Activation | None:
    """The activation of ``form`` by the numbers that it gives, because modules bring their own; None if it is none of
    ours."""
    scale = torch.cat((torch.linspace(-30, 30, _PROBE), torch.tensor(_LARGE))).double()
    gate, up = torch.meshgrid(scale, scale.flip(0), indexing="ij")
    try:
        wanted = _activate(form, gate, up) if form.gated else form.activate(gate)
        candidates = _candidates(form)
    except (RuntimeError, TypeError):
        return None
    for candidate in candidates:
        result = candidate(gate, up) if form.gated else candidate(gate)
        if result.shape == wanted.shape and torch.allclose(result, wanted.double(), rtol=1e-5, atol=1e-9):
            return candidate
    return None


def _activate(form: ExpertForm, gate: Tensor, up: Tensor) -> Tensor:
    """The module's own function of gate and up [n, I], in the order in which it takes them."""
    if len(form.inward) > 1:
        return form.activate(gate, up)
    return form.activate(torch.stack((gate, up), dim=-1).flatten(-2) if form.interleaved else torch.cat((gate, up), -1))


def _candidates(form: ExpertForm) -> list[Activation]:
    """Activations whose constants are those that single values show."""
    if not form.gated:
        return [Activation(curve, gated=False) for curve in ("silu", "gelu", "gelu_tanh", "relu2")]

    def at(gate: float, up: float) -> float:
        one = torch.ones(1, 2, dtype=torch.float64)
        return float(_activate(form, one * gate, one * up)[0, 0])

    nothing, little = at(_SMALL, 0.0), at(_SMALL, _SMALL)
    curve = (little - nothing) / _SMALL
    if not math.isfinite(curve) or curve == 0:
        return []
    shift, maximum = nothing / curve, at(_SMALL, 1e6) / curve
    limit = math.inf if maximum - shift > 1e5 else _short(maximum - shift)
    share = curve / _SMALL
    alpha = _short(math.log(share / (1 - share)) / _SMALL) if 0 < share < 1 else 1.0
    curves = [("silu", alpha), ("gelu", 1.0), ("gelu_tanh", 1.0), ("relu2", 1.0)]
    return [
        Activation(name, function, limit, _short(shift), late)
        for name, function in curves
        for late in ((False, True) if limit < math.inf else (False,))
    ]


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}") if abs(value) > 10**-_DIGITS else 0.0
