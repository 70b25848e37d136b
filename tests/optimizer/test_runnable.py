"""What can be planned and not run says so: in the plan, its JSON, its table and its file, and where it is asked to run.

A plan that says it runs is not refused for what it is; what is listed as impossible the engine refuses.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.engine.api import optimize
from moelight.engine.options import EngineOptions
from moelight.engine.planning import hardware_for, plan_for, resolve
from moelight.formats.packed import PackedFormat
from moelight.models.checkpoints import open_model
from moelight.optimizer.runnable import device_faults, policy_faults
from moelight.profiles.hardware import HardwareProfile, load_hardware_profile
from moelight.profiles.hardware_text import hardware_profile_text
from moelight.profiles.policy_files import load_policy, policy_text
from moelight.profiles.quantization import with_stored
from moelight.profiles.workload import Workload
from moelight.runtime.machine import find_machine
from tests.cases import thorough
from tests.cli.program import moelight_inside, write_prompts
from tests.shapes import small_model

pytestmark = pytest.mark.usefixtures("unproved")
WORK = Workload(num_requests=24, prompt_len=12, max_prompt_len=16, gen_len=8)
ASKED = ("--num-requests", "24", "--prompt-len", "12", "--gen-len", "8")
ON_GPU = Policy(model="m", ffn_device="gpu")
IMPOSSIBLE = {
    "several GPUs": (replace(ON_GPU, gpus=2), "it is for 2 GPUs, and the engine uses one"),
    "int8 experts": (replace(ON_GPU, weight_dtype="int8"), "moelight convert m OUT --experts int8 makes one"),
    "int4 experts": (replace(ON_GPU, weight_dtype="int4"), "moelight convert m OUT --experts int4 makes one"),
    "another cache": (replace(ON_GPU, kv_dtype="float16"), "kv_dtype 'float16'"),
    "an int4 cache": (replace(ON_GPU, kv_dtype="int4"), "kv_dtype 'int4' must be int8 or the weights' dtype"),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_what_is_listed_is_what_the_engine_refuses(kind: str) -> None:
    policy, words = IMPOSSIBLE[kind]
    (fault,) = policy_faults(policy)
    assert words in fault
    with pytest.raises(ConfigError) as refused:
        resolve(policy, small_model(), discrete=True)
    assert fault in str(refused.value)


def test_what_is_not_listed_is_not_refused() -> None:
    both = replace(ON_GPU, weight_dtype="float16", kv_dtype="float16")
    for policy in (ON_GPU, both, replace(ON_GPU, kv_dtype="int8")):
        assert not policy_faults(policy)
        resolve(policy, small_model(), discrete=True)


@pytest.mark.parametrize(
    ("machine", "model", "runs"),
    thorough(
        [("t4", "deepseek-v2-lite", False), ("l4", "deepseek-v2-lite", True), ("t4", "olmoe-1b-7b", True)],
        but=[("t4", "deepseek-v2-lite", False)],
    ),
)
def test_module_graphs_need_a_card_with_bfloat16(machine: str, model: str, runs: bool) -> None:
    plan = optimize(machine, model, WORK, cache=False)
    assert plan.runs == runs
    assert runs or "not computed in float16 on a GPU without bfloat16" in plan.why_not[0]


def test_a_plan_says_whether_it_runs_also_from_the_cache() -> None:
    model = small_model()
    for _ in range(2):
        one, two = (optimize(hardware, model, WORK, fix={"ffn": "gpu"}) for hardware in ("t4", "2xt4"))
        assert (one.runs, one.why_not, one.policy.gpus) == (True, (), 1)
        assert (two.runs, two.policy.gpus) == (False, 2) and "2 GPUs" in two.why_not[0]


class CPUFormat(PackedFormat):
    """A format that has no Triton unpacker."""

    unpacker = None


def test_experts_in_a_format_without_an_unpacker_run_on_the_cpu() -> None:
    stored = CPUFormat(name="int4", bits=4, scale="F32", group=0)
    model = with_stored(small_model(), lambda module: stored if "experts" in module else None, "config.json")
    fault = "ffn_device gpu: the experts are int4, which no program of a GPU unpacks; use ffn_device cpu"
    with pytest.raises(ConfigError, match=fault):
        resolve(ON_GPU, model, discrete=True)
    plan, fixed = (optimize("t4", model, WORK, fix=fix, cache=False) for fix in ({}, {"ffn": "gpu"}))
    assert (plan.runs, plan.policy.ffn_device) == (True, "cpu")
    assert fixed.why_not == (fault,)
    served = with_stored(small_model(), lambda _: PackedFormat(name="int4", bits=4, scale="F32"), "config.json")
    assert not device_faults(ON_GPU, served)


def test_the_table_the_json_and_the_file_say_so(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    asked = ("optimize", "--hw", "2xt4", "--model", "demo", *ASKED, "--fix", "ffn=gpu", "--weight-dtype", "int8")
    done = moelight_inside(*asked, "-o", path)
    assert done.returncode == 0
    message = " ".join(done.stdout.split())
    assert "cannot be run yet: it is for 2 GPUs, and the engine uses one" in message
    assert "experts in int8 (weight_dtype) need a checkpoint that stores them so: moelight convert demo OUT" in message
    result = json.loads(moelight_inside(*asked, "--json").stdout)
    assert result["runs"] is False and len(result["why_not"]) == 2 and result["policy"]["gpus"] == 2
    assert load_policy(path).gpus == 2 and yaml.safe_load(path.read_text())["gpus"] == 2
    comments = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    assert "It cannot be run yet: it is for 2 GPUs" in comments and "Run it" not in comments
    runs = tmp_path / "runs.yaml"
    moelight_inside("optimize", "--hw", "t4", "--model", "demo", *ASKED, "-o", runs)
    assert "# Run it: moelight generate" in runs.read_text() and "cannot be run" not in runs.read_text()


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy(model="demo", ffn_device="gpu", gpus=4), ["4 GPUs"]),
        (Policy(model="demo", weight_dtype="int4", gpus=2), ["int4", "2 GPUs"]),
        (Policy(model="dbrx", gpus=2), ["2 GPUs"]),
    ],
)
def test_generate_refuses_it_by_name(policy: Policy, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(policy_text(policy))
    prompts = write_prompts(tmp_path / "p.jsonl", {"prompt": "add 1 and 2 ="})
    done = moelight_inside("generate", prompts, "--policy", path, "-o", tmp_path / "out.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"moelight: error: --policy {path} cannot be run: ") and done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def two_gpus(tmp_path: Path) -> tuple[HardwareProfile, Path]:
    """A machine as `moelight profile` writes one of a host with two GPUs, and its file."""
    machine = replace(load_hardware_profile("2xt4"), name="two")
    path = tmp_path / "two.yaml"
    path.write_text(hardware_profile_text(machine))
    return machine, path


def test_one_of_several_gpus_can_be_asked_for(tmp_path: Path) -> None:
    model = small_model()
    one, asked = (optimize("2xt4", model, WORK, fix={"ffn": "gpu", "gpus": count}, cache=False) for count in (1, 2))
    assert (one.runs, one.policy.gpus, asked.policy.gpus) == (True, 1, 2)
    assert one.use_of("device").capacity_bytes * 2 == asked.use_of("device").capacity_bytes
    for machine, present in (("2xt4", 2), ("t4", 1), ("cpu-avx2", 0)):
        with pytest.raises(ConfigError, match=f"gpus=4: the machine {machine} has {present}"):
            optimize(machine, model, WORK, fix={"gpus": 4})


@pytest.mark.thorough
def test_of_several_gpus_one_is_planned_for(tmp_path: Path) -> None:
    machine, path = two_gpus(tmp_path)
    unit = machine.processor("gpu")
    assert unit is not None and unit.count == 2
    result = hardware_for(str(path), discrete=True)
    one = result.processor("gpu")
    assert one is not None and one == replace(unit, count=1) and result.tiers == machine.tiers
    source = open_model("demo")

    def planned(hw: str) -> float:
        options = EngineOptions(hw=hw, host_memory=2 << 30, device_memory=1 << 30)
        plan = plan_for("demo", source, find_machine("twin"), options, WORK)
        assert plan.runs and plan.policy.gpus == 1
        assert plan.use_of("device").capacity_bytes == 1 << 30
        return plan.estimate.tokens_per_s

    alone = tmp_path / "one.yaml"
    alone.write_text(hardware_profile_text(replace(result, name="one")))
    assert planned(str(path)) == planned(str(alone))
