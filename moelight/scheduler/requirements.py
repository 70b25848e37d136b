"""The layouts that each builder supports: some schedules need a link, one place of attention, or GPU experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.hrm.footprint import WHOLE_EXPERTS
from moelight.hrm.schedule_time import ON_DEMAND_SCHEDULES
from moelight.scheduler.layout import EXPERT_PLACES, Layout, PassShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The requirements of a builder. ``attention``: the devices on which it can attend beside a GPU."""

    gpu: bool = False
    attention: tuple[str, ...] = ("cpu", "gpu")
    device_experts: bool = True


NEEDS: Mapping[str, Needs] = {
    "cgopipe": Needs(device_experts=False),
    "fastdecode": Needs(attention=("cpu",)),
    "flexgen-c": Needs(gpu=True, attention=("cpu",)),
    "flexgen": Needs(attention=("gpu",)),
    "flexgen-loop": Needs(),
    "serial": Needs(device_experts=False),
    "module": Needs(),
}


def misfit(schedule: str, *, discrete: bool, attention: str, experts: str, small_ring: bool = False) -> str | None:
    """The reason why the builder ``schedule`` does not support such a layout, as one clause; None if it does.
    ``small_ring``: the ring holds fewer pages than two layers stream, so that no micro-batch finds a whole layer."""
    needs = NEEDS[schedule]
    if small_ring and schedule not in WHOLE_EXPERTS:
        return "needs a ring of two layers (ring_pages 0)"
    if not discrete:
        return "needs a GPU, and there is none" if needs.gpu else None
    if attention not in needs.attention:
        return f"needs attention_device {needs.attention[0]}, not {attention}"
    if needs.device_experts and experts != "device":
        return "needs ffn_device gpu: no part of the experts on the CPU"
    return None


def check_policy(policy: Policy, *, discrete: bool | None = None, small_ring: bool = False) -> None:
    """Raise ConfigError for a policy that its schedule does not support, with the schedules that do."""
    discrete, experts = policy.discrete if discrete is None else discrete, EXPERT_PLACES[policy.ffn_device]
    _check(policy.schedule, discrete, policy.attention_device, experts, small_ring=small_ring)


def check_layout(schedule: str, layout: Layout, shape: PassShape) -> None:
    """Raise ConfigError for a layout or ``shape`` that the builder ``schedule`` does not support."""
    _check(schedule, layout.discrete, layout.attention, layout.experts, small_ring=layout.turn_parts > 0)
    if shape.routed_only and schedule not in ON_DEMAND_SCHEDULES:
        raise ConfigError(f"schedule {schedule!r} moves every page, whoever is routed to it")
    if shape.routed_only and layout.turn_parts:
        raise ConfigError("a pass of routed pages only needs a ring of two layers (ring_pages 0)")


def _check(schedule: str, discrete: bool, attention: str, experts: str, *, small_ring: bool = False) -> None:
    def fault(name: str) -> str | None:
        return misfit(name, discrete=discrete, attention=attention, experts=experts, small_ring=small_ring)

    if (reason := fault(schedule)) is not None:
        others = ", ".join(name for name in NEEDS if fault(name) is None)
        raise ConfigError(f"schedule {schedule!r} {reason}; here these do: {others}")
