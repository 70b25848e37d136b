"""Quantised checkpoints give the tokens of the checkpoint of their numbers, whatever holds the pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moelight.core.policy import Shares
from tests.engine.graphs import STREAMED, tokens
from tests.engines import Tiny
from tests.weights.quantised import METHODS, quantise

SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(params=METHODS)
def pair(request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Path) -> tuple[Path, Path]:
    """A quantised mixtral, and one of its numbers."""
    return quantise(tiny("mixtral", intermediate_size=96, **SHAPE), tmp_path, METHODS[request.param])


def test_tokens_are_those_of_the_numbers(pair: tuple[Path, Path]) -> None:
    quantised, numbers = (str(each) for each in pair)
    wanted = tokens(Path(numbers), weights=Shares(host=1.0))
    assert tokens(Path(quantised), weights=Shares(host=1.0)) == wanted
    assert tokens(Path(quantised), weights=STREAMED) == wanted
