"""The planner in Python: names or profiles in, plans and timelines out."""

from __future__ import annotations

from pathlib import Path

import pytest

import moelight
from moelight.core.errors import BudgetError, ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane, TaskKind
from moelight.engine.api import optimize, simulate
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload

pytestmark = pytest.mark.usefixtures("unproved")
WORK = Workload(num_requests=24, prompt_len=12, max_prompt_len=16, gen_len=8)
DEMO = str(Path(moelight.__file__).parent / "demo")
POLICY = Policy(
    model=DEMO,
    batch_size=12,
    micro_batch_size=4,
    micro_batch_tokens=32,
    kv_tokens=1024,
    ffn_device="gpu",
    weights=Shares(device=0.25, host=0.75),
)


def test_names_and_profiles_ask_the_same() -> None:
    by_name = optimize("cpu-avx2", DEMO, WORK, cache=False)
    by_profile = optimize(load_hardware_profile("cpu-avx2"), load_model_profile(DEMO), WORK, name=DEMO, cache=False)
    assert by_name.policy == by_profile.policy and by_name.policy.model == DEMO
    assert by_name.hardware == "cpu-avx2" and by_name.workload == WORK


def test_fixed_parts_have_the_keys_of_the_command_line() -> None:
    fix = {"attention": "cpu", "ffn": "gpu", "batch_size": 6, "weights.device": 0.5}
    policy = optimize("t4", DEMO, WORK, fix=fix, cache=False).policy
    assert (policy.attention_device, policy.ffn_device, policy.batch_size) == ("cpu", "gpu", 6)
    assert policy.weights.device == 0.5
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        optimize("t4", DEMO, WORK, fix={"batchsize": 6})


def test_limits_hold_to_the_byte() -> None:
    with pytest.raises(BudgetError) as refused:
        optimize("cpu-avx2", DEMO, WORK, limits={"host": 1 << 20}, cache=False)
    assert refused.value.tier == "host"
    plan = optimize("cpu-avx2", DEMO, WORK, limits={"host": refused.value.needed_bytes}, cache=False)
    assert plan.use_of("host").total_bytes <= refused.value.needed_bytes


@pytest.mark.parametrize(
    ("ask", "nearest"),
    [
        (lambda: optimize("l44", DEMO, WORK), "'l4'"),
        (lambda: optimize("t4", "mixtrall", WORK), "'mixtral-8x7b'"),
        (lambda: optimize("t4", DEMO, "mtbunch"), "'mtbench'"),
        (lambda: optimize("t4", DEMO, WORK, estimator="papper"), "'paper'"),
        (lambda: simulate(POLICY, hardware="t4", schedule="cgopip"), "'cgopipe'"),
    ],
)
def test_unknown_names_come_with_the_nearest(ask, nearest: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="did you mean") as refused:
        ask()
    assert nearest in str(refused.value)


def test_a_plan_knows_its_machine_and_its_work() -> None:
    plan = optimize("cpu-avx2", DEMO, WORK, cache=False)
    timeline = simulate(plan)
    assert set(timeline.busy_s()) <= {Lane.CPU, Lane.DISK}
    kinds = [span.task.kind for span in timeline.spans]
    assert kinds.count(TaskKind.SAMPLE) == plan.policy.num_micro_batches


def test_a_policy_needs_a_machine_and_may_run_in_another_order() -> None:
    with pytest.raises(ConfigError, match="hardware="):
        simulate(POLICY)
    lengths = {}
    for schedule in ("cgopipe", "serial"):
        timeline = simulate(POLICY, hardware="t4", workload=WORK, schedule=schedule)
        lengths[schedule] = timeline.end_s - timeline.start_s
        assert sum(span.task.kind is TaskKind.SEND_PAGE for span in timeline.spans) == 24
    assert lengths["cgopipe"] < lengths["serial"]


def test_prompts_may_ride_along() -> None:
    plain = simulate(POLICY, hardware="t4", workload=WORK)
    mixed = simulate(POLICY, hardware="t4", workload=WORK, with_prompts=True)
    attended = {span.task.kind for span in mixed.spans}
    assert TaskKind.ATTENTION in attended and TaskKind.ATTENTION not in {span.task.kind for span in plain.spans}


def test_the_public_functions_are_these() -> None:
    assert moelight.optimize is optimize and moelight.simulate is simulate
