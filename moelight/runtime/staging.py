"""Pinned staging buffers: host memory through which activations pass between the device and the CPU.

Depends only on bytes per token and offsets, not on when transfers run.

Legend: T tokens, H hidden, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelight.core.dtypes import DType
from moelight.core.policy import Policy
from moelight.hrm import costs
from moelight.models.moe import Routed
from moelight.profiles.model import ModelProfile
from moelight.weights.torch_dtypes import to_torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StagingBuffers:
    """Staging buffers of one micro-batch: five regions, each of its own size; all uint8.

    ``down`` receives queries, keys and values (or keys and values only), ``up`` holds the attention output; ``routing``
    and ``routed`` receive the inputs of the CPU's experts, ``experts`` holds their output.
    """

    dtype: torch.dtype
    down: Tensor
    up: Tensor
    routing: Tensor
    routed: Tensor
    experts: Tensor

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copy q, k and v to host memory; the copies are complete when the lane's event is."""
        start, landed = 0, []
        for part in (q, k, v):
            size = part.numel() * part.element_size()
            landed.append(_land(self.down[start : start + size], part))
            start += size
        return landed[0], landed[1], landed[2]

    def take_routed(self, routed: Routed) -> Routed:
        """Copy ``routed`` (ids int32) to host memory; the copy is complete when the lane's event is."""
        half = self.routing.numel() // 2
        return Routed(
            x=_land(self.routed, routed.x),
            weights=_land(self.routing[:half], routed.weights),
            ids=_land(self.routing[half:], routed.ids),
        )

    def attention_output(self, shape: torch.Size) -> Tensor:
        """View of ``up`` for the attention output ``[T, Hq, D]``."""
        return self.up.view(self.dtype).view(shape)

    def experts_output(self, shape: torch.Size) -> Tensor:
        """View of ``experts`` for the output ``[T, H]`` of the CPU's experts."""
        return self.experts.view(self.dtype).view(shape)


class StagingArena:
    """The ``crossing`` arena: each of the five regions, sized for a whole pass."""

    def __init__(self, arena: Tensor, model: ModelProfile, policy: Policy, dtype: DType, tokens: int) -> None:
        """``arena`` uint8, of `staging_token_bytes` for each of ``tokens``."""
        self._dtype, start = to_torch(dtype), 0
        self._places: dict[str, tuple[Tensor, int]] = {}
        for name, each in _token_bytes(model, policy, dtype).items():
            self._places[name] = (arena[start : start + tokens * each], each)
            start += tokens * each

    def share(self, row: int, tokens: int) -> StagingBuffers:
        """Buffers of ``tokens`` tokens from row ``row`` of the pass on."""
        cut = {name: place[row * each : (row + tokens) * each] for name, (place, each) in self._places.items()}
        return StagingBuffers(dtype=self._dtype, **cut)


def _token_bytes(model: ModelProfile, policy: Policy, dtype: DType) -> dict[str, int]:
    """Bytes per token in each region. ``routing`` is first because its elements are the widest."""
    on_host, beside = policy.attention_device == "cpu", policy.ffn_device != "gpu"
    residual = costs.residual_bytes(model, dtype, 1) if beside else 0
    return {
        "routing": costs.routing_bytes(model) if beside else 0,
        "down": costs.qkv_bytes(model, dtype, 1) if on_host else costs.kv_bytes(model, dtype, 1),
        "up": costs.hidden_bytes(model, dtype, 1) if on_host else 0,
        "routed": residual,
        "experts": residual,
    }


def _land(place: Tensor, source: Tensor) -> Tensor:
    return place.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
