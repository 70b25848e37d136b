"""Experts of quantised pages beside the same numbers in 16 bits, by the grouped kernels, at few rows and at many; with
activations as they are and in int8.

    python -m gpu_sections.unpacking --device cuda
    python -m gpu_sections.unpacking --device cuda --tiles Q4_K

A process of its own. Pages rotate over more memory than a card's caches hold. The last line is JSON: seconds of a layer
in each format and at each number of rows an expert. ``--tiles``: of one format with activations in int8, the fastest
tiles and the one in force, instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from moelight.formats.format import Format
from moelight.formats.fp8 import fp8
from moelight.formats.ggml import GGML_FORMATS
from moelight.formats.gptq import gptq
from moelight.formats.matrix import Matrix
from moelight.formats.mxfp4 import mxfp4
from moelight.formats.packed import PackedFormat
from moelight.kernels.device import Device
from moelight.kernels.gpu import tiles
from moelight.kernels.gpu.grouped import expert_ffn
from moelight.kernels.gpu.pages import ExpertTable
from moelight.kernels.gpu.serving import expert_kernel, serves_integers
from moelight.runtime.machine import find_machine

PACKED = PackedFormat(
    name="int4",
    bits=4,
    scale="BF16",
    group=128,
    names=(".weight_packed", ".weight_scale", ".weight_zero_point"),
)
FORMATS = {
    "int4": PACKED,
    "gptq int4": gptq(bits=4, group=128, order=False),
    "fp8 blocks": fp8(block=(128, 128), scale="F32"),
    "mxfp4": mxfp4(("_blocks", "_scales")),
    "Q4_K": GGML_FORMATS["Q4_K"],
    "Q6_K": GGML_FORMATS["Q6_K"],
    "Q8_0": GGML_FORMATS["Q8_0"],
}
WITH_INT8 = ("int4", "Q4_K", "Q6_K", "Q8_0")  # measured with activations in int8 as well
_DTYPES = {"I32": torch.int32, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROWS = (1, 16, 64, 512)
EXPERTS, HIDDEN, WIDTH, COPIES = 16, 2048, 768, 8
SMALL, SMALL_FORMATS = (2, 256, 256, 1), ("16 bits", "int4", "fp8 blocks", "mxfp4", "Q4_K")
SIDES = {"rows": (16, 32, 64, 128), "columns": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)}  # of tiles tried


def matrix(stored: Format, rows: int, columns: int, device: torch.device) -> Matrix[Tensor]:
    """Any codes and small scales."""
    parts = {}
    for part in stored.tensors(rows, columns):
        if (name := part.dtypes[0]) in _FLOATS:
            parts[part.suffix] = torch.full(part.shape, 1e-3, dtype=_FLOATS[name], device=device)
        elif part.suffix in stored.names:
            some = torch.randint(0, 8, (part.nbytes,), dtype=torch.uint8, device=device)
            parts[part.suffix] = some.view(_DTYPES[name]).view(part.shape)
    return Matrix(stored=stored, rows=rows, columns=columns, tensors=parts)


def tables(
    form: str,
    sizes: tuple[int, int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    activations: str = "auto",
) -> list[ExpertTable]:
    """As many layers as rotate."""
    experts, hidden, width, copies = sizes
    shapes = ((2 * width, hidden), (hidden, width))
    if form == "16 bits":
        return [
            ExpertTable.of(*([torch.randn(shape, device=device).to(dtype) for _ in range(experts)] for shape in shapes))
            for _ in range(copies)
        ]
    return [
        ExpertTable.of(
            *([matrix(FORMATS[form], *shape, device) for _ in range(experts)] for shape in shapes),
            activations=activations,
        )
        for _ in range(copies)
    ]


def seconds_of(work: Callable[[int], Any], device: torch.device, rounds: int, first: int) -> float:
    """Median seconds of ``work``, by number; the ``first`` rounds, which compile, do not count."""
    result = []
    for number in range(first + rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        result.append(time.perf_counter() - began)
    return statistics.median(result[first:])


def layer_seconds(
    layers: list[ExpertTable], rows: int, device: torch.device, dtype: torch.dtype, rounds: int, first: int
) -> float:
    """Median seconds of one of ``layers`` with ``rows`` rows an expert."""
    experts, hidden = layers[0].experts, layers[0].hidden
    x = torch.randn(experts * rows, hidden, device=device).to(dtype)
    offsets = torch.arange(0, len(x) + 1, rows, dtype=torch.int32, device=device)
    return seconds_of(lambda number: expert_ffn(x, layers[number % len(layers)], offsets), device, rounds, first)


def forms_of(names: tuple[str, ...], *, integers: bool) -> list[tuple[str, str]]:
    """Formats with activations, those that are measured with both first, as time may end."""
    both = [(name, how) for name in names if integers and name in WITH_INT8 for how in ("auto", "int8")]
    return [(names[0], "auto"), *both, *((name, "auto") for name in names[1:] if (name, "auto") not in both)]


def tried(layers: list[ExpertTable], rows: int, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Tiles of products of int8, both of a layer alike, with their seconds: the one in force first."""
    usual = tiles.choose_integers
    yield {"tile": None, "rows": rows, "seconds": layer_seconds(layers, rows, device, dtype, 5, 2)}
    for values in product(*SIDES.values()):
        sides = dict(zip(SIDES, values, strict=True))
        if sides["rows"] > max(16, 2 * rows):
            continue
        tiles.choose_integers = lambda *inputs, sides=sides, **options: replace(usual(*inputs, **options), **sides)
        try:
            seconds = layer_seconds(layers, rows, device, dtype, 5, 2)
        except Exception as error:  # noqa: BLE001 - a tile that does not fit the card is none
            yield {"tile": sides, "rows": rows, "error": str(error).splitlines()[0][:120]}
        else:
            yield {"tile": sides, "rows": rows, "seconds": seconds}
        finally:
            tiles.choose_integers = usual


