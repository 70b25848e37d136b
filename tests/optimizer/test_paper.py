"""The published planner: its known results, what may be fixed, what it refuses, and the plan it makes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import BudgetError, ConfigError
from moelight.core.units import GiB, MiB, parse_bytes
from moelight.optimizer.plan import Plan
from moelight.optimizer.published import published_plan
from moelight.profiles.files import profile_names
from moelight.profiles.hardware import HardwareProfile, load_hardware_profile
from moelight.profiles.model import ModelProfile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from tests.published import l4, machine, t4
from tests.shapes import examples, small_model

MIXTRAL = load_model_profile("mixtral")
PADDED_L4 = l4(188 * GiB)


def work(prompt_len: int, gen_len: int) -> Workload:
    return Workload(prompt_len=prompt_len, max_prompt_len=prompt_len, gen_len=gen_len)


def plan(hardware: HardwareProfile, workload: Workload, *, model: ModelProfile = MIXTRAL, **fix: object) -> Plan:
    fixed = {key.replace("__", "."): value for key, value in fix.items()}
    return published_plan(hardware, model, workload, name="m", fix=fixed, what_ifs=False)


def sizes(result: Plan) -> tuple[int, int]:
    return result.policy.micro_batch_size, result.policy.num_micro_batches


# ---------------------------------------------------------------------------------------------------------------------
# Known results


def test_the_readmes_result() -> None:
    result = plan(l4(), work(77, 32))
    assert sizes(result) == (324, 14)
    assert result.policy.batch_size == 4536
    assert round(result.policy.weights.device, 4) == 0.0559
    assert round(result.estimate.decode_tokens_per_s, 2) == 944.66
    assert round(result.estimate.layer_s * 32, 3) == 4.957
    assert result.estimate.binding == "h2d"
    memory = {use.tier: use.total_bytes for use in result.memory}
    assert round(memory["device"] / GiB, 2) == 20.64
    assert round(memory["host"] / GiB, 2) == 147.28


@pytest.mark.parametrize(
    ("hardware", "prompt_len", "gen_len", "expected"),
    [
        (l4(), 77, 64, (228, 16)),
        (l4(), 77, 128, (164, 16)),
        (l4(), 256, 50, (100, 15)),
        (t4(), 77, 128, (164, 14)),
        (t4(), 418, 32, (36, 14)),
        (t4(), 418, 64, (36, 14)),
        (t4(), 418, 128, (36, 14)),
        (t4(), 418, 256, (36, 14)),
        (PADDED_L4, 418, 32, (68, 16)),
        (PADDED_L4, 418, 64, (68, 15)),
        (PADDED_L4, 418, 128, (68, 13)),
        (PADDED_L4, 418, 256, (68, 11)),
    ],
)
def test_the_reproducible_policies(
    hardware: HardwareProfile, prompt_len: int, gen_len: int, expected: tuple[int, int]
) -> None:
    assert sizes(plan(hardware, work(prompt_len, gen_len))) == expected


@pytest.mark.parametrize(
    ("gpus", "gen_len", "batch_size"),
    [
        (2, 32, 252),
        (2, 64, 252),
        (2, 128, 252),
        (2, 256, 252),
        (4, 32, 648),
        (4, 64, 612),
        (4, 128, 540),
        (4, 256, 468),
    ],
)
def test_two_and_four_gpus(gpus: int, gen_len: int, batch_size: int) -> None:
    """Settings S6 and S7: Mixtral 8x22B, padded. How much of 416 GB the host had left is not published; 401 GiB fit."""
    result = plan(t4(gpus=gpus, host_bytes=401 * GiB), work(418, gen_len), model=load_model_profile("mixtral-8x22b"))
    assert result.policy.batch_size == batch_size


@pytest.mark.parametrize(
    ("prompt_len", "gen_len", "published", "ours"),
    [
        (77, 32, (164, 19), (164, 22)),
        (77, 64, (164, 19), (164, 20)),
        (256, 50, (36, 26), (36, 41)),
        (1984, 64, (4, 19), (4, 54)),
    ],
)
def test_rows_that_differ_among_equals(
    prompt_len: int, gen_len: int, published: tuple[int, int], ours: tuple[int, int]
) -> None:
    """The GPU binds, and a sequence takes the same time in all of them; rounding stopped the artifact's search."""
    result = plan(t4(), work(prompt_len, gen_len))
    theirs = plan(t4(), work(prompt_len, gen_len), micro_batch_size=published[0], num_micro_batches=published[1])
    assert sizes(result) == ours
    assert result.estimate.binding == theirs.estimate.binding == "device"
    assert theirs.estimate.decode_tokens_per_s == pytest.approx(result.estimate.decode_tokens_per_s, rel=1e-12)


