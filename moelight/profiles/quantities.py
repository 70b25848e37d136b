"""Sizes, bandwidths, speeds and times in profiles: a number in base units, or text with a unit.

Each kind has a range, wide enough for every machine and narrow enough that products of a few quantities stay finite.
Parsing and formatting are inverse: formatted values parse to the same number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal

from moelight.core.errors import ConfigError, quoted
from moelight.core.units import parse_bytes

MOST_PROCESSORS = 4096  # of one kind in one machine


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """A kind of quantity: its name, an example, and its range in base units and in words."""

    name: str
    example: str
    least: float
    most: float
    range: str

    def check(self, value: float, what: str) -> float:
        """``value`` if it is a number within the range."""
        if isinstance(value, bool) or not self.least <= value <= self.most:
            raise ConfigError(f"{what}: {quoted(value)} is out of range; {self.name} is from {self.range}")
        return float(value)

    def unreadable(self, value: str, what: str) -> ConfigError:
        """The error for text that is not such a quantity."""
        return ConfigError(f"{what}: {quoted(value)} is not {self.name}; write {self.example}")


_CAPACITY = _Kind(
    name="a size", example="bytes or a unit, for example 24GiB", least=1, most=(1 << 63) - 1, range="1 byte to 8EiB"
)
_BANDWIDTH = _Kind(
    name="a bandwidth",
    example="bytes/s or a unit, for example 285GiB/s",
    least=1e3,
    most=1e18,
    range="1KB/s to 1,000,000TB/s",
)
_SPEED = _Kind(
    name="a speed",
    example="flop/s or a unit, for example 104TFLOP/s",
    least=1e3,
    most=1e21,
    range="1KFLOP/s to 1,000,000PFLOP/s",
)
_TIME = _Kind(
    name="a time", example="seconds or a unit, for example 40us or 1.5ms", least=1e-12, most=1e6, range="1e-12s to 1e6s"
)
_SHARE = _Kind(
    name="a share of a whole", example="a number above 0 and at most 1", least=1e-9, most=1, range="1e-9 to 1"
)
_COUNT = _Kind(name="a number of processors", example="a number", least=1e-12, most=1e6, range="1e-12 to 1e6")

_NUMBER = r"\s*(\d+(?:\.\d*)?|\.\d+)\s*"
_FLOPS = re.compile(_NUMBER + r"([kKMGTP]?)(?:FLOP/s|FLOPS)\s*", re.IGNORECASE)
_SECONDS = re.compile(_NUMBER + r"(ns|us|µs|μs|ms|s)\s*")
_FLOPS_UNITS = {"": "1", "K": "1e3", "M": "1e6", "G": "1e9", "T": "1e12", "P": "1e15"}
_SECONDS_UNITS = {"ns": "1e-9", "us": "1e-6", "µs": "1e-6", "μs": "1e-6", "ms": "1e-3", "s": "1"}
_BINARY = ("TiB", "GiB", "MiB", "KiB")
_DECIMAL = ("TB", "GB", "MB", "KB")


def capacity_bytes(value: str | float, *, what: str) -> int:
    """Bytes from ``24GiB`` or a number of bytes.

    Raises:
        ConfigError: not a size, or out of range; names ``what``.
    """
    size = parse_bytes(value, what=what) if isinstance(value, str) else value
    _CAPACITY.check(size, what)
    return int(size)


def bandwidth_bytes_per_s(value: str | float, *, what: str) -> float:
    """Bytes per second from ``285GiB/s`` or a number.

    Raises:
        ConfigError: not a bandwidth, or out of range; names ``what``.
    """
    if isinstance(value, str):
        size, slash, per = value.rpartition("/")
        if not slash or per.strip() != "s":
            raise _BANDWIDTH.unreadable(value, what)
        try:
            return _BANDWIDTH.check(parse_bytes(size), what)
        except ConfigError:
            raise _BANDWIDTH.unreadable(value, what) from None
    return _BANDWIDTH.check(value, what)


def flops_per_s(value: str | float, *, what: str) -> float:
    """Flop per second from ``104TFLOP/s`` or a number.

    Raises:
        ConfigError: not a speed, or out of range; names ``what``.
    """
    if isinstance(value, str):
        match = _FLOPS.fullmatch(value)
        if match is None:
            raise _SPEED.unreadable(value, what)
        value = _scaled(match.group(1), _FLOPS_UNITS[match.group(2).upper()])
    return _SPEED.check(value, what)


def seconds(value: str | float, *, what: str) -> float:
    """Seconds from ``40us``, ``1.5ms`` or a number.

    Raises:
        ConfigError: not a time, or out of range; names ``what``.
    """
    if isinstance(value, str):
        match = _SECONDS.fullmatch(value)
        if match is None:
            raise _TIME.unreadable(value, what)
        value = _scaled(match.group(1), _SECONDS_UNITS[match.group(2)])
    return _TIME.check(value, what)


def share(value: str | float, *, what: str) -> float:
    """A fraction: a number above 0 and at most 1.

    Raises:
        ConfigError: anything else; names ``what``.
    """
    if isinstance(value, str):
        raise _SHARE.unreadable(value, what)
    return _SHARE.check(value, what)


def positive(value: str | float, *, what: str) -> float:
    """A number of processors, not necessarily an integer.

    Raises:
        ConfigError: anything else; names ``what``.
    """
    if isinstance(value, str):
        raise _COUNT.unreadable(value, what)
    return _COUNT.check(value, what)


def spelled_capacity(size: int) -> str:
    """``24GiB``: the short form if exact, else the bytes."""
    units = ((unit, parse_bytes(f"1{unit}")) for unit in (*_BINARY, *_DECIMAL))
    return _spelled(size, units, lambda text: capacity_bytes(text, what="size"))


def spelled_bandwidth(bytes_per_s: float) -> str:
    """``31.5GB/s``: the short form if exact, else the number."""
    units = ((f"{unit}/s", parse_bytes(f"1{unit}")) for unit in (*_DECIMAL, *_BINARY))
    return _spelled(bytes_per_s, units, lambda text: bandwidth_bytes_per_s(text, what="bandwidth"))


def spelled_flops(flops: float) -> str:
    """``104TFLOP/s``: the short form if exact, else the number."""
    units = ((f"{name}FLOP/s", float(factor)) for name, factor in reversed(_FLOPS_UNITS.items()))
    return _spelled(flops, units, lambda text: flops_per_s(text, what="speed"))


def spelled_seconds(time_s: float) -> str:
    """``40us``: the short form if exact, else the number."""
    units = ((name, float(_SECONDS_UNITS[name])) for name in ("s", "ms", "us", "ns"))
    return _spelled(time_s, units, lambda text: seconds(text, what="time"))


def _spelled(value: float, units: Iterable[tuple[str, float]], read: Callable[[str], float]) -> str:
    """The shortest form that parses to ``value``, in any unit that gives 1 to 100,000; else the number."""
    candidates = [f"{value / factor:.6g}{unit}" for unit, factor in units if 1 <= value / factor < 1e5]
    exact = [text for text in candidates if read(text) == value]
    return min(exact, key=len) if exact else repr(value)


def _scaled(number: str, factor: str) -> float:
    """The product, rounded once."""
    return float(Decimal(number) * Decimal(factor))
