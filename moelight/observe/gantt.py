"""Gantt plot of timelines: one panel per timeline, one row per lane, one colour per task kind, one time axis.

matplotlib is imported when something is drawn. Simulated and measured timelines look alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moelight.core.errors import ConfigError
from moelight.core.schedule import Lane, Task, TaskKind
from moelight.core.timeline import Span, Timeline
from moelight.observe.number_format import seconds_text, share_text
from moelight.observe.report_page import COLOURS

SUFFIXES = (".png", ".svg", ".pdf")
WIDTH_INCHES, DPI = 12.0, 100  # 1200 px wide
_INK, _MUTED, _IDLE = "#1a1a1a", "#666666", "#c0392b"
_LANE_NAMES = {
    Lane.DISK: "disk",
    Lane.STAGE: "staging copy",
    Lane.H2D: "link up",
    Lane.D2H: "link down",
    Lane.DEVICE: "GPU",
    Lane.CPU: "CPU",
}
_LEFT, _RIGHT = 0.098, 0.885  # of the width; lane names on the left, lane load on the right
_ROW, _BAR = 0.36, 0.78  # height of a lane in inches; share of the height that its bars fill
_HEAD, _GAP, _FOOT = 0.95, 0.68, 0.62  # inches above, between and below the panels
_KEYS, _KEY_ROW = 8, 0.23  # legend entries per row, and the height of a row in inches
_LETTER = 0.0052  # of the axis: width of one letter in a bar
_LAYER_NAME = 0.075  # of the axis: width of a layer name above the bars
_LEAST = 0.0012  # of the axis: minimal width of a bar


def excerpt(timeline: Timeline, start_s: float, end_s: float) -> Timeline:
    """Return the part of ``timeline`` between two times, clipped and shifted to begin at 0."""
    inside = (span for span in timeline.spans if span.end_s > start_s and span.start_s < end_s)
    return Timeline(
        spans=tuple(
            replace(span, start_s=max(span.start_s, start_s) - start_s, end_s=min(span.end_s, end_s) - start_s)
            for span in inside
        )
    )


def plot_timelines(path: Path, rows: Sequence[tuple[str, Timeline]], *, title: str = "") -> None:
    """Draw each ``(title, timeline)`` as a panel, from its own start, to ``path``, in the format given by its suffix.

    The busiest lane of each timeline is the binding lane; its idle time is shaded and labelled.

    Raises:
        ConfigError: the suffix is not in `SUFFIXES`, nothing to draw, or matplotlib is not installed.
        OSError: ``path`` cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: the name of a picture ends in one of {', '.join(SUFFIXES)}")
    if not any(timeline.spans for _, timeline in rows):
        raise ConfigError(f"{path}: no timeline to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing needs matplotlib: pip install 'moelight[plots]'") from None
    panels = [_Panel(name, timeline) for name, timeline in rows if timeline.spans]
    kinds = [kind for kind in TaskKind if any(kind in panel.kinds for panel in panels)]
    head = _HEAD + _KEY_ROW * -(-(len(kinds) + 1) // _KEYS)
    height = head + _FOOT + _GAP * (len(panels) - 1) + _ROW * sum(len(panel.lanes) for panel in panels)
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI)
    FigureCanvasAgg(figure)
    longest_s, top = max(panel.seconds for panel in panels), height - head
    for panel in panels:
        bottom = top - _ROW * len(panel.lanes)
        box = (_LEFT, bottom / height, _RIGHT - _LEFT, (top - bottom) / height)
        panel.draw(figure.add_axes(box), longest_s, last=panel is panels[-1])
        top = bottom - _GAP
    _head(figure, title, kinds, height)
    figure.savefig(path, dpi=DPI)


def _head(figure: Any, title: str, kinds: Sequence[TaskKind], height: float) -> None:
    """Draw the title and, below it, the legend of the colours."""
    from matplotlib.patches import Patch

    figure.text(_LEFT, 1 - 0.26 / height, title, fontsize=14, fontweight="bold", color=_INK, va="center")
    note = "in bars: layer and expert of a page, or micro-batch"
    figure.text(_RIGHT, 0.2 / height, note, fontsize=9, color=_MUTED, ha="right", va="center")
    handles: list[Any] = [Patch(facecolor=COLOURS[kind], label=str(kind).replace("_", " ")) for kind in kinds]
    handles.append(Patch(facecolor="white", edgecolor=_IDLE, hatch="////", linewidth=0.6, label="binding lane idle"))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(_LEFT - 0.004, 1 - 0.46 / height),
        ncols=_KEYS,
        fontsize=10,
        frameon=False,
        borderaxespad=0.0,
        borderpad=0.0,
        handlelength=1.1,
        handleheight=1.0,
        handletextpad=0.45,
        columnspacing=1.3,
    )


