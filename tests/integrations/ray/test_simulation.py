"""The virtual clock of a cluster: no job is faster than its engines, and what slows one down does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from moelight.core.errors import ConfigError
from moelight.integrations.ray.simulation import ClusterRun, ClusterSimulation, SimulatedCluster

BASE = SimulatedCluster(nodes=4, rows=8000, batch_rows=64, row_s=32.0, jitter=0.0)


def run(**changes: float) -> ClusterRun:
    return ClusterSimulation(replace(BASE, **changes)).run()  # type: ignore[arg-type]


@cache
def long_run() -> ClusterRun:
    return run(rows=40_000)


def test_no_job_is_faster_than_its_engines() -> None:
    for nodes in (1, 2, 7, 32):
        result = run(nodes=nodes)
        assert 0.4 < result.efficiency <= 1.0
        assert result.ideal_s == pytest.approx(8000 * 32.0 / 64 / nodes)
        assert result.redone_rows == result.failures == 0


def test_long_jobs_are_efficient_and_loading_is_not() -> None:
    assert long_run().efficiency > 0.97
    assert run(rows=40_000, load_s=600.0).efficiency < long_run().efficiency - 0.1


def test_slow_nodes_cost_what_they_lack() -> None:
    """The ideal counts their speed: leases follow it, so the efficiency stays."""
    slow = run(rows=40_000, slow_share=0.5, seed=3.0)
    assert slow.ideal_s > 1.1 * long_run().ideal_s
    assert slow.efficiency > 0.95


def test_failures_redo_the_rows_that_an_engine_held() -> None:
    result = run(rows=40_000, failures_per_hour=2.0)
    assert result.failures > 3
    assert 0 < result.redone_rows <= result.failures * 2 * 64  # in its passes, and answers on their way
    assert result.efficiency < long_run().efficiency


def test_the_driver_is_the_bound_where_rows_cost_more_than_engines_bring() -> None:
    fast = replace(BASE, nodes=256, rows=1_000_000, row_s=0.5, row_driver_s=1e-4)
    result = ClusterSimulation(fast).run()
    assert result.driver_share > 0.9
    assert result.seconds >= 1_000_000 * 1e-4


def test_a_run_is_repeatable() -> None:
    assert run(failures_per_hour=1.0, slow_share=0.3) == run(failures_per_hour=1.0, slow_share=0.3)


def test_impossible_clusters_are_refused() -> None:
    with pytest.raises(ConfigError, match="nodes must be above 0"):
        run(nodes=0)
