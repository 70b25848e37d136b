"""A whole job with the engine played by a stand-in: order, error rows, refusals, reports."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moelight.batch import job
from moelight.batch.job import run_job
from moelight.batch.options import JobOptions
from moelight.batch.output import whole_file
from moelight.batch.progress import Progress
from moelight.batch.row_processor import LONGEST_SHOWN
from moelight.core.errors import CheckpointError, ConfigError, InputError, MoelightError
from moelight.core.policy import Policy
from moelight.core.request import SamplingParams
from moelight.core.timeline import Timeline
from moelight.engine.model import LazyModel
from moelight.observe.stats import Binding
from moelight.profiles.workload import Workload
from tests.batch.playing import DEMO, Heard, StandIn, prompts, rows


def test_rows_in_the_order_of_the_input(engine: StandIn, tmp_path: Path) -> None:
    inputs = [{"prompt": f"add {n}", "custom_id": f"id-{n}"} for n in range(20)]
    out = tmp_path / "out.jsonl"
    heard = Heard()
    options = JobOptions(prompts=prompts(tmp_path, *inputs), output=out, token_ids=True)
    result = run_job(options, progress=heard)
    assert (result.completed, result.failed, result.first_error) == (20, 0, None)
    assert [row["custom_id"] for row in rows(out)] == [line["custom_id"] for line in inputs]
    assert [row["text"] for row in rows(out)] == [f"answer {n}" for n in range(20)]
    assert rows(out)[0]["token_ids"] == [1, 2]
    assert [request.index for request in engine.requests] == list(range(20))
    assert heard.why == "because the test says so"
    assert heard.changes == ["r3", "r6"]
    shown = sorted(heard.rows, key=lambda row: row.number)
    assert [row.prompt for row in shown] == [line["prompt"] for line in inputs]
    assert engine.closed


def test_expected_tokens_shrink_as_sequences_end(engine: StandIn, tmp_path: Path) -> None:
    heard = Heard()
    path = prompts(tmp_path, {"prompt": "a", "max_tokens": 10}, {"prompt": "b", "max_tokens": 30})
    run_job(JobOptions(prompts=path), progress=heard)
    assert heard.told[0] == (2, 40)
    assert heard.told[1] in ((4, 32), (4, 12))
    assert heard.bound == [engine.binding] * 2


def test_bad_lines_keep_their_place(engine: StandIn, tmp_path: Path) -> None:
    path = prompts(
        tmp_path,
        {"prompt": "one"},
        "{broken",
        "",
        {"prompt": "", "custom_id": "empty"},
        {"prompt": "x" * 30, "custom_id": "long"},
        {"prompt": "half \ud800", "custom_id": "half"},
        {"messages": [{"role": "assistant", "content": "x"}], "custom_id": "template"},
        {"prompt": "last"},
    )
    out = tmp_path / "out.jsonl"
    result = run_job(JobOptions(prompts=path, output=out))
    assert (result.completed, result.failed) == (2, 5)
    assert result.first_error is not None and result.first_error.line == 2
    assert [row.get("custom_id") for row in rows(out)] == [None, None, "empty", "long", "half", "template", None]
    assert [row.get("line") for row in rows(out)] == [None, 2, 4, 5, 6, 7, None]
    assert [row["error"]["code"] for row in rows(out) if "error" in row] == [
        "invalid_json",
        "empty_prompt",
        "context_length_exceeded",
        "invalid_text",
        "chat_template",
    ]
    assert [request.index for request in engine.requests] == [0, 1]
    assert rows(out)[-1]["text"] == "answer 1"


def test_only_bad_lines_load_no_model(engine: StandIn, tmp_path: Path) -> None:
    out, stats, trace = tmp_path / "out.jsonl", tmp_path / "stats.json", tmp_path / "trace.json"
    options = JobOptions(prompts=prompts(tmp_path, "{", "[]"), output=out, stats=stats, trace=trace)
    result = run_job(options)
    assert (result.completed, result.failed) == (0, 2)
    assert engine.workload is None
    assert len(rows(out)) == 2
    assert json.loads(stats.read_text())["completion_tokens"] == 0
    assert "traceEvents" in json.loads(trace.read_text())


def test_the_planner_hears_of_the_work(engine: StandIn, tmp_path: Path) -> None:
    path = prompts(tmp_path, {"prompt": "ab"}, {"prompt": "abcdefg", "max_tokens": 505}, {"prompt": "x" * 9000})
    run_job(JobOptions(prompts=path, sampling=SamplingParams(max_tokens=30)))
    # The demo's context is 512 tokens, one per letter: nothing is planned beyond it, or for what does not fit it.
    assert engine.workload == Workload(num_requests=2, prompt_len=5, max_prompt_len=7, gen_len=505)


def test_conversations_go_through_the_template(engine: StandIn, tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "add 1 and 2 ="}]}
    heard = Heard()
    run_job(JobOptions(prompts=prompts(tmp_path, talk, {"prompt": "add 1 and 2 ="})), progress=heard)
    assert engine.requests[0].token_ids == engine.requests[1].token_ids
    assert {row.prompt for row in heard.rows} == {"add 1 and 2 ="}


def test_no_template_is_an_error_row(engine: StandIn, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO, model, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer_config.json", "*.jinja"))
    talk = {"messages": [{"role": "user", "content": "x"}]}
    out = tmp_path / "out.jsonl"
    run_job(JobOptions(prompts=prompts(tmp_path, talk, {"prompt": "x"}), model=str(model), output=out))
    assert rows(out)[0]["error"]["code"] == "no_chat_template"
    assert "text" in rows(out)[1]


def test_stats_and_trace(engine: StandIn, tmp_path: Path) -> None:
    stats, trace = tmp_path / "stats.json", tmp_path / "trace.json"
    path = prompts(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    run_job(JobOptions(prompts=path, stats=stats, trace=trace))
    assert json.loads(stats.read_text()) == engine.stats.as_dict()
    bars = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [bar["args"]["pass"] for bar in bars] == [0, 1]
    data = json.loads(trace.read_text())["otherData"]
    assert data["source"] == "measured" and data["policy"]["batch_size"] == 2
    assert data["predicted"]["cpu"]["busy_s"] > 0 and data["hardware"]


def test_a_trace_keeps_no_pass(engine: StandIn, tmp_path: Path) -> None:
    alive: list[int] = []

    class Counting(Progress):
        def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:
            alive.append(sum(type(thing) is Timeline for thing in gc.get_objects()))

    trace = tmp_path / "trace.json"
    path = prompts(tmp_path, *({"prompt": "a"} for _ in range(30)))
    run_job(JobOptions(prompts=path, trace=trace), progress=Counting())
    assert len(alive) == 30 and max(alive) <= alive[0] + 1
    assert json.loads(trace.read_text())["traceEvents"][-1]["args"]["pass"] == 29


def test_a_disk_too_full_for_the_trace_costs_no_answers(
    engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said at the end; answers and stats are written, an earlier trace is as it was."""

    @contextlib.contextmanager
    def full(path: Path, *, label: str) -> Iterator[Callable[[bytes], None]]:
        with whole_file(path, label=label) as write:

            def some(data: bytes) -> None:
                if b"thread_name" in data:
                    raise InputError(f"{label} {path}: cannot be written (no space left)", code="output_path")
                write(data)

            yield some

    monkeypatch.setattr(job, "whole_file", full)
    out, stats, trace = tmp_path / "out.jsonl", tmp_path / "stats.json", tmp_path / "trace.json"
    trace.write_text("earlier")
    path = prompts(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(InputError, match="no space left"):
        run_job(JobOptions(prompts=path, output=out, stats=stats, trace=trace))
    assert [row["text"] for row in rows(out)] == ["answer 0", "answer 1"]
    assert json.loads(stats.read_text())["passes"] == 3
    assert trace.read_text() == "earlier"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "out.jsonl",
        "out.jsonl.journal",
        "prompts.jsonl",
        "stats.json",
        "trace.json",
    ]


