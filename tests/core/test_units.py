"""Sizes survive being written and read, and no reader mistakes GB for GiB."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.core.units import GB, GiB, KiB, MiB, TiB, align_up, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3GiB", 3 * GiB),
        ("3GB", 3 * GB),
        ("1.5GiB", 3 * GiB // 2),
        (" .5 mib ", MiB // 2),
        ("2tib", 2 * TiB),
        ("7", 7),
        ("7B", 7),
        (4096, 4096),
    ],
)
def test_sizes_are_read_in_their_own_unit(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "3 GiB GiB", "3Gib/s", "-1GiB", "0", "0.0001B", "1e9", "3,5GiB", "three", 0, -5]
)
def test_what_is_not_a_positive_size_is_refused_under_the_options_name(text: str | int) -> None:
    with pytest.raises(ConfigError, match="--host-memory"):
        parse_bytes(text, label="--host-memory")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0B"), (1023, "1023B"), (KiB, "1.0KiB"), (432537600, "412.5MiB"), (3 * TiB, "3.0TiB")]
)
def test_sizes_are_written_with_one_decimal(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1, 1 << 52))
def test_rounding_up_never_names_less_than_is_needed(size: int) -> None:
    named = parse_bytes(format_bytes(size, round_up=True))
    assert size <= named <= size * 1.11 + 1


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 20))
def test_align_up_is_the_least_multiple_not_below(size: int, alignment: int) -> None:
    aligned = align_up(size, alignment)
    assert aligned % alignment == 0
    assert 0 <= aligned - size < alignment
