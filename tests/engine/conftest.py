"""Tiny checkpoints that the tests of this room share: each written once a session."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moelight.engine import planning
from tests.engines import Tiny
from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """``tiny(family, **options)``: the directory of that checkpoint; options as for `save_tiny`."""
    made: dict[str, Path] = {}

    def find(family: str, **options: Any) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in made:
            made[key] = save_tiny(tmp_path_factory.mktemp(family), family, **options)
        return made[key]

    return find


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``checkpoints(family)``: a tiny checkpoint of a family that transformers computes, and its greedy tokens; each
    made once."""
    from tests.engine.graphs import made

    return functools.cache(lambda family: made(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="package", autouse=True)
def _machines_are_read_once() -> Iterator[None]:
    """Their profiles: half of the time that a tiny engine takes to open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "hardware_for", functools.cache(planning.hardware_for))
        yield
