"""Cores are shared by rule: none twice, none too many, and a reason for everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane
from moelight.runtime.topology import CoreShares, Demands, PciSlot, demands_of, share_cores
from tests.runtime.machines import topology

PLAIN = Demands(device=False)
BOTH = Demands(device=True, computes=True, stages=True)


def counts(shares: CoreShares) -> tuple[int, int]:
    return tuple(0 if share is None else share.threads for share in (shares.compute, shares.staging))  # type: ignore[return-value]


def test_without_a_device_all_cores_compute_and_reads_run_between_them() -> None:
    result = share_cores(topology(4), PLAIN, at_most=4)
    assert result.compute is not None and result.compute.places == ((0,), (1,), (2,), (3,))
    assert (result.staging, result.free) == (None, ())
    assert result.reason == "4 threads, each bound to its core; reads run between them"
    assert result.of(Lane.CPU) == result.of(Lane.STAGE) == result.of(Lane.DEVICE) == result.compute
    assert result.of(Lane.DISK) is None


def test_hyperthreads_of_a_core_are_one_place() -> None:
    result = share_cores(topology(2, siblings=2), PLAIN, at_most=4)
    assert result.compute is not None and result.compute.places == ((0, 2), (1, 3))


def test_torchs_number_is_an_upper_bound_and_then_nobody_is_bound() -> None:
    result = share_cores(topology(8), PLAIN, at_most=3)
    assert (counts(result), result.compute and result.compute.places) == ((3, 0), ())
    assert (
        result.reason == "3 threads for 8 cores (torch's number, OMP_NUM_THREADS), none bound; reads run between them"
    )


@pytest.mark.parametrize(("quota", "threads"), [(0.5, 1), (1.0, 1), (1.5, 2), (7.2, 8), (100.0, 8)])
def test_a_quota_is_rounded_up(quota: float, threads: int) -> None:
    result = share_cores(topology(8, quota=quota), PLAIN, at_most=8)
    assert counts(result) == (threads, 0)
    if threads < 8:
        assert f"a quota of {quota:g} processors" in result.reason and "none bound" in result.reason


@pytest.mark.parametrize(
    ("cores", "demands", "wanted", "free"),
    [
        (1, BOTH, (1, 1), 0),
        (2, BOTH, (1, 1), 0),
        (3, BOTH, (2, 1), 0),
        (4, BOTH, (2, 1), 1),
        (8, BOTH, (5, 2), 1),
        (32, BOTH, (27, 4), 1),
        (32, Demands(device=True, stages=True, link_bytes_per_s=55e9), (24, 7), 1),
        (8, Demands(device=True), (7, 0), 1),
        (8, Demands(device=True, computes=False, stages=True), (0, 4), 4),
        (2, Demands(device=True, computes=False, stages=True), (0, 2), 0),
        (8, Demands(device=True, computes=False), (0, 0), 0),
    ],
)
def test_beside_a_device(cores: int, demands: Demands, wanted: tuple[int, int], free: int) -> None:
    result = share_cores(topology(cores), demands, at_most=cores)
    assert counts(result) == wanted
    assert len(result.free) == free
    assert result.of(Lane.CPU) is result.compute and result.of(Lane.STAGE) is result.staging
    assert all(result.of(lane) is None for lane in (Lane.DISK, Lane.H2D, Lane.D2H, Lane.DEVICE))


def test_launching_and_staging_are_near_the_device() -> None:
    result = share_cores(topology(8, nodes=2), Demands(device=True, stages=True, node=1), at_most=8)
    assert result.free == (4,)
    assert result.staging is not None and result.staging.places == ((5,), (6,))
    assert result.compute is not None and result.compute.places == ((7,), (0,), (1,), (2,), (3,))


@given(
    cores=st.integers(1, 40),
    nodes=st.integers(1, 3),
    siblings=st.integers(1, 2),
    at_most=st.integers(1, 100),
    quota=st.none() | st.floats(0.1, 50),
    device=st.booleans(),
    computes=st.booleans(),
    stages=st.booleans(),
    rate=st.floats(1e9, 200e9),
)
def test_shares_are_sound(
    cores: int,
    nodes: int,
    siblings: int,
    at_most: int,
    quota: float | None,
    device: bool,
    computes: bool,
    stages: bool,
    rate: float,
) -> None:
    present = topology(cores, nodes=min(nodes, cores), siblings=siblings, quota=quota)
    asked = Demands(
        device=device, computes=computes or not device, stages=stages and device, link_bytes_per_s=rate, node=0
    )
    result = share_cores(present, asked, at_most=at_most)
    computing, staging = counts(result)
    assert (computing > 0) == asked.computes and (staging > 0) == asked.stages
    full = min(cores, at_most)
    assert computing + staging <= max(full, 2) and max(computing, staging) <= full
    if quota is not None:
        assert computing + staging <= max(2, quota + 1)
    places = [position for share in (result.compute, result.staging) if share is not None for position in share.places]
    taken = [processor for position in places for processor in position] + list(result.free)
    assert len(taken) == len(set(taken))
    assert set(taken) in (set(), {processor for core in present.cores for processor in core.processors})
    assert not places or len(places) == computing + staging
    assert not places or full == cores
    assert ("each bound" in result.reason) == bool(places) and "\n" not in result.reason


def test_what_a_policy_asks_for() -> None:
    plain = Policy(model="m")
    assert demands_of(plain, None, device=False) == PLAIN
    streamed = Policy(model="m", ffn_device="gpu", attention_device="cpu", weights=Shares(host=1.0))
    plug = PciSlot(address="0000:81:00.0", node=1, bytes_per_s=63e9)
    assert demands_of(streamed, plug, device=True) == Demands(
        device=True, computes=True, stages=True, link_bytes_per_s=63e9, node=1
    )
    resident = Policy(
        model="m", ffn_device="gpu", attention_device="gpu", weights=Shares(device=0.5, disk=0.5), kv=Shares(device=1.0)
    )
    result = demands_of(resident, None, device=True)
    assert (result.computes, result.stages) == (False, False)
    split = Policy(model="m", ffn_device="split", attention_device="gpu", weights=Shares(host=1.0), cpu_experts=1.0)
    result = demands_of(split, None, device=True)
    assert (result.computes, result.stages) == (True, False)
