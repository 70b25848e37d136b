"""`make gpu` on a twin: its cheap parts run, a part that breaks stops no other, and figures are made as they should."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.benchmarks.scripts import BENCHMARKS, ran
from tests.cli.program import moelight_inside


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks by name, as the script does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def setting_of(module: Any, path: Path, *, seconds: float = 60.0, **changes: Any) -> Any:
    scratch = path / "scratch"
    scratch.mkdir()
    until = time.monotonic() + seconds
    inputs = {"device": "twin", "small": True, "scratch": scratch, "results": path, "until": until, **changes}
    return module("gpu_sections.setting").Setting(**inputs)


def inside(name: str, arguments: list[str], seconds: float, environment: Mapping[str, str]) -> Any:
    """``python -m name`` in this process."""
    setting = importlib.import_module("gpu_sections.setting")
    if name == "moelight.cli.main":
        done = moelight_inside(*arguments)
        return setting.Ended(code=done.returncode, out=done.stdout, err=done.stderr, seconds=0.0)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", [name, *arguments])
        code = importlib.import_module(name).main()
    return setting.Ended(code=code, out=out.getvalue(), err=err.getvalue(), seconds=0.0)


@pytest.mark.thorough
def test_cheap_parts_run_on_a_twin(module: Any, tmp_path: Path) -> None:
    changes = {
        "gpu_sections.setting.run_module": inside,
        "gpu_sections.shapes.RUNS": {"cgopipe-streamed": ("schedule=cgopipe", "ffn=gpu")},
        "gpu_sections.shapes.MODELS": ("mixtral-0p9b",),
        "gpu_sections.quantised.KINDS": ("int4",),
        "gpu_sections.least.ORDERS": ("cgopipe",),
    }
    options = ["--device", "twin", "--out", tmp_path, "--parts"]
    options += ["tokens", "profile", "shapes", "quantised", "least", "long"]
    module("gpu")
    message = ran("gpu", *options, changes=changes)
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("gpu_twin_*.json"))
    parts = report["parts"]
    assert {name: part["state"] for name, part in parts.items()} == {
        "tokens": "done",
        "profile": "left out",
        "shapes": "done",
        "quantised": "done",
        "least": "done",
        "long": "done",
    }, (tmp_path / "gpu.log").read_text()
    assert [row["identical"] for row in parts["tokens"]["rows"]] == [True, True, True]
    assert all({"disk", "h2d", "device"} <= set(row["tasks"]) for row in parts["tokens"]["rows"])
    (shape,) = parts["shapes"]["rows"]
    assert shape["report"]["lanes"]["h2d"]["bytes"] > 0 and "needs a card" in shape["calls"]["unable"]
    plain, packed = parts["quantised"]["rows"]
    crossed = [row["report"]["lanes"]["h2d"]["bytes"] for row in (plain, packed)]
    assert 0 < crossed[1] < crossed[0] / 2, "int4 pages cross as they are stored"
    assert {row["format"] for row in parts["quantised"]["products"]} > {"16 bits", "int4", "Q4_K", "fp8 blocks"}
    assert parts["long"]["completed"] == parts["long"]["requests"] == 12
    assert message["goals"] == report["goals"] and message["parts"]["profile"]["why"].startswith("needs a card")
    (text,) = (path.read_text() for path in tmp_path.glob("gpu_twin_*.md"))
    assert "| float32 tokens in every order are the CPU's | 3 of 3 orders | yes |" in text
    assert "| the least device memory that a refusal names runs | 1 of 1 orders | yes |" in text
    assert "not all of it can be shown" not in text
    assert not list(tmp_path.glob(".*"))


def test_a_part_that_breaks_stops_no_other(module: Any, tmp_path: Path) -> None:
    gpu, setting = module("gpu"), module("gpu_sections.setting")

    def broken(selected: Any) -> None:
        selected.keep(rows=[{"run": "one"}])
        raise ZeroDivisionError("in the\nmiddle")

    def cut(selected: Any) -> None:
        selected.until = 0.0
        selected.moelight("doctor")

    parts = {
        "environment": gpu.Part(broken, lambda figures: [str(figures["absent"])], 60.0),
        "tokens": gpu.Part(cut, lambda _: [], 60.0),
        "profile": gpu.PARTS["profile"],
        "least": gpu.Part(lambda selected: selected.add_row(unable="no such order"), lambda _: [], 60.0),
        "long": gpu.Part(lambda selected: selected.keep(completed=3), lambda _: ["three"], 60.0),
    }
    message = ran("gpu", "--device", "twin", "--out", tmp_path, "--parts", *parts, changes={"gpu.PARTS": parts})
    assert {name: (result["state"], result.get("why", "")) for name, result in message["parts"].items()} == {
        "environment": ("failed", "ZeroDivisionError: in the middle"),
        "tokens": ("cut", "no time was left to start it"),
        "profile": (
            "left out",
            "needs a card: a twin has no speed of its own; later parts plan with a shipped profile",
        ),
        "least": ("failed", "no such order"),
        "long": ("done", ""),
    }
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("gpu_twin_*.json"))
    assert report["parts"]["environment"]["rows"] == [{"run": "one"}]
    assert "Traceback" in (tmp_path / "gpu.log").read_text()
    assert issubclass(setting.TimeOverError, setting.FailedError)


def test_what_came_before_counts_and_nothing_starts_late(module: Any, tmp_path: Path) -> None:
    began = time.time() - 540
    module("gpu")
    message = ran("gpu", "--device", "twin", "--began", began, "--out", tmp_path, "--parts", "tokens", "least")
    assert {result["state"] for result in message["parts"].values()} == {"not started"}


def test_a_program_that_hangs_is_killed_with_all_it_started(module: Any, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        "import subprocess, sys\n"
        "print('began', flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    setting = setting_of(module, tmp_path, seconds=1.6)
    ended = setting.python("hangs", environment={"PYTHONPATH": str(tmp_path)})
    assert (ended.code, ended.out, ended.why) == (None, "began\n", "began (time over)")
    assert "$ python -m hangs" in (tmp_path / "gpu.log").read_text()


TESTS = """
import os, pytest
def test_passes(): pass
def test_fails(): assert 1 + 1 == 3
@pytest.mark.skip(reason="no tensor cores")
def test_skipped(): pass
def test_crashes(): os._exit(11)
def test_loses_the_device(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_runs_in_a_new_process(): assert os.environ["MARK"] == "set"
"""


@pytest.mark.thorough
def test_outcomes_survive_a_crash_and_a_lost_device(module: Any, tmp_path: Path) -> None:
    suites, path = module("gpu_sections.suites"), tmp_path / "test_card.py"
    path.write_text(TESTS)
    setting = setting_of(module, tmp_path)
    result = suites.run_tests(setting, "some", [str(path)], environment={"MARK": "set"})
    assert {test.partition("::")[2]: line["outcome"] for test, line in result.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skipped": "skipped",
        "test_crashes": "crashed",
        "test_loses_the_device": "failed",
        "test_runs_in_a_new_process": "passed",
    }
    figures = suites.summary(result)
    assert (figures["passed"], figures["failed"], figures["crashed"], figures["skipped"]) == (2, 2, 1, 1)
    assert {figure["test"].partition("::")[2]: figure["said"] for figure in figures["failures"]}[
        "test_fails"
    ].startswith("assert (1 + 1) == 3")
    assert figures["skipped_for"] == {"Skipped: no tensor cores": 1}
    assert suites.lines(figures)[0] == "2 passed, 2 failed, 1 crashed, 1 skipped, 0 cut"


@pytest.mark.thorough
def test_sharing_and_repeating_tests(module: Any, tmp_path: Path) -> None:
    suites, path = module("gpu_sections.suites"), tmp_path / "test_card.py"
    path.write_text("def test_one(): pass\ndef test_two(): pass\n")
    result = suites.run_tests(setting_of(module, tmp_path), "some", [str(path), "--turns", "3"], shards=2)
    assert len(result) == 6 and {line["outcome"] for line in result.values()} == {"passed"}
    original = [
        list(map(int, re.findall(r"\[(\d)\]", " ".join(_begun(path))))) for path in tmp_path.rglob("some-*.jsonl")
    ]
    assert all(turns == sorted(turns) for turns in original) and sum(map(len, original)) == 6


def _begun(path: Path) -> list[str]:
    lines = map(json.loads, path.read_text().splitlines())
    return [line["test"] for line in lines if line["outcome"] == "begun"]


def test_every_marked_test_is_in_a_file_that_is_run(module: Any) -> None:
    suites = module("gpu_sections.suites")
    files, kernels = suites.marked_files(), suites.kernel_files()
    assert files[0].startswith("tests/kernels/") and "tests/engine/test_invariance.py" in files
    assert "tests/runtime/test_lanes.py" in files and "tests/benchmarks/test_planner.py" not in files
    assert "tests/kernels/test_gpu_kernels.py" in kernels and "tests/kernels/test_gpu_compiles.py" not in kernels


def test_calls_and_copies_a_pass(module: Any) -> None:
    def call(name: str, category: str = "cuda_runtime", **more: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, **more}

    events = [
        *[call("cudaLaunchKernel")] * 12,
        *[call("cuLaunchKernelEx", "cuda_driver")] * 4,
        *[call("cudaGraphLaunch")] * 2,
        *[call("cudaStreamSynchronize")] * 2,
        call("cudaMemcpy"),
        *[call("cudaMemcpyAsync")] * 6,
        call("cudaEventQuery"),
        call("cudaMalloc"),
        call("aten::mm", "cpu_op"),
        *[call("gemm", "kernel", dur=3.0)] * 8,
        *[call("norm", "kernel", dur=1.0)] * 4,
        *[call("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", dur=5.0, args={"bytes": 100})] * 4,
        {"ph": "M", "name": "process_name"},
    ]
    result = module("gpu_sections.launches").figures_of(events, passes=2, layers=3, micro_batches=1)
    assert (result["launches"], result["launches_per_layer_and_micro_batch"]) == (9.0, 3.0)
    assert (result["waits"], result["copies"], result["allocations"]) == (1.5, 3.5, 0.5)
    assert result["copied"] == {"Memcpy HtoD (Pinned -> Device)": {"count": 2.0, "bytes": 200.0, "us": 10.0}}
    assert [(row["name"], row["count"], row["us"]) for row in result["kernels"]] == [
        ("gemm", 4.0, 12.0),
        ("norm", 2.0, 2.0),
    ]
    assert result["kernel_s"] == pytest.approx(14e-6)


def test_growth_and_drift(module: Any) -> None:
    rows = [(n, 1000 + (50 if n < 4 else 0) + n, 7000, 1e-4 + n * 1e-5) for n in range(20)]
    result = module("gpu_sections.long").figures_of(rows, 20)
    assert result["grown_bytes"] == {"host": 15, "device": 0}
    assert result["clock"]["last_s"] - result["clock"]["first_s"] == pytest.approx(18e-5)


def shape_row(predicted: float, measured: float, busy: float, rate: float) -> dict[str, Any]:
    lanes = {
        "h2d": {"busy_share": busy, "bytes_per_s": rate, "roof_bytes_per_s": 1.0, "predicted_s": 1.0, "pass_s": 1.0}
    }
    report = {"predicted_pass_s": predicted, "pass_s": measured, "lanes": lanes, "binding": "h2d"}
    calls = {"launches_per_layer_and_micro_batch": 21.0, "waits": 3.0, "allocations": 0.0, "layers": 4}
    return {
        "model": "m",
        "run": "cgopipe",
        "report": report,
        "tokens_per_s": 5.0,
        "calls": {**calls, "launches": 84.0, "pinned_h2d_bytes_per_s": 50e9},
    }


def small_card_row(name: str, tokens_per_s: float, theirs: float) -> dict[str, Any]:
    steady = {"lanes": {"h2d": 0.95}, "h2d_share_of_roof": 0.85, "pass_s": 2.0, "sequences": 1000, "fill_s": 10.0}
    job = {"new_tokens": 32, "tokens_per_s": tokens_per_s, "whole_tokens_per_s": 1.0, "cut": False}
    ours = {"contestant": "cgopipe", "steady": {**steady, "prompt_tokens": 80_000}, "predicted_pass_s": 1.9}
    ours["predicted_lanes"] = {"h2d": 1.9, "cpu": 1.0}
    rows = [{**ours, "jobs": [job]}, {"contestant": "accelerate", "tokens_per_s": theirs}]
    return {"run": name, "layers": 16, "rows": rows}


def test_goals_are_met_or_missed(module: Any) -> None:
    parts = {
        "tests": {"tests": 3, "passed": 3, "failed": 0, "crashed": 0, "uncached": {"failed": 1, "crashed": 0}},
        "shapes": {"rows": [shape_row(1.0, 1.05, 0.92, 46e9), {"unable": "refused"}]},
        "small-card": {"rows": [small_card_row("16GiB", 100.0, 40.0), small_card_row("moe-gen", 1.0, 1.0)]},
        "profile": {"links": {"host_to_device": 47.25e9}, "bytes_per_s": {"device": 640e9}},
    }
    result = {goal["goal"]: (goal["found"], goal["met"]) for goal in module("gpu_sections.goals").goals(parts)}
    assert result["tests marked gpu pass"] == ("3 passed, 1 did not", False)
    assert result["m, cgopipe: predicted pass within 10 %"] == ("+5.0%", True)
    assert result["m, cgopipe: link 90 % busy at 90 % of pinned copies"] == ("92.0% at 92.0%", True)
    assert result["m, cgopipe: at most 20 launches a layer and micro-batch"] == ("21.0", False)
    assert result["m, cgopipe: no wait for the device a layer"] == ("3.0 a pass", True)
    assert result["small card 16GiB: link 90 % busy at 90 % of pinned copies"] == ("95.0% at 85.0%", False)
    assert result["small card 16GiB: 3 x accelerate"] == ("2.5 x", False)
    # The memory of this device is twice a T4's, its link three times a T4's; 16 layers of 32: four times as fast. Of
    # the A5000, whose memory is faster than ours, 640 / 768.
    assert result["MoE-Lightning, T4, 32 new tokens: 63 tok/s published, 252 scaled"] == ("100 tok/s", False)
    assert result["MoE-Gen, A5000, decode: 469 tok/s published, 782 scaled"] == ("500 tok/s", False)
    assert result["MoE-Gen, A5000, prefill: 2790 tok/s published, 4650 scaled"] == ("8000 tok/s", True)
    assert module("gpu_sections.goals").goals({}) == []


def test_reports_of_several_runs_are_joined(module: Any, tmp_path: Path) -> None:
    def report(name: str, **parts: str) -> Path:
        about = {"benchmark": "gpu", "card": "NVIDIA H200", "device": "auto", "date": "2026-11-23", "goals": []}
        path = tmp_path / f"{name}.json"
        result = {part: {"state": state, "seconds": 1.0, "note": name} for part, state in parts.items()}
        path.write_text(json.dumps({**about, "parts": result}))
        return path

    first = report("gpu_h200_2026-11-23", tests="failed", streams="not started")
    second = report("second", streams="done", tests="left out")
    module("gpu")
    out = tmp_path / "joined"
    ran("gpu", "--join", first, second, "--out", out)
    joined = json.loads((out / "gpu_h200_2026-11-23.json").read_text())
    assert {name: (result["state"], result["note"]) for name, result in joined["parts"].items()} == {
        "tests": ("failed", "gpu_h200_2026-11-23"),
        "streams": ("done", "second"),
    }
    assert "## streams: done, 1 s" in (out / "gpu_h200_2026-11-23.md").read_text()


def test_sleeps_change_no_token(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stress of streams on a twin, whose lanes are threads."""
    from moelight.core.policy import Policy
    from moelight.core.request import SamplingParams
    from moelight.engine.engine import Engine
    from moelight.runtime.lanes import HostTicket, StreamTicket

    policy = Policy(model="demo", batch_size=4, micro_batch_size=2, ffn_device="gpu")
    how = SamplingParams(max_tokens=3, ignore_eos=True)

    def answers() -> list[tuple[int, ...]]:
        with Engine(policy, device="twin", lanes="threads") as engine:
            return [item.token_ids for item in engine.generate([[5, 6, 7], [8, 9]], how)]

    before = answers()
    monkeypatch.setattr(StreamTicket, "launch", StreamTicket.launch)  # put back afterwards
    monkeypatch.setattr(HostTicket, "carry_out", HostTicket.carry_out)
    outcomes = module("gpu_sections.outcomes")
    sleeps: list[float] = []
    monkeypatch.setattr(outcomes, "time", SimpleNamespace(sleep=sleeps.append))
    outcomes.add_jitter(1)
    assert answers() == before
    assert len(sleeps) > 5 and sys.modules["moelight.runtime.lanes"].StreamTicket.launch.__name__ == "jittered"
