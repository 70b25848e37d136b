"""Experts whose matrices are quantised, as checkpoints store them, beside the same ones in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from peers.common import agree, fed_forward, sets_for, turns
from runner.drawn import drawn
from torch import Tensor

from kernel_cases.experts import Layer
from kernel_cases.setting import Setting, here
from kernel_cases.turns import Case, Contender, Timed
from moelight.formats.awq import awq
from moelight.formats.bitsandbytes import bitsandbytes
from moelight.formats.format import Format
from moelight.formats.fp8 import fp8
from moelight.formats.ggml import ggml_format
from moelight.formats.gptq import gptq
from moelight.formats.int8 import Int8Format
from moelight.formats.matrix import Matrix
from moelight.formats.mlx import mlx
from moelight.formats.mxfp4 import mxfp4
from moelight.formats.nvfp4 import nvfp4
from moelight.formats.packed import PackedFormat
from moelight.kernels.ffn import cpu_expert_ffn
from moelight.kernels.quantized import dense_values, expert_ffn
from moelight.kernels.repack import repacked

SHAPE, SIZES = "H1024 I3584 E8", (1024, 3584, 8)
ROWS = (1, 4, 16, 64)
FEW, MIDDLE = 4, 16
TITLE = f"experts {SHAPE} as checkpoints store them, one layer a call"


def packed(bits: int, group: int) -> Format:
    """As `moelight convert` writes it."""
    return PackedFormat(
        name=f"int{bits} g{group}",
        bits=bits,
        scale="BF16",
        group=group,
        names=(".weight_packed", ".weight_scale", ".weight_zero_point"),
    )


PACKED_INT4 = packed(4, 128)
INT8 = Int8Format(
    name="int8 rows",
    scale="BF16",
    group=0,
)
# Of each format how much faster than bfloat16 it has to be with few rows, and with more.
FORMATS = (
    (PACKED_INT4, 3.0, 0.95),
    (INT8, 1.8, 0.0),
    (mxfp4(("_blocks", "_scales")), 3.0, 0.95),
    (fp8(block=(128, 128), scale="F32"), 1.5, 0.0),
    (gptq(bits=4, group=128, order=False), 0.0, 0.0),
    (awq(group=128), 0.0, 0.0),
    (nvfp4(divides=True), 0.0, 0.0),
    (mlx(bits=4, group=64), 0.0, 0.0),
    (bitsandbytes("nf4"), 0.0, 0.0),
    (ggml_format("Q4_0"), 0.0, 0.0),
    (ggml_format("Q4_K"), 3.0, 0.95),
    (ggml_format("Q5_K"), 0.0, 0.0),
    (ggml_format("Q6_K"), 1.5, 0.0),
    (ggml_format("Q8_0"), 1.8, 0.0),
    *(
        (ggml_format(name), 0.0, 0.0)
        for name in (
            *("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
            *("TQ2_0", "TQ1_0"),
        )
    ),
)
# Stored by columns: as pages of a CPU's experts have them.
REPACKED = (gptq(bits=4, group=128, order=False), awq(group=128), gptq(bits=8, group=128, order=False))
# The same with activations rounded to int8.
INTEGERS = (
    (PACKED_INT4, 3.0, 1.5),
    (packed(4, 32), 3.0, 1.5),
    (packed(8, 128), 1.8, 1.5),
    (ggml_format("Q8_0"), 1.8, 1.5),
    (ggml_format("Q4_0"), 3.0, 1.5),
    (ggml_format("Q4_K"), 3.0, 1.5),
    (ggml_format("Q5_K"), 0.0, 1.5),
    (ggml_format("Q6_K"), 1.5, 1.5),
    (mxfp4(("_blocks", "_scales")), 3.0, 1.5),
)
FEW_SHARE = 0.8  # of its own read roof, with few rows


def cases(setting: Setting) -> Iterator[Case]:
    """Every format with every number of rows an expert."""
    exact = [(*form, "auto") for form in FORMATS]
    forms = (*exact, *((*form, "int8") for form in INTEGERS))
    setting = setting.shared_by(1 + len(REPACKED) + len(forms))
    for rows in ROWS:
        layer = Layer(SIZES, rows, setting)
        hidden, width, count = SIZES
        values, moved = 3 * hidden * width * count, 4 * count * rows * hidden
        flop = 2 * values * rows
        contenders = [Contender(name="moelight", make=layer.ours, nbytes=2 * values + moved, flop=flop)]
        contenders.extend(
            Contender(
                name=f"moelight {stored.name} repacked",
                make=partial(_ours, stored, layer, setting, "auto", turned=True),
                nbytes=_bytes(stored, layer) + moved,
                flop=flop,
                over="moelight",
            )
            for stored in REPACKED
        )
        for stored, few, middle, activations in forms:
            rounded = activations == "int8"
            contenders.append(
                Contender(
                    name=f"{'int8 x' if rounded else 'moelight'} {stored.name}",
                    make=partial(_ours, stored, layer, setting, activations),
                    product_dtype="int8" if rounded else "bfloat16",
                    nbytes=_bytes(stored, layer) + moved,
                    flop=flop,
                    over="moelight",
                    share_bar=FEW_SHARE if few and rows <= FEW else 0.0,
                    ratio_bar=few if rows <= FEW else middle if rows >= MIDDLE else 0.0,
                )
            )
        yield Case(name=f"quantised {SHAPE} r{rows}", contenders=contenders)


def _sides(layer: Layer) -> tuple[tuple[int, int], tuple[int, int]]:
    return (2 * layer.width, layer.hidden), (layer.hidden, layer.width)


def _bytes(stored: Format, layer: Layer) -> int:
    """Of one layer's experts."""
    return layer.count * sum(stored.bytes_for(*side) for side in _sides(layer))


def _ours(stored: Format, layer: Layer, setting: Setting, activations: str, *, turned: bool = False) -> Timed:
    sets, out = sets_for(_bytes(stored, layer), setting.gib), torch.empty_like(layer.x)
    layers = [[random_matrices(stored, layer.count, *side) for side in _sides(layer)] for _ in range(sets)]
    if turned:
        layers = [[[repacked(item) for item in side] for side in sides] for sides in layers]
    turn = turns(sets)

    def once() -> None:
        cpu_expert_ffn(
            layer.x, *layers[next(turn)], layer.offsets, activations=activations, out=out, threads=setting.threads
        )

    timed = here(once)
    first, sides = layer.x[:1], layers[0]
    if activations == "int8":
        agree(out[:1], expert_ffn(first, sides[0][:1], sides[1][:1], [0, 1], activations=(activations, activations)))
    else:
        agree(out[:1], fed_forward(first, *(dense_values(side[0], torch.float32) for side in sides)))
    return timed


def random_matrices(stored: Format, count: int, rows: int, columns: int) -> list[Matrix[Tensor]]:
    """Of random codes, and of scales that make numbers of about 0.02."""
    tensors = drawn(stored, count, rows, columns)
    return [
        Matrix(stored=stored, rows=rows, columns=columns, tensors={key: item[e] for key, item in tensors.items()})
        for e in range(count)
    ]
