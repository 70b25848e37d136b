"""A hardware profile on the terminal: single figures with their spread, and speeds by size of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from moelight.cli.tables import heading, indented, plain_table, printable
from moelight.core.units import format_bytes
from moelight.observe.number_format import flops_text, rate_or_count, rate_text, scaled_text, seconds_text, share_text
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.hardware import (
    BYTES_PER_S,
    EFFICIENCY,
    FLOPS,
    MEASURED,
    PROCESSORS_BUSY,
    SECONDS,
    SHARE,
    TO,
    HardwareProfile,
)

_TEXT: dict[str, Callable[[float], str]] = {
    BYTES_PER_S: rate_text,
    FLOPS: flops_text,
    SECONDS: seconds_text,
    SHARE: share_text,
    PROCESSORS_BUSY: rate_or_count,
}
_MEANS = {
    "linear": "products",
    "experts": "experts",
    "attention": "decode attention",
    "prefill": "prompts' attention",
    "elementwise": "norms and sums",
}
_AXES = {"linear": "rows", "experts": "rows", "attention": "context", "prefill": "tokens", "elementwise": "bytes"}
_LEAST_COLUMNS = 4
_COLUMN_WIDTH = 7
_MARGIN = 14
_SAME_COLUMN = 1.12


def print_profile(console: Console, profile: HardwareProfile) -> None:
    """Print all of ``profile``, on 80 columns or more."""
    console.print(Text(printable(profile.notes), style="dim"))
    console.print()
    console.print(Group(heading("figures"), indented(_figures(profile))))
    spread = dict(profile.spread)
    for surface in profile.efficiency:
        unit, _, work = surface.name.partition("_")
        title = f"{_MEANS[work]} on the {unit.upper()}, {EFFICIENCY[surface.name]}"
        width = spread.get(f"efficiency.{surface.name}")
        console.print()
        console.print(Text.assemble((title, "bold"), ("" if width is None else f"  spread {share_text(width)}", "dim")))
        for table in _curves(surface, console.width):
            console.print(indented(table))


def _figures(profile: HardwareProfile) -> Table:
    table = plain_table("figure", "value", "spread", numbers=("value", "spread"))
    table.add_column("")
    spread = dict(profile.spread)
    for key, value, meaning in _rows(profile):
        width = spread.get(key)
        name = key.removeprefix("measured.")
        table.add_row(name, value, "" if width is None else share_text(width), Text(meaning, style="dim"))
    return table


def _rows(profile: HardwareProfile) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and meaning of every single figure."""
    for tier in profile.tiers:
        yield f"tiers.{tier.name}.capacity", format_bytes(tier.capacity_bytes), ""
        yield f"tiers.{tier.name}.bandwidth", rate_text(tier.bandwidth_bytes_per_s), "reading"
    for link in profile.links:
        yield f"links.{link.src}{TO}{link.dst}.bandwidth", rate_text(link.bandwidth_bytes_per_s), "pinned"
    for unit in profile.processors:
        count = "" if unit.count == 1 else f"of each of {unit.count}; "
        yield f"processors.{unit.name}.peak", flops_text(unit.peak_flops), f"{count}the fastest product"
    for name, value in profile.measured:
        yield f"measured.{name}", _TEXT[MEASURED[name].unit](value), MEASURED[name].says


def _curves(surface: Surface, width: int) -> Iterator[Table]:
    """Yield tables with points as columns and weight sizes as lines: several where one would be too wide."""
    columns = _columns(surface)
    head = _AXES[surface.name.partition("_")[2]]
    many = max(_LEAST_COLUMNS, (width - _MARGIN) // _COLUMN_WIDTH)
    for first in range(0, len(columns), many):
        some = columns[first : first + many]
        names = tuple(scaled_text(x) if head == "bytes" else f"{x:,.0f}" for x in some)
        table = plain_table(head, *names, numbers=names)
        for size, curve in zip(surface.sizes, surface.curves, strict=True):
            table.add_row(format_bytes(int(size)) if size else "", *(_near(curve, x) for x in some))
        yield table


def _columns(surface: Surface) -> list[float]:
    """Return the sizes of work of all curves; sizes within `_SAME_COLUMN` of each other share a column."""
    found: list[float] = []
    for x in sorted({x for curve in surface.curves for x in curve.x}):
        if not found or x > found[-1] * _SAME_COLUMN:
            found.append(x)
    return found


def _near(curve: Curve, x: float) -> str:
    """Speed measured in the column of ``x``; empty if there is none."""
    speed = next((y for known, y in zip(curve.x, curve.y, strict=True) if x <= known <= x * _SAME_COLUMN), None)
    return "" if speed is None else scaled_text(speed)
