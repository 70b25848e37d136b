"""Export of tensors to the extension through DLPack."""

from __future__ import annotations

from torch import Tensor
from torch.utils.dlpack import to_dlpack


def as_dlpack(name: str, tensor: Tensor) -> object:
    """DLPack capsule of the tensor's memory, for the extension; ValueError, naming the argument, if it cannot be
    exported."""
    try:
        return to_dlpack(tensor)
    except (TypeError, RuntimeError, BufferError) as error:
        raise ValueError(f"{name}: not a tensor in CPU memory: {error}") from error
