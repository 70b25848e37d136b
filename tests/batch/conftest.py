"""The engine that jobs of this room are given, and signals as a terminal gives them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from moelight.batch import job
from moelight.batch.options import JobOptions
from moelight.profiles.workload import Workload
from tests.batch.playing import StandIn


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()

    def plan_job(options: JobOptions, workload: Workload) -> SimpleNamespace:
        stand_in.workload = workload
        return SimpleNamespace(plan=None, why="because the test says so", workload=workload, load=lambda _: stand_in)

    monkeypatch.setattr(job, "plan_job", plan_job)
    return stand_in


@pytest.fixture(autouse=True)
def signals_of_a_terminal() -> Iterator[None]:
    """A shell starts what runs in its background with SIGINT ignored, and a job respects that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
