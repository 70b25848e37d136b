"""Selection of the implementation of a GPU operation, Triton, CUDA C++ or torch, with the reason.

Imports torch and Triton only on demand.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING

from moelight.kernels.gpu.tiles import UNITS_SINCE
from moelight.kernels.native import Serving

if TYPE_CHECKING:
    import torch

OLDEST = (7, 5)
BFLOAT16_SINCE = (8, 0)
# On a T4 (320 GB/s, 8 Tflop/s without tensor cores) the bytes of 16-bit weights bind up to 25 rows per expert.
MOST_ROWS_WITHOUT_UNITS = 24


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
    """True if Triton runs its kernels on the CPU, element by element (TRITON_INTERPRET=1): correct, and slow."""
    if not triton_available():
        return False
    standard = importlib.import_module("triton.language.standard")
    return type(standard.cdiv).__name__ == "InterpretedFunction"


@cache
def capability(index: int | None) -> tuple[int, int]:
    """Compute capability of a CUDA card; None for the current card."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return major, minor


@cache
def failure(index: int | None) -> str | None:
    """Why Triton, or the C compiler that it needs, fails on a card, found by running a kernel; None if it runs."""
    import torch

    from moelight.kernels.gpu import routing_triton

    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    try:
        with torch.cuda.device(device):
            ones = torch.ones(1, 1, device=device)
            out = torch.zeros(1, 16, device=device)
            places = torch.zeros(1, 1, dtype=torch.int64, device=device)
            routing_triton.combine[(1, 1)](out + 1, ones, places, out, 1, 16, TOP_K=1, ADD=False, BY_HAND=False, BW=16)
            right = bool((out == 1).all())
    except Exception as error:  # noqa: BLE001 - torch computes after any error of a compiler, driver or launcher
        return "triton's kernels do not run here: " + (str(error).strip() or repr(error)).splitlines()[0]
    return None if right else "triton's kernels give wrong numbers here"


def serves(device: torch.device, dtype: torch.dtype, rows_per_expert: float = 0.0) -> tuple[bool, str]:
    """True if Triton computes with tensors of ``dtype`` on ``device``, and the reason in one clause.

    ``rows_per_expert``: of a product; where Triton uses no tensor cores, torch is faster with many rows.
    """
    if not triton_available():
        return False, triton_reason()
    if device.type == "cpu":
        found = interpreting()
        return found, f"{triton_reason()}, interpreted" if found else "the tensors are in CPU memory"
    if interpreting():
        return False, "triton was told to interpret its kernels (TRITON_INTERPRET=1)"
    if device.type != "cuda":
        return False, f"no kernel was written for devices of type {device.type}"
    if why := failure(device.index):
        return False, why
    return card_serves(capability(device.index), str(dtype).removeprefix("torch."), rows_per_expert)


def card_serves(card: tuple[int, int], dtype: str, rows_per_expert: float) -> tuple[bool, str]:
    """`serves` for a CUDA card of compute capability ``card``; ``dtype`` by its torch name."""
    name = f"compute capability {card[0]}.{card[1]}"
    if card < OLDEST:
        return False, f"{name}: triton needs 7.5"
    if dtype == "bfloat16" and card < BFLOAT16_SINCE:
        return False, f"{name} has no bfloat16"
    if rows_per_expert > MOST_ROWS_WITHOUT_UNITS:
        if card < UNITS_SINCE:
            return False, f"{name}: many rows, and triton does not use its tensor units, as torch does"
        if dtype == "float32":
            return False, "many rows in float32, for which triton uses no tensor units"
    return True, f"{triton_reason()}, {name}"


def expert_kernel(device: torch.device, dtype: torch.dtype, mean_rows: float) -> tuple[str, str]:
    """The implementation of the product of experts with ``mean_rows`` rows each, and the reason in one clause.

    ``cuda`` (`grouped_cuda`, whose first use compiles it), ``triton``, or ``torch``, which alone reads the rows of each
    expert on the host.
    """
    fault = None
    if device.type == "cuda" and serves(device, dtype)[0]:
        card = capability(device.index)
        if wants_cuda(card, str(dtype).removeprefix("torch."), mean_rows):
            from moelight.kernels.gpu import grouped_cuda

            fault = grouped_cuda.failure(device.index)
            if fault is None:
                return (
                    "cuda",
                    f"{grouped_cuda.nvrtc()[1]}, for the tensor units of compute capability {card[0]}.{card[1]}",
                )
    served, reason = serves(device, dtype, mean_rows)
    return ("triton" if served else "torch"), reason if fault is None else f"{reason}; {fault}"


def wants_cuda(card: tuple[int, int], dtype: str, mean_rows: float) -> bool:
    """True for products that the tensor units of ``card`` compute, and Triton without them."""
    return OLDEST <= card < UNITS_SINCE and dtype == "float16" and mean_rows > MOST_ROWS_WITHOUT_UNITS


def serving_on(device: torch.device) -> list[Serving]:
    """The experts on a GPU with their implementations in this process, in its 16-bit dtype."""
    import torch

    old = device.type == "cuda" and capability(device.index) < BFLOAT16_SINCE
    dtype, found = torch.float16 if old else torch.bfloat16, []
    for rows, count in (("few", 1), ("many", 10 * MOST_ROWS_WITHOUT_UNITS)):
        name, why = expert_kernel(device, dtype, count)
        found.append(Serving(operation=f"experts of {rows} rows on {device}", implementation=name, reason=why))
    return found
