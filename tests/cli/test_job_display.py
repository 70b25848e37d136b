"""What a person sees of a job, without running one."""

from __future__ import annotations

import io
import subprocess
import time
from dataclasses import replace

import pytest
from rich.console import Console

from moelight.batch.progress import JobCounts, JobStart, ProgressFields, ProgressGroup
from moelight.batch.time_left import TimeLeft
from moelight.cli import job_display
from moelight.cli.job_display import (
    Bar,
    LogLines,
    TableOfRows,
    about_text,
    command_lines,
    end_line,
    interrupted_line,
    log_line,
    start_line,
)
from moelight.cli.tables import printable
from moelight.core.schedule import Lane
from moelight.observe.stats import Binding, LaneStats, RunStats

START = JobStart(
    input="prompts.jsonl",
    detected="OpenAI batch lines",
    total=9998,
    refused=2,
    resumed=500,
    prompt_tokens=1_200_000,
    expected_tokens=2_500_000,
    plan="mixtral: everything stays",
    machine="cpu-amx",
    predicted_s=6000.0,
)
COUNTS = JobCounts(
    total=100_000,
    completed=12_337,
    failed=3,
    running=512,
    waiting=87_000,
    generation_tokens=543_200,
    expected_tokens=4_000_000,
    elapsed_s=120.0,
    running_s=100.0,
    state="in_progress",
)
DISK = Binding(lane=Lane.DISK, share=0.968)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Grüße 世 🦊", "Grüße 世 🦊"),
        ("two\nlines\tand", "two\nlines\tand"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\u202eturned", "\\u202eturned"),
        ("half \ud800", "half \\ud800"),
        ("\x9b2J", "\\x9b2J"),
    ],
)
def test_nothing_steers_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


def drawn(table: TableOfRows) -> str:
    console = Console(file=io.StringIO(), width=60, color_system=None)
    console.print(table.table())
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_table_takes_text_as_it_is() -> None:
    table = TableOfRows()
    table.row(ProgressFields(number=2, prompt="bad", error="no \x1b[0m token"))
    table.row(ProgressFields(number=1, prompt="cut", texts=("endless",), finish_reasons=("length",)))
    table.row(
        ProgressFields(
            number=0, prompt="[bold]prompt[/bold]", texts=("[red]x[/red] :smile:",), finish_reasons=("stop",)
        )
    )
    text = drawn(table)
    places = [text.index(message) for message in ("[bold]prompt[/bold]", "cut", "bad")]
    assert places == sorted(places), "rows come in the order of the input"
    for message in ("[red]x[/red] :smile:", "endless …", "error: no \\x1b[0m token"):
        assert message in text


def test_all_samples_of_a_row_are_shown() -> None:
    table = TableOfRows()
    table.row(ProgressFields(number=0, prompt="text", texts=("one", "two"), finish_reasons=("stop", "length")))
    text = drawn(table)
    assert "one" in text and "two …" in text


def test_long_text_is_folded_and_kept() -> None:
    table = TableOfRows()
    table.row(ProgressFields(number=0, prompt="p" * 100, texts=("c" * 300,), finish_reasons=("stop",)))
    text = drawn(table)
    assert max(map(len, text.splitlines())) <= 60
    assert text.count("p") == 100 + "prompt completion".count("p")
    assert text.count("c") == 300 + "prompt completion".count("c")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_two_lines_at_the_foot_of_a_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    eta = TimeLeft()
    bar = Bar(console, eta)
    told = ProgressGroup([eta, bar])
    told.reading(4000, 500, 1000)
    assert "4,000 rows, 50 %" in _shown(console, bar)
    told.planning()
    assert _shown(console, bar).split()[-1] == "planning"
    told.started(START)
    assert "loading the model" in _shown(console, bar)
    told.planned("mixtral: everything stays")
    told.counts(COUNTS)
    told.tokens(543_200, 4_000_000, DISK)
    told.adapted("disk takes 3.0x what was planned, so N goes from 32 to 88")
    shown = _shown(console, bar)
    lines = shown.splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= width
    for message in ("12,340/100,000 rows", "543k/", "tokens", "5,432 tok/s", "disk 97 %", "3 failed"):
        assert message in shown or width < 80
    above = console.file.getvalue()  # type: ignore[attr-defined]
    words = " ".join(above.split())
    assert words.count("mixtral: everything stays") == 1
    assert "so N goes from 32 to 88" in words
    assert max(map(len, above.splitlines())) <= width


@pytest.mark.parametrize("width", [40, 80])
def test_lines_end_between_words_and_the_command_runs_as_it_is_copied(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    command = ["moelight", "generate", "my prompts.jsonl", "--model", "a/model/somewhere", "-o", "it's an output.jsonl"]
    bar = Bar(console, TimeLeft())
    bar.say(start_line(START))
    above = console.file.getvalue()  # type: ignore[attr-defined]
    assert above.split() == start_line(START).split() and max(map(len, above.splitlines())) <= width
    bar.say_last("interrupted; continue with:", command)
    lines = command_lines(command, width)
    assert lines in console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, lines.splitlines())) <= width and lines.count(" \\\n") == len(lines.splitlines()) - 1
    script = f"moelight() {{ printf '%s\\n' moelight \"$@\"; }}; {lines}"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == command


