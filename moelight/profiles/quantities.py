"""Sizes, bandwidths and speeds as profiles write them: a number in base units, or text with its unit."""

from __future__ import annotations

import re

from moelight.core.errors import ConfigError
from moelight.core.units import parse_bytes

_FLOPS = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kKMGTP]?)(?:FLOP/s|FLOPS|flop/s)\s*")
_FLOPS_FACTORS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def capacity_bytes(value: str | float, *, what: str) -> int:
    """Bytes from ``24GiB`` or a number of bytes.

    Raises:
        ConfigError: not a positive size; names ``what``.
    """
    return parse_bytes(value if isinstance(value, str) else int(_positive(value, what)), what=what)


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
    return _positive(float(match.group(1)) * _FLOPS_FACTORS[match.group(2)], what)


def _positive(value: float, what: str) -> float:
    if isinstance(value, bool) or not 0 < value < 1e24:
        raise ConfigError(f"{what}: {value!r} is not a positive number")
    return float(value)
