"""Tiny checkpoints that the tests of this room share: each written once a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
