"""A whole job with the engine played by a stand-in: order, error rows, refusals, reports."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moelight.batch import job, run_trace
from moelight.batch.output import whole_file
from moelight.core.adaptation import Adaptation
from moelight.core.errors import BudgetError, CheckpointError, ConfigError, InputError, MoelightError
from moelight.core.policy import Policy
from moelight.core.request import Completion, Request, SamplingParams
from moelight.core.schedule import Lane, Task, TaskKind
from moelight.core.timeline import Span, Timeline
from moelight.experts.options import ExpertOptions
from moelight.observe.stats import Binding, LaneStats, Stats
from moelight.profiles.families import profile_from_dir
from moelight.profiles.workload import Workload

DEMO = Path(job.__file__).parents[1] / "demo"


class StandIn:
    """An engine that answers in a shuffled order; a prompt of more than 20 tokens is more than it can serve."""

    def __init__(self) -> None:
        self.plan: SimpleNamespace | None = SimpleNamespace(why="because the test says so")
        self.policy = Policy(model="demo", batch_size=2, micro_batch_size=2, kv_tokens=64)
        self.profile = profile_from_dir(DEMO)
        self.progress_tokens = 0
        self.timeline: Timeline | None = None
        self.binding: Binding | None = Binding(lane=Lane.CPU, share=0.5)
        self.requests: list[Request] = []
        self.workload: Workload | None = None
        self.fault: Exception | None = None
        self.lost = 0
        self.closed = False

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def check(self, request: Request) -> None:
        if len(request.token_ids) > 20:
            raise InputError("longer than 20 tokens", code="context_length_exceeded")

    def run(self, requests: Sequence[Request], *, on_pass: Callable[[], None]) -> Iterator[Completion]:
        self.requests = list(requests)
        order = list(requests)
        random.Random(5).shuffle(order)
        for request in order[self.lost :]:
            if self.fault is not None:
                raise self.fault
            task = Task(kind=TaskKind.SAMPLE, lane=Lane.CPU)
            self.timeline = Timeline(spans=(Span(task=task, start_s=1.0, end_s=2.0),))
            self.progress_tokens += 2
            on_pass()
            yield Completion(
                index=request.index,
                text=f"answer {request.index}",
                token_ids=(1, 2),
                finish_reason="stop",
                prompt_tokens=len(request.token_ids),
            )

    @property
    def adaptations(self) -> tuple[Adaptation, ...]:
        """One change after the third pass, another one after the sixth."""
        fields = {"before": {"batch_size": 2}, "now": {"batch_size": 4}, "predicted_gain": 0.1}
        made = [Adaptation(after_pass=at, reason=f"r{at}", **fields) for at in (3, 6)]  # type: ignore[arg-type]
        return tuple(change for change in made if self.progress_tokens >= 2 * change.after_pass)

    @property
    def stats(self) -> Stats:
        return Stats(
            wall_s=2.0,
            load_s=1.0,
            prompt_tokens=5,
            completion_tokens=self.progress_tokens,
            passes=3,
            peak_rss_bytes=7,
            lanes={Lane.CPU: LaneStats(busy_s=1.5, bytes=0, tasks=4)},
        )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()

    def open_engine(options: job.JobOptions, workload: Workload) -> StandIn:
        stand_in.workload = workload
        return stand_in

    monkeypatch.setattr(job, "open_engine", open_engine)
    return stand_in


class Heard(job.Progress):
    def __init__(self) -> None:
        self.why = ""
        self.counts: list[tuple[int, int]] = []
        self.bound: list[Binding | None] = []
        self.rows: list[tuple[str, dict[str, Any]]] = []
        self.changes: list[str] = []

    def adapted(self, why: str) -> None:
        self.changes.append(why)

    def planned(self, why: str) -> None:
        self.why = why

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:
        self.counts.append((done, expected))
        self.bound.append(binding)

    def row(self, shown: str, row: dict[str, Any]) -> None:
        self.rows.append((shown, row))


def prompts(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_in_the_order_of_the_input(engine: StandIn, tmp_path: Path) -> None:
    given = [{"prompt": f"add {n}", "custom_id": f"id-{n}"} for n in range(20)]
    out = tmp_path / "out.jsonl"
    heard = Heard()
    options = job.JobOptions(prompts=prompts(tmp_path, *given), output=out, token_ids=True)
    result = job.run_job(options, progress=heard)
    assert (result.completed, result.failed, result.first_error) == (20, 0, None)
    assert [row["custom_id"] for row in rows(out)] == [line["custom_id"] for line in given]
    assert [row["text"] for row in rows(out)] == [f"answer {n}" for n in range(20)]
    assert rows(out)[0]["token_ids"] == [1, 2]
    assert [request.index for request in engine.requests] == list(range(20))
    assert heard.why == "because the test says so"
    assert heard.changes == ["r3", "r6"]
    assert [shown for shown, _ in heard.rows] == [line["prompt"] for line in given]
    assert engine.closed


def test_expected_tokens_shrink_as_sequences_end(engine: StandIn, tmp_path: Path) -> None:
    heard = Heard()
    path = prompts(tmp_path, {"prompt": "a", "max_tokens": 10}, {"prompt": "b", "max_tokens": 30})
    job.run_job(job.JobOptions(prompts=path), progress=heard)
    assert heard.counts[0] == (2, 40)
    assert heard.counts[1] in ((4, 32), (4, 12))
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
    result = job.run_job(job.JobOptions(prompts=path, output=out))
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
    options = job.JobOptions(prompts=prompts(tmp_path, "{", "[]"), output=out, stats=stats, trace=trace)
    result = job.run_job(options)
    assert (result.completed, result.failed) == (0, 2)
    assert engine.workload is None
    assert len(rows(out)) == 2
    assert json.loads(stats.read_text())["completion_tokens"] == 0
    assert "traceEvents" in json.loads(trace.read_text())


def test_the_planner_hears_of_the_work(engine: StandIn, tmp_path: Path) -> None:
    path = prompts(tmp_path, {"prompt": "ab"}, {"prompt": "abcdefg", "max_tokens": 4000}, {"prompt": "x" * 9000})
    job.run_job(job.JobOptions(prompts=path, sampling=SamplingParams(max_tokens=30)))
    # The demo's context is 512 tokens, one per letter: nothing is planned beyond it.
    assert engine.workload == Workload(num_requests=3, prompt_len=174, max_prompt_len=512, gen_len=505)


def test_conversations_go_through_the_template(engine: StandIn, tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "add 1 and 2 ="}]}
    heard = Heard()
    job.run_job(job.JobOptions(prompts=prompts(tmp_path, talk, {"prompt": "add 1 and 2 ="})), progress=heard)
    assert engine.requests[0].token_ids == engine.requests[1].token_ids
    assert heard.rows[0][0] == "add 1 and 2 ="


def test_no_template_is_an_error_row(engine: StandIn, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO, model, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer_config.json", "*.jinja"))
    talk = {"messages": [{"role": "user", "content": "x"}]}
    out = tmp_path / "out.jsonl"
    job.run_job(job.JobOptions(prompts=prompts(tmp_path, talk, {"prompt": "x"}), model=str(model), output=out))
    assert rows(out)[0]["error"]["code"] == "no_chat_template"
    assert "text" in rows(out)[1]


def test_stats_and_trace(engine: StandIn, tmp_path: Path) -> None:
    stats, trace = tmp_path / "stats.json", tmp_path / "trace.json"
    path = prompts(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    job.run_job(job.JobOptions(prompts=path, stats=stats, trace=trace))
    assert json.loads(stats.read_text()) == engine.stats.as_dict()
    bars = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [bar["args"]["pass"] for bar in bars] == [0, 1]
    data = json.loads(trace.read_text())["otherData"]
    assert data["source"] == "measured" and data["policy"]["batch_size"] == 2
    assert data["predicted"]["cpu"]["busy_s"] > 0 and data["hardware"]


def test_a_trace_keeps_no_pass(engine: StandIn, tmp_path: Path) -> None:
    alive: list[int] = []

    class Counting(job.Progress):
        def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:
            alive.append(sum(type(thing) is Timeline for thing in gc.get_objects()))

    trace = tmp_path / "trace.json"
    path = prompts(tmp_path, *({"prompt": "a"} for _ in range(30)))
    job.run_job(job.JobOptions(prompts=path, trace=trace), progress=Counting())
    assert len(alive) == 30 and max(alive) <= alive[0] + 1
    assert json.loads(trace.read_text())["traceEvents"][-1]["args"]["pass"] == 29


def test_a_disk_too_full_for_the_trace_costs_no_answers(
    engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said at the end; answers and stats are written, an earlier trace is as it was."""

    @contextlib.contextmanager
    def full(path: Path, *, what: str) -> Iterator[Callable[[bytes], None]]:
        with whole_file(path, what=what) as write:

            def some(data: bytes) -> None:
                if b"thread_name" in data:
                    raise InputError(f"{what} {path}: cannot be written (no space left)", code="output_path")
                write(data)

            yield some

    monkeypatch.setattr(run_trace, "whole_file", full)
    out, stats, trace = tmp_path / "out.jsonl", tmp_path / "stats.json", tmp_path / "trace.json"
    trace.write_text("earlier")
    path = prompts(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(InputError, match="no space left"):
        job.run_job(job.JobOptions(prompts=path, output=out, stats=stats, trace=trace))
    assert [row["text"] for row in rows(out)] == ["answer 0", "answer 1"]
    assert json.loads(stats.read_text())["passes"] == 3
    assert trace.read_text() == "earlier"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "out.jsonl",
        "prompts.jsonl",
        "stats.json",
        "trace.json",
    ]


