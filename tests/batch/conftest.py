"""The engine that jobs of this room are given."""

from __future__ import annotations

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
