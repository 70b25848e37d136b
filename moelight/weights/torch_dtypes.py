"""Moelight's number formats beside torch's. Knows nothing else."""

from __future__ import annotations

import torch

from moelight.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from moelight.core.errors import ConfigError

_TORCH = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
_CORE = {theirs: ours for ours, theirs in _TORCH.items()}


def to_torch(dtype: DType) -> torch.dtype:
    """Torch's type for ``dtype``."""
    return _TORCH[dtype]


def from_torch(dtype: torch.dtype) -> DType:
    """The format that torch calls ``dtype``.

    Raises:
        ConfigError: weights of that type are not supported.
    """
    if dtype not in _CORE:
        raise ConfigError(f"{dtype} is not supported; known: {', '.join(ours.name for ours in _TORCH)}")
    return _CORE[dtype]
