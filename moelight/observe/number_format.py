"""Formats figures for display: seconds, rates, shares and counts."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Format seconds as ``6.20 s``, ``18.3 ms``, ``940 µs`` or ``2 h 13 min``: three digits and the fitting unit."""
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60} min"
    if seconds >= 600:
        return f"{seconds / 60:.1f} min"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{_three(seconds / size)} {unit}"
    return "0 s" if seconds < 5e-10 else f"{_three(seconds / 1e-9)} ns"


def rate_text(bytes_per_s: float) -> str:
    """Format bytes per second as ``12.3 GB/s``, in powers of ten as data sheets do."""
    return f"{scaled_text(bytes_per_s, step=' ')}B/s"


def flops_text(flops_per_s: float) -> str:
    """Format flop/s as ``104 Tflop/s``."""
    return f"{scaled_text(flops_per_s, step=' ')}flop/s"


def scaled_text(value: float, *, step: str = "") -> str:
    """Format a value as ``46.7G``: three digits and a power of ten, with ``step`` before the letter."""
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{_three(value / size)}{step}{letter}"
    return f"{_three(value)}{step}"


def count_text(value: float) -> str:
    """Format a count as ``46.7 billion``, ``3.35 million`` or ``840``."""
    for word, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if value >= 0.9995 * size:
            return f"{_three(value / size)} {word}"
    return f"{value:,.0f}"


def rate_or_count(value: float) -> str:
    """Format a count or rate as ``944.7``, ``6.24`` or ``12,345``."""
    return f"{value:,.0f}" if value >= 999.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def share_text(share: float, *, signed: bool = False) -> str:
    """Format a share as ``5.6 %``; a nonzero share is never rounded to 0 %, an incomplete one never to 100 %."""
    percent = 100 * share
    if percent == 0:
        return "0 %"
    if 0 < percent < 0.05:
        return "< 0.1 %"
    if 99.95 <= percent < 100:
        return "> 99.9 %"
    digits = 1 if abs(percent) < 9.95 or 99.5 <= percent < 100 else 0
    written = f"{percent:+.{digits}f} %" if signed else f"{percent:.{digits}f} %"
    return written.replace("-", "−")


def _three(value: float) -> str:
    """Format with three digits, or all digits of a larger whole number."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
