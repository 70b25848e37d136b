"""How many experts should have room, and how many can: the sizing rule with its statuses.

Basis: about twice the experts that one token activates is where caches of single sequences balance speed and memory
(arXiv 2505.16056); a batch meets more of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from moelight.core.errors import ConfigError
from moelight.core.units import MiB
from moelight.hrm.costs import expected_distinct

RESERVE_BYTES = 512 * MiB


class Status(str, Enum):
    """What is to be thought of a `SlotPlan`."""

    EMPTY = "EMPTY"  # there is nothing to cache
    UNKNOWN_EXPERT_SIZE = "UNKNOWN_EXPERT_SIZE"  # the caller decides
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"  # not one fits: stream, or compute where they lie
    BELOW_RECOMMENDED = "BELOW_RECOMMENDED"
    OK = "OK"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """``slots`` to allocate, how many are ``recommended``, how many the memory has room for (``budget``)."""

    slots: int
    recommended: int
    budget: int
    status: Status

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    """Slots for the experts of ``layers`` layers.

    Args:
        layers: with experts that may be cached.
        num_experts: of each of them.
        active: of them, how many a token chooses.
        free_bytes: as read when weights, cache and scratch are allocated.
        per_expert_bytes: of an expert with all its tensors, as the allocator rounds it, the largest over all layers.
        reserve_bytes: of the free ones, what is left alone.
        batch: tokens of a pass. For one, twice its experts are recommended; for more, those that they are expected to
            meet, if these are more.

    Raises:
        ConfigError: ``batch`` below 1.
    """
    if batch < 1:
        raise ConfigError(f"batch must be at least 1 token, not {batch}")
    total = layers * num_experts
    if total <= 0:
        return SlotPlan(slots=0, recommended=0, budget=0, status=Status.EMPTY)
    # 1e-9: an expectation that is whole in exact arithmetic is not rounded up.
    met = math.ceil(float(expected_distinct(num_experts, min(active, num_experts), batch)) - 1e-9) if batch > 1 else 0
    recommended = min(total, layers * min(num_experts, max(2 * active, met)))
    if per_expert_bytes <= 0:
        return SlotPlan(slots=total, recommended=recommended, budget=total, status=Status.UNKNOWN_EXPERT_SIZE)
    budget = max(0, (free_bytes - reserve_bytes) // per_expert_bytes)
    status = Status.BELOW_RECOMMENDED if budget < recommended else Status.OK
    if budget == 0:
        status = Status.BUDGET_EXHAUSTED
    return SlotPlan(slots=min(budget, total), recommended=recommended, budget=budget, status=status)


def judge_slots(slots: int, *, allocated: int, layers: int, num_experts: int, active: int, batch: int = 1) -> SlotPlan:
    """What the rule says of a cache of ``slots`` where memory for ``allocated`` was given, whoever decided that; the
    others as in `plan_slots`."""
    plan = plan_slots(
        layers=layers,
        num_experts=num_experts,
        active=active,
        free_bytes=allocated,
        per_expert_bytes=1,
        reserve_bytes=0,
        batch=batch,
    )
    return replace(plan, slots=min(slots, plan.slots))
