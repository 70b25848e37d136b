"""Recommended and possible numbers of slots. Caches of single sequences balance speed and memory at about twice the
experts that one token activates (arXiv 2505.16056); a batch routes to more experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from moelight.core.errors import ConfigError
from moelight.core.units import MiB
from moelight.hrm.costs import expected_distinct

RESERVE_BYTES = 512 * MiB


class Status(str, Enum):
    """Assessment of a `SlotPlan`."""

    EMPTY = "EMPTY"  # there is nothing to cache
    UNKNOWN_EXPERT_SIZE = "UNKNOWN_EXPERT_SIZE"  # the caller decides
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"  # no expert fits: stream pages, or compute where they are stored
    BELOW_RECOMMENDED = "BELOW_RECOMMENDED"
    OK = "OK"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """``slots`` to allocate, ``recommended`` slots, and slots that fit in memory (``budget``)."""

    slots: int
    recommended: int
    budget: int
    status: Status

    def as_dict(self) -> dict[str, Any]:
        return {
            "slots": self.slots,
            "recommended_slots": self.recommended,
            "budget_slots": self.budget,
            "status": self.status.value,
        }


def plan_slots(
    *,
    layers: int,
    num_experts: int,
    active: int,
    free_bytes: int,
    per_expert_bytes: int,
    reserve_bytes: int = RESERVE_BYTES,
    batch: int = 1,
) -> SlotPlan:
    """Return the slots for the experts of ``layers`` layers.

    Args:
        layers: layers with experts that may be cached.
        num_experts: experts of each layer.
        active: experts per token.
        free_bytes: free memory once weights, KV cache and scratch are allocated.
        per_expert_bytes: largest expert over all layers, with all its tensors, as the allocator rounds it.
        reserve_bytes: part of the free bytes that is not used.
        batch: tokens of a pass. For one token, twice its experts are recommended; for more, the expected number of
            distinct experts if that is larger.
    """
    if batch < 1:
        raise ConfigError(f"batch must be at least 1 token, not {batch}")
    total = layers * num_experts
    if total <= 0:
        return SlotPlan(slots=0, recommended=0, budget=0, status=Status.EMPTY)
    # 1e-9: an expectation that is an integer in exact arithmetic is not rounded up.
    met = math.ceil(float(expected_distinct(num_experts, min(active, num_experts), batch)) - 1e-9)
    recommended = min(total, layers * min(num_experts, max(2 * active, met)))
    if per_expert_bytes <= 0:
        return SlotPlan(slots=total, recommended=recommended, budget=total, status=Status.UNKNOWN_EXPERT_SIZE)
    budget = max(0, (free_bytes - reserve_bytes) // per_expert_bytes)
    status = Status.BELOW_RECOMMENDED if budget < recommended else Status.OK
    if budget == 0:
        status = Status.BUDGET_EXHAUSTED
    return SlotPlan(slots=min(budget, total), recommended=recommended, budget=budget, status=status)
