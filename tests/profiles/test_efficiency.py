"""Curves and surfaces: exact at what was measured, between neighbours in between, level outside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.profiles.efficiency import Curve, Surface
from tests.shapes import examples

CURVE = Curve(x=(1.0, 4.0, 64.0), y=(10.0, 40.0, 20.0))
SURFACE = Surface(name="x", sizes=(8.0, 128.0), curves=(CURVE, Curve(x=(1.0,), y=(1000.0,))))


def test_points_ends_and_the_middle_of_a_decade() -> None:
    assert [CURVE.at(x) for x in (1.0, 4.0, 64.0)] == pytest.approx([10, 40, 20])
    assert CURVE.at(0.01) == pytest.approx(10) and CURVE.at(1e9) == pytest.approx(20)
    assert CURVE.at(2.0) == pytest.approx(20) and CURVE.at(16.0) == pytest.approx(40 / 2**0.5)
    result = CURVE.at(np.array([[1.0, 2.0], [4.0, 64.0]]))
    assert result.shape == (2, 2) and result[0, 1] == pytest.approx(20)


def test_between_sizes_of_weights() -> None:
    assert SURFACE.at(4.0) == SURFACE.at(4.0, 1.0) == pytest.approx(40)
    assert SURFACE.at(4.0, 1e9) == pytest.approx(1000)
    assert SURFACE.at(4.0, 32.0) == pytest.approx((40 * 1000) ** 0.5)
    assert isinstance(SURFACE.at(4.0, 32.0), float)


@examples(100)
@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.floats(0.1, 10.0))
def test_nothing_leaves_the_range_of_what_was_measured(x: float, size: float, factor: float) -> None:
    speed = SURFACE.at(x, size)
    assert 10 * (1 - 1e-9) <= speed <= 1000 * (1 + 1e-9)
    assert SURFACE.times(factor).at(x, size) == pytest.approx(factor * speed)
    assert SURFACE.at(np.array([x]), size)[0] == pytest.approx(speed)
