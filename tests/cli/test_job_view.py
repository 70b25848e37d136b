"""What a person sees of a job, without running one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from moelight.batch.job import JobResult
from moelight.cli.job_view import Bar, Plain, TableOfRows
from moelight.cli.tables import printable
from moelight.core.schedule import Lane
from moelight.observe.stats import Binding, LaneStats, Stats


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
    console.print(table.table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_table_takes_text_as_it_is() -> None:
    table = TableOfRows()
    table.row("[bold]prompt[/bold]", {"text": "[red]x[/red] :smile:", "finish_reason": "stop"})
    table.row("cut", {"text": "endless", "finish_reason": "length"})
    table.row("bad", {"line": 3, "error": {"code": "c", "message": "no \x1b[0m token"}})
    text = drawn(table)
    for said in ("[bold]prompt[/bold]", "[red]x[/red] :smile:", "endless …", "error: no \\x1b[0m token"):
        assert said in text


def test_long_text_is_folded_and_kept() -> None:
    table = TableOfRows()
    table.row("p" * 100, {"text": "c" * 300, "finish_reason": "stop"})
    text = drawn(table)
    assert max(map(len, text.splitlines())) <= 60
    assert text.count("p") == 100 + "prompt completion".count("p")
    assert text.count("c") == 300 + "prompt completion".count("c")


def test_the_bar_counts_tokens_and_sums_up() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    table = TableOfRows()
    with Bar(console, table) as bar:
        bar.planned("mixtral: everything stays")
        bar.adapted("disk takes 3.0x what was planned, so N goes from 32 to 88")
        bar.tokens(500, 2000)
        bar.tokens(900, 1000, Binding(lane=Lane.DISK, share=0.968))
        bar.row("p", {"text": "t", "finish_reason": "stop"})
    stats = Stats(
        wall_s=2.0,
        load_s=0.5,
        prompt_tokens=5,
        completion_tokens=900,
        passes=3,
        peak_rss_bytes=3 << 30,
        lanes={Lane.CPU: LaneStats()},
    )
    bar.summarize(JobResult(completed=7, failed=0, stats=stats), None)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "so N goes from 32 to 88" in text
    for said in (
        "mixtral: everything stays",
        "900/1,000 tokens",
        "  disk 97 %",
        "7 completions, 900 tokens in 2.0 s",
        "450 tok/s",
        "3.0GiB",
    ):
        assert said in text
    assert table.table.row_count == 1


def test_without_a_terminal_all_that_was_said_is_kept_in_order() -> None:
    plain = Plain()
    plain.planned("first")
    plain.adapted("second")
    assert plain.said == ["first", "second"]
