"""A ring of fewer pages than two layers stream: the same tokens, whatever its size, devices and kind of model."""

from __future__ import annotations

import pytest

from moelight.core.policy import Policy
from tests.engine.test_invariance import DEVICES, MODELS, fits, run, truth
from tests.engines import Tiny

SMALL = [name for name, chosen in DEVICES.items() if fits("module", Policy(model="m", **chosen))]


@pytest.mark.parametrize("ring_pages", [2, 3, 5])
@pytest.mark.parametrize("devices", SMALL)
def test_a_ring_of_any_size_gives_the_same_tokens(tiny: Tiny, devices: str, ring_pages: int) -> None:
    """Prompts are cut, so that passes have several micro-batches of several sizes."""
    model = tiny("mixtral", **MODELS["mixtral"])
    policy = Policy(
        model=str(model),
        schedule="module",
        batch_size=9,
        micro_batch_size=4,
        micro_batch_tokens=20,
        kv_tokens=9 * 160,
        ring_pages=ring_pages,
        **DEVICES[devices],
    )
    assert run(policy) == truth(model)
