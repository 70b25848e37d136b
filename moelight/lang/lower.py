"""Convert checked values to `ExpertPolicy` objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moelight.experts.policy import (
    AdaptRule,
    CacheRules,
    Capacity,
    ExpertPolicy,
    MonitorRules,
    PerLayerRules,
    PrefetchRules,
    ScheduleRules,
)
from moelight.lang.rules import Place

# Replaces a missing or unreadable capacity: rules about counts do not apply to a share.
UNKNOWN_CAPACITY = Capacity(value=100.0, unit="percent")


def lower(
    name: str, values: Mapping[Place, Any], *, blocks: Iterable[str] = (), adapt: Iterable[AdaptRule] = ()
) -> ExpertPolicy:
    """The policy of ``values`` by block and key; missing keys take the language's defaults. ``blocks``: those present
    in the text, empty ones included."""
    sections: dict[str, dict[str, Any]] = {block: {} for block in blocks}
    for (block, key), value in values.items():
        sections.setdefault(block, {})["strategy" if key == "predictor" else key] = value
    cache = {"capacity": UNKNOWN_CAPACITY, **sections.get("cache", {})}
    layers = sections.get("per_layer")
    if layers is not None and layers.get("total_budget") == 0:
        layers["total_budget"] = None  # the reference's spelling of: not given
    return ExpertPolicy(
        name=name,
        cache=CacheRules(**cache),
        prefetch=PrefetchRules(**sections.get("prefetch", {})),
        schedule=ScheduleRules(**sections.get("schedule", {})),
        monitor=MonitorRules(**sections["monitor"]) if "monitor" in sections else None,
        per_layer=None if layers is None else PerLayerRules(**layers),
        adapt=tuple(adapt),
    )
