"""The matrices and biases of one expert: one type for what is stored, a page, and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

MATRICES = ("gate_up", "up", "down")  # of an expert, as kernels take them
M = TypeVar("M")
N = TypeVar("N")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout(Generic[M]):
    """The matrices and biases of an expert, where they lie.

    Attributes:
        parts: by the names of `cpu_expert_ffn`: ``gate_up`` has gate rows above up rows, or the gate alone if there is
            ``up``, or up alone if the expert has no gate. A layer of a dense model is one expert, whose matrices have
            the names of its parameters.
        interleaved: rows of gate and up alternate in ``gate_up`` and its bias.
    """

    parts: Mapping[str, M]
    interleaved: bool = False

    def __hash__(self) -> int:
        return hash((self.interleaved, *self.parts.items()))

    def map(self, function: Callable[[M], N]) -> ExpertLayout[N]:
        """The layout of the results of ``function`` on matrices and biases."""
        parts = {name: function(part) for name, part in self.parts.items()}
        return ExpertLayout(parts=parts, interleaved=self.interleaved)
