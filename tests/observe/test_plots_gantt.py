"""The Gantt picture: what is cut out, what is drawn, what is refused."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from moelight.core.errors import ConfigError
from moelight.core.schedule import Lane, Page, Task, TaskKind
from moelight.core.timeline import Span, Timeline
from moelight.observe.plots import excerpt, plot_timelines


def span(lane: Lane, kind: TaskKind, start_s: float, end_s: float, *, layer: int = 0, j: int = 0) -> Span:
    page = Page(layer=layer, expert=j) if kind is TaskKind.SEND_PAGE else None
    return Span(task=Task(kind=kind, lane=lane, layer=layer, micro_batch=j, page=page), start_s=start_s, end_s=end_s)


TIMELINE = Timeline(
    spans=(
        span(Lane.H2D, TaskKind.SEND_PAGE, 10.0, 14.0, layer=1, j=3),
        span(Lane.H2D, TaskKind.LOAD_HIDDEN, 16.0, 17.0),
        span(Lane.DEVICE, TaskKind.POST_ATTENTION, 11.0, 13.0),
        span(Lane.DEVICE, TaskKind.POST_ATTENTION, 13.0, 15.0, layer=1),
        span(Lane.CPU, TaskKind.STORE_KV, 15.0, 15.0),
    )
)
SHORTER = Timeline(spans=(span(Lane.DEVICE, TaskKind.POST_ATTENTION, 2.0, 5.0),))


def texts(path: Path) -> str:
    """Every text of an SVG picture; matplotlib keeps them as comments beside their outlines."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))
    tree = ET.parse(path, parser=parser)
    return "\n".join((node.text or "").strip() for node in tree.iter() if node.tag is ET.Comment)


def test_an_excerpt_is_cut_and_moved_to_zero() -> None:
    cut = excerpt(TIMELINE, 12.0, 16.0)
    assert [(s.task.kind, s.start_s, s.end_s) for s in cut.spans] == [
        (TaskKind.SEND_PAGE, 0.0, 2.0),
        (TaskKind.POST_ATTENTION, 0.0, 1.0),
        (TaskKind.POST_ATTENTION, 1.0, 3.0),
        (TaskKind.STORE_KV, 3.0, 3.0),
    ]
    assert excerpt(TIMELINE, 17.0, 20.0).spans == ()


def test_the_picture_says_what_a_reader_needs(tmp_path: Path) -> None:
    """Lanes, load, the binding lane's idle time, layers, pages, colours; a lane that took no time is not there."""
    path = tmp_path / "orders.svg"
    plot_timelines(path, [("first", TIMELINE), ("second", SHORTER)], title="Two orders")
    result = texts(path)
    for wanted in (
        "Two orders",
        "first: 7.00 s",
        "link up idle 29 %",
        "71 % busy",
        "57 % busy",
        "second: 3.00 s",
        "done 4.00 s sooner",
        "layer 1",
        "1:e3",
        "send page",
        "post attention",
        "binding lane idle",
        "time, s",
    ):
        assert wanted in result
    assert "CPU" not in result


def test_a_png_is_1200_pixels_wide(tmp_path: Path) -> None:
    path = tmp_path / "orders.png"
    plot_timelines(path, [("first", TIMELINE)])
    header = path.read_bytes()[:24]
    assert header[1:4] == b"PNG"
    assert int.from_bytes(header[16:20], "big") == 1200


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ends in one of \.png"):
        plot_timelines(tmp_path / "orders.txt", [("first", TIMELINE)])
    with pytest.raises(ConfigError, match="no timeline to draw"):
        plot_timelines(tmp_path / "orders.png", [("first", Timeline(spans=()))])
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'moelight\[plots\]'"):
        plot_timelines(tmp_path / "orders.png", [("first", TIMELINE)])
