"""Conversion between moelight's number formats and torch dtypes."""

from __future__ import annotations

import torch

from moelight.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from moelight.core.errors import ConfigError

_CORE = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_TORCH = {ours.name: theirs for theirs, ours in _CORE.items()}


def to_torch(dtype: DType) -> torch.dtype:
    """The torch dtype of ``dtype``."""
    return _TORCH[dtype.name]


def from_torch(dtype: torch.dtype) -> DType:
    """The number format of the torch ``dtype``; raises ConfigError for an unsupported one."""
    if dtype not in _CORE:
        raise ConfigError(f"{dtype} is not supported; known: {', '.join(_TORCH)}")
    return _CORE[dtype]
