"""Activations between the two products of an expert, as parameters that every kernel takes. Imports torch alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Mixed precision stores act(gate) * up in float16 times this power of two, which the float32 sums of `down` undo: it
# ends at 1,048,064, not 65,504, and numbers from 2^-10 on keep all bits.
SHRINK = 2.0**-4
CURVES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "silu": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "gelu": lambda x, _: functional.gelu(x),
    "gelu_tanh": lambda x, _: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x, _: functional.relu(x).square(),
}


@dataclass(frozen=True, slots=True)
class Activation:
    """curve(min(gate, limit)) * (clamp(up, -limit, limit) + shift), or of an expert without a gate curve(up).

    Attributes:
        curve: of `CURVES`; silu is x sigmoid(alpha x).
        late: the limit is on what the curve makes of the gate, not on the gate.
        gated: False: up alone enters.
    """

    curve: str = "silu"
    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0
    late: bool = False
    gated: bool = True

    def __post_init__(self) -> None:
        if self.curve not in CURVES:
            raise ValueError(f"activation: must be one of {', '.join(CURVES)}, is {self.curve!r}")
        if not (math.isfinite(self.alpha) and math.isfinite(self.shift) and self.limit > 0):
            raise ValueError(f"activation: needs finite numbers and a positive limit, is {self!r}")
        if not self.gated and (self.shift, self.limit) != (0.0, math.inf):
            raise ValueError(f"activation: without a gate there is neither shift nor limit, is {self!r}")

    def __call__(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """gate and up [n, I] -> [n, I]; of one without a gate, up alone is given."""
        curve = CURVES[self.curve]
        if self.late:
            active = curve(gate, self.alpha).clamp(max=self.limit)
        else:
            active = curve(gate.clamp(max=self.limit), self.alpha)
        return active if up is None else (up.clamp(-self.limit, self.limit) + self.shift) * active


SILU = Activation()
NAMED = {"silu": SILU, "gelu_tanh": Activation("gelu_tanh"), "swiglu_oai": Activation("silu", 1.702, 7.0, 1.0)}


def activation_of(activation: object) -> Activation:
    """``activation``, or the one of its name in `NAMED`."""
    resolved = NAMED.get(activation) if isinstance(activation, str) else activation
    if not isinstance(resolved, Activation):
        raise ValueError(f"activation: must be an Activation or one of {', '.join(NAMED)}, is {activation!r}")
    return resolved
