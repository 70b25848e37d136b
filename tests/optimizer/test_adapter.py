"""Adapting on a machine that is not as planned: the right decision, none without need, and back from a wrong one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import BFLOAT16
from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.engine.planning import hardware_for
from moelight.hrm.footprint import footprint
from moelight.hrm.machine_model import Speeds, slowed, speeds_of
from moelight.hrm.workload_model import steady_passes
from moelight.optimizer.adapter import (
    FIELDS,
    MOST_CHANGES,
    WORTH_IT,
    Adapter,
    Allocation,
    Rest,
    values_of,
    with_values,
)
from moelight.optimizer.pass_prices import Passed, PassPrices, passes_that_ran
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from tests.cases import thorough
from tests.optimizer.played import Played, adapted
from tests.shapes import examples

MIXTRAL = replace(load_model_profile("mixtral"), num_layers=2, moe_layers=(True,) * 2)
CPU = replace(speeds_of(hardware_for("cpu-amx", discrete=False)), under_disk=1.0, disk_under_cpu=1.0)
GPU = speeds_of(hardware_for("t4", discrete=True))
# Room for twice as many sequences as N says; and, on a GPU, for not one more.
ROOMY = Policy(
    model="m",
    batch_size=32,
    micro_batch_size=32,
    micro_batch_tokens=512,
    kv_tokens=64 * 200,
    weights=Shares(host=0.3, disk=0.7),
)
FULL = Policy(
    model="m",
    batch_size=256,
    micro_batch_size=32,
    micro_batch_tokens=512,
    kv_tokens=256 * 160,
    ffn_device="gpu",
    weights=Shares(device=0.5, host=0.5),
)
EQUAL = [(128, 32)] * 800


def uneven(count: int) -> list[tuple[int, int]]:
    random = Random(3)
    return [(random.randint(50, 150), random.randint(12, 36)) for _ in range(count)]


@pytest.mark.parametrize(
    "truth", thorough([{"disk": 3.0}, {"cpu": 2.0}, {"disk": 0.2, "cpu": 4.0}], but=[{"disk": 3.0}])
)
def test_n_grows_to_what_the_cache_holds_as_brute_force_would_have_it(truth: dict[str, float]) -> None:
    plain = Played(MIXTRAL, ROOMY, slowed(CPU, truth), uneven(240))
    rates = {n: replace(plain, policy=_sized(n), ends_s=[], tokens=[]).play().rate() for n in (16, 32, 64, 96)}
    result = adapted(plain, CPU)
    assert result.changes[0].now["batch_size"] > 64
    assert result.changes[0].predicted_gain > WORTH_IT
    assert result.rate(first=0.5) > 0.93 * max(rates.values()) > 1.5 * rates[32]


def _sized(n: int) -> Policy:
    """``ROOMY`` with N sequences in as many tokens a pass as it has."""
    return replace(ROOMY, batch_size=n, micro_batch_size=n, prompt_micro_batches=7)


@pytest.mark.thorough
@pytest.mark.parametrize("truth", [{"device": 3.0}, {"h2d": 0.2, "stage": 0.2, "disk": 0.2}])
def test_larger_micro_batches_where_the_device_binds_as_brute_force_would_have_it(truth: dict[str, float]) -> None:
    """Each reads the experts again from the memory of the device."""
    plain = Played(MIXTRAL, FULL, slowed(GPU, truth), EQUAL)
    rates = {}
    for mu in (32, 128, 256):
        other = replace(FULL, micro_batch_size=mu)
        rates[mu] = replace(plain, policy=other, ends_s=[], tokens=[]).play().rate()
    result = adapted(plain, GPU)
    if max(rates.values()) > 1.1 * rates[32]:
        assert result.changes
    assert result.rate(first=0.5) > 0.93 * max(rates.values())


@pytest.mark.parametrize("noise", thorough([0.0, 0.1], but=[0.1]))
@pytest.mark.parametrize(("policy", "speeds"), [(_sized(32), CPU), (FULL, GPU)], ids=["cpu", "gpu"])
def test_nothing_changes_where_the_machine_is_as_planned(policy: Policy, speeds: Speeds, noise: float) -> None:
    """The cache holds N sequences, and all of N are the plan's best: only noise could speak for another policy."""
    tight = replace(policy, kv_tokens=policy.batch_size * 160)
    if policy is FULL:
        tight = _best_sized(tight, speeds)
    played = Played(MIXTRAL, tight, speeds, [(128, 32)] * (3 * policy.batch_size), noise=noise)
    assert adapted(played, speeds).changes == []


