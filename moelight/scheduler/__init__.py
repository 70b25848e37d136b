"""Schedules as data. `SCHEDULES` lists the builders by name and imports each on first use."""

from __future__ import annotations

from collections.abc import Callable

from moelight.core.registry import Registry
from moelight.core.schedule import Schedule
from moelight.scheduler.layout import Layout, PassShape

Builder = Callable[[Layout, PassShape], Schedule]

SCHEDULES: Registry[Builder] = Registry(
    "schedule",
    {
        "cgopipe": "moelight.scheduler.schedules:build_cgopipe",
        "fastdecode": "moelight.scheduler.schedules:build_fastdecode",
        "flexgen-c": "moelight.scheduler.schedules:build_flexgen_c",
        "flexgen": "moelight.scheduler.schedules:build_flexgen",
        "flexgen-loop": "moelight.scheduler.schedules:build_flexgen_loop",
        "serial": "moelight.scheduler.schedules:build_serial",
        "module": "moelight.scheduler.schedules:build_module",
    },
)
