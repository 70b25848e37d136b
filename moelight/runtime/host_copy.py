"""Numbers of the device that the host needs, copied behind the work that computes them; only who reads them waits."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moelight.kernels.device import Device
from moelight.runtime.lanes import wait_asleep


class HostCopy:
    """``tensors`` of one device on their way to host memory, launched on its current stream; any thread may `wait`.

    The stream's order protects the sources: later work of the same stream may overwrite them. Pinned memory belongs to
    the copy until this object is gone; torch reuses it only after the copies that were launched into it. Tensors in
    host memory are not copied, and must not change before they are read.
    """

    __slots__ = ("_arrived", "_host")

    def __init__(self, *tensors: Tensor) -> None:
        self._host, self._arrived = tensors, None
        if not (device := Device(tensors[0].device)).host:
            self._host = tuple([_begin(tensor) for tensor in tensors])
            self._arrived = device.event()
            self._arrived.record()

    def wait(self) -> list[np.ndarray]:
        """The numbers, once they have arrived; the thread sleeps until then."""
        if self._arrived is not None:
            wait_asleep(self._arrived)
        return [tensor.numpy() for tensor in self._host]


def _begin(tensor: Tensor) -> Tensor:
    return Device(tensor.device).host_memory(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
