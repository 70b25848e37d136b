"""Conversion between moelight's number formats and torch dtypes."""

from __future__ import annotations

import torch

from moelight.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from moelight.core.errors import ConfigError

_TORCH = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
_CORE = {theirs: ours for ours, theirs in _TORCH.items()}


def to_torch(dtype: DType) -> torch.dtype:
    """The torch dtype of ``dtype``."""
    return _TORCH[dtype]


def from_torch(dtype: torch.dtype) -> DType:
    """The number format of the torch ``dtype``; raises ConfigError for an unsupported one."""
    if dtype not in _CORE:
        raise ConfigError(f"{dtype} is not supported; known: {', '.join(ours.name for ours in _TORCH)}")
    return _CORE[dtype]