def test_a_policy_is_told_where_no_plan_says_why(engine: StandIn, tmp_path: Path) -> None:
    heard, engine.plan = Heard(), None
    job.run_job(job.JobOptions(prompts=prompts(tmp_path, {"prompt": "a"})), progress=heard)
    assert "as the policy says: N = 2 in micro-batches of 2, cgopipe" in heard.why


def test_a_policy_goes_to_the_engine_with_the_model_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from moelight.engine import engine as room

    opened: list[Any] = []
    monkeypatch.setattr(room, "Engine", lambda policy, **how: opened.append((policy, how)))
    given = Policy(model="mixtral", batch_size=2)
    job.open_engine(job.JobOptions(prompts=Path("p"), policy=given, model="here", device="cpu"), Workload())
    assert opened == [
        (dataclasses.replace(given, model="here"), {"device": "cpu", "adapt": None, "experts": ExpertOptions()})
    ]


def test_a_long_prompt_is_shown_short(engine: StandIn, tmp_path: Path) -> None:
    heard = Heard()
    job.run_job(job.JobOptions(prompts=prompts(tmp_path, {"prompt": "y" * 9999})), progress=heard)
    assert len(heard.rows[0][0]) == job.LONGEST_SHOWN


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
def test_a_fault_while_running_leaves_the_earlier_output(fault: Any, engine: StandIn, tmp_path: Path) -> None:
    engine.fault = fault
    out = tmp_path / "out.jsonl"
    out.write_text("earlier")
    path = prompts(tmp_path, {"prompt": "a"})
    with pytest.raises(type(fault)):
        job.run_job(job.JobOptions(prompts=path, output=out))
    assert out.read_text() == "earlier"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]
    assert engine.closed


