"""Plans without a proof, which takes as long as the search."""

from __future__ import annotations

import pytest

from moelight.optimizer import bound, optimize


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this is used nobody asks how near the bound comes, nor what a better machine would gain."""
    monkeypatch.setattr(bound, "MOST_BOXES", dict.fromkeys(bound.MOST_BOXES, 0))
    monkeypatch.setattr(optimize, "what_if", lambda *_: ())
