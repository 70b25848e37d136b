"""What the guard of speed calls a loss. How fast anything is, is no test."""

from __future__ import annotations

import importlib
import json
from types import ModuleType

import pytest

from tests.benchmarks.scripts import BENCHMARKS


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("kernel_cases.guard")


def test_a_loss_is_a_ratio_that_is_above_the_recorded_one_in_all_tries(guard: ModuleType) -> None:
    names = list(guard._OVER)
    expected = dict.fromkeys(names, 2.0)
    slow, usual = dict.fromkeys(names, 2.4), {**dict.fromkeys(names, 2.4), names[0]: 2.2}
    assert guard._losses(guard._over(min, [slow, slow]), expected) == names
    assert guard._losses(guard._over(min, [slow, usual]), expected) == names[1:]
    assert guard._losses(slow, {}) == []  # of a processor of which nothing is recorded


def test_what_is_recorded_is_what_is_measured(guard: ModuleType) -> None:
    for ratios in json.loads(guard.RATIOS.read_text()).values():
        assert ratios.keys() == guard._OVER.keys()
