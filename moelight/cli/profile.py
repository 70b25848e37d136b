"""``moelight profile``: measure this machine, print the hardware profile and save it for ``--hw``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moelight.cli.options import option, with_options
from moelight.cli.tables import indented, open_console, plain_table, say_missing_kernels, section, show, stacked, text
from moelight.core.errors import ConfigError
from moelight.core.units import format_bytes
from moelight.observe.number_format import flops_text, rate_or_count, rate_text, scaled_text, seconds_text, share_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from moelight.profiles.efficiency import Curve, Surface
    from moelight.profiles.hardware import HardwareProfile


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


@with_options()
def profile(
    output: Path | None = option(
        "File to write the profile to; by default it is cached for --hw auto.", "--output", "-o", metavar="FILE.yaml"
    ),
    device: str = option("Device to use: auto, cpu, cuda, xpu, or one card (cuda:1).", default="auto"),
    quick: bool = option("Measure fewer points, in about ten seconds.", default=False),
    disk_dir: Path | None = option(
        "Directory on the disk that models are read from; defaults to the current directory.", metavar="DIR"
    ),
) -> None:
    """Measure this machine in about a minute: memory, processor, disk, and a GPU and its link.

    Prints the figures, and writes the profile to FILE.yaml, for --hw FILE.yaml, or to the place where --hw auto finds
    it. Run no other programs meanwhile: they make the machine look slower than it is.
    """
    from rich.console import Console

    from moelight.profiles.hardware_text import write_hardware_profile
    from moelight.runtime.calibration.effort import FULL, QUICK
    from moelight.runtime.machine_profile import AUTO, COMMENTS, kept_path

    if output is not None and output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output {output}: a profile is a .yaml file, or --hw would take it for a name")
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")
    if disk_dir is not None and not disk_dir.is_dir():
        raise ConfigError(f"--disk-dir {disk_dir}: no such directory")
    say_missing_kernels()
    path = kept_path(device) if output is None else output
    from moelight.runtime.calibration.machine import measure_machine
    from moelight.runtime.machine import find_machine

    # Where stderr is a terminal it shows the current step.
    with Console(stderr=True, highlight=False, markup=False).status("looking around") as status:
        machine = measure_machine(
            find_machine(device),
            QUICK if quick else FULL,
            name=AUTO if output is None else path.stem,
            disk_dir=disk_dir or Path.cwd(),
            disk_needed=disk_dir is not None,
            say=status.update,
        )
    write_hardware_profile(machine, path, comments=COMMENTS)
    print_profile(open_console(), machine)
    use = "--hw auto uses it" if output is None else f"use it with --hw {path}"
    print(f"moelight: wrote {path}; {use}", file=sys.stderr)


def print_profile(console: Console, profile: HardwareProfile) -> None:
    """Print ``profile``, on 80 columns or more: figures with their spread, and speeds by size of work."""
    from moelight.profiles.hardware import EFFICIENCY

    parts: list[RenderableType] = [text((profile.notes, "dim")), section("figures", _figures(profile))]
    spread = dict(profile.spread)
    for surface in profile.efficiency:
        unit, _, work = surface.name.partition("_")
        words = f"{_MEANS[work]} on the {unit.upper()}, {EFFICIENCY[surface.name]}"
        width = spread.get(f"efficiency.{surface.name}")
        title = text((words, "bold"), ("" if width is None else f"  spread {share_text(width)}", "dim"))
        parts.append(stacked(title, *(indented(table) for table in _curves(surface, console.width))))
    show(console, *parts)


def _figures(profile: HardwareProfile) -> Table:
    table = plain_table("figure", ">value", ">spread", "")
    table.columns[3].no_wrap = False
    spread = dict(profile.spread)
    for key, value, meaning in _rows(profile):
        width = spread.get(key)
        name = key.removeprefix("measured.")
        table.add_row(name, value, "" if width is None else share_text(width), text((meaning, "dim")))
    return table


def _rows(profile: HardwareProfile) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and meaning of every single figure."""
    from moelight.profiles.hardware import BYTES_PER_S, FLOPS, MEASURED, PROCESSORS_BUSY, SECONDS, SHARE, TO

    written = {
        BYTES_PER_S: rate_text,
        FLOPS: flops_text,
        SECONDS: seconds_text,
        SHARE: share_text,
        PROCESSORS_BUSY: rate_or_count,
    }
    for tier in profile.tiers:
        yield f"tiers.{tier.name}.capacity", format_bytes(tier.capacity_bytes), ""
        yield f"tiers.{tier.name}.bandwidth", rate_text(tier.bandwidth_bytes_per_s), "reading"
    for link in profile.links:
        yield f"links.{link.src}{TO}{link.dst}.bandwidth", rate_text(link.bandwidth_bytes_per_s), "pinned"
    for unit in profile.processors:
        count = "" if unit.count == 1 else f"of each of {unit.count}; "
        yield f"processors.{unit.name}.peak", flops_text(unit.peak_flops), f"{count}the fastest product"
    for name, value in profile.measured:
        yield f"measured.{name}", written[MEASURED[name].unit](value), MEASURED[name].says


def _curves(surface: Surface, width: int) -> Iterator[Table]:
    """Yield tables with points as columns and weight sizes as lines: several where one would be too wide."""
    columns = _columns(surface)
    head = _AXES[surface.name.partition("_")[2]]
    many = max(_LEAST_COLUMNS, (width - _MARGIN) // _COLUMN_WIDTH)
    for first in range(0, len(columns), many):
        some = columns[first : first + many]
        table = plain_table(head, *(f">{scaled_text(x) if head == 'bytes' else f'{x:,.0f}'}" for x in some))
        for size, curve in zip(surface.sizes, surface.curves, strict=True):
            table.add_row(format_bytes(int(size)) if size else "", *(_near(curve, x) for x in some))
        yield table


def _columns(surface: Surface) -> list[float]:
    """Return the sizes of work of all curves; sizes within `_SAME_COLUMN` of each other share a column."""
    columns: list[float] = []
    for x in sorted({x for curve in surface.curves for x in curve.x}):
        if not columns or x > columns[-1] * _SAME_COLUMN:
            columns.append(x)
    return columns


def _near(curve: Curve, x: float) -> str:
    """Speed measured in the column of ``x``; empty if there is none."""
    speed = next((y for known_x, y in zip(curve.x, curve.y, strict=True) if x <= known_x <= x * _SAME_COLUMN), None)
    return "" if speed is None else scaled_text(speed)
