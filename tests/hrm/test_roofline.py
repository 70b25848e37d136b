"""Roofs and turning points: the case study's golden values, chains of any length, and where a policy lies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import FLOAT16, INT4, DType
from moelight.core.policy import Policy, Shares
from moelight.hrm.estimate import estimate
from moelight.hrm.machine_model import speeds_of
from moelight.hrm.roofline import (
    Level,
    attainable,
    attainable_from,
    attention_intensity,
    balance_point,
    chain_of,
    compute_roof,
    fed_intensity,
    ffn_intensity,
    first_turning_point,
    flops_of_experts,
    link_between,
    link_roof,
    memory_roof,
    roofline_of,
    scores_intensity,
    second_turning_point,
    turning_point,
)
from moelight.profiles.hardware import HardwareProfile, Processor, Tier, load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from tests.published import l4, machine
from tests.shapes import examples

MIXTRAL = load_model_profile("mixtral")
WORK = Workload(prompt_len=77, max_prompt_len=418, gen_len=32)
# The inputs of the paper's figures 3 to 5, an L4 in decimal units.
GPU = Level(name="device", processor="gpu", peak_flops=242e12, bandwidth=300e9, link_bandwidth=16e9)
CPU = Level(name="host", processor="cpu", peak_flops=1.3e12, bandwidth=100e9)
PLAIN_INT4 = DType(name="plain-int4", bits=4)


def test_p1_of_the_case_study() -> None:
    assert first_turning_point(CPU, GPU.link_bandwidth) == 81.25


@pytest.mark.parametrize(("dtype", "expected"), [(FLOAT16, 2.0), (PLAIN_INT4, 8.0)])
def test_attention_of_the_case_study_counts_scores_alone(dtype: DType, expected: float) -> None:
    assert scores_intensity(MIXTRAL, 512, dtype=dtype) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("dtype", "about"), [(FLOAT16, 4.0), (INT4, 16.0)])
def test_with_values_attention_has_twice_the_intensity_and_stays_under_p1(dtype: DType, about: float) -> None:
    intensity = attention_intensity(MIXTRAL, 512, kv_dtype=dtype)
    assert about * 0.9 < intensity < about
    assert intensity < first_turning_point(CPU, GPU.link_bandwidth) / 4


@pytest.mark.parametrize(("tokens", "expected"), [(32, 7.997), (128, 31.95), (1024, 252.6), (16384, 3373)])
def test_experts_of_the_case_study(tokens: int, expected: float) -> None:
    assert ffn_intensity(MIXTRAL, tokens) == pytest.approx(expected, rel=2e-4)


def test_p2_of_the_case_study() -> None:
    kernel = ffn_intensity(MIXTRAL, 128)
    assert attainable(GPU, kernel) / 1e9 == pytest.approx(9584, abs=1)
    second = second_turning_point(GPU, GPU.link_bandwidth, kernel)
    assert second == pytest.approx(599, abs=0.1)
    assert second == balance_point(GPU, GPU.link_bandwidth, kernel)
    assert ffn_intensity(MIXTRAL, 2474) == pytest.approx(second, rel=1e-3)


def test_static_weights_raise_the_intensity_at_the_farther_level() -> None:
    assert fed_intensity(MIXTRAL, 504, share=0.5) == 2 * fed_intensity(MIXTRAL, 504, share=1.0)


def test_what_crosses_a_link_is_weights_and_the_hidden_states_of_attention_on_the_cpu() -> None:
    """The plan of a T4 host keeps 18 % of the experts on disk, 15.1 GiB, which the device reads through both links."""
    policy = Policy(
        model="mixtral",
        batch_size=3732,
        micro_batch_size=933,
        attention_device="cpu",
        ffn_device="gpu",
        weights=Shares(device=0.062, host=0.758, disk=0.18),
    )
    layer = 3 * MIXTRAL.experts.num_experts * MIXTRAL.hidden_size * MIXTRAL.experts.intermediate_size * 2
    flops = 6 * 3732 * MIXTRAL.hidden_size * MIXTRAL.experts.intermediate_size * MIXTRAL.router.top_k
    t4 = load_hardware_profile("t4")
    host = roofline_of(t4, MIXTRAL, policy, WORK).points[1]
    assert (host.home, host.bound) == ("host", "link")
    assert host.home_intensity == pytest.approx(flops / (0.938 * layer + 2 * 3732 * MIXTRAL.hidden_size))
    more = replace(policy, weights=Shares(device=0.062, host=0.638, disk=0.3))
    disk = roofline_of(t4, MIXTRAL, more, WORK).points[1]
    assert disk.home == "disk" and disk.home_intensity == pytest.approx(flops / (0.3 * layer))


@pytest.mark.parametrize("disk", [0.05, 0.18, 0.3])
def test_the_work_attains_what_the_plan_counts_with(disk: float) -> None:
    """The link that binds a decode pass, and its seconds, are those of the cost model."""
    policy = Policy(
        model="mixtral",
        batch_size=3732,
        micro_batch_size=933,
        attention_device="cpu",
        ffn_device="gpu",
        weights=Shares(device=0.062, host=0.938 - disk, disk=disk),
        kv=Shares(host=1.0),
        kv_tokens=3732 * 500,
        micro_batch_tokens=1168,
    )
    t4 = load_hardware_profile("t4")
    estimated = estimate(MIXTRAL, policy, replace(WORK, num_requests=8000), speeds_of(t4))
    seconds = {lane: estimated.lanes[lane] for lane in ("h2d", "disk")}
    experts = roofline_of(t4, MIXTRAL, policy, WORK).points[1]
    busiest = max(seconds, key=seconds.__getitem__)
    assert {"host": "h2d", "disk": "disk"}[experts.home] == busiest
    flops = MIXTRAL.num_layers * flops_of_experts(MIXTRAL, 3732)
    assert flops / seconds[busiest] == pytest.approx(experts.flops, rel=0.02)


@examples(80)
@given(resident=st.floats(0.01, 1e5), far=st.floats(0.01, 1e5))
def test_the_least_roof_is_attained(resident: float, far: float) -> None:
    roofs = (compute_roof(GPU), memory_roof(GPU, resident), link_roof(16e9, far))
    assert attainable_from(GPU, 16e9, resident, far) == min(roofs)
    assert attainable(GPU, resident) == min(roofs[:2])


@examples(80)
@given(intensity=st.floats(0.01, 1e5), far=st.floats(0.01, 1e5))
def test_turning_points_part_what_they_say(intensity: float, far: float) -> None:
    """Below P1 the CPU is at least as fast as anything the link can feed; above P2 the link no longer matters; above
    the balance point neither does more intensity at the CPU."""
    fed = link_roof(16e9, far)
    if far < first_turning_point(CPU, 16e9, far):
        assert attainable(CPU, far) > fed
    if far > second_turning_point(GPU, 16e9, intensity):
        assert attainable_from(GPU, 16e9, intensity, far) == attainable(GPU, intensity)
    if far > balance_point(GPU, 16e9, intensity):
        assert fed > memory_roof(GPU, intensity)


def test_a_level_alone_turns_where_its_roofs_meet() -> None:
    turn = turning_point(GPU)
    assert memory_roof(GPU, turn) == pytest.approx(compute_roof(GPU))


def test_a_chain_has_every_tier_of_the_machine() -> None:
    hardware = machine(
        device_bytes=1, device_bandwidth=300e9, gpu_flops=65e12, cpu_flops=1e12, link=16e9, disk_bytes=10**12
    )
    device, host, disk = chain_of(hardware)
    assert (device.name, device.processor, device.link_bandwidth) == ("device", "gpu", 16e9)
    assert (host.name, host.processor, host.link_bandwidth) == ("host", "cpu", 6.8e9)
    assert (disk.name, disk.processor, disk.peak_flops, disk.link_bandwidth) == ("disk", "", 0.0, 0.0)
    chain = (device, host, disk)
    assert link_between(chain, 0, 1) == 16e9
    assert link_between(chain, 0, 2) == 6.8e9
    assert first_turning_point(disk, 6.8e9) == 0


def test_gpus_and_their_links_count_together() -> None:
    one = machine(device_bytes=1, device_bandwidth=300e9, gpu_flops=65e12, cpu_flops=1e12, link=16e9)
    four = machine(device_bytes=1, device_bandwidth=300e9, gpu_flops=65e12, cpu_flops=1e12, link=16e9, gpus=4)
    (single, _), (several, host) = chain_of(one), chain_of(four)
    assert several.peak_flops == 4 * single.peak_flops
    assert several.bandwidth == 4 * single.bandwidth
    assert several.link_bandwidth == 4 * single.link_bandwidth
    assert host == chain_of(one)[1]


def test_the_published_policy_lies_under_the_link() -> None:
    policy = Policy(
        model="mixtral",
        batch_size=4536,
        micro_batch_size=324,
        ffn_device="gpu",
        weights=Shares(device=0.0559, host=0.9441),
    )
    picture = roofline_of(l4(), MIXTRAL, policy, WORK)
    attention, experts = picture.points
    assert (attention.level, attention.home, attention.bound) == ("host", "host", "memory")
    assert (experts.level, experts.home, experts.bound) == ("device", "host", "link")
    marks = {mark.name: mark for mark in picture.marks}
    assert attention.intensity < marks["P1"].far_intensity < experts.home_intensity < marks["P2"].far_intensity
    assert marks["P1"].flops == pytest.approx(0.6 * 1.6e12)
    assert experts.flops == pytest.approx(link_roof(0.78 * 16 * 2**30, experts.home_intensity))


@pytest.mark.parametrize(
    ("changes", "location"),
    [
        ({"attention_device": "gpu"}, ("attention", "device", "host", "link")),
        ({"attention_device": "gpu", "kv": Shares(device=1.0)}, ("attention", "device", "device", "memory")),
        ({"weights": Shares(device=1.0)}, ("ffn", "device", "device", "memory")),
        ({"weights": Shares(device=0.5, host=0.4, disk=0.1)}, ("ffn", "device", "host", "link")),
        ({"weights": Shares(device=0.5, host=0.1, disk=0.4)}, ("ffn", "device", "disk", "link")),
        ({"ffn_device": "cpu", "weights": Shares(host=1.0)}, ("ffn", "host", "host", "memory")),
        ({"ffn_device": "cpu", "weights": Shares(host=0.5, disk=0.5)}, ("ffn", "host", "disk", "link")),
        (
            {"ffn_device": "split", "cpu_experts": 0.3, "weights": Shares(host=1.0)},
            ("ffn on the CPU", "host", "host", "memory"),
        ),
    ],
)
def test_work_lies_where_the_policy_puts_it(changes: dict[str, object], location: tuple[str, ...]) -> None:
    hardware = machine(
        device_bytes=24, device_bandwidth=306e9, gpu_flops=104e12, cpu_flops=50e12, link=17e9, disk_bytes=10**12
    )
    policy = Policy(model="m", batch_size=64, micro_batch_size=16, ffn_device="gpu", weights=Shares(host=1.0))
    picture = roofline_of(hardware, MIXTRAL, replace(policy, **changes), WORK)  # type: ignore[arg-type]
    point = next(point for point in picture.points if point.work == location[0])
    assert (point.work, point.level, point.home, point.bound) == location


def test_without_a_gpu_the_chain_begins_at_the_host() -> None:
    hardware = HardwareProfile(
        name="cpu",
        tiers=(
            Tier(name="host", capacity_bytes=1, bandwidth_bytes_per_s=300e9),
            Tier(name="disk", capacity_bytes=1, bandwidth_bytes_per_s=6e9),
        ),
        links=(),
        processors=(Processor(name="cpu", count=2, peak_flops=50e12),),
    )
    policy = Policy(model="m", batch_size=512, micro_batch_size=512, weights=Shares(host=0.5, disk=0.5))
    picture = roofline_of(hardware, MIXTRAL, policy, WORK)
    assert [level.name for level in picture.chain] == ["host", "disk"]
    assert picture.stated[0].peak_flops == 100e12
    assert picture.chain[0].peak_flops == pytest.approx(60e12)
    assert {mark.name for mark in picture.marks} == {"P2", "balance"}
    assert {point.level for point in picture.points} == {"host"}