def _best_sized(policy: Policy, speeds: Speeds) -> Policy:
    """What the adapter itself would have planned."""
    adapter = Adapter(MIXTRAL, policy, speeds, BFLOAT16)
    rest = Rest(waiting=True, prompt_len=128, gen_len=32, most_running=policy.batch_size)
    adapter._with_prompts = 0.0  # equal answers that began together end together
    best, _ = adapter._best(values_of(policy), rest)
    return with_values(policy, best)


@dataclass
class Thrashing(Played):
    """More sequences than 32 cost the machine dearly, which no ledger knows."""

    def _noisy(self, random: Random) -> float:
        return 3.0 if self.adapter is not None and self.adapter.policy.batch_size > 32 else 1.0


def test_back_from_a_change_that_did_not_keep_its_promise() -> None:
    result = adapted(Thrashing(MIXTRAL, ROOMY, CPU, uneven(400)), CPU)
    present, back = result.changes[:2]
    assert present.now["batch_size"] > 32
    assert back.now == present.before and back.before == present.now
    assert back.predicted_gain == 0
    assert "of the +" in back.reason
    assert result.adapter is not None
    assert result.adapter.policy.batch_size == 32
    assert all(change.now.get("batch_size", 32) <= 32 for change in result.changes[1:])


def test_changes_are_few_whatever_the_passes_say() -> None:
    """Lanes that are ten times faster or slower from one pass to the next."""
    random = Random(5)
    adapter = Adapter(MIXTRAL, FULL, GPU, BFLOAT16)
    rest = Rest(waiting=True, prompt_len=128, gen_len=32, most_running=400)
    changes = []
    for number in range(1600):
        busy = {lane: random.choice([0.05, 0.5, 5.0]) for lane in ("stage", "h2d", "d2h", "device", "cpu")}
        prompts = random.choice([0, 0, 8])
        adapter.observe(
            Passed(
                decode_tokens=200,
                context=140.0,
                prompt_tokens=128 * prompts,
                prompt_len=128.0 if prompts else 1.0,
                seconds=max(busy.values()) * random.uniform(1, 2),
                busy_s=busy,
            )
        )
        if number % 8 == 7:
            change = adapter.look(rest, after_pass=number)
            changes += [] if change is None else [change]
    assert len(changes) <= MOST_CHANGES


def test_what_the_user_fixed_stays() -> None:
    plain = Played(MIXTRAL, ROOMY, slowed(CPU, {"disk": 3.0}), uneven(160))
    assert "batch_size" in adapted(plain, CPU).changes[0].now
    for change in adapted(plain, CPU, fixed=("batch_size",)).changes:
        assert "batch_size" not in change.now


@examples(36)
@given(
    sequences=st.integers(1, 700),
    parts=st.integers(1, 12),
    tokens=st.sampled_from([64, 256, 1024]),
    devices=st.sampled_from([("cpu", "cpu"), ("cpu", "gpu"), ("gpu", "gpu")]),
    running=st.integers(1, 2000),
)
def test_candidates_need_no_more_memory_in_any_region(
    sequences: int, parts: int, tokens: int, devices: tuple[str, str], running: int
) -> None:
    mu = min(-(-sequences // parts), tokens)
    policy = Policy(
        model="m",
        batch_size=sequences,
        micro_batch_size=mu,
        micro_batch_tokens=tokens,
        kv_tokens=200 * sequences,
        attention_device=devices[0],
        ffn_device=devices[1],
    )
    allocation = Allocation(MIXTRAL, policy, BFLOAT16)
    resident = allocation.neighbours(values_of(policy), most_running=running)
    assert resident[0] == values_of(policy)
    assert len(set(resident)) == len(resident)
    allotted = _regions(policy)
    for values in resident:
        other = with_values(policy, values)
        allocation.check(other)
        for purpose, size in _regions(other).items():
            assert size <= allotted[purpose]


def _regions(policy: Policy) -> dict[str, int]:
    """Bytes by purpose; the buffer of contexts is filled as far as it goes, whatever the policy."""
    taken = footprint(MIXTRAL, policy, dtype=BFLOAT16)
    return {arena.purpose: arena.bytes for arena in taken.arenas if arena.purpose != "kv_buffer"}


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 33},
        {"micro_batch_tokens": 513},
        {"prompt_micro_batches": 9},
        {"schedule": "serial"},
        {"kv_tokens": 64},
        {"weights": Shares(host=1.0)},
    ],
)
def test_what_is_not_within_the_allocation_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="not within what was allocated"):
        Allocation(MIXTRAL, ROOMY, BFLOAT16).check(replace(ROOMY, **change))  # type: ignore[arg-type]


