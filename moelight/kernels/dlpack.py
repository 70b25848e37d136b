"""Tensors lent to the extension. Knows DLPack and nothing else."""

from __future__ import annotations

from torch import Tensor
from torch.utils.dlpack import to_dlpack


def as_dlpack(name: str, tensor: Tensor) -> object:
    """A capsule that lends the tensor's memory to the extension; ValueError, naming the argument, where it cannot."""
    try:
        return to_dlpack(tensor)
    except (TypeError, RuntimeError, BufferError) as error:
        raise ValueError(f"{name}: not a tensor in CPU memory: {error}") from error