def test_rows_that_the_formulas_do_not_give() -> None:
    """docs/concepts/hrm.md lists them; a formula bent until they came out would show here."""
    result = plan(l4(), work(77, 256))
    theirs = plan(l4(), work(77, 256), micro_batch_size=132, num_micro_batches=12)
    assert sizes(result) == (164, 10)
    assert theirs.estimate.decode_tokens_per_s == pytest.approx(0.974 * result.estimate.decode_tokens_per_s, rel=1e-3)
    assert sizes(plan(t4(), work(77, 256))) == (132, 11)
    assert sizes(plan(l4(), work(1984, 64))) == (4, 62)
    for hardware, workload, (mu, n_ub) in ((t4(), work(77, 256), (100, 15)), (l4(), work(1984, 64), (8, 36))):
        with pytest.raises(BudgetError) as caught:
            plan(hardware, workload, micro_batch_size=mu, num_micro_batches=n_ub)
        assert caught.value.tier == "host"


def test_rates_follow_from_the_layer() -> None:
    result = plan(l4(), work(77, 32))
    batch, layer_s = result.policy.batch_size, result.estimate.layer_s
    assert result.estimate.decode_tokens_per_s == pytest.approx(batch * 32 / (layer_s * 31 * 32))
    whole_s = result.estimate.phases[0].seconds + 32 * 31 * layer_s
    assert result.estimate.tokens_per_s == pytest.approx(batch * 32 / whole_s)
    assert result.estimate.tokens_per_s < result.estimate.decode_tokens_per_s
    assert (
        max(result.estimate.lanes.values())
        == pytest.approx(32 * layer_s)
        == pytest.approx(result.estimate.lanes[result.estimate.binding])
    )
    assert max(result.estimate.phases[0].lanes.values()) == pytest.approx(result.estimate.phases[0].seconds)


def test_requests_and_the_longest_prompt_do_not_enter() -> None:
    one = Workload(num_requests=1, prompt_len=77, max_prompt_len=77, gen_len=32)
    many = Workload(num_requests=10**6, prompt_len=77, max_prompt_len=4000, gen_len=32)
    result = plan(l4(), one)
    assert replace(plan(l4(), many), workload=one) == result


# ---------------------------------------------------------------------------------------------------------------------
# The search


def test_of_equals_the_largest_is_taken() -> None:
    """Where the CPU's attention binds, every cell of enough sequences takes the same time per sequence."""
    slow_cpu = replace(l4(), processors=tuple(replace(p, peak_flops=1e9) for p in l4().processors if p.name == "cpu"))
    slow_cpu = replace(slow_cpu, processors=(l4().processors[0], *slow_cpu.processors))
    result = plan(slow_cpu, work(77, 32))
    assert result.estimate.binding == "cpu"
    mu, n_ub = sizes(result)
    larger = [{"micro_batch_size": mu + 32}, {"micro_batch_size": mu, "num_micro_batches": n_ub + 1}]
    for fix in larger:
        with pytest.raises(BudgetError):
            plan(slow_cpu, work(77, 32), **fix)


def test_what_cannot_win_is_pruned_and_not_lost() -> None:
    """One-token prompts of a toy on a big machine: billions of cells."""
    result = plan(l4(), work(8, 8), model=small_model())
    assert result.policy.batch_size > 10**6


@pytest.mark.thorough
def test_every_shipped_machine_and_model_is_planned() -> None:
    machines = [load_hardware_profile(name) for name in profile_names("hardware")]
    models = [load_model_profile(name) for name in profile_names("model")]
    for hardware in machines:
        for model in models:
            try:
                result = plan(hardware, work(77, 32), model=model)
            except (BudgetError, ConfigError) as error:
                assert "\n" not in str(error)
                continue
            assert result.policy.weights.device + result.policy.weights.host == pytest.approx(1)


# ---------------------------------------------------------------------------------------------------------------------
# What is fixed


@pytest.mark.parametrize(
    "fix",
    [
        {"batch_size": 504},
        {"batch_size": 7},
        {"micro_batch_size": 8},
        {"num_micro_batches": 3},
        {"batch_size": 500, "num_micro_batches": 5},
        {"batch_size": 500, "micro_batch_size": 50},
        {"micro_batch_size": 50, "num_micro_batches": 5},
        {"batch_size": 250, "micro_batch_size": 50, "num_micro_batches": 5},
        {"weight_dtype": "int4", "kv_dtype": "int8"},
        {"ffn_device": "gpu", "attention_device": "cpu", "schedule": "cgopipe"},
        {"attention_device": "gpu", "schedule": "flexgen"},
    ],
)
def test_what_is_fixed_is_kept(fix: dict[str, Any]) -> None:
    policy = plan(l4(), work(77, 32), **fix).policy
    assert {key: getattr(policy, key) for key in fix} == fix
    assert policy.batch_size == policy.micro_batch_size * policy.num_micro_batches


