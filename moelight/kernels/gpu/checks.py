"""Argument checks of the GPU's kernels. Every error is a ValueError that names the argument."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tensor(
    name: str, value: object, dtypes: tuple[torch.dtype, ...], ndim: int, device: torch.device | None = None
) -> None:
    """Check for a dense tensor with ``ndim`` dimensions, one of ``dtypes``, on ``device`` (None: any but meta)."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: must be a tensor, is {type(value).__name__}")
    if value.layout != torch.strided or value.device.type == "meta":
        raise ValueError(f"{name}: must be a dense tensor in memory")
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: must be {names}, is {value.dtype}")
    if value.ndim != ndim:
        raise ValueError(f"{name}: must have {ndim} dimensions, has shape {list(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: must be on {device}, is on {value.device}")


def check_shape(name: str, value: Tensor, expected: tuple[int, ...]) -> None:
    """Check for exactly this shape, contiguous."""
    if tuple(value.shape) != expected:
        raise ValueError(f"{name}: must have shape {list(expected)}, has {list(value.shape)}")
    if not value.is_contiguous():
        raise ValueError(f"{name}: must be contiguous")


def check_rows(name: str, value: Tensor) -> None:
    """Check for two dimensions, contiguous but for the distance between rows, which do not overlap."""
    if value.shape[1] > 1 and value.stride(1) != 1:
        raise ValueError(f"{name}: must be contiguous within its rows")
    if value.shape[0] > 1 and value.stride(0) < value.shape[1]:
        raise ValueError(f"{name}: rows overlap")


def check_offsets(name: str, offsets: Tensor, last: int) -> None:
    """Check that offsets rise from 0 to ``last``; in host memory only, because the check would synchronize a device."""
    if offsets.device.type != "cpu":
        return
    found = offsets.tolist()
    if found[0] != 0 or found[-1] != last or found != sorted(found):
        raise ValueError(f"{name}: must rise from 0 to {last}, is {found}")


def check_indices(name: str, value: Tensor, end: int) -> None:
    """Check that indices are from 0 to ``end`` - 1; in host memory only."""
    if value.device.type == "cpu" and value.numel() and not (int(value.min()) >= 0 and int(value.max()) < end):
        raise ValueError(f"{name}: must lie between 0 and {end - 1}")


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Check for an integer within bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}: must be an integer {bounds}, is {value!r}")
