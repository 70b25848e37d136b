"""Activations rounded to int8 through the engine: asked for, said, near the exact tokens, and refused by name."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moelight.batch.fingerprint import number_facts
from moelight.cli.main import main
from moelight.core.errors import CheckpointError, ConfigError
from moelight.core.policy import Policy, Shares
from moelight.engine.api import optimize
from moelight.engine.planning import resolve
from moelight.formats.ggml import ggml_format
from moelight.hrm.estimate import cost_model_of
from moelight.hrm.machine_model import speeds_of
from moelight.kernels import native
from moelight.kernels.gpu import serving
from moelight.models.checkpoints import open_model
from moelight.optimizer.plan import plan_as_dict
from moelight.optimizer.runnable import activation_faults
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from tests.cases import thorough
from tests.engine.graphs import STREAMED, tokens
from tests.engines import Tiny
from tests.weights.quantised import METHODS, quantise, quantise_stacks

SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
BOTH = ("auto", "int8")
RESIDENT = Shares(host=1.0)
WORK = Workload(num_requests=64, prompt_len=64, max_prompt_len=64, gen_len=32)
native_kernels = pytest.mark.skipif(not native.available(), reason="the extension is not built")


@pytest.fixture
def mixtral(tiny: Tiny) -> Path:
    return tiny("mixtral", intermediate_size=96, **SHAPE)


@native_kernels
@pytest.mark.parametrize(
    "name",
    thorough(["int4", "int4 zero points", "int8", "gptq int4", "awq", "mxfp4"], but=["int4 zero points"]),
)
def test_tokens_do_not_depend_on_the_order_of_work(name: str, mixtral: Path, tmp_path: Path) -> None:
    quantised, _ = quantise(mixtral, tmp_path, METHODS[name])
    wanted = tokens(quantised, weights=RESIDENT, activations="int8")
    small = {"batch_size": 1, "micro_batch_size": 1}
    for how in ({"schedule": "serial"}, {"schedule": "module"}, {"weights": STREAMED}, small):
        assert tokens(quantised, **{"weights": RESIDENT, "activations": "int8", **how}) == wanted


@pytest.mark.thorough
@native_kernels
def test_graphs_with_stacks_in_mxfp4_take_them(checkpoints: Any, tmp_path: Path) -> None:
    """Biases, and gate and up interleaved."""
    quantised, _ = quantise_stacks(checkpoints("gpt_oss")[0], tmp_path)
    wanted = tokens(quantised, weights=STREAMED, activations="int8")
    assert tokens(quantised, weights=RESIDENT, activations="int8", schedule="serial") == wanted


@pytest.mark.thorough
@native_kernels
def test_commands_ask_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model in 8 bits: the plan and every row say so, a job keeps to it, and predictions stay near."""
    model, out, prompts = str(tmp_path / "rounded"), str(tmp_path / "out.jsonl"), tmp_path / "prompts.jsonl"
    body = {"model": model, "max_tokens": 4}
    lines = [{"custom_id": str(a), "method": "POST", "url": "/v1/completions", "body": body} for a in range(5, 21)]
    for a, line in enumerate(lines, start=5):
        line["body"] = {**body, "prompt": f"{a} + {a + 3} ="}
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["convert", "demo", model, "--experts", "int8", "--group-size", "32"]) == 0
    job = ["generate", str(prompts), "--model", model, "-o", out]
    capsys.readouterr()
    assert main([*job, "--activations", "int8", "--dry-run"]) == 0
    assert "int8 activations" in " ".join(capsys.readouterr().out.split())
    assert main([*job, "--activations", "int8"]) == 0
    rows = [json.loads(line)["response"]["body"] for line in Path(out).read_text().splitlines()]
    assert len(rows) == 16 and {row["system_fingerprint"] for row in rows} == {"activations-int8"}
    assert main(job) == 2
    assert "numbers.activations" in capsys.readouterr().err
    against = ["compare", model, str(prompts), "--against", model, "--json"]
    assert main([*against, "--activations", "int8"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 < result["kl"]["value"] < 0.02 and result["top1"]["value"] > 0.9


def test_refusals(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Policy(model="m", activations="int8")
    with pytest.raises(ConfigError, match="activations must be one of auto, int8, not 'int4'"):
        replace(asked, activations="int4")
    plain = open_model(str(mixtral)).profile
    with pytest.raises(ConfigError, match="need experts stored as integers, and those here are float32"):
        resolve(asked, plain, discrete=False)
    eight = open_model(str(quantise(mixtral, tmp_path / "fp8", METHODS["fp8 blocks"])[0])).profile
    with pytest.raises(ConfigError, match="the experts are FP8 in blocks of 32x32, whose numbers are no integers"):
        resolve(asked, eight, discrete=False)
    four = open_model(str(quantise(mixtral, tmp_path / "int4", METHODS["int4"])[0])).profile
    on_gpu = replace(asked, ffn_device="gpu", schedule="flexgen", attention_device="gpu")
    assert resolve(on_gpu, four, discrete=True).activations == "int8"
    several = replace(four, stored=replace(four.stored, mixed=True))
    with pytest.raises(ConfigError, match="several formats, so on a GPU torch computes them"):
        resolve(on_gpu, several, discrete=True)
    assert resolve(asked, several, discrete=False).activations == "int8"
    points = replace(four, stored=replace(four.stored, cpu_integers=ggml_format("IQ2_XXS").gpu_int8_reason))
    with pytest.raises(ConfigError, match=r"experts are IQ2_XXS, whose points .* a CPU alone; use ffn_device cpu"):
        resolve(on_gpu, points, discrete=True)
    assert resolve(asked, points, discrete=False).activations == "int8"
    card = torch.device("cuda", 0)
    monkeypatch.setattr(serving, "serves", lambda device, dtype: (True, "triton"))
    for capability, refused in (((7, 5), True), ((8, 0), False)):
        monkeypatch.setattr(serving, "compute_capability", lambda index, capability=capability: capability)
        with pytest.raises(ConfigError, match=r"not served on cuda:0: .*7\.5") if refused else nullcontext():
            resolve(on_gpu, four, discrete=True, device=card)
    monkeypatch.setattr(native, "available", lambda: False)
    with pytest.raises(ConfigError, match="activations int8 need the native kernels"):
        resolve(asked, four, discrete=False)


@native_kernels
def test_columns_out_of_order_are_refused_by_tensor(mixtral: Path, tmp_path: Path) -> None:
    quantised, _ = quantise(mixtral, tmp_path, METHODS["gptq int4 ordered"])
    with pytest.raises(CheckpointError, match=r"g_idx.*not in the order of their groups"):
        tokens(quantised, weights=RESIDENT, activations="int8")


@pytest.mark.usefixtures("unproved")
def test_they_are_planned_only_where_asked_for() -> None:
    plans = {}
    for inputs in BOTH:
        fix = {} if inputs == "auto" else {"activations": inputs}
        plans[inputs] = optimize("l4", "gpt-oss-20b", WORK, cache=False, fix=fix)
    assert plans["auto"].policy.activations == "auto"
    assert plans["int8"].runs == (not activation_faults_of("gpt-oss-20b"))
    assert "int8 activations" in plans["int8"].why
    assert plan_as_dict(plans["int8"])["policy"]["activations"] == "int8"


def activation_faults_of(name: str) -> tuple[str, ...]:
    return activation_faults(Policy(model=name, activations="int8"), load_model_profile(name))


@pytest.mark.parametrize(("machine", "unit", "ratio"), [("cpu-amx", "cpu", 2), ("l4", "cpu", 2), ("rtx4090", "gpu", 4)])
def test_products_are_priced_as_faster_and_reads_as_they_are(machine: str, unit: str, ratio: float) -> None:
    model, speeds = load_model_profile("gpt-oss-20b"), speeds_of(load_hardware_profile(machine))
    models = [cost_model_of(model, Policy(model="m", activations=inputs), speeds) for inputs in BOTH]
    few, many = ([model.expert_s(getattr(speeds, unit), rows) for model in models] for rows in (1, 4096))
    assert few[1] == few[0] and many[1] == pytest.approx(many[0] / ratio, rel=1e-2)


@pytest.mark.usefixtures("unproved")
def test_a_card_without_integer_units_leaves_them_to_the_cpu() -> None:
    fixed = {"activations": "int8", "attention_device": "gpu"}
    assert optimize("t4", "mixtral-8x7b", WORK, cache=False, fix=fixed).policy.ffn_device == "cpu"
    with pytest.raises(ConfigError, match="contradict each other"):
        optimize("t4", "mixtral-8x7b", WORK, cache=False, fix={**fixed, "ffn_device": "gpu"})
    assert optimize("l4", "mixtral-8x7b", WORK, cache=False, fix={**fixed, "ffn_device": "gpu"}).policy.discrete


def test_facts_of_jobs_name_them_only_where_they_are() -> None:
    assert "activations" not in number_facts(None) and "activations" not in number_facts(None, activations="auto")
    assert number_facts(None, activations="int8") == number_facts(Policy(model="m", activations="int8"))
