"""Figures in words: three digits, the right unit, and nothing rounded into a falsehood."""

from __future__ import annotations

import pytest

from moelight.observe import number_format


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3e-9, "3.00 ns"),
        (9.4e-4, "940 µs"),
        (0.0183, "18.3 ms"),
        (0.9996, "1.00 s"),
        (6.2, "6.20 s"),
        (599.6, "600 s"),
        (600, "10.0 min"),
        (7980, "2 h 13 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert number_format.seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("share", "text", "signed"),
    [
        (0, "0 %", "0 %"),
        (1e-6, "< 0.1 %", "< 0.1 %"),
        (0.0559, "5.6 %", "+5.6 %"),
        (0.5, "50 %", "+50 %"),
        (0.997, "99.7 %", "+99.7 %"),
        (0.99999, "> 99.9 %", "> 99.9 %"),
        (1, "100 %", "+100 %"),
        (-0.25, "−25 %", "−25 %"),
        (3.5, "350 %", "+350 %"),
    ],
)
def test_shares(share: float, text: str, signed: str) -> None:
    assert number_format.share_text(share) == text
    assert number_format.share_text(share, signed=True) == signed


def test_rates_and_counts() -> None:
    assert number_format.rate_text(15.75e9) == "15.8 GB/s"
    assert number_format.rate_text(999.9e9) == "1.00 TB/s"
    assert number_format.flops_text(104e12) == "104 Tflop/s"
    assert number_format.count_text(46.7e9) == "46.7 billion"
    assert number_format.count_text(840) == "840"
    assert [number_format.rate_or_count(value) for value in (6.244, 944.66, 12345.6)] == ["6.24", "944.7", "12,346"]
