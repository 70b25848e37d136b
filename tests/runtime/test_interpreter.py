"""Settings of the interpreter hold while any engine is open, and are the user's own again afterwards."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from moelight.runtime import interpreter


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """The test's own settings, whatever engines other tests left open."""
    retained, settings = (sys.getswitchinterval(), gc.get_threshold()), interpreter._interpreter
    interpreter._interpreter = interpreter._Interpreter()
    yield
    sys.setswitchinterval(retained[0])
    gc.set_threshold(*retained[1])
    interpreter._interpreter = settings


def test_settings_are_those_of_before_once_the_last_engine_is_closed() -> None:
    sys.setswitchinterval(0.005)
    gc.set_threshold(600, 9, 8)
    with interpreter.shared_by_lanes():
        with interpreter.shared_by_lanes():
            assert sys.getswitchinterval() == pytest.approx(interpreter.SWITCH_S)
            assert gc.get_threshold() == (600, 9, interpreter.FULL_COLLECTIONS)
        assert gc.get_threshold()[2] == interpreter.FULL_COLLECTIONS
    assert (sys.getswitchinterval(), gc.get_threshold()) == (pytest.approx(0.005), (600, 9, 8))


def test_settings_that_a_user_chose_for_the_same_reason_stay() -> None:
    sys.setswitchinterval(1e-5)
    gc.set_threshold(500, 10, 5000)
    with interpreter.shared_by_lanes():
        assert sys.getswitchinterval() == pytest.approx(1e-5)
        assert gc.get_threshold() == (500, 10, 5000)
    assert gc.get_threshold() == (500, 10, 5000)
