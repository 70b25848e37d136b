"""Hardware profiles as YAML text, which `hardware` reads back unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import yaml

from moelight.core.errors import ConfigError
from moelight.core.paths import write_whole
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.files import yaml_comments
from moelight.profiles.hardware import EFFICIENCY, MEASURED, QUANTITIES, HardwareProfile, Processor, figures_of
from moelight.profiles.quantities import CAPACITY, Quantity

_COMMENT_WIDTH = 110
_PLAIN = re.compile(r"[A-Za-z][\w.+-]*")


def hardware_profile_text(profile: HardwareProfile, *, comments: Iterable[str] = ()) -> str:
    """``profile`` as YAML text, every value exact; ``comments`` precede it, one paragraph each."""
    return "\n".join([*yaml_comments(comments, _COMMENT_WIDTH), *_lines(profile)]) + "\n"


def write_hardware_profile(profile: HardwareProfile, path: Path, *, comments: Iterable[str] = ()) -> None:
    """Write ``profile`` to ``path`` atomically."""
    try:
        write_whole(path, hardware_profile_text(profile, comments=comments))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from None


def _lines(profile: HardwareProfile) -> Iterator[str]:
    for key in ("name", "date", "source", "notes"):
        if text := getattr(profile, key):
            yield f"{key}: {_text(text)}"
    sources = dict(profile.sources)

    def cited(key: str, value: str) -> str:
        return f"{{value: {value}, source: {_text(sources[key])}}}" if key in sources else value

    for where, parts in groupby(profile.parts(), key=itemgetter(0)):
        yield f"{where}:"
        for _, part in parts:
            stated = [f"count: {part.count}"] if isinstance(part, Processor) else []
            if isinstance(part, Processor) and not part.bfloat16:
                stated.append("bfloat16: false")
            for key, name, quantity in figures_of(part):
                value = cited(f"{where}.{part.name}.{key}", quantity.spelled(getattr(part, name)))
                stated.append(f"{key}: {value}")
            yield f"  {part.name}: {{{', '.join(stated)}}}"
    if profile.measured:
        yield "measured:"
    for name, number in profile.measured:
        yield f"  {name}: {cited(f'measured.{name}', QUANTITIES[MEASURED[name].unit].spelled(number))}"
    if profile.efficiency:
        yield "efficiency:"
    for surface in profile.efficiency:
        yield from _surface(surface)
    if profile.spread:
        yield "spread:"
        yield from (f"  {key}: {width!r}" for key, width in profile.spread)
    if profile.kernels:
        yield "kernels:"
        yield from (f"  {name}: {_text(form)}" for name, form in profile.kernels)


def _surface(surface: Surface) -> Iterator[str]:
    speed = QUANTITIES[EFFICIENCY[surface.name]]
    if surface.sizes == (0.0,):
        yield f"  {surface.name}: {_curve(surface.curves[0], speed)}"
        return
    yield f"  {surface.name}:"
    for size, curve in zip(surface.sizes, surface.curves, strict=True):
        yield f"    {CAPACITY.spelled(int(size))}: {_curve(curve, speed)}"


def _curve(curve: Curve, speed: Quantity) -> str:
    points = zip(curve.x, curve.y, strict=True)
    return "{" + ", ".join(f"{int(x) if x == int(x) else x}: {speed.spelled(y)}" for x, y in points) + "}"


def _text(value: str) -> str:
    """``value`` as a YAML scalar on one line that is valid inside braces too."""
    if _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    quoted = yaml.safe_dump(value, default_style='"', allow_unicode=value.isprintable(), width=float("inf"))
    return quoted.removesuffix("\n")