@pytest.mark.parametrize("free", [{}, {"attention_device": "gpu"}])
def test_fixed_shares_are_kept(free: dict[str, Any]) -> None:
    assert plan(l4(), work(77, 32), weights__device=0.03, **free).policy.weights.device == 0.03
    assert plan(l4(), work(77, 32), weights__host=0.99, weights__disk=0, **free).policy.weights.host == 0.99
    both = plan(l4(), work(77, 32), weights__host=0.9, weights__device=0.1, **free).policy.weights
    assert (both.device, both.host) == (0.1, 0.9)


def test_the_cache_may_be_shared_out_where_the_gpu_attends() -> None:
    free = plan(l4(), work(77, 32), attention_device="gpu")
    assert free.policy.kv.device == 1
    assert free.policy.schedule == "flexgen"
    assert free.estimate.lanes["cpu"] == 0
    half = plan(l4(), work(77, 32), attention_device="gpu", kv__device=0.5)
    assert (half.policy.kv.device, half.policy.kv.host) == (0.5, 0.5)
    assert half.estimate.decode_tokens_per_s < free.estimate.decode_tokens_per_s


def test_the_cpu_attends_unless_it_is_fixed() -> None:
    """On this machine the GPU would be better, and the artifact never asks."""
    hardware = replace(l4(), processors=(l4().processors[0], replace(l4().processors[1], peak_flops=1e9)))
    assert plan(hardware, work(77, 32)).policy.attention_device == "cpu"
    fixed = plan(hardware, work(77, 32), attention_device="gpu")
    assert fixed.estimate.decode_tokens_per_s > plan(hardware, work(77, 32)).estimate.decode_tokens_per_s


