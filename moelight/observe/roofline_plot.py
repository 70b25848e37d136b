"""Plot of the Hierarchical Roofline Model: roofs, turning points, and the work of a policy under them.

matplotlib is imported when something is drawn. ``hrm.roofline`` computes the roofs.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from moelight.core.errors import ConfigError
from moelight.hrm import roofline as hrm
from moelight.hrm.roofline import Mark, Point, Roofline
from moelight.observe.number_format import flops_text, rate_or_count, rate_text

SUFFIXES = (".png", ".svg", ".pdf")
SIZE_INCHES, DPI = (12.0, 7.0), 100  # 1200 px wide
_AXES = (0.07, 0.1, 0.555, 0.76)  # left, bottom, width, height; the rest is for the legend
_LEVEL_COLORS = {"device": "#00795a", "host": "#0060a8", "disk": "#8a4f9e"}
_LINK_COLORS = {"host": "#d1491b", "disk": "#a87900"}  # by the slower end of the link
_INK, _MUTED, _EXPERTS = "#1a1a1a", "#666666", "#7a1fa2"
_SYMBOLS = {"P1": "^", "P2": "v", "balance": "D"}
_OFFSETS = (
    (0, 13),
    (0, -13),
    (9, 0),
    (-9, 0),
    (7, 9),
    (-7, 9),
    (7, -9),
    (-7, -9),
    (0, 26),
    (0, -26),
    (9, 18),
    (-9, 18),
)


def write_roofline(path: Path, roofline: Roofline) -> None:
    """Draw ``roofline`` to ``path``, in the format given by its suffix.

    Raises:
        ConfigError: the suffix is not in `SUFFIXES`, or matplotlib is not installed.
        OSError: ``path`` cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: the name of a picture ends in one of {', '.join(SUFFIXES)}")
    figure_of(roofline).savefig(path, dpi=DPI)


