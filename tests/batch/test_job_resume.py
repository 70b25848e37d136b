"""A job that ends early, is another, or is done before: what is kept, what is refused, and what goes on."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from moelight.batch import job
from moelight.batch.job import run_job
from moelight.batch.options import Durability, JobOptions
from moelight.batch.progress import Progress
from moelight.core.errors import BudgetError, CheckpointError, InputError
from moelight.core.policy import Policy
from moelight.core.request import SamplingParams, StructuredOutputs
from moelight.engine.model import LazyModel
from moelight.observe.stats import Binding
from tests.batch.playing import DEMO, StandIn, prompts, rows


@pytest.mark.parametrize(
    "fault",
    [
        BudgetError("too small", tier="host", needed_bytes=1),
        CheckpointError("torn"),
        OSError("weights"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_after_a_fault_the_same_command_goes_on(fault: Any, engine: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = JobOptions(prompts=prompts(tmp_path, *({"prompt": "a"} for _ in range(9))), output=out)
    engine.fault, engine.fault_after = fault, 4
    with pytest.raises(type(fault)):
        run_job(options)
    assert engine.closed and [request.index for request in engine.requests] == list(range(9))
    before = rows(out)
    engine.fault = None
    result = run_job(options)
    assert (result.state, result.completed, result.failed) == ("done", 9, 0)
    assert len(engine.requests) == 5, "four were answered before the fault"
    assert rows(out)[: len(before)] == before and len(rows(out)) == 9
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.journal", "prompts.jsonl"]


def test_an_output_without_a_journal_is_not_touched(engine: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("earlier")
    options = JobOptions(prompts=prompts(tmp_path, {"prompt": "a"}), output=out)
    with pytest.raises(InputError, match="--restart"):
        run_job(options)
    assert out.read_text() == "earlier" and engine.workload is None
    again = dataclasses.replace(options, durability=Durability(restart=True))
    assert run_job(again).completed == 1 and rows(out)[0]["text"] == "answer 0"


def test_a_complete_output_needs_no_model(engine: StandIn, tmp_path: Path) -> None:
    options = JobOptions(prompts=prompts(tmp_path, {"prompt": "a"}, "{"), output=tmp_path / "out.jsonl")
    run_job(options)
    engine.workload = None
    result = run_job(options)
    assert (result.state, result.completed, result.failed, engine.workload) == ("done before", 1, 1, None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampling": SamplingParams(max_tokens=9)}, "sampling.max_tokens: was null, is 9"),
        ({"policy": Policy(model="demo", weight_dtype="bfloat16")}, "numbers.weight_dtype"),
        ({"token_ids": True}, "rows.token_ids"),
        ({"prompts": "other"}, "prompts.digest"),
        ({"model": "other"}, "model.tokenizer"),
    ],
)
def test_another_job_is_refused_with_the_difference(
    changed: dict[str, Any], message: str, engine: StandIn, tmp_path: Path
) -> None:
    path = prompts(tmp_path, {"prompt": "a"})
    options = JobOptions(prompts=path, output=tmp_path / "out.jsonl")
    run_job(options)
    if "prompts" in changed:
        changed = {"prompts": path.with_name("other.jsonl")}
        changed["prompts"].write_text('{"prompt": "b"}\n')
    if "model" in changed:
        changed = {"model": str(tmp_path / "model")}
        shutil.copytree(DEMO, changed["model"])
        (tmp_path / "model" / "tokenizer_config.json").unlink()
    other = dataclasses.replace(options, **changed)
    with pytest.raises(InputError, match=message) as refusal:
        run_job(other)
    assert "--allow-changed" in str(refusal.value) and "--restart" in str(refusal.value)
    allowed = dataclasses.replace(other, durability=Durability(allow_changed=True))
    assert run_job(allowed).completed == 1


def test_asked_to_end_it_keeps_what_is_finished(engine: StandIn, tmp_path: Path) -> None:
    class Asking(Progress):
        def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:
            if done == 6:
                signal.raise_signal(signal.SIGINT)

    options = JobOptions(prompts=prompts(tmp_path, *({"prompt": "a"} for _ in range(9))), output=tmp_path / "out.jsonl")
    result = run_job(options, progress=Asking())
    assert (result.state, result.completed, result.total) == ("interrupted", 3, 9)
    assert run_job(options).completed == 9


def refuse_to_plan(*_: object) -> None:
    raise BudgetError("too small", tier="host", needed_bytes=1)


@pytest.mark.parametrize("atomic", [False, True])
def test_refused_before_any_row_nothing_is_left(
    atomic: bool, engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prompts(tmp_path, {"prompt": "a"})
    result = tmp_path / "errors.jsonl"  # it was here, as a temporary file that a shell made would be
    result.touch()
    options = JobOptions(
        prompts=path, output=tmp_path / "out.jsonl", error_file=result, durability=Durability(atomic=atomic)
    )
    with monkeypatch.context() as patched:
        patched.setattr(LazyModel, "plan", refuse_to_plan)
        with pytest.raises(BudgetError):
            run_job(options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["errors.jsonl", "prompts.jsonl"]
    other = dataclasses.replace(options, sampling=SamplingParams(max_tokens=9), durability=Durability())
    assert run_job(other).completed == 1


def test_a_restart_that_is_refused_throws_nothing_away(
    engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = JobOptions(prompts=prompts(tmp_path, {"prompt": "a"}), output=tmp_path / "out.jsonl")
    run_job(options)
    with monkeypatch.context() as patched:
        patched.setattr(LazyModel, "plan", refuse_to_plan)
        with pytest.raises(BudgetError):
            run_job(dataclasses.replace(options, durability=Durability(restart=True)))
    assert rows(tmp_path / "out.jsonl") and run_job(options).state == "done before"


def test_a_job_without_a_row_binds_nobody(engine: StandIn, tmp_path: Path) -> None:
    options = JobOptions(prompts=prompts(tmp_path, {"prompt": "a"}, {"prompt": "b"}), output=tmp_path / "out.jsonl")
    engine.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_job(options)
    assert (tmp_path / "out.jsonl.journal").exists()
    engine.fault = None
    prompts(tmp_path, {"prompt": "c"})
    errors = tmp_path / "errors.jsonl"
    other = dataclasses.replace(
        options,
        sampling=SamplingParams(max_tokens=9),
        error_file=errors,
        durability=Durability(order="completion"),
    )
    assert run_job(other).completed == 1 and errors.read_bytes() == b""
    with pytest.raises(InputError, match="was begun otherwise"):
        run_job(options)


def test_an_atomic_job_without_a_row_still_keeps_what_it_would_replace(engine: StandIn, tmp_path: Path) -> None:
    options = JobOptions(prompts=prompts(tmp_path, {"prompt": "a"}), output=tmp_path / "out.jsonl")
    run_job(options)
    before = rows(tmp_path / "out.jsonl")
    engine.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_job(dataclasses.replace(options, durability=Durability(restart=True, atomic=True)))
    with pytest.raises(InputError, match="was begun otherwise"):
        run_job(options)
    assert rows(tmp_path / "out.jsonl") == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_while_the_input_is_read_the_status_says_so(
    number: signal.Signals, engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object, **__: object) -> None:
        signal.raise_signal(number)

    status = tmp_path / "status.json"
    options = JobOptions(prompts=prompts(tmp_path, {"prompt": "a"}), output=tmp_path / "out.jsonl", status=status)
    with monkeypatch.context() as patched:
        patched.setattr(job, "scan", ended)
        with pytest.raises(KeyboardInterrupt):
            run_job(options)
    assert json.loads(status.read_text())["status"] == "cancelled"
    assert run_job(options).completed == 1
    assert json.loads(status.read_text())["status"] == "completed"


@pytest.mark.parametrize("fault", [BudgetError("too small", tier="host", needed_bytes=1), OSError("weights")], ids=repr)
def test_after_a_fault_the_status_says_so(fault: Exception, engine: StandIn, tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    engine.fault = fault
    with pytest.raises(type(fault)):
        run_job(JobOptions(prompts=prompts(tmp_path, {"prompt": "a"}), output=tmp_path / "o.jsonl", status=status))
    assert json.loads(status.read_text())["status"] == "failed"


def test_a_constraint_that_went_is_one_difference(engine: StandIn, tmp_path: Path) -> None:
    inputs = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    options = JobOptions(prompts=prompts(tmp_path, {"prompt": "a"}), output=tmp_path / "out.jsonl", sampling=inputs)
    run_job(options)
    with pytest.raises(InputError) as refusal:
        run_job(dataclasses.replace(options, sampling=SamplingParams()))
    assert 'was another (sampling.structured_outputs.regex: was "a", is absent);' in str(refusal.value)