def _shown(console: Console, bar: Bar) -> str:
    with console.capture() as capture:
        console.print(bar.drawn())
    return capture.get()


def test_elsewhere_lines_are_held_until_the_job_runs(capsys: pytest.CaptureFixture[str]) -> None:
    eta = TimeLeft()
    log = LogLines(eta)
    log.started(START)
    log.planned("mixtral: everything stays")
    assert capsys.readouterr().err == ""
    log.release()
    message = capsys.readouterr().err
    assert message.startswith(
        "moelight: prompts.jsonl: OpenAI batch lines, 9,998 rows (2 with errors, 500 done before)"
    )
    assert "mixtral: everything stays; about 1 h 40 min" in message and message.count("\n") == 1
    eta.remaining_s = 7800.0
    log.counts(COUNTS)
    log.tell()
    assert capsys.readouterr().err == (
        "moelight: 12,340/100,000 rows (12 %), 3 failed, 5,432 tok/s, about 2 h 10 min left\n"
    )


def test_a_long_pass_is_no_silence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come without events."""
    monkeypatch.setattr(job_display, "HELD_S", 0.01)
    monkeypatch.setattr(job_display, "LOG_EVERY_S", 0.02)

    def twice(line: str) -> None:
        heard, deadline = "", time.monotonic() + 300
        while heard.count(f"moelight: {line}\n") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            heard += capsys.readouterr().err

    with LogLines(TimeLeft()) as log:
        log.reading(4000, 500, 1000)
        twice("reading the input: 4,000 rows, 50 %")
        log.started(START)
        log.counts(COUNTS)
        twice("12,340/100,000 rows (12 %), 3 failed, 5,432 tok/s")


def test_a_job_that_breaks_at_once_leaves_the_one_line_that_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"), LogLines(TimeLeft()) as log:
        log.started(START)
        raise ValueError("broken")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2, "a few seconds"),
        (42, "about 40 s"),
        (89.9, "about 90 s"),
        (100, "about 2 min"),
        (3560, "about 59 min"),
        (3590, "about 1 h"),
        (6000, "about 1 h 40 min"),
        (7810, "about 2 h 10 min"),
        (36_100, "about 10 h"),
        (172_799, "about 2 days"),
        (360_000, "about 4 days 4 h"),
    ],
)
def test_a_forecast_is_as_fine_as_it_is_worth(seconds: float, text: str) -> None:
    assert about_text(seconds) == text


def test_the_first_and_the_last_line_say_it_all() -> None:
    assert start_line(START) == (
        "prompts.jsonl: OpenAI batch lines, 9,998 rows (2 with errors, 500 done before), 1.20M prompt tokens, "
        "at most 2.50M to generate; mixtral: everything stays; about 1 h 40 min by the profile of cpu-amx if no answer "
        "ends early"
    )
    assert log_line(COUNTS, None, DISK).endswith("5,432 tok/s, disk 97 %")
    stats = RunStats(
        wall_s=2.0,
        load_s=0.5,
        prompt_tokens=5,
        completion_tokens=900,
        passes=3,
        peak_rss_bytes=3 << 30,
        lanes={Lane.CPU: LaneStats()},
    )
    assert end_line(stats, completed=7, failed=1, output="out.jsonl") == (
        "7 completions, 1 failed, 900 tokens in 2.00 s (450 tok/s), load 0.5 s, peak memory 3.0GiB -> out.jsonl"
    )
    no_answers = replace(stats, completion_tokens=0)
    counts = {"drafted_tokens": 1200, "model_drafted_tokens": 1000, "model_accepted_tokens": 700}
    with_drafts = replace(stats, counts={**counts, "lookup_drafted_tokens": 200, "lookup_accepted_tokens": 50})
    assert " a pass, 700 of 1,000 drafted by model, 50 of 200 drafted by lookup, in " in end_line(
        with_drafts, completed=7, failed=1
    )
    assert end_line(no_answers, completed=7, failed=0) == (
        "7 completions, 0 tokens in 2.00 s (0 tok/s), load 0.5 s, peak memory 3.0GiB"
    )
    assert end_line(no_answers, completed=7, failed=0, generates=False) == (
        "7 rows, 5 prompt tokens in 2.00 s (2 tok/s), load 0.5 s, peak memory 3.0GiB"
    )
    under_way = replace(COUNTS, running=1380)
    assert interrupted_line(under_way, output="out.jsonl") == (
        "interrupted: 12,340 of 100,000 rows are kept in out.jsonl; 1,380 answers were under way and are computed "
        "again; continue with:"
    )
    at_once = interrupted_line(None, output="out.jsonl")
    assert at_once == "interrupted: the rows that were finished are kept in out.jsonl; continue with:"
    for counts in (None, COUNTS):
        assert "continue with" not in interrupted_line(counts, output="")
