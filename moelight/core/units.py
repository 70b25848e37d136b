"""Byte units, parsing and formatting. GB (10^9) and GiB (2^30) are distinct."""

from __future__ import annotations

import re
from decimal import Decimal

from moelight.core.errors import ConfigError

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

_FACTORS = {"": 1, "b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB, "kb": KB, "mb": MB, "gb": GB, "tb": TB}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int, *, label: str = "size") -> int:
    """Bytes from ``"3GiB"``, ``"3GB"``, ``"1.5GiB"`` or a plain number; ``label`` names the option in errors."""
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = _SIZE.fullmatch(str(text))
        factor = _FACTORS.get(match.group(2).lower()) if match else None
        if match is None or factor is None:
            raise ConfigError(f"{label}: {text!r} is not a size; write bytes or a unit, for example 3GiB or 500MB")
        size = int(Decimal(match.group(1)) * factor)
    if not 0 < size < 1 << 63:
        raise ConfigError(f"{label}: {text!r} is not a size above zero that any machine could have")
    return size


def format_bytes(size: int, *, round_up: bool = False) -> str:
    """``"412.5MiB"``: one decimal, binary units. With ``round_up`` the result is never less than ``size``."""
    for name, unit in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if size >= unit:
            tenths = -(-size * 10 // unit) if round_up else round(size * 10 / unit)
            return f"{tenths // 10}.{tenths % 10}{name}"
    return f"{size}B"


def align_up(size: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is at least ``size``."""
    return -(-size // alignment) * alignment
