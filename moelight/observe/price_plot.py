"""The plot of offers: hours and price of the job on each machine, and the Pareto front.

matplotlib is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from moelight.core.errors import ConfigError
from moelight.observe.plots import DPI, INK, MUTED, check_suffix, new_figure

_HEIGHT_INCHES = 7.0
_AXES = (0.08, 0.1, 0.88, 0.76)  # left, bottom, width, height
_FRONT = "#00795a"
_TICKS = {
    "s": (1, (1, 2, 5, 10, 20, 30)),
    "min": (60, (1, 2, 5, 10, 20, 30)),
    "h": (3600, (1, 2, 5, 10)),
    "days": (86400, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
}
_SIDES = ((9, 6), (9, -6), (-9, 6), (-9, -6), (0, 14), (0, -14), (9, 20), (9, -20), (-9, 20), (-9, -20))  # in points


class PricedOffer(Protocol):
    """What the plot reads of an offer."""

    @property
    def seconds(self) -> float: ...

    @property
    def price(self) -> float | None: ...

    @property
    def on_front(self) -> bool: ...

    @property
    def label(self) -> str: ...


def write_offers(path: Path, offers: Sequence[PricedOffer], *, title: str, currency: str) -> None:
    """Draw the ``offers`` that have a price to ``path``, whose suffix is the format.

    Raises ConfigError if none has one.
    """
    check_suffix(path)
    points = [(offer.seconds, offer.price, offer) for offer in offers if offer.price is not None]
    if not points:
        raise ConfigError(f"{path}: no machine that runs the model has a price; nothing to draw")
    figure = new_figure(_HEIGHT_INCHES)
    from matplotlib.ticker import LogLocator, NullFormatter

    axes = figure.add_axes(_AXES)
    times, prices = [point[0] for point in points], [point[1] for point in points]
    axes.set(xscale="log", yscale="log")
    axes.set_ylim(min(prices) / 1.6, max(prices) * 1.6)
    axes.set_xlabel("time of the job", fontsize=12.5, color=INK)
    axes.set_ylabel(f"price of the job, {currency}", fontsize=12.5, color=INK)
    axes.tick_params(labelsize=11.5, colors=INK, which="both")
    ticks = {size * count: f"{count:,} {unit}" for unit, (size, counts) in _TICKS.items() for count in counts}
    axes.set_xticks([*ticks], [*ticks.values()])
    axes.set_xticks([], minor=True)
    axes.set(xlim=(min(times) / 1.5, max(times) * 1.8))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda price, _: f"{price:,.10g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="major", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    front = sorted((seconds, price) for seconds, price, offer in points if offer.on_front)
    axes.plot(*zip(*front, strict=True), color=_FRONT, linewidth=2.0, drawstyle="steps-post", zorder=2)
    for seconds, price, offer in points:
        color = _FRONT if offer.on_front else MUTED
        axes.plot([seconds], [price], "o", color=color, markersize=9 if offer.on_front else 6, zorder=3)
    figure.text(_AXES[0], 0.945, title, fontsize=16, fontweight="bold", color=INK)
    note = "green: no other is at once as fast and as cheap; names where there is room"
    figure.text(_AXES[0], 0.9, note, fontsize=12.5, color=MUTED)
    _label(figure, axes, points)
    figure.savefig(path, dpi=DPI)


def _label(figure: Any, axes: Any, points: Sequence[tuple[float, float, PricedOffer]]) -> None:
    """Write the names, those of the front first, on the first side where they cover no point and no other name. Names
    of the front are written in any case, others are left out where there is no such side."""
    from matplotlib.transforms import Bbox

    renderer = figure.canvas.get_renderer()
    spots = axes.transData.transform([(seconds, price) for seconds, price, _ in points])
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in spots]
    for seconds, price, offer in sorted(points, key=lambda point: not point[2].on_front):
        for dx, dy in _SIDES:
            label = axes.annotate(
                offer.label,
                (seconds, price),
                xytext=(dx, dy),
                textcoords="offset points",
                fontsize=11,
                color=_FRONT if offer.on_front else MUTED,
                fontweight="bold" if offer.on_front else "normal",
                ha="left" if dx > 0 else "right" if dx < 0 else "center",
                va="center",
            )
            box = label.get_window_extent(renderer)
            inside = figure.bbox.x0 < box.x0 and box.x1 < figure.bbox.x1
            if (inside and not box.count_overlaps(taken)) or (offer.on_front and (dx, dy) == _SIDES[-1]):
                taken.append(box)
                break
            label.remove()
