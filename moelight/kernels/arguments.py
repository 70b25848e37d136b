"""Arguments of the kernels: exported to the extension, which checks them, or checked here for torch; and the number of
threads that a call takes.

Every refusal is a ValueError of one line that begins with the argument's name.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
SOFTCAPS = (1e-6, 1e6)
_FOREVER = 1 << 62

Shape = Sequence[int | None]


class _Caller(threading.local):
    """``kernels``: threads of kernels that this thread calls; 0: as many as torch's operations have."""

    kernels = 0


_caller = _Caller()


def kernel_threads() -> int:
    """Return the number of threads that kernels use when they are called from this thread."""
    return _caller.kernels or torch.get_num_threads()


@contextmanager
def one_thread_for_torch() -> Iterator[None]:
    """Torch's own operations run on the calling thread alone within the context, kernels on as many threads as before.

    For small operations between kernels: the threads that torch shares them with keep looking out for more work, on
    the cores that the next kernel needs. A thread whose first operation of torch falls into the context of another
    would have one thread for ever; `torch.get_num_threads` is such an operation.
    """
    before, _caller.kernels = _caller.kernels, kernel_threads()
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
        _caller.kernels = before


def lend(**tensors: Tensor) -> list[object]:
    """DLPack capsules of the tensors' memory, in order."""
    return [as_dlpack(name, tensor) for name, tensor in tensors.items()]


def lend_given(**tensors: Tensor | None) -> list[object]:
    """`lend`, and None for None."""
    return [None if tensor is None else as_dlpack(name, tensor) for name, tensor in tensors.items()]


def as_dlpack(name: str, tensor: Tensor) -> object:
    """DLPack capsule of the tensor's memory."""
    try:
        return to_dlpack(tensor)
    except (TypeError, RuntimeError, BufferError, AttributeError) as error:
        raise ValueError(f"{name}: not a tensor in CPU memory: {error}") from error


def stored(result: Tensor, out: Tensor | None) -> Tensor:
    """``result``, in ``out`` if given."""
    return result if out is None else out.copy_(result)


def check_threads(threads: object) -> int:
    """The number of threads; None is `kernel_threads`."""
    if threads is None:
        return kernel_threads()
    if not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads: must be a positive integer or None, is {threads!r}")
    return min(threads, _FOREVER)


def check_window(window: object) -> int | None:
    """The number of positions in the attention window; None is all."""
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window: must be a positive integer or None, is {window!r}")
    return None if window is None else min(window, _FOREVER)


def check_softcap(cap: object) -> float | None:
    """The cap of scores, within `SOFTCAPS`, or None."""
    if cap is not None and not (isinstance(cap, (int, float)) and SOFTCAPS[0] <= cap <= SOFTCAPS[1]):
        raise ValueError(f"softcap: must be a number from {SOFTCAPS[0]} to {SOFTCAPS[1]} or None, is {cap!r}")
    return None if cap is None else float(cap)


def check_number(name: str, value: object, least: float = -math.inf) -> float:
    """A finite number, at least ``least``."""
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
        bound = "" if least == -math.inf else f" from {least:g} on"
        raise ValueError(f"{name}: must be a finite number{bound}, is {value!r}")
    return value


def check_integer(name: str, value: object, least: int, maximum: int | None = None) -> int:
    """An integer within bounds."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < least
        or (maximum is not None and value > maximum)
    ):
        bounds = f"at least {least}" if maximum is None else f"from {least} to {maximum}"
        raise ValueError(f"{name}: must be an integer {bounds}, is {value!r}")
    return value


def check_dense(name: str, value: object, device: torch.device | None = CPU) -> Tensor:
    """A dense tensor on ``device``; None is any device but meta."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: must be a tensor, is {type(value).__name__}")
    if value.layout != torch.strided or value.device.type == "meta" or device not in {None, value.device}:
        memory = "memory" if device is None else "CPU memory" if device == CPU else f"memory of {device}"
        raise ValueError(f"{name}: must be a dense tensor in {memory}")
    return value


def check_tensor(
    name: str,
    value: object,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    shape: Shape,
    *,
    device: torch.device | None = CPU,
    gap: bool = True,
) -> torch.Size:
    """Check that ``value`` is dense on ``device`` (None: any but meta), with one of ``dtypes``; return its shape.

    None in ``shape`` is any size. ``value`` is contiguous, but with ``gap`` rows of the first dimension may be apart.
    """
    value = check_dense(name, value, device)
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if value.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        names = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name}: must be {names}, is {str(value.dtype).removeprefix('torch.')}")
    if value.ndim != len(shape):
        raise ValueError(f"{name}: must have {len(shape)} dimensions, has shape {list(value.shape)}")
    if any(size not in {None, actual} for size, actual in zip(shape, value.shape, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: must have shape [{sizes}], has {list(value.shape)}")
    if not value.is_contiguous():
        if not gap or value.ndim < 2:
            raise ValueError(f"{name}: must be contiguous")
        if not value[0].is_contiguous() or value.stride(0) < value[0].numel():
            raise ValueError(f"{name}: must be contiguous beyond its first dimension, with rows that do not overlap")
    return value.shape


def check_offsets(name: str, offsets: Tensor, last: int) -> list[int]:
    """The offsets, which rise from 0 to ``last``."""
    values: list[int] = offsets.tolist()
    if not values or values[0] != 0 or values[-1] != last or any(after < before for before, after in pairwise(values)):
        raise ValueError(f"{name}: must rise from 0 to {last}, is {values}")
    return values


def check_indices(name: str, value: Tensor, end: int, *, least: int = 0) -> None:
    """Check that indices are from ``least`` to ``end`` - 1; in host memory only, to not synchronize a device."""
    if value.device == CPU and value.numel() and not least <= int(value.min()) <= int(value.max()) < end:
        raise ValueError(f"{name}: must be from {least} to {end - 1}, is {int(value.min())} to {int(value.max())}")