def search(
    form: str, sizes: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype, limit_s: float
) -> int:
    """Print what was tried at each number of rows, fastest first, until ``limit_s`` have passed."""
    layers, began = tables(form, sizes, device, dtype, "int8"), time.monotonic()
    for rows in ROWS[1:]:
        result = []
        for item in tried(layers, rows, device, dtype):
            result.append(item)
            if time.monotonic() - began > limit_s:
                break
        best = sorted((item for item in result if "seconds" in item), key=lambda item: item["seconds"])
        print(json.dumps({"format": form, "rows": rows, "tried": len(result), "in force": result[0], "best": best[:5]}))
        sys.stdout.flush()
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="sizes for a machine without a card")
    parser.add_argument("--tiles", metavar="FORMAT", choices=WITH_INT8, help="search tiles of products of int8")
    parser.add_argument("--limit", type=float, default=75.0, metavar="SECONDS", help="after which nothing is begun")
    args = parser.parse_args()
    device = find_machine(args.device).device
    sizes = SMALL if args.small else (EXPERTS, HIDDEN, WIDTH, COPIES)
    dtype, result = torch.bfloat16 if Device(device).bfloat16 else torch.float16, []
    if args.tiles:
        return search(args.tiles, sizes, device, dtype, args.limit)
    rounds, first = (1, 0) if args.small else (10, 2)
    integers, began = serves_integers(device)[0], time.monotonic()
    for form, activations in forms_of(SMALL_FORMATS if args.small else ("16 bits", *FORMATS), integers=integers):
        layers = tables(form, sizes, device, dtype, activations)
        name = form if activations == "auto" else f"{form}, int8 activations"
        for rows in ROWS[:2] if args.small else ROWS:
            if time.monotonic() - began > args.limit:
                break
            seconds = layer_seconds(layers, rows, device, dtype, rounds, first)
            result.append({"format": name, "rows": rows, "seconds": seconds})
        del layers
    kernel, reason = expert_kernel(device, dtype, 1, plain=False)
    print(json.dumps({"kernel": kernel, "why": reason, "sizes": sizes, "products": result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
