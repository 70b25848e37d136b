"""Hardware profiles as YAML text, the output of ``moelight profile``; ``hardware`` reads it back unchanged."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from moelight.core.errors import ConfigError
from moelight.core.paths import write_whole
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
from moelight.profiles.quantities import spelled_bandwidth, spelled_capacity, spelled_flops, spelled_seconds

_SPELLED = {
    BYTES_PER_S: spelled_bandwidth,
    FLOPS: spelled_flops,
    SECONDS: spelled_seconds,
    SHARE: repr,
    PROCESSORS_BUSY: repr,
}
_COMMENT_WIDTH = 110
_PLAIN = re.compile(r"[A-Za-z][\w.+-]*")


def hardware_profile_text(profile: HardwareProfile, *, comments: Iterable[str] = ()) -> str:
    """``profile`` as YAML text, every value exact; ``comments`` precede it, one paragraph each."""
    return "\n".join([*_head(comments), *_lines(profile)]) + "\n"


def write_hardware_profile(profile: HardwareProfile, path: Path, *, comments: Iterable[str] = ()) -> None:
    """Write ``profile`` to the file ``path`` atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_whole(path, hardware_profile_text(profile, comments=comments))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from None


def _head(comments: Iterable[str]) -> Iterator[str]:
    for comment in comments:
        plain = "".join(c if c.isprintable() else " " for c in comment)
        yield from (f"# {line}" for line in textwrap.wrap(plain, _COMMENT_WIDTH))


def _lines(profile: HardwareProfile) -> Iterator[str]:
    for key, text in (
        ("name", profile.name),
        ("date", profile.date),
        ("source", profile.source),
        ("notes", profile.notes),
    ):
        if text:
            yield f"{key}: {_text(text)}"
    yield from _figures(profile)
    if profile.efficiency:
        yield "efficiency:"
    for surface in profile.efficiency:
        yield from _surface(surface)
    if profile.spread:
        yield "spread:"
        yield from (f"  {key}: {width!r}" for key, width in profile.spread)


def _figures(profile: HardwareProfile) -> Iterator[str]:
    sources = dict(profile.sources)

    def cited(key: str, value: str) -> str:
        return f"{{value: {value}, source: {_text(sources[key])}}}" if key in sources else value

    yield "tiers:"
    for tier in profile.tiers:
        key = f"tiers.{tier.name}"
        capacity = cited(f"{key}.capacity", spelled_capacity(tier.capacity_bytes))
        bandwidth = cited(f"{key}.bandwidth", spelled_bandwidth(tier.bandwidth_bytes_per_s))
        yield f"  {tier.name}: {{capacity: {capacity}, bandwidth: {bandwidth}}}"
    if profile.links:
        yield "links:"
    for link in profile.links:
        name = f"{link.src}{TO}{link.dst}"
        bandwidth = cited(f"links.{name}.bandwidth", spelled_bandwidth(link.bandwidth_bytes_per_s))
        yield f"  {name}: {{bandwidth: {bandwidth}}}"
    yield "processors:"
    for unit in profile.processors:
        peak = cited(f"processors.{unit.name}.peak", spelled_flops(unit.peak_flops))
        yield f"  {unit.name}: {{count: {unit.count}, peak: {peak}}}"
    if profile.measured:
        yield "measured:"
    for name, value in profile.measured:
        yield f"  {name}: {cited(f'measured.{name}', _SPELLED[MEASURED[name].unit](value))}"


def _surface(surface: Surface) -> Iterator[str]:
    unit = EFFICIENCY[surface.name]
    if surface.sizes == (0.0,):
        yield f"  {surface.name}: {_curve(surface.curves[0], unit)}"
        return
    yield f"  {surface.name}:"
    for size, curve in zip(surface.sizes, surface.curves, strict=True):
        yield f"    {spelled_capacity(int(size))}: {_curve(curve, unit)}"


def _curve(curve: Curve, unit: str) -> str:
    points = zip(curve.x, curve.y, strict=True)
    return "{" + ", ".join(f"{int(x) if x == int(x) else x}: {_SPELLED[unit](y)}" for x, y in points) + "}"


def _text(value: str) -> str:
    """``value`` as a YAML scalar on one line that is valid inside braces too."""
    if _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    quoted = yaml.safe_dump(value, default_style='"', allow_unicode=value.isprintable(), width=float("inf"))
    return quoted.removesuffix("\n")
