"""Codebooks hold the points of ggml's, index by index."""

from __future__ import annotations

import gguf.quants
import numpy as np
import pytest

from moelight.formats.codebook import CODEBOOKS
from moelight.formats.ggml import GGML_FORMATS


@pytest.mark.parametrize("name", [name for name, stored in GGML_FORMATS.items() if stored.codebook])
def test_points_are_those_of_the_gguf_package(name: str) -> None:
    theirs = getattr(gguf.quants, name)
    theirs.init_grid()
    points = np.array(CODEBOOKS[GGML_FORMATS[name].codebook].points())
    assert np.array_equal(points, theirs.grid.reshape(theirs.grid_shape))
    assert len(np.unique(points, axis=0)) == len(points)
