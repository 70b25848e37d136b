"""Two plots: timelines as Gantt charts, and the Hierarchical Roofline Model with the work of a policy under it.

matplotlib is imported on first use. ``hrm.roofline`` computes the roofs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from moelight.core.errors import ConfigError
from moelight.core.schedule import Lane, Task, TaskKind
from moelight.core.timeline import Span, Timeline
from moelight.hrm import roofline as hrm
from moelight.hrm.roofline import Mark, Point, Roofline
from moelight.observe.number_format import flops_text, rate_or_count, rate_text, seconds_text, share_text
from moelight.observe.report_page import COLOURS

SUFFIXES = (".png", ".svg", ".pdf")
WIDTH_INCHES, DPI = 12.0, 100  # 1200 px wide
INK, MUTED, _IDLE, _EXPERTS = "#1a1a1a", "#666666", "#c0392b", "#7a1fa2"
_LANE_NAMES = {
    Lane.DISK: "disk",
    Lane.STAGE: "staging copy",
    Lane.H2D: "link up",
    Lane.D2H: "link down",
    Lane.DEVICE: "GPU",
    Lane.CPU: "CPU",
    Lane.EXCHANGE: "other ranks",
}
_LEFT, _RIGHT = 0.098, 0.885  # of the width; lane names on the left, lane load on the right
_ROW, _BAR = 0.36, 0.78  # height of a lane in inches; share of the height that its bars fill
_HEAD, _GAP, _FOOT = 0.95, 0.68, 0.62  # inches above, between and below the panels
_KEYS, _KEY_ROW = 8, 0.23  # legend entries per row, and the height of a row in inches
_LETTER = 0.0052  # of the axis: width of one letter in a bar
_LAYER_NAME = 0.075  # of the axis: width of a layer name above the bars
_LEAST = 0.0012  # of the axis: minimal width of a bar
_ROOFS_INCHES = 7.0
_AXES = (0.07, 0.1, 0.555, 0.76)  # left, bottom, width, height; the rest is for the legend
_LEVEL_COLORS = {"device": "#00795a", "host": "#0060a8", "disk": "#8a4f9e"}
_LINK_COLORS = {"host": "#d1491b", "disk": "#a87900"}  # by the slower end of the link
_SYMBOLS = {"P1": "^", "P2": "v", "balance": "D"}
_OFFSETS = (
    *((0, 13), (0, -13), (9, 0), (-9, 0)),
    *((7, 9), (-7, 9), (7, -9), (-7, -9)),
    *((0, 26), (0, -26), (9, 18), (-9, 18)),
)


def check_suffix(path: Path) -> None:
    """Raise ConfigError unless the suffix of ``path`` is one of `SUFFIXES`."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: the name of a picture ends in one of {', '.join(SUFFIXES)}")