def test_a_policy_goes_to_the_engine_with_the_model_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from moelight.engine import engine as room

    opened: list[Any] = []
    monkeypatch.setattr(room, "Engine", lambda policy, **how: opened.append((policy, how)))
    options = JobOptions(prompts=Path("p"), policy=Policy(model="mixtral", batch_size=2), device="cpu")
    planned = LazyModel("demo").plan(options, Workload(), options.policy)
    assert "as the policy says: N = 2 in micro-batches of 64, cgopipe" in planned.why
    planned.load()
    ((policy, how),) = opened
    assert policy == Policy(model="demo", batch_size=2)
    assert (how["options"].device, how["options"].adapt, how["source"].directory) == ("cpu", None, DEMO)


def test_a_long_prompt_is_shown_short(engine: StandIn, tmp_path: Path) -> None:
    heard = Heard()
    run_job(JobOptions(prompts=prompts(tmp_path, {"prompt": "y" * 450})), progress=heard)
    assert len(heard.rows[0].prompt) == LONGEST_SHOWN


def test_rows_of_several_prompts_and_samples_are_one_line(engine: StandIn, tmp_path: Path) -> None:
    body = {"model": "demo", "prompt": ["a", "b"], "n": 1}
    line = {"custom_id": "two", "method": "POST", "url": "/v1/completions", "body": body}
    again = {**line, "custom_id": "two"}
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    run_job(JobOptions(prompts=prompts(tmp_path, line, again), output=out, error_file=errors))
    (answer,) = rows(out)
    assert [choice["text"] for choice in answer["response"]["body"]["choices"]] == ["answer 0", "answer 1"]
    assert answer["response"]["body"]["usage"]["completion_tokens"] == 4
    (refused,) = rows(errors)
    assert refused["error"]["code"] == "duplicate_custom_id"
    assert len(engine.requests) == 2


