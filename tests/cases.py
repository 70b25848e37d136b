"""Which cases of a parametrised test are run when: representatives by `make test` or in CI, the others more seldom."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def exhaustive(cases: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """``cases``, of which `make thorough` runs all, and CI those that are in ``but``; several values are a tuple."""
    return [_marked(case, () if case in but else pytest.mark.exhaustive) for case in cases]


def thorough(cases: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """``cases``, of which CI runs all, and `make test` those that are in ``but``; several values are a tuple."""
    return [_marked(case, () if case in but else pytest.mark.thorough) for case in cases]


def covering(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few of ``cases`` in which every value that any of them has at some position occurs there: each is the first that
    adds most."""
    among = list(cases)
    left = {value for case in among for value in enumerate(case)}
    chosen = []
    while left:
        chosen.append(max(among, key=lambda case: len(left.intersection(enumerate(case)))))
        left.difference_update(enumerate(chosen[-1]))
    return chosen


def _marked(case: Any, marks: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
