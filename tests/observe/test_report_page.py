"""The page: everything in one file, everything escaped, and honest about what it leaves out."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from moelight.core.schedule import Lane, Task, TaskKind
from moelight.core.timeline import Span, Timeline
from moelight.observe import report_page
from moelight.observe.report import report_of
from moelight.observe.report_page import COLOURS, page_text, shown_passes
from moelight.observe.trace import LaneForecast, TraceHeader, read_trace
from tests.observe.traces import write_passes, write_timelines

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def page(path: Path, *, title: str = "trace.json") -> str:
    recording = read_trace(path)
    return "".join(page_text(report_of(recording), recording, title=title))


def data_of(text: str) -> dict[str, Any]:
    match = re.search(r"<script id=trace type=application/json>(.*?)</script>", text, re.DOTALL)
    assert match is not None
    return json.loads(match.group(1))  # type: ignore[no-any-return]


class Elements(HTMLParser):
    """Every element with its attributes, and all text outside scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    text = page(write_passes(tmp_path / "t.json", 3))
    elements = Elements()
    elements.feed(text)
    for tag, attributes in elements.elements:
        assert tag not in ("link", "img", "iframe", "object", "base", "form"), tag
        assert not {"src", "href", "action"} & set(attributes), (tag, attributes)
    assert not re.search(r"https?:|@import|url\(|\bfetch\(|XMLHttp|WebSocket|import\(", text)
    policy = next(a for tag, a in elements.elements if tag == "meta" and "content" in a and a.get("http-equiv"))
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def test_figures_and_policy_are_there(tmp_path: Path) -> None:
    text = Elements()
    text.feed(page(write_passes(tmp_path / "t.json", 3)))
    for message in (
        "demo",
        "on t4",
        "N = 8 in micro-batches of 4",
        "3passes",
        "1.25 sdecode pass, predicted",
        "h2d",
        "h2d 50 %the binding lane at work",
        "Why h2d stood still",
        "did nothing for 1.50 s, 50 % of the run",
        "not recorded",
        "pass 1, layer 1",
        "the end",
        "+25 %",
        "2.00 kB/s",
        "50 %",
        "host 0.5, disk 0.5",
        "the link binds",
        "moelight 1.2.3",
    ):
        assert message in text.text, message


def test_the_longest_rests_lead_into_the_chart(tmp_path: Path) -> None:
    elements = Elements()
    elements.feed(page(write_passes(tmp_path / "t.json", 3)))
    ways = [attributes for tag, attributes in elements.elements if attributes.get("class") == "goto"]
    assert [(way["data-from"], way["data-length"]) for way in ways] == [
        ("500000.000", "500000.000"),
        ("2500000.000", "500000.000"),
    ]


def test_a_lane_that_never_stood_still_has_no_table(tmp_path: Path) -> None:
    task = Task(kind=TaskKind.SAMPLE, lane=Lane.CPU)
    path = write_timelines(tmp_path / "t.json", [Timeline(spans=(Span(task=task, start_s=1.0, end_s=2.0),))])
    assert "did nothing for 0 s" in page(path) and "<th>cause" not in page(path)


def test_a_bar_says_what_it_waited_for(tmp_path: Path) -> None:
    data = data_of(page(write_passes(tmp_path / "t.json", 1)))
    message = {
        data["kinds"][kind]["name"]: (data["causes"][cause] if cause >= 0 else None, until)
        for kind, cause, until in zip(data["bars"]["kind"], data["bars"]["cause"], data["bars"]["until"], strict=True)
    }
    assert message == {"send_page": (None, 0), "cpu_attention": (None, 0), "post_attention": ("send_page", 500_000)}


def test_a_trace_without_a_prediction_says_so(tmp_path: Path) -> None:
    text = page(write_passes(tmp_path / "t.json", 2, about=None))
    assert "brings no prediction" in text and "<h2>Policy</h2>" not in text


def test_what_a_trace_holds_cannot_become_markup(tmp_path: Path) -> None:
    about = TraceHeader(
        version=EVIL,
        source=EVIL,
        policy={"model": EVIL, EVIL: EVIL, "batch_size": EVIL, "micro_batch_size": EVIL, "schedule": {EVIL: EVIL}},
        hardware=EVIL,
        predicted={"cpu": LaneForecast(busy_s=1.0)},
        notes={EVIL: EVIL},
    )
    text = page(write_passes(tmp_path / "t.json", 2, about=about), title=EVIL)
    elements = Elements()
    elements.feed(text)
    assert [tag for tag, _ in elements.elements].count("script") == 2
    assert "img" not in [tag for tag, _ in elements.elements]
    assert elements.text.count("alert(1)") >= 8


def test_the_script_gets_every_task(tmp_path: Path) -> None:
    data = data_of(page(write_passes(tmp_path / "t.json", 3, tasks=2)))
    bars = data["bars"]
    assert {len(column) for column in bars.values()} == {12}
    assert data["lanes"] == ["h2d", "device", "cpu"] and data["roofs"] == [4000.0, None, None]
    assert [data["kinds"][kind]["name"] for kind in bars["kind"][:2]] == ["send_page", "cpu_attention"]
    assert bars["start"] == sorted(bars["start"])
    assert sum(bars["bytes"]) == 3000 and data["end"] == 3e6
    assert [window["name"] for window in data["passes"]] == ["0", "1", "2"]
    assert data["passes"][1]["shares"] == [0.5, 0.5, 0.25]


def test_a_long_run_is_thinned_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "MOST_TASKS_SHOWN", 40)
    monkeypatch.setattr(report_page, "MOST_WINDOWS", 25)
    text = page(write_passes(tmp_path / "t.json", 100))
    data = data_of(text)
    assert "Of 100 passes this page holds the tasks of 13 passes, evenly spread," in text
    assert len(data["bars"]["start"]) == 39
    shown = [window for window in data["passes"] if window["shown"]]
    assert len(shown) == 13 and (shown[0]["name"], shown[-1]["name"]) == ("0", "99")
    assert data["passes"][0]["start"] == 0 and data["passes"][-1]["end"] == data["end"]
    for before, after in zip(data["passes"], data["passes"][1:], strict=False):
        assert before["end"] == after["start"]
    assert "1–4" in [window["name"] for window in data["passes"]]


@pytest.mark.parametrize(
    ("tasks", "limit", "shown"),
    [
        ([5, 5, 5], 15, [0, 1, 2]),
        ([5, 5, 5], 14, [0, 2]),
        ([5, 5, 5], 3, [1]),
        ([1], 0, [0]),
        ([100, 1, 1, 1, 100], 10, [2]),
        ([1] * 1000, 10, [0, 111, 222, 333, 444, 555, 666, 777, 888, 999]),
    ],
)
def test_which_passes_a_page_holds(tasks: list[int], limit: int, shown: list[int]) -> None:
    assert shown_passes(tasks, limit) == shown


def test_every_kind_of_task_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(TaskKind)
    assert len(set(COLOURS.values())) == len(COLOURS)
