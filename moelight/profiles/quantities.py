"""Sizes, bandwidths, speeds and times in profiles: a number in base units, or text with a unit.

Each quantity has a range, wide enough for every machine and narrow enough that products of a few stay finite.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from moelight.core.errors import ConfigError, quoted
from moelight.core.units import parse_bytes

MOST_PROCESSORS = 4096  # of one kind in one machine

_NUMBER = r"\s*(\d+(?:\.\d*)?|\.\d+)\s*"
_FLOPS = re.compile(_NUMBER + r"([kKMGTP]?)(?:FLOP/s|FLOPS)\s*", re.IGNORECASE)
_SECONDS = re.compile(_NUMBER + r"(ns|us|µs|μs|ms|s)\s*")
_FLOPS_UNITS = {"P": "1e15", "T": "1e12", "G": "1e9", "M": "1e6", "K": "1e3", "": "1"}
_SECONDS_UNITS = {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "μs": "1e-6", "ns": "1e-9"}
_BINARY = {unit: float(parse_bytes(f"1{unit}")) for unit in ("TiB", "GiB", "MiB", "KiB")}
_DECIMAL = {unit: float(parse_bytes(f"1{unit}")) for unit in ("TB", "GB", "MB", "KB")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """A kind of quantity: its name, an example, and its range in base units and in words.

    ``read`` returns base units of a text, or None; ``units`` are the factors of the units that `spelled` writes.
    """

    name: str
    example: str
    least: float
    maximum: float
    range: str
    read: Callable[[str], float | None] = lambda _: None
    units: Mapping[str, float] = field(default_factory=dict)
    integral: bool = False

    def parse(self, value: str | float, *, label: str) -> float:
        """Base units from text with a unit or from a number; an error names ``label``."""
        number = self.read(value) if isinstance(value, str) else value
        if number is None:
            raise ConfigError(f"{label}: {quoted(value)} is not {self.name}; write {self.example}")
        if isinstance(number, bool) or not self.least <= number <= self.maximum:
            raise ConfigError(f"{label}: {quoted(number)} is out of range; {self.name} is from {self.range}")
        return int(number) if self.integral else float(number)

    def spelled(self, value: float) -> str:
        """The shortest text that `parse` reads as ``value``, in a unit that gives 1 to 100,000; else the number."""
        scaled = ((unit, value / factor) for unit, factor in self.units.items())
        texts = [f"{number:.6g}{unit}" for unit, number in scaled if 1 <= number < 1e5]
        return min((text for text in texts if self.read(text) == value), key=len, default=repr(value))


def _bytes(text: str) -> float | None:
    try:
        return parse_bytes(text)
    except ConfigError:
        return None


def _bandwidth(text: str) -> float | None:
    size, slash, per = text.rpartition("/")
    return _bytes(size) if slash and per.strip() == "s" else None


def _scaled(pattern: re.Pattern[str], units: Mapping[str, str], text: str) -> float | None:
    """The number in ``text`` times the factor of its unit, rounded once."""
    match = pattern.fullmatch(text)
    return None if match is None else float(Decimal(match.group(1)) * Decimal(units[match.group(2)]))


CAPACITY = Quantity(
    name="a size",
    example="bytes or a unit, for example 24GiB or 500MB",
    least=1,
    maximum=(1 << 63) - 1,
    range="1 byte to 8EiB",
    read=_bytes,
    units=_BINARY | _DECIMAL,
    integral=True,
)
BANDWIDTH = Quantity(
    name="a bandwidth",
    example="bytes/s or a unit, for example 285GiB/s",
    least=1e3,
    maximum=1e18,
    range="1KB/s to 1,000,000TB/s",
    read=_bandwidth,
    units={f"{unit}/s": factor for unit, factor in (_DECIMAL | _BINARY).items()},
)
SPEED = Quantity(
    name="a speed",
    example="flop/s or a unit, for example 104TFLOP/s",
    least=1e3,
    maximum=1e21,
    range="1KFLOP/s to 1,000,000PFLOP/s",
    read=lambda text: _scaled(_FLOPS, _FLOPS_UNITS, text.upper()),
    units={f"{prefix}FLOP/s": float(factor) for prefix, factor in _FLOPS_UNITS.items()},
)
TIME = Quantity(
    name="a time",
    example="seconds or a unit, for example 40us or 1.5ms",
    least=1e-12,
    maximum=1e6,
    range="1e-12s to 1e6s",
    read=lambda text: _scaled(_SECONDS, _SECONDS_UNITS, text),
    units={unit: float(factor) for unit, factor in _SECONDS_UNITS.items() if unit.isascii()},
)
SHARE_OF_WHOLE = Quantity(
    name="a share of a whole", example="a number above 0 and at most 1", least=1e-9, maximum=1, range="1e-9 to 1"
)
PROCESSOR_COUNT = Quantity(
    name="a number of processors", example="a number", least=1e-12, maximum=1e6, range="1e-12 to 1e6"
)
