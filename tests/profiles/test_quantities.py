"""Quantities: every unit is honoured, nonsense is refused by name, and what is spelled reads back as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.profiles import quantities
from moelight.profiles.quantities import bandwidth_bytes_per_s, capacity_bytes, flops_per_s, positive, seconds, share
from tests.shapes import examples


@pytest.mark.parametrize(
    ("read", "written", "value"),
    [
        (capacity_bytes, "24GiB", 24 * 2**30),
        (capacity_bytes, "24 GB", 24e9),
        (capacity_bytes, 197880360960, 197880360960),
        (capacity_bytes, 1.5e9, 1_500_000_000),
        (bandwidth_bytes_per_s, "285GiB/s", 285 * 2**30),
        (bandwidth_bytes_per_s, "15.75 GB/s", 15.75e9),
        (bandwidth_bytes_per_s, 3e11, 3e11),
        (flops_per_s, "104TFLOP/s", 104e12),
        (flops_per_s, "1.5 PFLOP/s", 1.5e15),
        (flops_per_s, "114.7tflops", 114.7e12),
        (flops_per_s, "900 Gflop/s", 900e9),
        (flops_per_s, 1.04e14, 1.04e14),
        (seconds, "40us", 4e-5),
        (seconds, "40µs", 4e-5),
        (seconds, "1.5ms", 1.5e-3),
        (seconds, "800 ns", 8e-7),
        (seconds, "2s", 2.0),
        (seconds, 0.25, 0.25),
        (share, 1, 1.0),
        (positive, 1.7, 1.7),
    ],
)
def test_values_with_and_without_units(read, written, value) -> None:  # type: ignore[no-untyped-def]
    assert read(written, what="x") == value


@pytest.mark.parametrize(
    ("read", "written"),
    [
        (capacity_bytes, "24 parsecs"),
        (capacity_bytes, 0),
        (bandwidth_bytes_per_s, "24GB"),
        (bandwidth_bytes_per_s, "24GB/min"),
        (bandwidth_bytes_per_s, True),
        (flops_per_s, "104TB/s"),
        (flops_per_s, "fast"),
        (flops_per_s, float("inf")),
        (seconds, "40"),
        (seconds, "40 minutes"),
        (seconds, -1.0),
        (share, 0),
        (share, 1.01),
        (share, "half"),
        (capacity_bytes, 1 << 63),
        (capacity_bytes, 10**400),
        (bandwidth_bytes_per_s, 999.0),
        (bandwidth_bytes_per_s, "1000001TB/s"),
        (flops_per_s, "0.5KFLOP/s"),
        (flops_per_s, "1000001PFLOP/s"),
        (seconds, 1e-13),
        (share, 1e-300),
        (positive, "1"),
        (positive, float("nan")),
    ],
)
def test_anything_else_is_refused_by_name(read, written) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"tiers\.host"):
        read(written, what="tiers.host")


def test_short_spellings() -> None:
    assert quantities.spelled_capacity(24 * 2**30) == "24GiB"
    assert quantities.spelled_capacity(192 * 10**9) == "192GB"
    assert quantities.spelled_capacity(197880360960) == "197880360960"
    assert quantities.spelled_bandwidth(31.5e9) == "31.5GB/s"
    assert quantities.spelled_flops(104e12) == "104TFLOP/s"
    assert quantities.spelled_seconds(4e-5) == "40us"


@examples(200)
@given(st.integers(1, 2**62), st.floats(1e3, 1e18), st.floats(1e-12, 1e6))
def test_what_is_spelled_reads_back(size: int, rate: float, time_s: float) -> None:
    assert read_number(quantities.spelled_capacity(size), capacity_bytes) == size
    assert read_number(quantities.spelled_bandwidth(rate), bandwidth_bytes_per_s) == rate
    assert read_number(quantities.spelled_flops(rate), flops_per_s) == rate
    assert read_number(quantities.spelled_seconds(time_s), seconds) == time_s


def read_number(text: str, read) -> float:  # type: ignore[no-untyped-def]
    """As a profile's YAML has it: a plain number, or text with a unit."""
    try:
        value: str | float = int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            value = text
    return read(value, what="x")  # type: ignore[no-any-return]
