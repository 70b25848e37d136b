"""The CUDA kernel of compute capability 7.5, compiled for the host: `grouped_cuda.launch` for tests without a card."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from moelight.kernels.gpu import grouped_cuda
from moelight.kernels.gpu.grouped_cuda import Call, Variant
from moelight.kernels.gpu.pages import ExpertTable

HERE = Path(__file__).parent
COMPILER = next((result for name in ("g++", "clang++") if (result := shutil.which(name))), None)
HALF, BFLOAT = 0, 1
# Stored, gated, rows of a slot, aligned: as few as meet every branch, because compiling them takes most time.
VARIANTS = [
    (stored, gated, rows, aligned)
    for stored, rows, aligned in ((HALF, 128, True), (HALF, 32, False), (BFLOAT, 32, True))
    for gated in (True, False)
]


class Span(ctypes.Structure):
    """Bytes that a launch may read, and write where ``written``."""

    _fields_ = (("begin", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("written", ctypes.c_int64))


def build(folder: Path) -> ctypes.CDLL:
    """The kernel in every one of `VARIANTS` as a library in ``folder``."""
    assert COMPILER is not None
    variants = " ".join(f"VARIANT({','.join(str(int(value)) for value in variant)})" for variant in VARIANTS)
    library = folder / "grouped_turing.so"
    flags = ["-std=c++17", "-O0", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    paths = [f"-I{HERE}", f"-I{grouped_cuda.SOURCE.parent}", f"-DVARIANTS={variants}"]
    source = HERE / "grouped_turing_on_host.cpp"
    ran = subprocess.run(
        [COMPILER, *flags, *paths, str(source), "-o", str(library)], check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ctypes.CDLL(str(library))


class Player:
    """Launches in host memory; nothing but the tensors in ``spans`` may be touched."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.spans: list[Span] = []
        self.rows = 32

    @property
    def rows(self) -> int:
        """Rows of a slot."""
        return grouped_cuda.SLOT_ROWS

    @rows.setter
    def rows(self, rows: int) -> None:
        grouped_cuda.SLOT_ROWS = rows

    def call_of(self, pages: ExpertTable, part: str, x: Tensor, out: Tensor, slots: Tensor, offsets: Tensor,
                tokens: Tensor | None, *rest: object) -> tuple[Variant, Call, int]:  # fmt: skip
        """`grouped_cuda.call_of`; allows what the launch is given."""
        stored = [tensor for name in (part, f"{part}_bias") for tensor in pages.parts[name]]
        self.spans = [*_spans([x, slots, offsets, tokens, pages.table, *stored], 0), *_spans([out], 1)]
        return _CALL_OF(pages, part, x, out, slots, offsets, tokens, *rest)  # type: ignore[arg-type]

    def launch(self, variant: Variant, call: Call, blocks: int) -> None:
        """`grouped_cuda.launch`. Raises RuntimeError with the first fault."""
        fault = ctypes.create_string_buffer(400)
        spans = (Span * len(self.spans))(*self.spans)
        flags = (variant.stored, variant.gated, variant.rows, variant.aligned)
        result = self._library.run(*flags, ctypes.byref(call), blocks, spans, len(spans), fault, len(fault))
        assert result >= 0, f"{variant} is not among VARIANTS"
        if result:
            raise RuntimeError(fault.value.decode())


_CALL_OF = grouped_cuda.call_of


def _spans(tensors: Iterable[Tensor | None], written: int) -> list[Span]:
    present = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
    values = [1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True)) for t in present]
    return [
        Span(begin=tensor.data_ptr(), bytes=count * tensor.itemsize, written=written)
        for tensor, count in zip(present, values, strict=True)
    ]
