"""How the stored bytes of one expert lie in its page, and where each kind of experts module keeps its matrices.

Shapes: E experts, H hidden, I expert width. Matrices are given as a linear layer has them: gate and up [I, H], down
[H, I], biases [I] and [H]; the page keeps the order of the checkpoint, which strides describe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from moelight.core.errors import ConfigError
from moelight.models.graph.boxes import Box, Boxes, Shape
from moelight.weights.source import TensorInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A matrix [rows, columns] or a bias [rows] of a page: at number ``offset``, by ``strides``, in numbers."""

    offset: int
    shape: Shape
    strides: Shape

    @property
    def transposed(self) -> bool:
        """True if the numbers of a column are nearer to each other than those of a row."""
        return self.strides[0] < self.strides[-1]

    def of(self, page: Tensor) -> Tensor:
        """View of ``page``, the numbers of a page [at least a page]."""
        return page.as_strided(self.shape, self.strides, page.storage_offset() + self.offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLayout:
    """The places of an expert's matrices in a page of ``numbers`` numbers; those that it has not are None."""

    numbers: int
    up: Matrix
    down: Matrix
    gate: Matrix | None = None
    gate_bias: Matrix | None = None
    up_bias: Matrix | None = None
    down_bias: Matrix | None = None

    @property
    def interleaved(self) -> bool:
        """True if outputs of the gate and of up take turns."""
        return self.gate is not None and 2 * (self.up.offset - self.gate.offset) == self.gate.strides[0]

    @property
    def gate_up(self) -> Matrix | None:
        """The gate and up as one matrix [2 I, H], if up's rows follow the gate's; else None."""
        gate, up = self.gate, self.up
        if gate is None or gate.strides != up.strides or up.offset != gate.offset + gate.shape[0] * gate.strides[0]:
            return None
        return Matrix(offset=gate.offset, shape=(2 * gate.shape[0], gate.shape[1]), strides=gate.strides)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsForm:
    """The parameters of an experts module that hold its matrices, by their paths; each has all E experts.

    Attributes:
        first: the gate and up in one, or each of them, or up alone.
        gated: there is a gate.
        concatenated: in one: first the gate, then up; else they take turns.
        first_transposed, down_transposed: [inputs, outputs] instead of [outputs, inputs].
        biases: the biases of ``first`` and ``down``, in one each; empty if there are none.
        by_rows: the experts follow each other in the first dimension: [E x I, H].
    """

    first: tuple[str, ...]
    down: str
    gated: bool = True
    concatenated: bool = True
    first_transposed: bool = False
    down_transposed: bool = False
    biases: tuple[str, ...] = ()
    by_rows: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """All paths, in the order of a page."""
        return (*self.first, self.down, *self.biases)


_UNDECORATED = {
    # Experts modules of transformers that say nothing of their form, by the name of their class.
    "DbrxExperts": ExpertsForm(first=("mlp.w1", "mlp.v1"), down="mlp.w2", down_transposed=True, by_rows=True),
    "JetMoeMoE": ExpertsForm(first=("input_linear.weight",), down="output_linear.weight"),
    "Llama4TextExperts": ExpertsForm(
        first=("gate_up_proj",), down="down_proj", first_transposed=True, down_transposed=True
    ),
    "LongcatFlashExperts": ExpertsForm(first=("gate_up_proj",), down="down_proj"),
    "Step3p7Experts": ExpertsForm(first=("gate_up_proj",), down="down_proj"),
}


def experts_form(module: nn.Module) -> ExpertsForm:
    """Where ``module`` keeps its experts: as transformers' decorator ``use_experts_implementation`` says, or by class.
    Raises ConfigError for a module of unknown form."""
    known = _UNDECORATED.get(type(module).__name__)
    if known is not None:
        return known
    try:
        gated, bias, transposed = module.has_gate, module.has_bias, module.is_transposed
        concatenated = module.is_concatenated
    except AttributeError:
        raise ConfigError(f"{type(module).__name__}: experts of a form that moelight does not know") from None
    first = "gate_up_proj" if gated else "up_proj"
    return ExpertsForm(
        first=(first,),
        down="down_proj",
        gated=bool(gated),
        concatenated=bool(concatenated),
        first_transposed=bool(transposed),
        down_transposed=bool(transposed),
        biases=(f"{first}_bias", "down_proj_bias") if bias else (),
    )


def matrices(form: ExpertsForm, tensors: Mapping[str, Boxes]) -> dict[str, Boxes]:
    """The matrices of one expert, by their names in `PageLayout`, of its ``tensors`` by their paths."""
    first = [_upright(tensors[path], form.first_transposed) for path in form.first]
    found = dict(zip(_names(form), _halves(first, form), strict=True))
    found["down"] = _upright(tensors[form.down], form.down_transposed)
    if form.biases:
        biases = _halves([tensors[form.biases[0]]], form)
        found |= {f"{name}_bias": bias for name, bias in zip(_names(form), biases, strict=True)}
        found["down_bias"] = tensors[form.biases[1]]
    return found


def _names(form: ExpertsForm) -> tuple[str, ...]:
    return ("gate", "up") if form.gated else ("up",)


def _upright(tensor: Boxes, transposed: bool) -> Boxes:
    return tensor.permute((1, 0)) if transposed else tensor


def _halves(first: Sequence[Boxes], form: ExpertsForm) -> Sequence[Boxes]:
    if len(first) == len(_names(form)):
        return first
    whole, width = first[0], first[0].shape[0] // 2
    if form.concatenated:
        return whole.split(0, (width, width))
    return whole.view((width, 2, *whole.shape[1:])).unbind(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """``count`` stored numbers of ``info`` from number ``begin`` on."""

    info: TensorInfo
    begin: int
    count: int


def lay_out(parts: Mapping[str, Boxes]) -> tuple[PageLayout, tuple[Run, ...]] | None:
    """The layout of a page of the matrices ``parts``, and the runs of stored numbers that make the page, in order; None
    if one is not a box of stored numbers, or other numbers lie between theirs."""
    if any(len(part.boxes) != 1 for part in parts.values()):
        return None
    boxes = {name: part.boxes[0] for name, part in parts.items()}
    runs = _runs(list(boxes.values()))
    if sum(run.count for run in runs) != sum(math.prod(box.shape) for box in boxes.values()):
        return None
    places = {
        name: Matrix(offset=_place(box, runs), shape=box.shape, strides=box.strides) for name, box in boxes.items()
    }
    numbers = sum(run.count for run in runs)
    return PageLayout(numbers=numbers, **places), tuple(runs)


def _runs(boxes: Sequence[Box]) -> list[Run]:
    """The stored numbers from the first to the last of each box; one run of those that meet."""
    found: list[Run] = []
    for box in boxes:
        begin, end = box.offset, box.offset + box.span
        for index, run in enumerate(found):
            if run.info is box.info and begin <= run.begin + run.count and run.begin <= end:
                begin, end = min(begin, run.begin), max(end, run.begin + run.count)
                found[index] = Run(info=run.info, begin=begin, count=end - begin)
                break
        else:
            found.append(Run(info=box.info, begin=begin, count=end - begin))
    return found


def _place(box: Box, runs: Sequence[Run]) -> int:
    """The number of the page at which ``box`` starts."""
    start = 0
    for run in runs:
        if run.info is box.info and 0 <= box.offset - run.begin < run.count:
            break
        start += run.count
    return start + box.offset - run.begin
