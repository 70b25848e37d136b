"""Selection of the implementation of a GPU operation, Triton, CUDA C++ or torch, with the reason.

Imports Triton only on demand.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from functools import cache
from typing import Any

import torch

from moelight.kernels.device import BFLOAT16_SINCE, Device, compute_capability
from moelight.kernels.gpu.tiles import UNITS_SINCE
from moelight.kernels.native import INT8_ACTIVATIONS, Serving

OLDEST = (7, 5)
INTEGERS_BEFORE = (10, 0)  # where tiles that were made for earlier cards spill up to a kilobyte
# On a T4 (320 GB/s, 8 Tflop/s without tensor cores) the bytes of 16-bit weights bind up to 25 rows per expert.
MOST_ROWS_WITHOUT_UNITS = 24
_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
# On a T4, attention of a prompt of 128 tokens over 32 heads takes as long without tensor cores (134 Mflop at 2 Tflop/s)
# as torch's launches.
MOST_TOKENS_WITHOUT_UNITS = 128


@cache
def _load() -> tuple[str | None, str]:
    """Version of Triton, None if it is missing, and one clause about it."""
    try:
        triton = importlib.import_module("triton")
    except ModuleNotFoundError:
        return None, "triton is not installed (it comes with the CUDA builds of torch, or `pip install triton`)"
    except (ImportError, OSError) as error:
        return None, f"triton does not load: {error}"
    return str(triton.__version__), f"triton {triton.__version__}"


def triton_available() -> bool:
    """True if Triton can be imported."""
    return _load()[0] is not None


def triton_reason() -> str:
    """The version of Triton, or the reason why there is none, in one clause."""
    return _load()[1]


@cache
def interpreting() -> bool:
    """True if Triton runs its kernels on the CPU, element by element (TRITON_INTERPRET=1): correct, and slow.

    Triton is imported only where it may: its 70 MB would stay in the memory of every run on a CPU.
    """
    told = "TRITON_INTERPRET" in os.environ or "triton" in sys.modules
    if not told or not triton_available():
        return False
    standard = importlib.import_module("triton.language.standard")
    return type(standard.cdiv).__name__ == "InterpretedFunction"


_refused: dict[torch.device, str] = {}


def refuse(device: torch.device, error: Exception) -> bool:
    """Let torch serve on ``device`` from now on, because a kernel of Triton failed there with ``error``; False if
    Triton did not serve."""
    if (Device(device).host and not interpreting()) or not triton_available() or device in _refused:
        return False
    _refused[device] = "a triton kernel failed: " + (str(error).strip() or repr(error)).splitlines()[0]
    return True


@cache
def failure(index: int | None) -> str | None:
    """Why Triton, or the C compiler that it needs, fails on a card, found by running a kernel; None if it runs."""
    from moelight.kernels.gpu import rows_triton

    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    try:
        with Device(device).context():
            ones = torch.ones(1, 1, device=device)
            out = torch.zeros(1, 16, device=device)
            places = torch.zeros(1, 1, dtype=torch.int64, device=device)
            flags = {"TOP_K": 1, "BEGUN": False, "ADD": False, "BY_HAND": False, "BW": 16}
            rows_triton.combine[(1, 1)](out + 1, ones, places, out, out, 1, 0, 16, **flags)
            right = bool((out == 1).all())
    except Exception as error:  # noqa: BLE001 - torch computes after any error of a compiler, driver or launcher
        return "triton's kernels do not run here: " + (str(error).strip() or repr(error)).splitlines()[0]
    return None if right else "triton's kernels give wrong numbers here"


def serves(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    """True if Triton computes with tensors of ``dtype`` on ``device``, and the reason in one clause."""
    on_cpu = Device(device).host
    if on_cpu and not interpreting():
        return False, "the tensors are in CPU memory"
    if not triton_available():
        return False, triton_reason()
    if _refused and device in _refused:
        return False, _refused[device]
    if on_cpu:
        return True, f"{triton_reason()}, interpreted"
    if interpreting():
        return False, "triton was told to interpret its kernels (TRITON_INTERPRET=1)"
    if not Device(device).cuda:
        return False, f"no kernel was written for devices of type {device.type}"
    if reason := failure(device.index):
        return False, reason
    return card_serves(compute_capability(device.index), str(dtype).removeprefix("torch."))


def card_serves(card: tuple[int, int], dtype: str) -> tuple[bool, str]:
    """`serves` for a CUDA card of compute capability ``card``; ``dtype`` by its torch name."""
    name = f"compute capability {card[0]}.{card[1]}"
    if card < OLDEST:
        return False, f"{name}: triton needs 7.5"
    if dtype == "bfloat16" and card < BFLOAT16_SINCE:
        return False, f"{name} has no bfloat16"
    return True, f"{triton_reason()}, {name}" + ("" if card >= UNITS_SINCE else ", without its tensor units")


def serves_integers(device: torch.device) -> tuple[bool, str]:
    """True if kernels on ``device`` multiply rows rounded to int8 by the integers of experts, and the reason in one
    clause."""
    served, reason = serves(device, torch.float16)
    if not served or Device(device).host:
        return served, reason
    return card_serves_integers(compute_capability(device.index))


def card_serves_integers(card: tuple[int, int]) -> tuple[bool, str]:
    """`serves_integers` for a CUDA card of compute capability ``card`` on which Triton runs."""
    name = f"compute capability {card[0]}.{card[1]}"
    if card < UNITS_SINCE:
        return False, f"{name}: triton multiplies integers on tensor units from 8.0 on"
    if card >= INTEGERS_BEFORE:
        return False, f"{name}: the tiles of integer products do not fit its registers"
    return True, f"{triton_reason()}, {name}, integer tensor units"


def expert_kernel(device: torch.device, dtype: torch.dtype, mean_rows: float, *, plain: bool = True) -> tuple[str, str]:
    """The implementation of the product of experts with ``mean_rows`` rows each, and the reason in one clause.

    ``cuda`` (`grouped_cuda`, whose first use compiles it), ``triton``, or ``torch``, which alone reads the rows of each
    expert on the host. ``plain``: gate and up are one matrix of contiguous rows, and the activation one of
    `activations.NAMED`.
    """
    fault = None
    if Device(device).cuda and serves(device, dtype)[0]:
        card = compute_capability(device.index)
        if wants_cuda(card, str(dtype).removeprefix("torch."), mean_rows):
            from moelight.kernels.gpu import grouped_cuda

            fault = (
                grouped_cuda.failure(device.index) if plain else "the CUDA kernel computes gate and up as one matrix"
            )
            if fault is None:
                return (
                    "cuda",
                    f"{grouped_cuda.nvrtc()[1]}, for the tensor units of compute capability {card[0]}.{card[1]}",
                )
    served, reason = serves(device, dtype)
    return ("triton" if served else "torch"), reason if fault is None else f"{reason}; {fault}"


def wants_cuda(card: tuple[int, int], dtype: str, mean_rows: float) -> bool:
    """True for products that the tensor units of ``card`` compute, and Triton without them."""
    return OLDEST <= card < UNITS_SINCE and dtype == "float16" and mean_rows > MOST_ROWS_WITHOUT_UNITS


def reads_host(host: torch.Tensor, device: torch.device) -> tuple[bool, str]:
    """True if kernels on ``device`` read the host memory of ``host``, and the reason in one clause.

    Page-locked memory has an address on the device, which CUDA's driver names and Triton's launcher looks up. Reading
    must not be tried: a wrong access ends the process's use of the device.
    """
    served, reason = serves(device, host.dtype)
    if not served or Device(device).host:
        return served, reason
    if not Device(device).nvidia:
        return False, "addresses of host memory are looked up with CUDA's driver only"
    pointer = ctypes.c_uint64()
    try:
        with Device(device).context():
            lookup = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
            code = lookup(ctypes.byref(pointer), _DEVICE_POINTER, ctypes.c_uint64(host.data_ptr()))
    except (OSError, AttributeError) as error:
        return False, f"CUDA's driver does not look up addresses: {error}"
    if code or not pointer.value:
        return False, "the host memory is not page-locked"
    return True, "kernels read page-locked host memory over the link"


def serving_on(device: torch.device) -> list[Serving]:
    """The operations of a GPU with their implementations in this process."""
    half = torch.bfloat16 if Device(device).bfloat16 else torch.float16
    kernels = {name: ("triton", "torch", serves(device, half)) for name in ("attention", "routing")}
    if Device(device).cuda and kernels["attention"][2][0] and compute_capability(device.index) < UNITS_SINCE:
        reason = f"torch for prompts from {MOST_TOKENS_WITHOUT_UNITS + 1} tokens on, for the tensor cores"
        kernels["attention"] = "triton", "torch", (True, f"{kernels['attention'][2][1]}; {reason}")
    host = Device(device).host_memory((1,), half)
    kernels["contexts from host memory"] = "one kernel", "copies by run of blocks", reads_host(host, device)
    rows = [
        Serving(operation=f"{name} on {device}", implementation=best if served else other, reason=reason)
        for name, (best, other, (served, reason)) in kernels.items()
    ]
    served, reason = serves_integers(device)
    implementation = "triton" if served else "unpacked to 16 bits; `generate` refuses --activations int8"
    rows.append(Serving(operation=f"{INT8_ACTIVATIONS} on {device}", implementation=implementation, reason=reason))
    for many, count in (("few", 1), ("many", 10 * MOST_ROWS_WITHOUT_UNITS)):
        name, reason = expert_kernel(device, half, count)
        rows.append(Serving(operation=f"experts of {many} rows on {device}", implementation=name, reason=reason))
    return rows


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))