def new_figure(height_inches: float) -> Any:
    """Return an empty matplotlib ``Figure`` of `WIDTH_INCHES`; raises ConfigError if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing needs matplotlib: pip install 'moelight[plots]'") from None
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def _note(
    axes: Any, text: str, at: tuple[float, float], offset: tuple[float, float], *, above: bool = False, **style: Any
) -> Any:
    """Write ``text`` at ``offset`` (points) from a data point; ``above``: from the height ``at[1]`` of the axes."""
    coordinates = axes.get_xaxis_transform() if above else "data"
    return axes.annotate(text, at, xycoords=coordinates, xytext=offset, textcoords="offset points", **style)


def excerpt(timeline: Timeline, start_s: float, end_s: float) -> Timeline:
    """Return the part of ``timeline`` between two times, clipped and shifted to begin at 0."""
    return Timeline(
        spans=tuple(
            replace(span, start_s=max(span.start_s, start_s) - start_s, end_s=min(span.end_s, end_s) - start_s)
            for span in timeline.spans
            if span.end_s > start_s and span.start_s < end_s
        )
    )


def plot_timelines(path: Path, rows: Sequence[tuple[str, Timeline]], *, title: str = "") -> None:
    """Draw each ``(title, timeline)`` as a panel, from its own start, to ``path``.

    The suffix of ``path``, one of `SUFFIXES`, is the format. The busiest lane of each timeline is the binding lane; its
    idle time is shaded and labelled.
    """
    check_suffix(path)
    if not any(timeline.spans for _, timeline in rows):
        raise ConfigError(f"{path}: no timeline to draw")
    panels = [_Panel(name, timeline) for name, timeline in rows if timeline.spans]
    kinds = [kind for kind in TaskKind if any(kind in panel.kinds for panel in panels)]
    head = _HEAD + _KEY_ROW * -(-(len(kinds) + 1) // _KEYS)
    height = head + _FOOT + _GAP * (len(panels) - 1) + _ROW * sum(len(panel.lanes) for panel in panels)
    figure = new_figure(height)
    longest_s, top = max(panel.seconds for panel in panels), height - head
    for panel in panels:
        bottom = top - _ROW * len(panel.lanes)
        box = (_LEFT, bottom / height, _RIGHT - _LEFT, (top - bottom) / height)
        panel.draw(figure.add_axes(box), longest_s, last=panel is panels[-1])
        top = bottom - _GAP
    _head(figure, title, kinds, height)
    figure.savefig(path, dpi=DPI)


def _head(figure: Any, title: str, kinds: Sequence[TaskKind], height: float) -> None:
    from matplotlib.patches import Patch

    figure.text(_LEFT, 1 - 0.26 / height, title, fontsize=14, fontweight="bold", color=INK, va="center")
    note = "in bars: layer and expert of a page, or micro-batch"
    figure.text(_RIGHT, 0.2 / height, note, fontsize=9, color=MUTED, ha="right", va="center")
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
        self._frame(axes, longest_s, last=last)
        for row, lane in enumerate(self.lanes):
            spans = sorted((s for s in self.timeline.spans if s.task.lane is lane), key=lambda span: span.start_s)
            if lane is self.binding:
                self._idle(axes, row, spans)
            for kind in dict.fromkeys(span.task.kind for span in spans):
                kind_spans = [span for span in spans if span.task.kind is kind]
                bars = [(span.start_s, max(span.end_s - span.start_s, _LEAST * longest_s)) for span in kind_spans]
                where = (row - _BAR / 2, _BAR)
                axes.broken_barh(bars, where, facecolor=COLOURS[kind], edgecolor="white", linewidth=0.35)
            self._names(axes, row, spans, longest_s)
            colour, weight = (_IDLE, "bold") if lane is self.binding else (MUTED, "normal")
            beside = {"transform": axes.get_yaxis_transform(), "va": "center", "color": colour, "weight": weight}
            axes.text(1.006, row, f"{share_text(self.busy_s[lane] / self.seconds)} busy", **beside)
        self._layers(axes, longest_s)
        if self.seconds < 0.8 * longest_s:
            axes.axvline(self.seconds, color=MUTED, linewidth=0.9)
            middle, sooner = (len(self.lanes) - 1) / 2, f"done {seconds_text(longest_s - self.seconds)} sooner"
            _note(axes, sooner, (self.seconds, middle), (8, 0), va="center", color=MUTED, fontsize=11)

    def _frame(self, axes: Any, longest_s: float, *, last: bool) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes.set(xlim=(0, longest_s), ylim=(len(self.lanes) - 0.5, -0.5))
        axes.set_yticks(range(len(self.lanes)), [_LANE_NAMES[lane] for lane in self.lanes], fontsize=10.5)
        axes.tick_params(axis="y", length=0, colors=INK)
        axes.tick_params(axis="x", labelsize=10, colors=INK, labelbottom=last)
        axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 2.5, 5, 10]))
        unit, name = (1.0, "s") if longest_s >= 2 else (1e-3, "ms") if longest_s >= 2e-3 else (1e-6, "µs")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at / unit:g}"))
        if last:
            axes.set_xlabel(f"time, {name}", fontsize=10.5, color=INK)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(visible=True, axis="x", color="#e9e9e9", linewidth=0.8)
        label = axes.get_yticklabels()[self.lanes.index(self.binding)]
        label.set(color=_IDLE, fontweight="bold")

    def _idle(self, axes: Any, row: int, spans: Sequence[Span]) -> None:
        gaps, reached = [], 0.0
        for start_s, end_s in (*((span.start_s, span.end_s) for span in spans), (self.seconds, self.seconds)):
            if start_s > reached:
                gaps.append((reached, start_s - reached))
            reached = max(reached, end_s)
        style = {"facecolor": "#fdecea", "edgecolor": _IDLE, "hatch": "////", "linewidth": 0.0}
        axes.broken_barh(gaps, (row - _BAR / 2, _BAR), **style)
        idle = share_text(max(0.0, sum(length for _, length in gaps) / self.seconds))
        large = {"fontsize": 12, "va": "bottom"}
        heading = f"{self.name}: {seconds_text(self.seconds)}"
        title = _note(axes, heading, (0, 1), (0, 17), above=True, fontweight="bold", color=INK, **large)
        axes.annotate(f"   {_LANE_NAMES[self.binding]} idle {idle}", (1, 0), xycoords=title, color=_IDLE, **large)

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
            if span.task.kind in (TaskKind.LAYERS, TaskKind.POST_ATTENTION, TaskKind.ROUTE):
                begun[span.task.layer] = min(span.start_s, begun.get(span.task.layer, span.start_s))
        free_from = -math.inf
        for layer, at in begun.items():
            axes.axvline(at, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            if at >= free_from:
                free_from = at + _LAYER_NAME * longest_s
                _note(axes, f"layer {layer}", (at, 1), (3, 2), above=True, fontsize=9, color=MUTED, va="bottom")


def _short(task: Task) -> str:
    """Return the name of the task's page, or the number of its micro-batch, or nothing."""
    if task.kind.moves_page and task.page is not None:
        return task.page.name
    return "" if task.serves_all else str(task.micro_batch)


