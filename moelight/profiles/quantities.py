"""Sizes, bandwidths, speeds and times as profiles write them: a number in base units, or text with its unit.

Reading and spelling are inverse: what is spelled reads back as the same number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from decimal import Decimal

from moelight.core.errors import ConfigError
from moelight.core.units import parse_bytes

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
        ConfigError: not a positive size; names ``what``.
    """
    if not isinstance(value, str):
        _positive(value, what)
        value = int(value)
    return parse_bytes(value, what=what)


def bandwidth_bytes_per_s(value: str | float, *, what: str) -> float:
    """Bytes per second from ``285GiB/s`` or a number.

    Raises:
        ConfigError: not a positive bandwidth; names ``what``.
    """
    if not isinstance(value, str):
        return _positive(value, what)
    size, slash, per = value.rpartition("/")
    if not slash or per.strip() != "s":
        raise ConfigError(f"{what}: {value!r} is not a bandwidth; write bytes/s or a unit, for example 285GiB/s")
    return float(parse_bytes(size, what=what))


def flops_per_s(value: str | float, *, what: str) -> float:
    """Flop per second from ``104TFLOP/s`` or a number.

    Raises:
        ConfigError: not a positive speed; names ``what``.
    """
    if not isinstance(value, str):
        return _positive(value, what)
    match = _FLOPS.fullmatch(value)
    if match is None:
        raise ConfigError(f"{what}: {value!r} is not a speed; write flop/s or a unit, for example 104TFLOP/s")
    return _positive(_scaled(match.group(1), _FLOPS_UNITS[match.group(2).upper()]), what)


def seconds(value: str | float, *, what: str) -> float:
    """Seconds from ``40us``, ``1.5ms`` or a number.

    Raises:
        ConfigError: not a positive time; names ``what``.
    """
    if not isinstance(value, str):
        return _positive(value, what)
    match = _SECONDS.fullmatch(value)
    if match is None:
        raise ConfigError(f"{what}: {value!r} is not a time; write seconds or a unit, for example 40us or 1.5ms")
    return _positive(_scaled(match.group(1), _SECONDS_UNITS[match.group(2)]), what)


def share(value: str | float, *, what: str) -> float:
    """A share of a whole: a number above 0, and at most 1.

    Raises:
        ConfigError: anything else; names ``what``.
    """
    if isinstance(value, (str, bool)) or not 0 < value <= 1:
        raise ConfigError(f"{what}: {value!r} is not a share; write a number above 0 and at most 1")
    return float(value)


def positive(value: str | float, *, what: str) -> float:
    """A plain number above 0.

    Raises:
        ConfigError: anything else; names ``what``.
    """
    if isinstance(value, str):
        raise ConfigError(f"{what}: {value!r} is not a number")
    return _positive(value, what)


def spelled_capacity(size: int) -> str:
    """``24GiB``: short where a short spelling is exact, else the bytes."""
    units = ((unit, parse_bytes(f"1{unit}")) for unit in (*_BINARY, *_DECIMAL))
    return _spelled(size, units, lambda text: capacity_bytes(text, what="size"))


def spelled_bandwidth(bytes_per_s: float) -> str:
    """``31.5GB/s``: short where a short spelling is exact, else the number."""
    units = ((f"{unit}/s", parse_bytes(f"1{unit}")) for unit in (*_DECIMAL, *_BINARY))
    return _spelled(bytes_per_s, units, lambda text: bandwidth_bytes_per_s(text, what="bandwidth"))


def spelled_flops(flops: float) -> str:
    """``104TFLOP/s``: short where a short spelling is exact, else the number."""
    units = ((f"{name}FLOP/s", float(factor)) for name, factor in reversed(_FLOPS_UNITS.items()))
    return _spelled(flops, units, lambda text: flops_per_s(text, what="speed"))


def spelled_seconds(time_s: float) -> str:
    """``40us``: short where a short spelling is exact, else the number."""
    units = ((name, float(_SECONDS_UNITS[name])) for name in ("s", "ms", "us", "ns"))
    return _spelled(time_s, units, lambda text: seconds(text, what="time"))


def _spelled(value: float, units: Iterable[tuple[str, float]], read: Callable[[str], float]) -> str:
    """The shortest spelling that reads back as ``value``, in any unit that leaves 1 to 100,000; else the number."""
    candidates = [f"{value / factor:.6g}{unit}" for unit, factor in units if 1 <= value / factor < 1e5]
    exact = [text for text in candidates if read(text) == value]
    return min(exact, key=len) if exact else repr(value)


def _scaled(number: str, factor: str) -> float:
    """The product without a rounding of its own."""
    return float(Decimal(number) * Decimal(factor))


def _positive(value: float, what: str) -> float:
    if isinstance(value, bool) or not 0 < value < 1e24:
        raise ConfigError(f"{what}: {value!r} is not a positive number")
    return float(value)
