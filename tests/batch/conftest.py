"""The engine that jobs of this room are given, and signals as a terminal gives them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from moelight.core.policy import Policy
from moelight.engine.model import LazyModel
from moelight.engine.options import EngineOptions
from moelight.engine.planning import hardware_for
from moelight.optimizer.simulation import SimulationSetup
from moelight.profiles.workload import Workload
from tests.batch.playing import StandIn


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()

    def plan(model: LazyModel, options: EngineOptions, workload: Workload, policy: Policy | None) -> SimpleNamespace:
        def simulation(policy: Policy) -> SimulationSetup:
            return SimulationSetup(policy, stand_in.profile, hardware_for("auto", discrete=False), workload)

        stand_in.workload = workload
        planned = SimpleNamespace(plan=None, why="because the test says so", simulation=simulation)
        planned.load = lambda *, record: stand_in
        return planned

    monkeypatch.setattr(LazyModel, "plan", plan)
    return stand_in


@pytest.fixture(autouse=True)
def signals_of_a_terminal() -> Iterator[None]:
    """A shell starts what runs in its background with SIGINT ignored, and a job respects that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
