"""Selection of the implementation of a GPU operation, Triton or torch, with the reason.

Imports torch and Triton only on demand.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING

from moelight.kernels.gpu.tiles import UNITS_SINCE

if TYPE_CHECKING:
    import torch

OLDEST = (7, 5)
BFLOAT16_SINCE = (8, 0)


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


_refused: dict[torch.device, str] = {}


def refuse(device: torch.device, error: Exception) -> bool:
    """Let torch serve on ``device`` from now on, because a kernel of Triton failed there with ``error``; False if
    Triton did not serve."""
    if not triton_available() or device in _refused or (device.type == "cpu" and not interpreting()):
        return False
    _refused[device] = "a triton kernel failed: " + (str(error).strip() or repr(error)).splitlines()[0]
    return True


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
            flags = {"TOP_K": 1, "BEGUN": False, "ADD": False, "BY_HAND": False, "BW": 16}
            routing_triton.combine[(1, 1)](out + 1, ones, places, out, out, 1, 0, 16, **flags)
            right = bool((out == 1).all())
    except Exception as error:  # noqa: BLE001 - torch computes after any error of a compiler, driver or launcher
        return "triton's kernels do not run here: " + (str(error).strip() or repr(error)).splitlines()[0]
    return None if right else "triton's kernels give wrong numbers here"


def serves(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    """True if Triton computes with tensors of ``dtype`` on ``device``, and the reason in one clause."""
    if not triton_available():
        return False, triton_reason()
    if _refused and device in _refused:
        return False, _refused[device]
    if device.type == "cpu":
        found = interpreting()
        return found, f"{triton_reason()}, interpreted" if found else "the tensors are in CPU memory"
    if interpreting():
        return False, "triton was told to interpret its kernels (TRITON_INTERPRET=1)"
    if device.type != "cuda":
        return False, f"no kernel was written for devices of type {device.type}"
    if why := failure(device.index):
        return False, why
    return card_serves(capability(device.index), str(dtype).removeprefix("torch."))


def card_serves(card: tuple[int, int], dtype: str) -> tuple[bool, str]:
    """`serves` for a CUDA card of compute capability ``card``; ``dtype`` by its torch name."""
    name = f"compute capability {card[0]}.{card[1]}"
    if card < OLDEST:
        return False, f"{name}: triton needs 7.5"
    if dtype == "bfloat16" and card < BFLOAT16_SINCE:
        return False, f"{name} has no bfloat16"
    return True, f"{triton_reason()}, {name}" + ("" if card >= UNITS_SINCE else ", without its tensor units")


def expert_kernel(device: torch.device, dtype: torch.dtype, mean_rows: float) -> tuple[str, str]:  # noqa: ARG001
    """The implementation of the product of experts with ``mean_rows`` rows each, ``triton`` or ``torch``, and the
    reason in one clause. Only ``torch`` reads the rows of each expert on the host; kernels serve any number of rows."""
    served, reason = serves(device, dtype)
    return ("triton" if served else "torch"), reason
