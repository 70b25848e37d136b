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
    card, name = capability(device.index), str(dtype).removeprefix("torch.")
    return card_serves(card, name, rows_per_expert, why_not_cuda(device.index, card, name, rows_per_expert))


def wants_cuda(card: tuple[int, int], dtype: str, rows_per_expert: float) -> bool:
    """True for products that the tensor units of ``card`` compute and Triton's do not: `grouped_cuda` is theirs."""
    return OLDEST <= card < UNITS_SINCE and dtype == "float16" and rows_per_expert > MOST_ROWS_WITHOUT_UNITS


def why_not_cuda(index: int | None, card: tuple[int, int], dtype: str, rows_per_expert: float) -> str | None:
    """The fault of `grouped_cuda` on a card, None if it computes such products or `wants_cuda` is False."""
    from moelight.kernels.gpu import grouped_cuda

    return grouped_cuda.failure(index) if wants_cuda(card, dtype, rows_per_expert) else None


def card_serves(
    card: tuple[int, int], dtype: str, rows_per_expert: float, fault: str | None = None
) -> tuple[bool, str]:
    """`serves` for a CUDA card of compute capability ``card``; ``dtype`` by its torch name, ``fault`` of
    `why_not_cuda`."""
    name = f"compute capability {card[0]}.{card[1]}"
    if card < OLDEST:
        return False, f"{name}: triton needs 7.5"
    if dtype == "bfloat16" and card < BFLOAT16_SINCE:
        return False, f"{name} has no bfloat16"
    if wants_cuda(card, dtype, rows_per_expert) and fault is None:
        return True, f"CUDA C++ for its tensor units, {name}"
    if rows_per_expert > MOST_ROWS_WITHOUT_UNITS:
        if card < UNITS_SINCE:
            why = f"{name}: many rows, and triton does not use its tensor units, as torch does"
            return False, why if fault is None else f"{why} ({fault})"
        if dtype == "float32":
            return False, "many rows in float32, for which triton uses no tensor units"
    return True, f"{triton_reason()}, {name}"


def expert_kernels(device: torch.device) -> list[Serving]:
    """The implementation of the experts on ``device`` for few and for many rows, in its 16-bit dtype."""
    import torch

    card = capability(device.index) if device.type == "cuda" else UNITS_SINCE
    dtype = torch.float16 if card < BFLOAT16_SINCE else torch.bfloat16
    found = []
    for rows, count in (("few", 1), ("many", 10 * MOST_ROWS_WITHOUT_UNITS)):
        served, why = serves(device, dtype, count)
        kernel = "cuda" if wants_cuda(card, str(dtype).removeprefix("torch."), count) else "triton"
        operation = f"expert_ffn of {rows} rows on {device}"
        found.append(Serving(operation=operation, implementation=kernel if served else "torch", reason=why))
    return found