def write_roofline(path: Path, roofline: Roofline) -> None:
    """Draw ``roofline`` to ``path``, whose suffix, one of `SUFFIXES`, is the format."""
    check_suffix(path)
    figure_of(roofline).savefig(path, dpi=DPI)


def figure_of(roofline: Roofline) -> Any:
    """Return the plot of ``roofline`` as a matplotlib ``Figure``."""
    figure = new_figure(_ROOFS_INCHES)
    _Picture(figure, roofline).draw()
    return figure


class _Picture:
    """State of one figure while it is drawn: axes, legend rows, and drawn points that labels should not cover."""

    def __init__(self, figure: Any, roofline: Roofline) -> None:
        self._figure, self._roofline = figure, roofline
        self._axes = figure.add_axes(_AXES)
        self._low, self._high = _horizontal(roofline)
        self._rows: list[tuple[Any, str]] = []  # handle None: a heading
        self._names: list[tuple[float, float, str, str]] = []
        self._drawn: list[tuple[float, float]] = []

    def draw(self) -> None:
        self._frame()
        self._rows.append((None, "Roofs"))
        self._roofs()
        self._rows.append((None, "Decoding under the policy"))
        for point in self._roofline.points:
            self._point(point)
        self._rows.append((None, "Turning points of the link"))
        for name, mark in _distinct(self._roofline.marks):
            self._mark(name, mark)
        self._bands()
        self._legend()
        self._write_names()

    def _frame(self) -> None:
        from matplotlib.ticker import EngFormatter

        axes, roofline = self._axes, self._roofline
        axes.set(xscale="log", yscale="log", xlim=(self._low, self._high), ylim=_vertical(roofline, self._low))
        axes.set_xlabel("operational intensity, flop / byte", fontsize=12.5, color=INK)
        axes.set_ylabel("performance, flop / s", fontsize=12.5, color=INK)
        axes.tick_params(labelsize=11.5, colors=INK)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        axes.yaxis.set_major_formatter(EngFormatter())
        axes.grid(visible=True, which="major", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        left, top = _AXES[0], _AXES[1] + _AXES[3]
        title = f"Hierarchical roofline: {roofline.model} on {roofline.machine}"
        policy = f"N = {roofline.batch_size:,} sequences in micro-batches of μ = {roofline.micro_batch_size:,}"
        self._figure.text(left, top + 0.075, title, fontsize=16, fontweight="bold", color=INK)
        self._figure.text(left, top + 0.035, policy, fontsize=12.5, color=MUTED)

    def _roofs(self) -> None:
        """Draw the memory and compute roof of each level, and each link's roof up to the compute roof of its target;
        dashed, up to the highest of the levels that it feeds."""
        chain = self._roofline.chain
        for index, level in enumerate(chain):
            if level.peak_flops:
                turn = (hrm.turning_point(level), level.peak_flops)
                start, end = (self._low, hrm.memory_roof(level, self._low)), (self._high, level.peak_flops)
                handle = self._line([start, turn, end], color=_LEVEL_COLORS[level.name], width=2.8)
                peak, bandwidth = flops_text(level.peak_flops), rate_text(level.bandwidth)
                self._rows.append((handle, f"{level.name}: {bandwidth}, {peak}"))
            if index + 1 < len(chain):
                far, link = chain[index + 1].name, level.link_bandwidth
                start = (self._low, hrm.link_roof(link, self._low))
                end = (hrm.second_turning_point(level, link), level.peak_flops)
                handle = self._line([start, end], color=_LINK_COLORS[far], width=2.8)
                if (highest := max(nearer.peak_flops for nearer in chain[: index + 1])) > level.peak_flops:
                    beyond = (highest / link, highest)  # what feeds a nearer level crosses this link, too
                    self._line([end, beyond], color=_LINK_COLORS[far], width=1.8, style="--")
                self._rows.append((handle, f"link {far} → {level.name}: {rate_text(link)}"))

    def _point(self, point: Point) -> None:
        """Draw work at its intensity on the tier of its data and, if data cross a link, on the level that computes."""
        name = "attention" if point.work == "attention" else "experts"
        color, symbol = (INK, "s") if name == "attention" else (_EXPERTS, "o")
        chip = {"device": "GPU", "host": "CPU"}[point.level]
        bounds = {"link": f"the link from {point.home}", "memory": f"{point.level} memory", "compute": f"the {chip}"}
        handle = self._marker(point.home_intensity, point.flops, symbol, color)
        self._names.append((point.home_intensity, point.flops, name, color))
        crosses = point.home != point.level
        batch, part = self._roofline.batch_size, self._roofline.micro_batch_size
        sizes = "" if name == "attention" else f", N = {batch:,}" if crosses else f", μ = {part:,}"
        where = f"{rate_or_count(point.home_intensity)} flop per byte of {point.home} → {flops_text(point.flops)}"
        self._rows.append((handle, f"{name} on the {chip}{sizes}\n{where}\nbound by {bounds[point.bound]}"))
        if crosses:
            self._kernel(point, name, symbol, color)

    def _kernel(self, point: Point, name: str, symbol: str, color: str) -> None:
        """Draw the ceiling that the computing level attains by itself, at any intensity on the tier of the data."""
        level = next(level for level in self._roofline.chain if level.name == point.level)
        flops = hrm.attainable(level, point.intensity)
        self._line([(point.intensity, flops), (self._high, flops)], color=color, width=1.5, style="--")
        handle = self._marker(point.intensity, flops, symbol, color, hollow=True)
        size = f", μ = {self._roofline.micro_batch_size:,}" if name == "experts" else ""
        self._names.append((point.intensity, flops, f"kernel{size}", color))
        where = f"{rate_or_count(point.intensity)} flop per byte of {point.level} → {flops_text(flops)}"
        self._rows.append((handle, f"ceiling of the kernel (dashed){size}\n{where}"))

    def _mark(self, name: str, mark: Mark) -> None:
        """Draw a turning point on the roof of its link, and a line down to its intensity."""
        kinds, color = name.split(" = "), _LINK_COLORS[mark.far]
        bottom, top = self._axes.get_ylim()
        height = min(mark.flops, top)
        self._line([(mark.far_intensity, bottom), (mark.far_intensity, height)], color=color, width=1.2, style=":")
        handle = self._marker(mark.far_intensity, height, _SYMBOLS[kinds[0]], color, ring=kinds[0] == "balance")
        self._names.append((mark.far_intensity, height, name, color))
        meanings = {
            "P1": f"below P1, compute on {mark.far} rather than ship",
            "P2": f"below P2, the link from {mark.far} binds",
            "balance": "above the balance, not N but μ must grow",
        }
        head = f"{name}: {rate_or_count(mark.far_intensity)} flop / byte"
        self._rows.append((handle, "\n".join([head, *(meanings[kind] for kind in kinds)])))

    def _bands(self) -> None:
        """Shade the bands left of P1, between P1 and P2 of one link, and right of P2; label wide bands."""
        ends = {mark.name: mark for mark in self._roofline.marks if mark.name != "balance"}
        if set(ends) != {"P1", "P2"} or ends["P1"].far != ends["P2"].far:
            return
        first, second = ends["P1"].far_intensity, ends["P2"].far_intensity
        bands = (
            (self._low, first, _LEVEL_COLORS[ends["P1"].far], "do not ship"),
            (first, second, _LINK_COLORS[ends["P2"].far], "link binds"),
            (second, self._high, _EXPERTS, "kernel binds"),
        )
        if first >= second:
            return
        bottom, renderer = self._axes.get_ylim()[0], self._figure.canvas.get_renderer()
        for start, end, color, text in bands:
            band = self._axes.axvspan(start, end, color=color, alpha=0.05, linewidth=0)
            label = self._text(text, (start * end) ** 0.5, bottom, (0, 7), color, fontsize=11)
            if label.get_window_extent(renderer).width > band.get_window_extent(renderer).width - 8:
                label.remove()

    def _line(self, corners: list[tuple[float, float]], *, color: str, width: float, style: str = "-") -> Any:
        for start, end in pairwise(corners):
            self._drawn.extend(_between(start, end))
        xs, ys = zip(*corners, strict=True)
        return self._axes.plot(xs, ys, color=color, linewidth=width, linestyle=style, clip_on=True)[0]

    def _marker(self, x: float, y: float, symbol: str, color: str, *, hollow: bool = False, ring: bool = False) -> Any:
        """Draw a symbol; as a ``ring`` it is larger, below the others, and shows what lies in it."""
        self._drawn.extend([(x, y)] * 80)
        face, edge = ("none", color) if ring else ("white", color) if hollow else (color, "white")
        size, order = (13, 4) if ring else (10, 5)
        style = {"markersize": size, "markerfacecolor": face, "markeredgecolor": edge, "markeredgewidth": 1.6}
        return self._axes.plot([x], [y], linestyle="none", marker=symbol, zorder=order, clip_on=False, **style)[0]

    def _legend(self) -> None:
        from matplotlib.lines import Line2D

        blank = Line2D([], [], linestyle="none")
        legend = self._figure.legend(
            [blank if handle is None else handle for handle, _ in self._rows],
            [text for _, text in self._rows],
            loc="upper left",
            bbox_to_anchor=(_AXES[0] + _AXES[2] + 0.02, _AXES[1] + _AXES[3] + 0.01),
            frameon=False,
            fontsize=10.5,
            labelcolor=INK,
            labelspacing=0.8,
            handlelength=1.8,
            borderaxespad=0,
        )
        for (handle, _), text in zip(self._rows, legend.get_texts(), strict=True):
            text.set_fontweight("bold" if handle is None else "normal")

    def _write_names(self) -> None:
        """Place each label on the side of its point where it covers the fewest drawn points and other labels."""
        renderer = self._figure.canvas.get_renderer()
        frame = self._axes.get_window_extent(renderer)
        drawn = self._axes.transData.transform(self._drawn)
        taken: list[Any] = []
        for x, y, text, color in self._names:
            boxes, covered = {}, {}
            for offset in _OFFSETS:
                label = self._text(text, x, y, offset, color, fontsize=12, fontweight="bold")
                box = boxes[offset] = label.get_window_extent(renderer)
                outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
                covered[offset] = box.count_contains(drawn) + 1000 * (box.count_overlaps(taken) + outside)
                label.remove()
            best = min(_OFFSETS, key=covered.__getitem__)
            self._text(text, x, y, best, color, fontsize=12, fontweight="bold")
            taken.append(boxes[best])

    def _text(self, text: str, x: float, y: float, offset: tuple[int, int], color: str, **style: Any) -> Any:
        """Write ``text`` at ``offset`` (in points) from a data point, outlined to stay legible over lines."""
        from matplotlib.patheffects import withStroke

        dx, dy = offset
        style["ha"] = "left" if dx > 0 else "right" if dx < 0 else "center"
        style["va"] = "bottom" if dy > 0 else "top" if dy < 0 else "center"
        outline = withStroke(linewidth=3, foreground="white")
        return _note(self._axes, text, (x, y), offset, color=color, path_effects=[outline], **style)


def _distinct(marks: tuple[Mark, ...]) -> list[tuple[str, Mark]]:
    """Return the marks with their names; marks at the same intensity are merged under both names."""
    distinct: list[tuple[str, Mark]] = []
    for mark in marks:
        if distinct and abs(distinct[-1][1].far_intensity / mark.far_intensity - 1) < 1e-6:
            distinct[-1] = (f"{distinct[-1][0]} = {mark.name}", distinct[-1][1])
        else:
            distinct.append((mark.name, mark))
    return distinct


def _horizontal(roofline: Roofline) -> tuple[float, float]:
    """Return the x limits: all intensities, with a margin on both sides."""
    points = [value for point in roofline.points for value in (point.intensity, point.home_intensity)]
    turns = [hrm.turning_point(level) for level in roofline.chain if level.peak_flops]
    intensities = [*points, *turns, *(mark.far_intensity for mark in roofline.marks)]
    return min(intensities) / 5, max(intensities) * 4


def _vertical(roofline: Roofline, low: float) -> tuple[float, float]:
    """Return the y limits: from below the lowest roof or point to above the highest compute roof."""
    links = [hrm.link_roof(level.link_bandwidth, low * 4) for level in roofline.chain if level.link_bandwidth]
    points = [point.flops / 4 for point in roofline.points]
    return min([*links, *points]), max(level.peak_flops for level in roofline.chain) * 3


def _between(start: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
    """Return 401 points along a line that is straight on log-log axes."""
    (x0, y0), (x1, y1) = start, end
    return [(x0 * (x1 / x0) ** (step / 400), y0 * (y1 / y0) ** (step / 400)) for step in range(401)]