def test_a_lost_request_is_our_fault(engine: StandIn, tmp_path: Path) -> None:
    engine.lost = 1
    out = tmp_path / "out.jsonl"
    with pytest.raises(MoelightError, match="never answered"):
        run_job(JobOptions(prompts=prompts(tmp_path, {"prompt": "a"}, {"prompt": "b"}), output=out))


def options_that_are_refused(tmp_path: Path) -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "nobody_knows"}')
    path = prompts(tmp_path, {"prompt": "a"})
    return {
        "missing prompts": ({"prompts": tmp_path / "none.jsonl"}, InputError, "none.jsonl"),
        "missing model": ({"model": str(tmp_path / "none")}, CheckpointError, "none"),
        "unknown family": ({"model": str(unknown)}, ConfigError, "nobody_knows"),
        "output is a directory": ({"output": tmp_path}, InputError, "output"),
        "stats in no directory": ({"stats": tmp_path / "none" / "s.json"}, InputError, "stats"),
        "trace is a directory": ({"trace": tmp_path}, InputError, "trace"),
        "output over the prompts": ({"output": path}, InputError, "same file as the prompts"),
        "stats over the output": (
            {"output": tmp_path / "o", "stats": tmp_path / "x" / ".." / "o"},
            InputError,
            "output|there is no directory",
        ),
        "trace over the stats": ({"stats": tmp_path / "o", "trace": tmp_path / "o"}, InputError, "same file"),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "missing prompts",
        "missing model",
        "unknown family",
        "output is a directory",
        "stats in no directory",
        "trace is a directory",
        "output over the prompts",
        "stats over the output",
        "trace over the stats",
    ],
)
def test_refused_before_the_engine_is_opened(kind: str, engine: StandIn, tmp_path: Path) -> None:
    changed, error, message = options_that_are_refused(tmp_path)[kind]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=message) as refusal:
        run_job(JobOptions(**{"prompts": tmp_path / "prompts.jsonl", **changed}))
    assert "\n" not in str(refusal.value)
    assert engine.workload is None
    assert sorted(tmp_path.iterdir()) == before


def test_rows_that_are_refused_and_repeat_an_id_do_not_stop_the_good_ones(engine: StandIn, tmp_path: Path) -> None:
    bad = {"prompt": "", "custom_id": "bad"}
    path = prompts(tmp_path, {"prompt": "a", "custom_id": "good"}, bad, bad, bad)
    heard = Heard()
    result = run_job(JobOptions(prompts=path, output=tmp_path / "out.jsonl"), progress=heard)
    assert (result.completed, result.failed) == (1, 3)
    assert engine.workload is not None and engine.workload.num_requests == 1


def test_what_the_engine_refuses_is_expected_no_longer(engine: StandIn, tmp_path: Path) -> None:
    heard = Heard()
    path = prompts(tmp_path, {"prompt": "x" * 30, "max_tokens": 30}, {"prompt": "b", "max_tokens": 10})
    options = JobOptions(prompts=path, output=tmp_path / "out.jsonl")
    engine.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_job(options, progress=heard)
    engine.fault = None
    run_job(options, progress=heard)
    assert heard.told == [(2, 10)]


def test_rows_in_a_file_and_errors_in_a_pipe_do_not_mix(engine: StandIn, tmp_path: Path) -> None:
    options = JobOptions(prompts=prompts(tmp_path, "{"), output=tmp_path / "out.jsonl", error_file=Path("/dev/null"))
    with pytest.raises(InputError, match="error file /dev/null: is a pipe or device"):
        run_job(options)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"stop_token_ids": [9999]}, "token id 9999 is not below the vocabulary's 98"),
        ({"logit_bias": {98: 1.0}}, "token id 98 is not below"),
    ],
)
def test_what_no_row_could_be_served_with_is_refused_once(
    sampling: dict[str, Any], message: str, engine: StandIn, tmp_path: Path
) -> None:
    path = prompts(tmp_path, {"prompt": "a"})
    with pytest.raises(InputError, match=re.escape(message)):
        run_job(JobOptions(prompts=path, output=tmp_path / "out.jsonl", sampling=SamplingParams(**sampling)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl"]
