"""Commands keep their plans in a directory of the test run's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moelight.core.paths import CACHE_VARIABLE


@pytest.fixture(autouse=True, scope="package")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory, which processes that tests start use too."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(directory))
        yield directory