def figure_of(roofline: Roofline) -> Any:
    """Return the plot as a matplotlib ``Figure``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing needs matplotlib: pip install 'moelight[plots]'") from None
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI)
    FigureCanvasAgg(figure)
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
        """Draw the whole figure, from the roofs to the labels of the points."""
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
        axes.set_xlabel("operational intensity, flop / byte", fontsize=12.5, color=_INK)
        axes.set_ylabel("performance, flop / s", fontsize=12.5, color=_INK)
        axes.tick_params(labelsize=11.5, colors=_INK)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        axes.yaxis.set_major_formatter(EngFormatter())
        axes.grid(visible=True, which="major", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        left, top = _AXES[0], _AXES[1] + _AXES[3]
        title = f"Hierarchical roofline: {roofline.model} on {roofline.machine}"
        policy = f"N = {roofline.batch_size:,} sequences in micro-batches of μ = {roofline.micro_batch_size:,}"
        self._figure.text(left, top + 0.075, title, fontsize=16, fontweight="bold", color=_INK)
        self._figure.text(left, top + 0.035, policy, fontsize=12.5, color=_MUTED)

    def _roofs(self) -> None:
        """Draw the memory and compute roof of each level, and each link's roof up to the compute roof of its target."""
        chain = self._roofline.chain
        for place, level in enumerate(chain):
            if level.peak_flops:
                turn = (hrm.turning_point(level), level.peak_flops)
                start, end = (self._low, hrm.memory_roof(level, self._low)), (self._high, level.peak_flops)
                handle = self._line([start, turn, end], color=_LEVEL_COLORS[level.name], width=2.8)
                peak, bandwidth = flops_text(level.peak_flops), rate_text(level.bandwidth)
                self._rows.append((handle, f"{level.name}: {bandwidth}, {peak}"))
            if place + 1 < len(chain):
                far, link = chain[place + 1].name, level.link_bandwidth
                start = (self._low, hrm.link_roof(link, self._low))
                end = (hrm.second_turning_point(level, link), level.peak_flops)
                handle = self._line([start, end], color=_LINK_COLORS[far], width=2.8)
                self._rows.append((handle, f"link {far} → {level.name}: {rate_text(link)}"))

    def _point(self, point: Point) -> None:
        """Draw work at its intensity on the tier of its data and, if data cross a link, on the level that computes."""
        name = "attention" if point.work == "attention" else "experts"
        color, symbol = (_INK, "s") if name == "attention" else (_EXPERTS, "o")
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
        flops = hrm.attainable(self._level(point.level), point.intensity)
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
        handle = self._marker(mark.far_intensity, height, _SYMBOLS[kinds[0]], color)
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

    def _level(self, name: str) -> hrm.Level:
        return next(level for level in self._roofline.chain if level.name == name)

    def _line(self, corners: list[tuple[float, float]], *, color: str, width: float, style: str = "-") -> Any:
        for start, end in pairwise(corners):
            self._drawn.extend(_between(start, end))
        xs, ys = zip(*corners, strict=True)
        return self._axes.plot(xs, ys, color=color, linewidth=width, linestyle=style, clip_on=True)[0]

    def _marker(self, x: float, y: float, symbol: str, color: str, *, hollow: bool = False) -> Any:
        self._drawn.extend([(x, y)] * 80)
        face, edge = ("white", color) if hollow else (color, "white")
        style = {"markersize": 10, "markerfacecolor": face, "markeredgecolor": edge, "markeredgewidth": 1.6}
        return self._axes.plot([x], [y], linestyle="none", marker=symbol, zorder=5, clip_on=False, **style)[0]

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
            labelcolor=_INK,
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
            tried: list[tuple[int, int, Any, Any]] = []
            for offset in _OFFSETS:
                label = self._text(text, x, y, offset, color, fontsize=12, fontweight="bold")
                box = label.get_window_extent(renderer)
                outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
                covered = box.count_contains(drawn) + 1000 * (box.count_overlaps(taken) + outside)
                tried.append((covered, len(tried), label, box))
            best = min(tried, key=lambda entry: entry[:2])
            taken.append(best[3])
            for entry in tried:
                if entry is not best:
                    entry[2].remove()

    def _text(self, text: str, x: float, y: float, offset: tuple[int, int], color: str, **style: Any) -> Any:
        """Write ``text`` at ``offset`` (in points) from a data point, outlined to stay legible over lines."""
        from matplotlib.patheffects import withStroke

        dx, dy = offset
        return self._axes.annotate(
            text,
            (x, y),
            xytext=offset,
            textcoords="offset points",
            ha="left" if dx > 0 else "right" if dx < 0 else "center",
            va="bottom" if dy > 0 else "top" if dy < 0 else "center",
            color=color,
            path_effects=[withStroke(linewidth=3, foreground="white")],
            **style,
        )


def _distinct(marks: tuple[Mark, ...]) -> list[tuple[str, Mark]]:
    """Return the marks with their names; marks at the same intensity are merged under both names."""
    found: list[tuple[str, Mark]] = []
    for mark in marks:
        if found and abs(found[-1][1].far_intensity / mark.far_intensity - 1) < 1e-6:
            found[-1] = (f"{found[-1][0]} = {mark.name}", found[-1][1])
        else:
            found.append((mark.name, mark))
    return found


def _horizontal(roofline: Roofline) -> tuple[float, float]:
    """Return the x limits: all intensities, with a margin on both sides."""
    points = [value for point in roofline.points for value in (point.intensity, point.home_intensity)]
    marks = [mark.far_intensity for mark in roofline.marks]
    turns = [hrm.turning_point(level) for level in roofline.chain if level.peak_flops]
    known = [*points, *marks, *turns]
    return min(known) / 5, max(known) * 4


def _vertical(roofline: Roofline, low: float) -> tuple[float, float]:
    """Return the y limits: from below the lowest roof or point to above the highest compute roof."""
    links = [hrm.link_roof(level.link_bandwidth, low * 4) for level in roofline.chain if level.link_bandwidth]
    points = [point.flops / 4 for point in roofline.points]
    return min([*links, *points]), max(level.peak_flops for level in roofline.chain) * 3


def _between(start: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
    """Return 401 points along a line that is straight on log-log axes."""
    (x0, y0), (x1, y1) = start, end
    return [(x0 * (x1 / x0) ** (step / 400), y0 * (y1 / y0) ** (step / 400)) for step in range(401)]
