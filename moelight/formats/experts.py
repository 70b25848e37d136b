"""The matrices and biases of one expert: one type for a checkpoint, a page, and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")
N = TypeVar("N")
MATRICES = ("gate_up", "up", "down")
BIASES = ("gate_up_bias", "up_bias", "down_bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout(Generic[M]):
    """The matrices of an expert, as `cpu_expert_ffn` takes them. ``M``: `formats.matrix.Matrix`, a tensor, or one for
    each expert of a layer.

    Attributes:
        gate_up: gate rows above up rows; the gate alone if there is ``up``; ``up`` alone if the expert has no gate.
        up: where it is stored apart from its gate.
        interleaved: rows of gate and up alternate in ``gate_up`` and its bias.
    """

    gate_up: M
    down: M
    up: M | None = None
    gate_up_bias: M | None = None
    up_bias: M | None = None
    down_bias: M | None = None
    interleaved: bool = False

    def parts(self) -> dict[str, M]:
        """Matrices, then biases, by name; those that the expert lacks are left out."""
        named = {name: getattr(self, name) for name in (*MATRICES, *BIASES)}
        return {name: part for name, part in named.items() if part is not None}

    def map(self, function: Callable[[M], N]) -> ExpertLayout[N]:
        """The layout of the results of ``function`` on matrices and biases."""
        parts = {name: function(part) for name, part in self.parts().items()}
        return ExpertLayout(**parts, interleaved=self.interleaved)
