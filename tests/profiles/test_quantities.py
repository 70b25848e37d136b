"""Quantities: every unit is honoured, nonsense is refused by name, and what is spelled reads back as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.profiles.quantities import BANDWIDTH, CAPACITY, PROCESSOR_COUNT, SHARE_OF_WHOLE, SPEED, TIME, Quantity
from tests.shapes import examples


@pytest.mark.parametrize(
    ("quantity", "written", "value"),
    [
        (CAPACITY, "24GiB", 24 * 2**30),
        (CAPACITY, "24 GB", 24e9),
        (CAPACITY, 197880360960, 197880360960),
        (CAPACITY, 1.5e9, 1_500_000_000),
        (BANDWIDTH, "285GiB/s", 285 * 2**30),
        (BANDWIDTH, "15.75 GB/s", 15.75e9),
        (BANDWIDTH, 3e11, 3e11),
        (SPEED, "104TFLOP/s", 104e12),
        (SPEED, "1.5 PFLOP/s", 1.5e15),
        (SPEED, "114.7tflops", 114.7e12),
        (SPEED, "900 Gflop/s", 900e9),
        (SPEED, 1.04e14, 1.04e14),
        (TIME, "40us", 4e-5),
        (TIME, "40µs", 4e-5),
        (TIME, "1.5ms", 1.5e-3),
        (TIME, "800 ns", 8e-7),
        (TIME, "2s", 2.0),
        (TIME, 0.25, 0.25),
        (SHARE_OF_WHOLE, 1, 1.0),
        (PROCESSOR_COUNT, 1.7, 1.7),
    ],
)
def test_values_with_and_without_units(quantity: Quantity, written: str | float, value: float) -> None:
    assert quantity.parse(written, label="x") == value


@pytest.mark.parametrize(
    ("quantity", "written"),
    [
        (CAPACITY, "24 parsecs"),
        (CAPACITY, 0),
        (BANDWIDTH, "24GB"),
        (BANDWIDTH, "24GB/min"),
        (BANDWIDTH, True),
        (SPEED, "104TB/s"),
        (SPEED, "fast"),
        (SPEED, float("inf")),
        (TIME, "40"),
        (TIME, "40 minutes"),
        (TIME, -1.0),
        (SHARE_OF_WHOLE, 0),
        (SHARE_OF_WHOLE, 1.01),
        (SHARE_OF_WHOLE, "half"),
        (CAPACITY, 1 << 63),
        (CAPACITY, 10**400),
        (BANDWIDTH, 999.0),
        (BANDWIDTH, "1000001TB/s"),
        (SPEED, "0.5KFLOP/s"),
        (SPEED, "1000001PFLOP/s"),
        (TIME, 1e-13),
        (SHARE_OF_WHOLE, 1e-300),
        (PROCESSOR_COUNT, "1"),
        (PROCESSOR_COUNT, float("nan")),
    ],
)
def test_anything_else_is_refused_by_name(quantity: Quantity, written: str | float) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.host"):
        quantity.parse(written, label="tiers.host")


def test_short_spellings() -> None:
    assert CAPACITY.spelled(24 * 2**30) == "24GiB"
    assert CAPACITY.spelled(192 * 10**9) == "192GB"
    assert CAPACITY.spelled(197880360960) == "197880360960"
    assert BANDWIDTH.spelled(31.5e9) == "31.5GB/s"
    assert SPEED.spelled(104e12) == "104TFLOP/s"
    assert TIME.spelled(4e-5) == "40us"


@examples(200)
@given(st.integers(1, 2**62), st.floats(1e3, 1e18), st.floats(1e-12, 1e6))
def test_what_is_spelled_reads_back(size: int, rate: float, time_s: float) -> None:
    assert read_number(CAPACITY.spelled(size), CAPACITY) == size
    assert read_number(BANDWIDTH.spelled(rate), BANDWIDTH) == rate
    assert read_number(SPEED.spelled(rate), SPEED) == rate
    assert read_number(TIME.spelled(time_s), TIME) == time_s


def read_number(text: str, quantity: Quantity) -> float:
    """As a profile's YAML has it: a plain number, or text with a unit."""
    try:
        value: str | float = int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            value = text
    return quantity.parse(value, label="x")
