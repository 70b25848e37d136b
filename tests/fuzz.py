"""Hypothesis settings beside fixtures, which are made once for all examples of a test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.shapes import examples


def fuzz(count: int) -> settings:
    """`examples`, which share the fixtures of the test."""
    parent = examples(count)
    return settings(parent, suppress_health_check=[*parent.suppress_health_check, HealthCheck.function_scoped_fixture])
