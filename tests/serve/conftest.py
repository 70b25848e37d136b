"""One server whose jobs are stand-ins, for all tests that neither kill it nor mind what others asked of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.standing import Standing, standing


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with standing(tmp_path_factory.mktemp("serve") / "data") as result:
        yield result
