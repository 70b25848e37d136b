"""The calibrated estimate: affine where the programme relies on it, the schedule's own bytes, orders that differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import BFLOAT16, FLOAT16, MIXED_FLOAT16
from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane
from moelight.hrm.estimate import cost_model_of, cost_of, estimate, flops_per_token
from moelight.hrm.machine_model import speeds_of
from moelight.hrm.pass_cost import PlacementCounts
from moelight.hrm.schedule_time import SCHEDULE_TERMS, pass_s
from moelight.hrm.workload_model import cache_tokens, decode_pass
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import MicroBatchShape, PassShape, layout_of
from tests.shapes import examples

MIXTRAL = load_model_profile("mixtral")
WORK = Workload(num_requests=2000, prompt_len=77, max_prompt_len=418, gen_len=64)
T4 = speeds_of(load_hardware_profile("t4"))


def policy(**changes: object) -> Policy:
    plain = Policy(
        model="m",
        batch_size=512,
        micro_batch_size=64,
        kv_tokens=512 * 200,
        ffn_device="gpu",
        weights=Shares(device=0.125, host=0.625, disk=0.25),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


SETTINGS = [
    policy(),
    policy(host_pages="pinned"),
    policy(attention_device="gpu", kv=Shares(device=0.5, host=0.5)),
    policy(ffn_device="split", cpu_experts=0.25),
    policy(ffn_device="cpu", attention_device="gpu", weights=Shares(host=0.75, disk=0.25)),
    policy(ffn_device="cpu", weights=Shares(host=0.75, disk=0.25)),
]


@pytest.mark.parametrize("given_policy", SETTINGS[:5])
def test_mixed_precision_moves_the_same_pages_and_the_cpu_converts(given_policy: Policy) -> None:
    """float16 over bfloat16 beside plain float16: transfers and the device take as long, its CPU somewhat longer."""
    plain, mixed = (estimate(MIXTRAL, given_policy, WORK, T4, dtype=dtype).lanes for dtype in (FLOAT16, MIXED_FLOAT16))
    for lane in ("h2d", "d2h", "disk", "stage", "device"):
        assert mixed[lane] == plain[lane]
    assert (mixed["cpu"] > plain["cpu"]) == (given_policy.ffn_device != "gpu")


@pytest.mark.parametrize("given_policy", SETTINGS)
@pytest.mark.parametrize("order", SCHEDULE_TERMS)
def test_every_term_is_affine_in_the_homes(given_policy: Policy, order: str) -> None:
    """Halfway between two homes each term is halfway: what the integer programme relies on."""
    cost_model, kind = cost_model_of(MIXTRAL, given_policy, T4), decode_pass(WORK, 512)
    chosen = replace(given_policy, schedule=order)
    resident, far = (
        PlacementCounts(from_host=10.0, from_disk=3.0, computed=5.0, device_kv=0.1),
        PlacementCounts(from_host=90.0, from_disk=41.0, computed=61.0, device_kv=0.9),
    )
    middle = PlacementCounts(from_host=50.0, from_disk=22.0, computed=33.0, device_kv=0.5)
    terms = [
        np.array([float(t) for t in SCHEDULE_TERMS[order](cost_of(cost_model, WORK, kind, h, chosen))])
        for h in (resident, middle, far)
    ]
    assert terms[1] == pytest.approx((terms[0] + terms[2]) / 2, rel=1e-9)


@pytest.mark.parametrize("given_policy", SETTINGS[:5])
def test_the_links_carry_the_schedules_own_bytes(given_policy: Policy) -> None:
    """Seconds times speed, launches aside, are the bytes of the schedule that the policy makes."""
    speeds = replace(T4, transfer_s=0.0)
    priced = estimate(MIXTRAL, given_policy, WORK, speeds)
    layout = layout_of(MIXTRAL, given_policy, BFLOAT16)
    context = round(64 * (WORK.prompt_len + WORK.gen_len / 2)) if layout.context_crosses else 0
    present = {"device_tokens": layout.device_tokens(64), "device_context": layout.device_tokens(context)}
    batches = (MicroBatchShape(tokens=64, context=context, **present),) * 8
    schedule = SCHEDULES.get("cgopipe")(layout, PassShape(micro_batches=batches, wraps=True, prefetched=0))
    again = SCHEDULES.get("cgopipe")(
        layout, PassShape(micro_batches=batches, wraps=True, prefetched=len(schedule.prefetched_next))
    )
    crossed = again.lane_bytes()
    rates = {Lane.H2D: speeds.h2d, Lane.STAGE: speeds.stage, Lane.DISK: speeds.disk, Lane.D2H: speeds.d2h}
    for lane, rate in rates.items():
        assert priced.lanes[str(lane)] * rate == pytest.approx(crossed.get(lane, 0), rel=0.01), lane


@examples(60)
@given(n=st.integers(1, 2000), count=st.integers(1, 40), setting=st.integers(0, 4))
def test_cgopipe_is_never_slower_than_the_other_orders_and_serial_never_faster(
    n: int, count: int, setting: int
) -> None:
    """Of one pass with the same work: so the optimizer need not try them."""
    chosen = replace(SETTINGS[setting], batch_size=n, micro_batch_size=-(-n // min(count, n)), micro_batch_tokens=4096)
    cost_model, kind = cost_model_of(MIXTRAL, chosen, T4), decode_pass(WORK, n)
    cost = cost_of(cost_model, WORK, kind, PlacementCounts(from_host=160.0, from_disk=64.0, computed=0.0), chosen)
    least = float(pass_s("cgopipe", cost))
    others = {order: float(pass_s(order, cost)) for order in SCHEDULE_TERMS if order != "module"}
    assert all(least <= seconds * (1 + 1e-9) for seconds in others.values()), others
    assert least >= max(float(s) for lane, s in cost.lanes.items()) * (1 - 1e-9)


def test_a_long_chain_takes_as_many_turns_as_look_ahead_allows() -> None:
    """Four micro-batches whose way is much longer than any lane's work on them; other orders look two ahead."""
    kind, placed = decode_pass(WORK, 512), PlacementCounts()
    slow = replace(T4, transfer_s=0.01)
    seconds, others = {}, set()
    for ahead in (1, 2, 3, 8):
        chosen = policy(micro_batch_size=128, look_ahead=ahead)
        cost = cost_of(cost_model_of(MIXTRAL, chosen, slow), WORK, kind, placed, chosen)
        seconds[ahead] = float(pass_s("cgopipe", replace(cost, lanes={"cpu": cost.lanes["cpu"]}, waits={})))
        others.add(float(pass_s("fastdecode", cost)))
    assert seconds[1] == pytest.approx(seconds[2] * 3 / 2)
    assert seconds[2] > seconds[3] == seconds[8]
    assert len(others) == 1


