"""The pinned memory beside the link: where what a micro-batch sends down lands, and what comes up for it waits.

Knows sizes per token and places. Refuses to know when anything crosses.

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
    """A micro-batch's share: five places in the order of use, each of its own size; all uint8.

    ``down`` takes queries, keys and values (or keys and values alone), ``up`` gives back the attention output;
    ``routing`` and ``routed`` take what the CPU's experts need, ``experts`` gives back what they made of it.
    """

    dtype: torch.dtype
    down: Tensor
    up: Tensor
    routing: Tensor
    routed: Tensor
    experts: Tensor

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of q, k and v in host memory; complete when the lane's event is."""
        start, landed = 0, []
        for part in (q, k, v):
            size = part.numel() * part.element_size()
            landed.append(_land(self.down[start : start + size], part))
            start += size
        return landed[0], landed[1], landed[2]

    def take_routed(self, routed: Routed) -> Routed:
        """A copy of ``routed`` (ids int32) in host memory; complete when the lane's event is."""
        half = self.routing.numel() // 2
        return Routed(
            x=_land(self.routed, routed.x),
            weights=_land(self.routing[:half], routed.weights),
            ids=_land(self.routing[half:], routed.ids),
        )

    def attention_output(self, shape: torch.Size) -> Tensor:
        """Where the attention output ``[T, Hq, D]`` waits for the link."""
        return self.up.view(self.dtype).view(shape)

    def experts_output(self, shape: torch.Size) -> Tensor:
        """Where what the CPU's experts made, ``[T, H]``, waits for the link."""
        return self.experts.view(self.dtype).view(shape)


class StagingArena:
    """The ``crossing`` arena: for each of the five places a part that holds a whole pass."""

    def __init__(self, arena: Tensor, model: ModelProfile, policy: Policy, dtype: DType, tokens: int) -> None:
        """``arena`` uint8, as large as `staging_token_bytes` says for ``tokens``."""
        self._dtype, start = to_torch(dtype), 0
        self._places: dict[str, tuple[Tensor, int]] = {}
        for name, each in _token_bytes(model, policy, dtype).items():
            self._places[name] = (arena[start : start + tokens * each], each)
            start += tokens * each

    def share(self, row: int, tokens: int) -> StagingBuffers:
        """The share of ``tokens`` tokens from ``row`` of the pass on."""
        cut = {name: place[row * each : (row + tokens) * each] for name, (place, each) in self._places.items()}
        return StagingBuffers(dtype=self._dtype, **cut)


def _token_bytes(model: ModelProfile, policy: Policy, dtype: DType) -> dict[str, int]:
    """What one token takes of each place. ``routing`` comes first: its numbers are the widest."""
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
