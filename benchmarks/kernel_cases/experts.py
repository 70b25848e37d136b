"""Experts: bound by reading their weights while few tokens meet each, by products when many do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial

import torch
from peers.common import agree, fed_forward, random_huge, sets_for, turns
from torch import Tensor
from torch.nn import functional

from kernel_cases.setting import Setting, here
from kernel_cases.turns import Case, Contender, Timed
from moelight.kernels.ffn import cpu_expert_ffn

# Hidden, intermediate, experts of a layer: many small ones, few large ones, two of Mixtral 8x7B's.
SHAPES = {
    "H1024 I3584 E8": (1024, 3584, 8),
    "H1024 I384 E64": (1024, 384, 64),
    "H4096 I14336 E2": (4096, 14336, 2),
}
ROWS = (1, 4, 16, 64, 256, 1024)
MIDDLE = (16, 256)
TITLE = "experts, silu, rows evenly spread, one layer a call; vLLM routes a token to one expert: its rows are the same"


def cases(setting: Setting) -> Iterator[Case]:
    """Every shape with every number of rows an expert."""
    for name, shape in SHAPES.items():
        for rows in ROWS:
            yield _case(f"{name} r{rows}", shape, rows, setting)


def _case(name: str, shape: tuple[int, int, int], rows: int, setting: Setting) -> Case:
    layer = Layer(shape, rows, setting)
    values = 3 * shape[0] * shape[1] * shape[2]
    moved = 4 * shape[2] * rows * shape[0]  # tokens in and out
    flop = 2 * values * rows
    asked = {"shape": shape, "rows": rows, "gib": setting.gib}
    middle = MIDDLE[0] <= rows <= MIDDLE[1]
    contenders = [
        Contender(name="moelight", make=layer.ours, nbytes=2 * values + moved, flop=flop, share_bar=0.85),
        Contender(name="torch grouped_mm", make=layer.grouped, ratio_bar=2.0),
        Contender(name="torch linear loop", make=layer.loop),
        Contender(name="vLLM", make=partial(setting.vllm.timed, "experts", asked), ratio_bar=1.2 if middle else 1.0),
    ]
    return Case(name=f"experts {name}", contenders=contenders)


class Layer:
    """Layers of experts, as many as the rotation asks for."""

    def __init__(self, shape: tuple[int, int, int], rows: int, setting: Setting) -> None:
        self.hidden, self.width, self.count = shape
        self.rows, self.setting = rows, setting
        self.offsets = torch.arange(self.count + 1, dtype=torch.int32) * rows

    @cached_property
    def x(self) -> Tensor:
        return torch.randn(self.count * self.rows, self.hidden).to(torch.bfloat16)

    @cached_property
    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """gate_up [E, 2I, H] and down [E, H, I] of every layer."""
        sets = sets_for(6 * self.hidden * self.width * self.count, self.setting.gib)
        shapes = (self.count, 2 * self.width, self.hidden), (self.count, self.hidden, self.width)
        return [(random_huge(shapes[0], std=0.02), random_huge(shapes[1], std=0.02)) for _ in range(sets)]

    def ours(self) -> Timed:
        layers = [(list(gate_up), list(down)) for gate_up, down in self.weights]
        out, turn = torch.empty_like(self.x), turns(len(layers))

        def once() -> None:
            gate_up, down = layers[next(turn)]
            cpu_expert_ffn(self.x, gate_up, down, self.offsets, out=out, threads=self.setting.threads)

        timed = here(once)
        agree(out[:1], fed_forward(self.x[:1], *(part[0] for part in layers[0])))
        return timed

    def grouped(self) -> Timed:
        """Two grouped products and the activation between, as transformers' grouped_mm experts do."""
        ends, turn = self.offsets[1:].clone(), turns(len(self.weights))

        def once() -> None:
            gate_up, down = self.weights[next(turn)]
            gate, up = functional.grouped_mm(self.x, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
            functional.grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)

        return here(once)

    def loop(self) -> Timed:
        """Two linear layers an expert, as transformers' eager experts do."""
        out, turn = torch.empty_like(self.x), turns(len(self.weights))

        def once() -> None:
            for e, (gate_up, down) in enumerate(zip(*self.weights[next(turn)], strict=True)):
                selected = slice(e * self.rows, (e + 1) * self.rows)
                gate, up = functional.linear(self.x[selected], gate_up).chunk(2, dim=1)
                out[selected] = functional.linear(functional.silu(gate) * up, down)

        return here(once)