class _Panel:
    """Panel of one timeline. Time runs from its first task to its last; tasks of zero length are dropped."""

    def __init__(self, name: str, timeline: Timeline) -> None:
        self.name = name
        moved = excerpt(timeline, timeline.start_s, timeline.end_s)
        self.timeline = Timeline(spans=tuple(span for span in moved.spans if span.end_s > span.start_s))
        self.seconds = self.timeline.end_s
        self.busy_s = self.timeline.busy_s()
        self.kinds = {span.task.kind for span in self.timeline.spans}
        self.lanes = [lane for lane in Lane if lane in self.busy_s]
        self.binding = max(self.lanes, key=self.busy_s.__getitem__)

    def draw(self, axes: Any, longest_s: float, *, last: bool) -> None:
        """Draw bars, idle time, layer boundaries and the load of each lane."""
        self._frame(axes, longest_s, last=last)
        for row, lane in enumerate(self.lanes):
            spans = sorted((s for s in self.timeline.spans if s.task.lane is lane), key=lambda span: span.start_s)
            if lane is self.binding:
                self._idle(axes, row, spans)
            for kind in dict.fromkeys(span.task.kind for span in spans):
                mine = [span for span in spans if span.task.kind is kind]
                bars = [(span.start_s, max(span.end_s - span.start_s, _LEAST * longest_s)) for span in mine]
                where = (row - _BAR / 2, _BAR)
                axes.broken_barh(bars, where, facecolor=COLOURS[kind], edgecolor="white", linewidth=0.35)
            self._names(axes, row, spans, longest_s)
            busy = self.busy_s[lane] / self.seconds
            colour, weight = (_IDLE, "bold") if lane is self.binding else (_MUTED, "normal")
            load = f"{share_text(busy)} busy"
            axes.annotate(
                load, (1.006, row), xycoords=axes.get_yaxis_transform(), va="center", color=colour, weight=weight
            )
        self._layers(axes, longest_s)
        if self.seconds < 0.8 * longest_s:
            axes.axvline(self.seconds, color=_MUTED, linewidth=0.9)
            sooner = f"done {seconds_text(longest_s - self.seconds)} sooner"
            middle = (len(self.lanes) - 1) / 2
            axes.annotate(
                sooner, (self.seconds, middle), xytext=(8, 0), textcoords="offset points", va="center", color=_MUTED
            ).set_fontsize(11)

    def _frame(self, axes: Any, longest_s: float, *, last: bool) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes.set(xlim=(0, longest_s), ylim=(len(self.lanes) - 0.5, -0.5))
        axes.set_yticks(range(len(self.lanes)), [_LANE_NAMES[lane] for lane in self.lanes], fontsize=10.5)
        axes.tick_params(axis="y", length=0, colors=_INK)
        axes.tick_params(axis="x", labelsize=10, colors=_INK, labelbottom=last)
        axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 2.5, 5, 10]))
        unit, name = (1.0, "s") if longest_s >= 2 else (1e-3, "ms") if longest_s >= 2e-3 else (1e-6, "µs")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at / unit:g}"))
        if last:
            axes.set_xlabel(f"time, {name}", fontsize=10.5, color=_INK)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(visible=True, axis="x", color="#e9e9e9", linewidth=0.8)
        label = axes.get_yticklabels()[self.lanes.index(self.binding)]
        label.set(color=_IDLE, fontweight="bold")

    def _idle(self, axes: Any, row: int, spans: Sequence[Span]) -> None:
        """Shade and label the idle time of the binding lane."""
        gaps, reached = [], 0.0
        for span in spans:
            if span.start_s > reached:
                gaps.append((reached, span.start_s - reached))
            reached = max(reached, span.end_s)
        if self.seconds > reached:
            gaps.append((reached, self.seconds - reached))
        style = {"facecolor": "#fdecea", "edgecolor": _IDLE, "hatch": "////", "linewidth": 0.0}
        axes.broken_barh(gaps, (row - _BAR / 2, _BAR), **style)
        idle_s = sum(length for _, length in gaps)
        heading = f"{self.name}: {seconds_text(self.seconds)}"
        text = f"{_LANE_NAMES[self.binding]} idle {share_text(max(0.0, idle_s / self.seconds))}"
        above = axes.get_xaxis_transform()
        title = axes.annotate(heading, (0, 1), xycoords=above, xytext=(0, 17), textcoords="offset points")
        title.set(fontsize=12, fontweight="bold", color=_INK, va="bottom")
        axes.annotate(f"   {text}", (1, 0), xycoords=title, va="bottom", fontsize=12, color=_IDLE)

    def _names(self, axes: Any, row: int, spans: Sequence[Span], longest_s: float) -> None:
        """Label every bar that is wide enough with its page or micro-batch."""
        for span in spans:
            text, width = _short(span.task), (span.end_s - span.start_s) / longest_s
            if text and width > _LETTER * len(text):
                middle, size = (span.start_s + span.end_s) / 2, 7.5 if width > 1.5 * _LETTER * len(text) else 6.2
                axes.text(middle, row, text, ha="center", va="center", fontsize=size, color="white", clip_on=True)

    def _layers(self, axes: Any, longest_s: float) -> None:
        """Draw a line where the compute unit begins the experts of a layer, labelled with the layer where it fits."""
        begun: dict[int, float] = {}
        for span in self.timeline.spans:
            if span.task.kind in (TaskKind.POST_ATTENTION, TaskKind.ROUTE):
                begun[span.task.layer] = min(span.start_s, begun.get(span.task.layer, span.start_s))
        free_from = -math.inf
        for layer, at in begun.items():
            axes.axvline(at, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
            if at < free_from:
                continue
            free_from = at + _LAYER_NAME * longest_s
            above = axes.get_xaxis_transform()
            axes.annotate(
                f"layer {layer}",
                (at, 1),
                xycoords=above,
                xytext=(3, 2),
                textcoords="offset points",
                fontsize=9,
                color=_MUTED,
                va="bottom",
            )


def _short(task: Task) -> str:
    """Return the name of the page or the number of the micro-batch; empty if the task has neither."""
    if task.kind.moves_page and task.page is not None:
        return task.page.name
    return str(task.micro_batch) if task.micro_batch >= 0 else ""