@pytest.mark.parametrize(
    ("fix", "named"),
    [
        ({"ffn_device": "cpu"}, ["ffn_device=cpu"]),
        ({"ffn_device": "split", "cpu_experts": 0.2}, ["ffn_device=split"]),
        ({"cpu_experts": 0.2}, ["cpu_experts=0.2"]),
        ({"weights.disk": 0.1}, ["weights.disk=0.1"]),
        ({"weights.device": 0.1, "weights.host": 0.5}, ["weights.device=0.1", "weights.host=0.5"]),
        ({"weights.device": 0.6, "weights.host": 0.5}, ["weights.device=0.6", "weights.host=0.5"]),
        ({"kv.device": 0.5}, ["kv.device=0.5", "attention_device=gpu"]),
        ({"kv.device": 0.5, "attention_device": "cpu"}, ["kv.device=0.5", "attention_device=cpu"]),
        ({"kv.host": 0.5, "attention_device": "cpu"}, ["kv.host=0.5", "attention_device=cpu"]),
        ({"schedule": "serial"}, ["schedule=serial"]),
        ({"schedule": "flexgen", "attention_device": "cpu"}, ["schedule=flexgen", "attention_device=cpu"]),
        ({"schedule": "cgopipe", "attention_device": "gpu"}, ["schedule=cgopipe", "attention_device=gpu"]),
        ({"batch_size": 500, "micro_batch_size": 36}, ["batch_size=500", "micro_batch_size=36"]),
        ({"batch_size": 500, "num_micro_batches": 7}, ["batch_size=500", "num_micro_batches=7"]),
        ({"kv_tokens": 5000}, ["kv_tokens=5000"]),
    ],
)
def test_contradictions_name_their_keys(fix: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        published_plan(l4(), MIXTRAL, work(77, 32), name="m", fix=fix)
    assert all(name in str(caught.value) for name in named), caught.value
    assert "\n" not in str(caught.value)


def test_one_token_is_no_decoding() -> None:
    with pytest.raises(ConfigError, match="gen_len 1"):
        plan(l4(), work(77, 1))


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@examples(25)
@given(prompt_len=st.integers(1, 500), gen_len=st.integers(2, 300), gpu=st.booleans(), gpus=st.integers(1, 3))
def test_memory_is_within_the_rules_and_adds_up(prompt_len: int, gen_len: int, gpu: bool, gpus: int) -> None:
    hardware = machine(
        device_bytes=24 * GiB, device_bandwidth=3e11, gpu_flops=1e14, cpu_flops=1e12, gpus=gpus, disk_bytes=10**12
    )
    result = plan(hardware, work(prompt_len, gen_len), attention_device="gpu" if gpu else "cpu")
    assert [(use.tier, use.capacity_bytes) for use in result.memory] == [
        ("device", gpus * 24 * GiB),
        ("host", hardware.tiers[1].capacity_bytes),
        ("disk", 10**12),
    ]
    used = {use.tier: use.total_bytes for use in result.memory}
    assert used["device"] <= 0.86 * gpus * 24 * GiB + 8
    assert used["host"] <= 0.8 * hardware.tiers[1].capacity_bytes + 8
    assert used["disk"] == 0


@pytest.mark.parametrize("fix", [{}, {"attention_device": "gpu"}, {"batch_size": 3000}, {"micro_batch_size": 500}])
@pytest.mark.parametrize("gpus", [1, 2])
def test_the_refusals_figure_is_enough_and_no_more(fix: dict[str, Any], gpus: int) -> None:
    """From almost nothing in steps of what the refusals ask for; a byte of capacity less is refused again."""
    given_bytes, seen = {"device": MiB, "host": MiB}, []

    def hardware() -> HardwareProfile:
        return machine(
            device_bytes=given_bytes["device"],
            device_bandwidth=3e11,
            gpu_flops=1e14,
            cpu_flops=1e12,
            host_bytes=given_bytes["host"],
            gpus=gpus,
        )

    for _ in range(4):
        try:
            plan(hardware(), work(77, 32), **fix)
            break
        except BudgetError as error:
            line = str(error)
            assert "\n" not in line
            asked = re.search(r"needs at least (\S+) for batch_size \d+.*?, (\S+) \((\d+) bytes\) more", line)
            assert asked
            assert f"--{error.tier}-memory" in line
            assert int(asked[3]) == error.needed_bytes - given_bytes[error.tier]
            assert parse_bytes(asked[1]) >= error.needed_bytes
            seen.append(error.tier)
            given_bytes[error.tier] = error.needed_bytes
    else:
        pytest.fail("what the refusals asked for was not enough")
    assert seen == ["device", "host"]
    for tier in seen:
        enough = dict(given_bytes)
        given_bytes[tier] -= 2
        with pytest.raises(BudgetError) as caught:
            plan(hardware(), work(77, 32), **fix)
        assert caught.value.needed_bytes - given_bytes[caught.value.tier] < 4 * GiB
        given_bytes.update(enough)


def test_a_refusal_offers_other_changes() -> None:
    with pytest.raises(BudgetError, match=r"; or a batch_size of at most (\d+) in micro-batches of 1") as caught:
        plan(l4(), work(77, 32), batch_size=100000)
    assert caught.value.tier in ("host", "device")
    match = re.search(r"at most (\d+) in", str(caught.value))
    assert match
    maximum = int(match[1])
    assert plan(l4(), work(77, 32), batch_size=maximum).policy.batch_size == maximum
    with pytest.raises(BudgetError):
        plan(l4(), work(77, 32), batch_size=maximum + 1)
    with pytest.raises(BudgetError, match=r"; or a micro_batch_size of at most \d+$"):
        plan(l4(), work(77, 32), micro_batch_size=5000)
    with pytest.raises(BudgetError, match=r"--host-memory .*; or \S+ more --device-memory"):
        plan(l4(60 * GiB), work(77, 32))
    tiny = machine(device_bytes=GiB, device_bandwidth=1e11, gpu_flops=1e13, cpu_flops=1e12, host_bytes=GiB)
    with pytest.raises(BudgetError, match=r"--device-memory 1.0GiB is too small .*, and --host-memory \S+$"):
        plan(tiny, work(77, 32))


# ---------------------------------------------------------------------------------------------------------------------
# The plan


def test_the_plan_says_what_the_search_found() -> None:
    result, made = plan(l4(), work(77, 32)), published_plan(l4(), MIXTRAL, work(77, 32), name="m", fix={})
    assert made.policy == result.policy
    assert made.estimate.pass_s == 32 * result.estimate.layer_s
    assert made.estimate.tokens_per_s < made.bound_tokens_per_s == result.estimate.decode_tokens_per_s
    jobs_s = sum(phase.passes * phase.seconds for phase in made.estimate.phases)
    assert result.policy.batch_size * 32 / jobs_s == pytest.approx(made.estimate.tokens_per_s)
    assert [use.tier for use in made.memory] == ["device", "host"]
    gains = [result.gain for result in made.what_if]
    assert gains == sorted(gains, reverse=True)
    assert made.what_if[0].change == "twice the link bandwidth"
    assert "324" in made.why
