"""Machines at the corners of what a profile may say are planned for without a warning, which fails any test."""

from __future__ import annotations

from itertools import product

import pytest

from moelight.core.errors import UserError
from moelight.optimizer import bound
from moelight.optimizer.optimize import make_plan
from moelight.optimizer.options import PlanOptions
from moelight.profiles.hardware import HardwareProfile, Link, Processor, Tier
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import MOST_REQUESTS, Workload, load_workload
from tests.cases import thorough

BANDWIDTHS, PEAKS = [(1e3, 1e3, 1e3), (1e18, 1e3, 1e18), (1e18, 1e18, 1e3)], (1e3, 1e21)


def machine(bandwidths: tuple[float, ...], peaks: tuple[float, ...], *, count: int = 1) -> HardwareProfile:
    host, device, link = bandwidths
    return HardwareProfile(
        name="corner",
        tiers=(
            Tier(name="device", capacity_bytes=16 << 30, bandwidth_bytes_per_s=device),
            Tier(name="host", capacity_bytes=200 << 30, bandwidth_bytes_per_s=host),
        ),
        links=tuple(
            Link(src=src, dst=dst, bandwidth_bytes_per_s=link) for src, dst in (("host", "device"), ("device", "host"))
        ),
        processors=(
            Processor(name="gpu", count=count, peak_flops=peaks[0]),
            Processor(name="cpu", count=1, peak_flops=peaks[1]),
        ),
    )


@pytest.fixture(autouse=True)
def _few_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """How near the bound comes is not asked here."""
    monkeypatch.setattr(bound, "MOST_BOXES", {True: 1000, False: 1000})


CORNERS = [*product(range(3), PEAKS)]


@pytest.mark.parametrize(("which", "gpu"), thorough(CORNERS, but=CORNERS[:1]))
def test_the_slowest_and_fastest_machines_are_planned_for(which: int, gpu: float) -> None:
    """Every two of the bandwidths, the peak of the GPU and that of the CPU, together."""
    bandwidths, cpu = BANDWIDTHS[which], PEAKS[(which + PEAKS.index(gpu)) % 2]
    work = Workload(num_requests=100, prompt_len=77, max_prompt_len=418, gen_len=16)
    plan = make_plan(
        machine(bandwidths, (gpu, cpu)), load_model_profile("mixtral"), work, PlanOptions(cache=False), name="m"
    )
    assert 0 < plan.estimate.tokens_per_s < 1e12


@pytest.mark.thorough
def test_the_most_gpus_and_the_most_requests_are_planned_for_or_refused() -> None:
    model, work = load_model_profile("mixtral"), load_workload("mtbench")
    plan = make_plan(
        machine((1e11, 1e12, 1e10), (1e14, 1e12), count=4096), model, work, PlanOptions(cache=False), name="m"
    )
    assert plan.estimate.tokens_per_s > 0
    maximum = Workload(num_requests=MOST_REQUESTS, prompt_len=77, max_prompt_len=418, gen_len=64)
    assert (
        make_plan(
            machine((1e11, 1e12, 1e10), (1e14, 1e12)), model, maximum, PlanOptions(cache=False), name="m"
        ).policy.kv_tokens
        > 0
    )
    far = Workload(num_requests=MOST_REQUESTS, prompt_len=1 << 24, max_prompt_len=1 << 24, gen_len=1 << 24)
    with pytest.raises(UserError, match="more than can be planned for"):
        make_plan(machine((1e11, 1e12, 1e10), (1e14, 1e12)), model, far, PlanOptions(cache=False), name="m")
