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


def misfit(schedule: str, *, discrete: bool, attention: str, experts: str) -> str | None:
    """The reason why the builder ``schedule`` does not support such a layout, as one clause; None if it does."""
    needs = NEEDS[schedule]
    if not discrete:
        return "needs a GPU, and there is none" if needs.gpu else None
    if attention not in needs.attention:
        return f"needs attention_device {needs.attention[0]}, not {attention}"
    if needs.device_experts and experts != "device":
        return "needs ffn_device gpu: no part of the experts on the CPU"
    return None


def check_policy(policy: Policy, *, discrete: bool | None = None) -> None:
    """Raise ConfigError for a policy that its schedule does not support, with the schedules that do."""
    discrete = policy.discrete if discrete is None else discrete
    _check(policy.schedule, discrete, policy.attention_device, EXPERT_PLACES[policy.ffn_device])


def check_layout(schedule: str, layout: Layout, shape: PassShape) -> None:
    """Raise ConfigError for a layout or ``shape`` that the builder ``schedule`` does not support."""
    _check(schedule, layout.discrete, layout.attention, layout.experts)
    if shape.routed_only and schedule not in ON_DEMAND_SCHEDULES:
        raise ConfigError(f"schedule {schedule!r} moves every page, whoever is routed to it")
    if layout.turn_parts and (schedule not in WHOLE_EXPERTS or shape.routed_only):
        check_ring(schedule, layout.ring_slots // len(layout.parts))
        raise ConfigError("a pass of routed pages only needs a ring of two layers")


def check_ring(schedule: str, ring_pages: int) -> None:
    """Raise ConfigError if experts run micro-batch by micro-batch under ``schedule``, which a ring of ``ring_pages``,
    fewer than two layers stream, cannot serve."""
    if schedule not in WHOLE_EXPERTS:
        raise ConfigError(
            f"ring_pages {ring_pages}: fewer than two layers stream, and schedule {schedule!r} computes micro-batch by "
            f"micro-batch with all pages of a layer; use schedule {' or '.join(WHOLE_EXPERTS)}, or ring_pages 0"
        )


def _check(schedule: str, discrete: bool, attention: str, experts: str) -> None:
    def why(name: str) -> str | None:
        return misfit(name, discrete=discrete, attention=attention, experts=experts)

    if (reason := why(schedule)) is not None:
        others = ", ".join(name for name in NEEDS if why(name) is None)
        raise ConfigError(f"schedule {schedule!r} {reason}; here these do: {others}")
