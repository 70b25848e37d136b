"""One expert of a graph model from its page: a pair of matrices for the native kernels where its form is theirs, else
the module's own activation between two products of torch. Does not depend on where pages come from.

Shapes: H hidden, I expert width, n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moelight.models.graph.families import ExpertForm
from moelight.models.moe import ExpertWeights
from moelight.weights.page_layout import Matrix, PageLayout

_PROBE = 64  # rows and width of what an activation is recognised by


@dataclass(frozen=True, slots=True)
class PageExpert:
    """The matrices of an expert, views of its page, as its form multiplies them.

    Attributes:
        inward: matrices and biases of the products whose results the form's ``activate`` is given.
        outward: matrix [H, I] and bias [H] of the product after it.
    """

    inward: Sequence[tuple[Tensor, Tensor | None]]
    outward: tuple[Tensor, Tensor | None]

    def forward(self, form: ExpertForm, x: Tensor) -> Tensor:
        """x [n, H] -> [n, H]."""
        active = form.activate(*(functional.linear(x, *each) for each in self.inward))
        out = functional.linear(active, *self.outward)
        return out if form.finish is None else form.finish(out)


class PageViews:
    """Finds the expert in a page of ``numbers``. ``native``: the native kernels compute it."""

    def __init__(self, layout: PageLayout, form: ExpertForm) -> None:
        self._layout, self.numbers = layout, layout.numbers
        gate_up, gate_up_bias = layout.gate_up, layout.gate_up_bias
        self._inward: Sequence[tuple[Matrix, Matrix | None]]
        if len(form.inward) > 1:
            assert layout.gate is not None
            self._inward = ((layout.gate, layout.gate_bias), (layout.up, layout.up_bias))
        elif not form.gated:
            self._inward = ((layout.up, layout.up_bias),)
        else:
            assert gate_up is not None
            self._inward = ((gate_up, gate_up_bias),)
        self._gate_up = gate_up if gate_up is not None and not layout.interleaved else None
        biased = layout.up_bias is not None or layout.down_bias is not None
        straight = self._gate_up is not None and not self._gate_up.transposed and not layout.down.transposed
        self.native = straight and not biased and form.finish is None and _is_gated_silu(form)

    def of(self, numbers: Tensor) -> ExpertWeights | PageExpert:
        """The expert whose page is ``numbers``, of the dtype of pages."""
        down = self._layout.down.of(numbers)
        if self.native:
            assert self._gate_up is not None
            return self._gate_up.of(numbers), down
        bias = self._layout.down_bias
        inward = [(matrix.of(numbers), None if each is None else each.of(numbers)) for matrix, each in self._inward]
        return PageExpert(inward, (down, None if bias is None else bias.of(numbers)))


def _is_gated_silu(form: ExpertForm) -> bool:
    """True if the activation of ``form`` is silu(gate) * up: it is asked, because modules bring their own."""
    gate, up = torch.linspace(-30, 30, _PROBE * _PROBE).view(_PROBE, _PROBE), torch.ones(_PROBE, _PROBE) * 3
    given = (gate, up) if len(form.inward) > 1 else (torch.cat((gate, up), dim=-1),)
    try:
        found = form.activate(*given)
    except RuntimeError:
        return False
    return torch.allclose(found, functional.silu(gate) * up, rtol=1e-6, atol=0)
