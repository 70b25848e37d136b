"""Rotary position embedding, half-rotation (HF), with cos and sin rounded to the model's dtype as in HF."""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.profiles.model import AttentionSpec

Rotation = tuple[Tensor, Tensor]


def rotation(spec: AttentionSpec, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """cos and sin ``[T, D]`` of ``positions [T]``, computed in float32."""
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=positions.device) / spec.head_dim
    frequency = 1.0 / (spec.rope_theta**exponent)
    angle = positions.float().unsqueeze(1) * (frequency / spec.rope_factor)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)
