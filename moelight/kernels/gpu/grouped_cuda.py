"""The grouped product of experts in CUDA C++, for cards whose tensor cores Triton does not use: compute capability 7.5.

NVRTC, which comes with the CUDA builds of torch, compiles `grouped_turing.cu` at first use, once for each `Variant`.
Binaries are kept in the cache directory and loaded once a process and device. `grouped` checks the arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelight.core.paths import cache_directory, write_whole
from moelight.kernels.activations import NAMED, Activation
from moelight.kernels.gpu.pages import MATRICES, TENSORS, ExpertTable

SOURCE = Path(__file__).with_name("grouped_turing.cu")
ARCHITECTURE = "sm_75"
THREADS = 128
SLOT_ROWS = 128  # of x
_NUMBERS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_ACTIVATIONS = [replace(NAMED[name], limit=math.inf) for name in ("silu", "gelu_tanh", "swiglu_oai")]  # by number
_MATRIX_ROWS = 128
_INVALID_CONTEXT = 201
_SHARED_MEMORY_SHARE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The compile-time constants of one kernel, as in `grouped_turing.cu`; ``stored`` and dtypes by number."""

    stored: int
    gated: bool
    rows: int
    aligned: bool

    def options(self) -> list[str]:
        """Options of NVRTC."""
        flags = (self.gated, self.rows, self.aligned)
        variant = ",".join(str(int(value)) for value in (self.stored, *flags))
        return [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", f"-DVARIANT={variant}"]


class Call(ctypes.Structure):
    """Arguments of a launch: `Call` of `grouped_turing.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "tokens", "out", "slots", "offsets")),
        *((name, ctypes.c_void_p) for name in ("weights", "biases")),
        ("x_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("x_rows", "experts", "depth", "columns")),
        *((name, ctypes.c_int) for name in ("activation", "bias_dtype", "out_dtype")),
        *((name, ctypes.c_float) for name in ("clamp", "factor")),
    )


def activation_number(activation: Activation) -> int | None:
    """Its number in `grouped_turing.cu`; None if it is not there."""
    boundless = replace(activation, limit=math.inf)
    number = _ACTIVATIONS.index(boundless) if boundless in _ACTIVATIONS else None
    limited = activation.limit < math.inf
    return number if limited == (number == len(_ACTIVATIONS) - 1) else None


def call_of(
    pages: ExpertTable,
    part: str,
    x: Tensor,
    out: Tensor,
    slots: Tensor,
    offsets: Tensor,
    tokens: Tensor | None,
    rows: int,
    activation: Activation,
    factor: float = 1.0,
) -> tuple[Variant, Call, int]:
    """Kernel, arguments and blocks of the product of float16 ``x`` with the matrices ``part`` -> ``out``, in float16 or
    float32.

    ``slots`` int32 [n, 3]: (column of the tables, first row, row after the expert's last) of at most ``rows`` rows, an
    expert's slots side by side; ``offsets`` int32 [E + 1] from which they were made; ``tokens`` int64 or None.
    ``factor`` multiplies the activation, and the sums of ``down`` before the bias.
    """
    gated, (depth, columns) = part == "gate_up", (x.shape[1], out.shape[1])
    even = not any(size % 16 for size in (x.data_ptr(), x.stride(0) * 2, depth * 2))
    form, first = pages.forms[part], MATRICES.index(part) * len(TENSORS)
    variant = Variant(stored=_NUMBERS[form.dtype_of(0)], gated=gated, rows=rows, aligned=even)
    addresses, step = pages.table.data_ptr(), pages.table.stride(0) * 8
    call = Call(
        x=x.data_ptr(),
        tokens=None if tokens is None else tokens.data_ptr(),
        out=out.data_ptr(),
        slots=slots.data_ptr(),
        offsets=offsets.data_ptr(),
        weights=addresses + first * step,
        biases=None if form.bias is None else addresses + (first + TENSORS.index("bias")) * step,
        x_stride=x.stride(0),
        x_rows=x.shape[0],
        experts=len(offsets) - 1,
        depth=depth,
        columns=columns,
        activation=activation_number(activation),
        bias_dtype=_NUMBERS[form.bias or torch.float32],
        out_dtype=_NUMBERS[out.dtype],
        clamp=activation.limit,
        factor=factor,
    )
    return variant, call, slots.shape[0] * -(-columns // (_MATRIX_ROWS // 2 if gated else _MATRIX_ROWS))


def launch(variant: Variant, call: Call, blocks: int) -> None:
    """Launch on the current stream of the current device. Raises OSError and RuntimeError."""
    index = torch.cuda.current_device()
    driver, function, context = _function(index, variant)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(call))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    launch = (function, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, None)
    code = driver.cuLaunchKernel(*launch)
    if code == _INVALID_CONTEXT:  # of a thread that has not called CUDA yet
        _check(driver, driver.cuCtxSetCurrent(context))
        code = driver.cuLaunchKernel(*launch)
    _check(driver, code)


@cache
def _function(index: int, variant: Variant) -> tuple[ctypes.CDLL, ctypes.c_void_p, ctypes.c_void_p]:
    """The driver, the kernel loaded on the card, and the card's context."""
    driver, context, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
    _check(driver, driver.cuDeviceGet(ctypes.byref(device), index))
    _check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check(driver, driver.cuCtxSetCurrent(context))
    module, function, image = ctypes.c_void_p(), ctypes.c_void_p(), binary(variant)
    if driver.cuModuleLoadData(ctypes.byref(module), image):  # a file cut short
        _check(driver, driver.cuModuleLoadData(ctypes.byref(module), binary(variant, anew=True)))
    _check(driver, driver.cuModuleGetFunction(ctypes.byref(function), module, b"grouped"))
    _check(driver, driver.cuFuncSetAttribute(function, _SHARED_MEMORY_SHARE, 100))
    return driver, function, context


def _check(driver: ctypes.CDLL, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"the CUDA driver: {(text.value or b'unknown error').decode()} ({code})")


def binary(variant: Variant, *, anew: bool = False) -> bytes:
    """The compiled kernel, from the cache directory unless ``anew``. Raises OSError and RuntimeError."""
    source, options = SOURCE.read_bytes(), variant.options()
    library, version = nvrtc()
    digest = hashlib.sha256(b"\0".join((source, repr((options, version)).encode()))).hexdigest()
    path = cache_directory("kernels", f"grouped_turing-{digest[:32]}.cubin")
    if not anew:
        with contextlib.suppress(OSError):
            return path.read_bytes()
    image = _compiled(library, source, options)
    with contextlib.suppress(OSError):  # of a directory that nobody may write
        write_whole(path, image)
    return image


@cache
def nvrtc() -> tuple[ctypes.CDLL, str]:
    """NVRTC and its version. Raises OSError, which says that there is none."""
    for name in _nvrtc_names():
        with contextlib.suppress(OSError):
            library, major, minor = ctypes.CDLL(name), ctypes.c_int(), ctypes.c_int()
            library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
            return library, f"NVRTC {major.value}.{minor.value}"
    raise OSError("NVRTC is not there (libnvrtc.so comes with the CUDA builds of torch)")


def _nvrtc_names() -> list[str]:
    """Where NVRTC may be, of the version that torch was built for: loaded already or on the loader's path, in packages
    beside torch, in a toolkit."""
    majors = [torch.version.cuda.split(".")[0]] if torch.version.cuda else ["13", "12"]
    packages = Path(torch.__file__).parents[1] / "nvidia"
    candidates = []
    for name in (f"libnvrtc.so.{major}" for major in majors):
        toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64" / name
        candidates += [name, *map(str, sorted(packages.glob(f"*/lib/{name}"))), str(toolkit)]
    return candidates


def _compiled(library: Any, source: bytes, options: list[str]) -> bytes:
    """Compile ``source`` by NVRTC to a binary of the card. Raises RuntimeError with the first line of its log."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if library.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None):
        raise RuntimeError("NVRTC does not take a program")
    try:
        if library.nvrtcCompileProgram(program, len(options), flags):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError("NVRTC: " + (log.value.decode(errors="replace").strip() or "no log").splitlines()[0])
        if library.nvrtcGetCUBINSize(program, ctypes.byref(size)) or not size.value:
            raise RuntimeError(f"NVRTC makes no binary for {ARCHITECTURE}")
        image = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def failure(index: int | None) -> str | None:
    """Why the kernel fails on a card, found by a small product; None if it runs and is right."""
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    try:
        with torch.cuda.device(device):
            right = _is_right(device)
    except Exception as error:  # noqa: BLE001 - others compute after any error of a compiler, driver or launcher
        return "the CUDA kernel does not run here: " + (str(error).strip() or repr(error)).splitlines()[0]
    return None if right else "the CUDA kernel gives wrong numbers here"


def _is_right(device: torch.device) -> bool:
    """True if ``down`` of two slots by one expert of two, with whole numbers, is exact."""
    rows, hidden, width, height = 165, 32, 48, SLOT_ROWS
    x = (torch.arange(rows * width, device=device) % 7 - 3).view(rows, width).half()
    gate_up, down = (
        (torch.arange(size * inputs, device=device) % 5 - 2).view(size, inputs).half()
        for size, inputs in ((2 * width, hidden), (hidden, width))
    )
    pages = ExpertTable.of([None, gate_up], [None, down])
    slots = torch.tensor([(1, 0, rows), (1, height, rows), (-1, 0, 0)], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 0, rows], dtype=torch.int32, device=device)
    out = torch.full((rows, hidden), 9.0, dtype=torch.float16, device=device)
    launch(*call_of(pages, "down", x, out, slots, offsets, None, height, NAMED["silu"]))
    return torch.equal(out.float(), x.float() @ down.float().t())
