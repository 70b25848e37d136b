"""Whether experts that are near may change: decided where it can help, and never at the cost of memory. Which machine a
plan is for."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import FLOAT32
from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine import planning
from moelight.engine.engine import Engine
from moelight.engine.model import LazyModel
from moelight.engine.options import EngineOptions
from moelight.engine.planning import resolve_residents
from moelight.hrm.footprint import footprint, ring_slots
from moelight.hrm.placement import place_pages
from moelight.hrm.schedule_time import ON_DEMAND_SCHEDULES
from moelight.kernels import native
from moelight.profiles.hardware import HardwareProfile, load_hardware_profile
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload
from moelight.scheduler import SCHEDULES
from tests.cases import thorough
from tests.shapes import examples, small_model, small_policy
from tests.tiny import save_tiny

MODEL = small_model((True, True), experts=8)
TWIN = {"device": "twin", "device_memory": 1 << 30}


def resolved(policy: Policy, *, wanted: bool = False, model: ModelProfile = MODEL, **limits: int) -> tuple[Policy, str]:
    return resolve_residents(policy, model, FLOAT32, limits, requested=wanted)


def here(resident: int, **changes: object) -> Policy:
    return replace(small_policy(MODEL, discrete=False, resident=resident), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "wanted", "reason"),
    [
        (here(4, residents="static"), True, "the policy says so"),
        (here(16), True, "every expert is resident"),
        (here(0), True, "no expert is resident"),
        (here(4, schedule="flexgen"), True, "flexgen moves every expert in every pass"),
        (here(12, batch_size=12), False, "the ring beside the experts holds less than a layer"),
        (here(1, batch_size=1), True, "on-demand passes"),
        (here(4, batch_size=12), False, "on-demand passes"),
        (here(12, batch_size=12), True, "on-demand passes"),
        (here(12, batch_size=1), False, "on-demand passes"),
        (here(12, batch_size=12, residents="learned"), False, "on-demand passes"),
    ],
)
def test_the_reason_is_said(policy: Policy, wanted: bool, reason: str) -> None:
    result, message = resolved(policy, wanted=wanted)
    assert message.startswith(reason)
    assert result.residents == ("learned" if reason == "on-demand passes" else "static")
    if result.residents == "static":
        assert result == replace(policy, residents="static")


def test_copies_of_what_is_near_a_device_need_room_in_host_memory() -> None:
    policy = small_policy(MODEL, discrete=True, resident=6, host=10)
    need = footprint(MODEL, replace(policy, residents="learned"), dtype=FLOAT32).total("host")
    assert resolved(policy, host=need)[0].residents == "learned"
    result, message = resolved(policy, host=need - 1)
    assert result.residents == "static"
    assert "host memory" in message


@examples(100)
@given(
    resident=st.integers(0, 16),
    host=st.integers(0, 16),
    discrete=st.booleans(),
    schedule=st.sampled_from(SCHEDULES.names()),
    wanted=st.booleans(),
    n=st.sampled_from([1, 8]),
)
def test_it_takes_no_more_memory_than_was_planned(
    resident: int, host: int, discrete: bool, schedule: str, wanted: bool, n: int
) -> None:
    """Beside the experts in any case; elsewhere within the limits, which here are what the plan takes."""
    policy = small_policy(MODEL, discrete=discrete, resident=resident, host=min(host, 16 - resident))
    policy = replace(policy, schedule=schedule, batch_size=n, micro_batch_size=min(4, n))
    before = footprint(MODEL, policy, dtype=FLOAT32)
    result, _ = resolved(policy, wanted=wanted, host=before.total("host"), device=before.total("device"))
    after = footprint(MODEL, result, dtype=FLOAT32)
    assert after.total("host") <= before.total("host")
    assert after.total("device") <= before.total("device")
    assert isinstance(result.weights, Shares)
    if result.residents == "learned":
        placement = place_pages(MODEL, result)
        assert schedule in ON_DEMAND_SCHEDULES
        assert 0 < len(placement.resident) <= resident
        assert ring_slots(placement) >= 8
    else:
        assert result.weights == policy.weights


@pytest.mark.parametrize(
    ("requests", "options", "measured"),
    thorough(
        [(10**6, {}, 1), (10, {}, 0), (10**6, {"hw": "cpu-avx2"}, 0), (10**6, TWIN, 0)],
        but=[(10**6, {}, 1)],
    ),
)
def test_a_long_job_on_an_unknown_machine_measures_it(
    monkeypatch: pytest.MonkeyPatch, requests: int, options: dict[str, Any], measured: int
) -> None:
    """Once, before the plan is made, with the disk of the model."""
    retained: list[HardwareProfile] = []
    disks: list[Path | None] = []

    def measure(*, disk_dir: Path | None) -> None:
        disks.append(disk_dir)
        retained.append(replace(load_hardware_profile("laptop-nvme"), name="auto"))

    monkeypatch.setattr(planning, "machine_profile", measure)
    monkeypatch.setattr(planning, "kept_profile", lambda: retained[0] if retained else None)
    monkeypatch.setattr(planning, "accelerator_name", lambda device: None)
    monkeypatch.setattr(planning, "hardware_for", inspect.unwrap(planning.hardware_for))
    model, workload = LazyModel("demo"), Workload(num_requests=requests)
    plans = [model.plan(EngineOptions(**({"device": "cpu"} | options)), workload).plan for _ in range(2)]
    assert disks == [model.directory] * measured
    assert [plan and plan.hardware == "auto" for plan in plans] == [bool(measured)] * 2


@pytest.mark.parametrize(("tiles", "name"), [(True, "cpu-amx"), (False, "cpu-avx2")])
def test_a_machine_that_was_not_measured_is_planned_as_one_of_its_kind(
    tiles: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "kept_profile", lambda: None)
    monkeypatch.setattr(native, "has_tiles", lambda: tiles)
    find = inspect.unwrap(planning.hardware_for)
    assert (find("auto", discrete=False).name, find("auto", discrete=True).name) == (name, "t4")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("m"), "qwen3_moe", dtype="bfloat16")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "float16", "auto"])
def test_the_dtype_of_computation_is_planned_and_run(tiny: Path, dtype: str) -> None:
    how = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
    with Engine.from_pretrained(tiny, dtype=dtype, device="cpu", batch_size=1) as engine:
        assert engine.plan is not None and engine.plan.policy.weight_dtype == engine.policy.weight_dtype == dtype
        assert ("weight_dtype" in engine.plan.fixed) == (dtype != "auto")
        (planned,) = engine.generate(["abc"], how)
        policy = replace(engine.policy, model=str(tiny))
    with Engine(policy, device="cpu") as engine:
        (as_policy,) = engine.generate(["abc"], how)
    assert planned.token_ids == as_policy.token_ids and planned.cumulative_logprob == as_policy.cumulative_logprob


def test_a_dtype_that_nothing_computes_in_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"--dtype 'float8' is not one of auto, bfloat16, float16, float32"):
        Engine.from_pretrained(tiny, dtype="float8", device="cpu")
    with pytest.raises(ConfigError, match="does not compute in it; use float16 or float32"):
        Engine.from_pretrained(tiny, dtype="bfloat16", device="twin:fp16", device_memory="1GiB")