def test_phases_add_up_to_the_job() -> None:
    priced = estimate(MIXTRAL, policy(), WORK, T4)
    total = sum(phase.passes * phase.seconds for phase in priced.phases)
    assert priced.tokens_per_s == pytest.approx(WORK.num_requests * WORK.gen_len / total)
    assert priced.pass_s == pytest.approx(priced.layer_s * 32)
    assert priced.decode_tokens_per_s == pytest.approx(512 / priced.pass_s)
    assert priced.binding in priced.lanes


def test_more_of_everything_is_faster() -> None:
    before = estimate(MIXTRAL, policy(), WORK, T4).tokens_per_s
    faster = replace(T4, disk=2 * T4.disk, h2d=2 * T4.h2d, stage=2 * T4.stage, dram=2 * T4.dram)
    assert estimate(MIXTRAL, policy(), WORK, faster).tokens_per_s > 1.3 * before


def test_flops_of_a_token_are_twice_its_weights() -> None:
    """12.9 billion parameters are active in Mixtral, 0.26 of them in embedding and head."""
    assert flops_per_token(MIXTRAL) == pytest.approx(2 * 12.62e9, rel=0.01)


def test_a_larger_n_than_the_cache_holds_brings_nothing() -> None:
    """Buffers for the contexts of a micro-batch are for its share of the cache as N has it."""
    tokens = int(cache_tokens(WORK, 300, Policy(model="m").kv_block_size, MIXTRAL.max_positions))
    gpu = {"attention_device": "gpu", "kv": Shares(device=1.0), "kv_tokens": tokens}
    honest = estimate(MIXTRAL, policy(**gpu, batch_size=300, micro_batch_size=50), WORK, T4).tokens_per_s
    for times in (2, 3, 4):
        more = policy(**gpu, batch_size=300 * times, micro_batch_size=50)
        larger = policy(**gpu, batch_size=300 * times, micro_batch_size=50 * times)
        assert estimate(MIXTRAL, more, WORK, T4).tokens_per_s < honest
        assert estimate(MIXTRAL, larger, WORK, T4).tokens_per_s == pytest.approx(honest)
