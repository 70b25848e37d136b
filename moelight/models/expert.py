"""The weights of one expert, of a layer's experts, and what is computed with them; does not depend on pages.

Legend: n rows, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.nn import functional

from moelight.formats.experts import MATRICES
from moelight.kernels.activations import SILU, Activation
from moelight.kernels.layer import BoundExperts
from moelight.kernels.matrices import Weight, floats_of, matrix_of
from moelight.kernels.products import Workspace, feed_forward, linear
from moelight.kernels.quantized import dense_values
from moelight.kernels.ranks import Ranks
from moelight.kernels.reference import gate_and_up

PARTS = (*MATRICES, "gate_up_bias", "up_bias", "down_bias")  # of `Expert`


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expert:
    """Views of an expert's matrices and biases, by the names of `cpu_expert_ffn`, whose form is any that it takes;
    ``activations`` as there. Those of one ``layout_id`` have one form; others of a layer are computed apart."""

    gate_up: Weight
    down: Weight
    up: Weight | None = None
    gate_up_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    interleaved: bool = False
    layout_id: int = 0
    activations: tuple[str, str] = ("auto", "auto")

    @property
    def floats(self) -> tuple[Tensor, Tensor] | None:
        """``gate_up`` and ``down``, if they are floats by rows, gate and up one after the other, without biases."""
        alone = self.up is None and self.gate_up_bias is None and self.down_bias is None and not self.interleaved
        wide, narrow = (floats_of((matrix_of(weight),)) for weight in (self.gate_up, self.down))
        if not alone or wide is None or narrow is None:
            return None
        return (wide, narrow) if wide.is_contiguous() and narrow.is_contiguous() else None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertFunction:
    """The function that experts compute with their weights.

    Attributes:
        activation: between the products; None if it is none of the kernels.
        forward: the function by torch, rows [n, H] -> [n, H].
        finish: its last step, the same for all experts of a layer, each row by itself.
    """

    activation: Activation | None
    forward: Callable[[Expert, Tensor], Tensor]
    finish: Callable[[Tensor], Tensor] | None = None


def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [n, in] times ``weight`` [out, in], plus the bias, by torch -> [n, out]."""
    weight = dense_values(weight, x.dtype)
    return (linear if weight.stride(1) == 1 else functional.linear)(x, weight, bias)


def gated_silu(expert: Expert, x: Tensor) -> Tensor:
    """``expert`` with a gated SiLU by torch: x [n, H] -> [n, H]."""
    gate = product(x, expert.gate_up)
    if expert.up is None:
        gate, up = gate_and_up(gate, interleaved=expert.interleaved)
    else:
        up = product(x, expert.up)
    return product(functional.silu(gate).mul_(up), expert.down)  # rounded as `feed_forward` rounds


GATED_SILU = ExpertFunction(SILU, gated_silu)


class LayerExperts(list["Expert | None"]):
    """The experts of a layer, None for one computed elsewhere, in memory that does not change while this is used."""

    def __init__(
        self,
        experts: Iterable[Expert | None],
        function: ExpertFunction = GATED_SILU,
        *,
        install: Callable[[], None] | None = None,
    ) -> None:
        """``install``: of a dense layer in pages, which has no experts: puts the matrices of its page in place."""
        super().__init__(experts)
        self.function, self.install = function, install

    @classmethod
    def on_rank(cls, experts: Sequence[Expert | None], function: ExpertFunction, ranks: Ranks | None) -> LayerExperts:
        """``experts``, and behind them None for those of other ``ranks``."""
        return cls(experts if ranks is None else (*experts, None), function)

    def only(self, some: range) -> LayerExperts:
        """These experts without those whose numbers are not in ``some``."""
        return LayerExperts((expert if index in some else None for index, expert in enumerate(self)), self.function)

    @cached_property
    def bound(self) -> BoundExperts | None:
        """All of them as `DecoderLayer` takes them; None if it does not compute them, or if one is elsewhere."""
        activation, experts = self.function.activation, [expert for expert in self if expert is not None]
        alike = experts and len(experts) == len(self) and len({expert.layout_id for expert in experts}) == 1
        if not alike or activation is None or self.function.finish is not None:
            return None
        return BoundExperts(experts[0].down.shape[0], **expert_arguments(experts), activation=activation)


def expert_arguments(experts: Sequence[Expert | None]) -> dict[str, Any]:
    """The arguments of `cpu_expert_ffn` for ``experts`` of one layout, of which at least one is not None."""
    first = next(expert for expert in experts if expert is not None)
    lists: dict[str, Any] = {
        name: [None if expert is None else getattr(expert, name) for expert in experts]
        for name in PARTS
        if getattr(first, name) is not None
    }
    return lists | {"interleaved": first.interleaved, "activations": first.activations}


def in_torch(expert: Expert, function: ExpertFunction, x: Tensor, space: Workspace, *, wide: bool) -> Tensor:
    """``function`` of ``expert`` by torch: x [n, H], with n on the grid of `products` on a CPU, -> [n, H]; ``wide`` as
    for `feed_forward`."""
    if function.activation == SILU and function.finish is None and (floats := expert.floats) is not None:
        return feed_forward(x, *floats, space, wide=wide)
    return function.forward(expert, x)
