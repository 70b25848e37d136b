"""``moelight report``: a trace becomes a table and a page, or one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moelight.core.schedule import Lane, Task, TaskKind
from moelight.core.timeline import Span, Timeline
from moelight.observe.report import report_of
from moelight.observe.trace import LaneForecast, TraceHeader, read_trace
from tests.cli.program import PLANNED, read_rows, write_prompts
from tests.cli.program import moelight_inside as run
from tests.observe.traces import write_passes, write_timelines


def test_the_table_and_the_page(tmp_path: Path) -> None:
    done = run("report", write_passes(tmp_path / "run.json", 5))
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    for message in (
        "demo on t4 · 5 passes measured, 5.00 s",
        "The median pass took 1.00 s, 20 % less than the predicted 1.25 s.",
        "h2d was the binding lane, at work for 50 % of the run.",
        "lane predicted measured off by bytes rate of roof busy",
        "h2d 500 ms 500 ms 0 % 1000B 2.00 kB/s 50 % 50 %",
        "cpu 200 ms 250 ms +25 % – – 80 % 25 %",
        "device – 500 ms – – – – 50 %",
        "h2d stood still for 2.50 s (50 %), because of cause seconds of run times longest before pass, layer",
        "not recorded 2.00 s 40 % 4 500 ms 1, 1",
        "no task left 500 ms 10 % 1 500 ms the end",
        "The others stood still: device 2.50 s (50 %), cpu 3.75 s (75 %).",
        f"page: {tmp_path / 'run.html'}",
    ):
        assert message in words, message
    page = (tmp_path / "run.html").read_text()
    assert page.startswith("<!doctype html>") and "run.json" in page


def test_the_page_may_lie_elsewhere(tmp_path: Path) -> None:
    trace = write_passes(tmp_path / "run.json", 1, about=None)
    done = run("report", trace, "-o", tmp_path / "else.html")
    assert done.returncode == 0 and "1 pass measured" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["else.html", "run.json"]
    done = run("report", trace, "-o", "-")
    assert done.returncode == 0 and done.stdout == (tmp_path / "else.html").read_text()


def test_figures_for_programs(tmp_path: Path) -> None:
    trace = write_passes(tmp_path / "run.json", 5)
    done = run("report", trace, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == report_of(read_trace(trace)).as_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    again = run("report", trace, "--json", "-o", tmp_path / "page.html")
    assert again.stdout == done.stdout and (tmp_path / "page.html").exists()


def test_a_lane_that_never_stood_still(tmp_path: Path) -> None:
    task = Task(kind=TaskKind.SAMPLE, lane=Lane.CPU)
    timeline = Timeline(spans=(Span(task=task, start_s=1.0, end_s=2.0),))
    done = run("report", write_timelines(tmp_path / "run.json", [timeline]))
    assert "cpu never stood still.\n" in done.stdout and "The others" not in done.stdout


@pytest.mark.parametrize("width", ["80", "100", "120"])
def test_the_table_fits_the_terminal(width: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    done = run("report", write_passes(tmp_path / "run.json", 3))
    assert max(map(len, done.stdout.splitlines())) <= int(width)
    assert "…" not in done.stdout.replace(str(tmp_path), "")


def test_what_a_trace_says_cannot_steer_the_terminal(tmp_path: Path) -> None:
    about = TraceHeader(
        version="1",
        source="measured",
        policy={"model": "\x1b[2Jevil"},
        hardware="[red]t4",
        predicted={"cpu": LaneForecast(busy_s=1.0)},
    )
    done = run("report", write_passes(tmp_path / "run.json", 1, about=about))
    assert "\x1b" not in done.stdout and "\\x1b[2Jevil on [red]t4" in done.stdout


REFUSED = {
    "no such trace": ("@/none.json", ["@/none.json", "No such file"]),
    "a directory": ("@", ["@", "directory"]),
    "no trace": ("@/prompts.jsonl", ["@/prompts.jsonl", "not a trace"]),
    "cut off": ("@/torn.json", ["@/torn.json", "cut off"]),
    "empty": ("@/empty.json", ["@/empty.json", "cut off"]),
    "over the trace": ("@/good.json -o @/good.json", ["same file"]),
    "in no directory": ("@/good.json -o @/none/page.html", ["@/none"]),
    "two things printed": ("@/good.json -o - --json", ["--json", "contradict"]),
    "nothing named": ("", ["TRACE"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_one_clear_line(kind: str, tmp_path: Path) -> None:
    text = write_passes(tmp_path / "good.json", 2).read_text()
    (tmp_path / "torn.json").write_text(text[: len(text) // 2])
    (tmp_path / "empty.json").write_text("")
    write_prompts(tmp_path / "prompts.jsonl", {"prompt": "x"})
    before = sorted(tmp_path.iterdir())
    arguments, words = REFUSED[kind]
    done = run("report", *arguments.replace("@", str(tmp_path)).split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("moelight: error: ") and done.stderr.count("\n") == 1
    for word in words:
        assert word.replace("@", str(tmp_path)) in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_of_the_engine_can_be_reported(tmp_path: Path) -> None:
    prompts, trace = write_prompts(tmp_path / "p.jsonl", {"prompt": "add 17 and 25 ="}), tmp_path / "run.json"
    done = run("generate", prompts, "--trace", trace, "--max-tokens", "6", *PLANNED)
    assert done.returncode == 0 and len(read_rows(done.stdout)) == 1
    done = run("report", trace)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cpu" in done.stdout and "median pass" in done.stdout