def test_a_lost_request_is_our_fault(engine: StandIn, tmp_path: Path) -> None:
    engine.lost = 1
    out = tmp_path / "out.jsonl"
    with pytest.raises(MoelightError, match="never answered"):
        job.run_job(job.JobOptions(prompts=prompts(tmp_path, {"prompt": "a"}, {"prompt": "b"}), output=out))
    assert not out.exists()


def options_that_are_refused(tmp_path: Path) -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text('{"model_type": "llama"}')
    path = prompts(tmp_path, {"prompt": "a"})
    return {
        "missing prompts": ({"prompts": tmp_path / "none.jsonl"}, InputError, "none.jsonl"),
        "missing model": ({"model": str(tmp_path / "none")}, CheckpointError, "none"),
        "dense model": ({"model": str(dense)}, ConfigError, "mixtral, qwen3_moe, olmoe"),
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
        "dense model",
        "output is a directory",
        "stats in no directory",
        "trace is a directory",
        "output over the prompts",
        "stats over the output",
        "trace over the stats",
    ],
)
def test_refused_before_the_engine_is_opened(kind: str, engine: StandIn, tmp_path: Path) -> None:
    changed, error, said = options_that_are_refused(tmp_path)[kind]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=said) as refusal:
        job.run_job(job.JobOptions(**{"prompts": tmp_path / "prompts.jsonl", **changed}))
    assert "\n" not in str(refusal.value)
    assert engine.workload is None
    assert sorted(tmp_path.iterdir()) == before