@examples(36)
@given(
    by=st.fixed_dictionaries({lane: st.floats(0.2, 5.0) for lane in ("disk", "stage", "h2d", "d2h", "device", "cpu")}),
    discrete=st.booleans(),
    contended=st.booleans(),
)
def test_the_machine_is_found_from_what_its_lanes_took(by: dict[str, float], discrete: bool, contended: bool) -> None:
    """Passes as the ledger prices them on the true machine: every factor comes out, and nothing is unexplained."""
    policy, speeds = (FULL, replace(GPU, transfer_s=0.0)) if discrete else (ROOMY, CPU)
    if contended:
        speeds = replace(speeds, under_disk=0.8, disk_under_cpu=0.9)
    true = PassPrices(MIXTRAL, policy, slowed(speeds, by), BFLOAT16)
    ran = []
    for decode, prompts in ((32, 0), (31, 2), (20, 8)):
        made = Passed(
            decode_tokens=decode,
            context=150.0,
            prompt_tokens=100 * prompts,
            prompt_len=100.0 if prompts else 1.0,
            seconds=0.0,
            busy_s={},
        )
        took = float(np.sum(true.seconds(policy, passes_that_ran([made]), {})))
        ran.append(replace(made, seconds=took, busy_s=true.lanes(policy, passes_that_ran([made]), {})))
    result = PassPrices(MIXTRAL, policy, speeds, BFLOAT16).learn(policy, ran, {})
    assert result.pop("pass") == pytest.approx(1.0, rel=0.02)
    for lane, factor in result.items():
        assert factor == pytest.approx(by[lane], rel=0.05)


@examples(200)
@given(
    prompt=st.integers(1, 600),
    gen=st.integers(1, 300),
    n=st.integers(1, 3000),
    riding=st.sampled_from([16, 256, 4096, 65536]),
    spread=st.floats(0, 400),
)
def test_in_full_swing_every_prompt_comes_once_and_is_answered(
    prompt: int, gen: int, n: int, riding: int, spread: float
) -> None:
    work = Workload(num_requests=10_000, prompt_len=prompt, max_prompt_len=prompt, gen_len=gen)
    kinds = steady_passes(work, n, riding, spread=spread)
    assert np.all(kinds.count >= 0) and np.all(kinds.decode_tokens >= -1e-9)
    assert np.sum(kinds.count * kinds.prompt_tokens) == pytest.approx(n * prompt)
    assert np.sum(kinds.count * kinds.decode_tokens) == pytest.approx(n * (gen - 1), abs=1e-6)
    rows = kinds.decode_tokens + kinds.prompts
    assert np.all(rows[kinds.count > 0] <= n * (1 + 1e-9))
    assert np.all((kinds.decode_tokens + kinds.prompt_tokens)[kinds.count > 0] <= (n + riding) * (1 + 1e-9)) or n > (
        n + riding
    ) / (prompt + gen)


def test_a_slowed_machine_takes_so_much_longer() -> None:
    by = {"disk": 2.0, "device": 3.0, "cpu": 5.0}
    slow = slowed(GPU, by)
    assert slow.gpu is not None and GPU.gpu is not None
    assert slow.disk == GPU.disk / 2
    assert slow.h2d == GPU.h2d
    for unit, original, factor in ((slow.cpu, GPU.cpu, 5.0), (slow.gpu, GPU.gpu, 3.0)):
        assert unit.product_s(64.0, 1 << 24, BFLOAT16) == pytest.approx(
            factor * original.product_s(64.0, 1 << 24, BFLOAT16)
        )
        assert unit.touch_s(1e6) == pytest.approx(factor * original.touch_s(1e6))
        assert unit.prefill_s(1e9, 128.0) == pytest.approx(factor * original.prefill_s(1e9, 128.0))
    assert slow.cpu.task_s == 5 * GPU.cpu.task_s


def test_fields_are_the_policys_own() -> None:
    assert set(FIELDS) <= set(Policy.__dataclass_fields__)
    assert with_values(ROOMY, values_of(ROOMY)) == ROOMY
