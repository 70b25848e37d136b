"""Schedules as data. A lazy table of builders serves look-ups, help texts and errors."""

from __future__ import annotations

from collections.abc import Callable

from moelight.core.registry import Registry
from moelight.core.schedule import Schedule
from moelight.scheduler.layout import Layout, PassShape

Builder = Callable[[Layout, PassShape], Schedule]

SCHEDULES: Registry[Builder] = Registry(
    "schedule",
    {
        "cgopipe": "moelight.scheduler.cgopipe:build_cgopipe",
        "fastdecode": "moelight.scheduler.blocks:build_fastdecode",
        "flexgen-c": "moelight.scheduler.blocks:build_flexgen_c",
        "flexgen": "moelight.scheduler.blocks:build_flexgen",
        "flexgen-loop": "moelight.scheduler.blocks:build_flexgen_loop",
        "serial": "moelight.scheduler.serial:build_serial",
        "module": "moelight.scheduler.module:build_module",
    },
)
