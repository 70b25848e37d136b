"""Regions of memory: as large as announced, aligned, cut into slots that do not overlap."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given

from moelight.core.dtypes import FLOAT32
from moelight.core.errors import BudgetError
from moelight.core.policy import Policy
from moelight.hrm.footprint import ArenaSize, Footprint, footprint
from moelight.paging.arena import allocate, typed
from moelight.profiles.model import ModelProfile
from tests.shapes import examples, placed

CPU = torch.device("cpu")
BOUNDS = {"transient", "host_transient", "states", "runtime", "transformers", "device_runtime"}


@examples(25)
@given(case=placed())
def test_regions_are_aligned_and_of_announced_size(case: tuple[ModelProfile, Policy]) -> None:
    model, policy = case
    announced = footprint(model, policy, dtype=FLOAT32)
    arenas = allocate(announced, CPU)
    assert set(arenas) == {arena.purpose for arena in announced.arenas} - BOUNDS
    for purpose, arena in arenas.items():
        assert arena.numel() == announced.bytes_of(purpose)
        assert arena.dtype is torch.uint8
        assert arena.data_ptr() % (2 << 20) == 0, "at the start of a huge page"


def test_regions_do_not_overlap() -> None:
    sizes = [ArenaSize(purpose=f"p{n}", tier="host", bytes=4096 * n + 17) for n in range(1, 6)]
    spans = sorted(
        (a.data_ptr(), a.data_ptr() + a.numel()) for a in allocate(Footprint(arenas=tuple(sizes)), CPU).values()
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_refusal_of_the_machine_names_tier_and_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    arena = ArenaSize(purpose="kv", tier="host", bytes=3 << 20)
    with pytest.raises(BudgetError, match=r"no 3.0MiB left on tier host for kv.*--host-memory") as caught:
        allocate(Footprint(arenas=(arena,)), CPU)
    assert caught.value.tier == "host"
    assert caught.value.needed_bytes == 3 << 20


def test_a_typed_view_is_the_arena_itself() -> None:
    arena = torch.zeros(100, dtype=torch.uint8)
    view = typed(arena, torch.float32, (2, 3))
    view.fill_(1.0)
    assert view.shape == (2, 3)
    assert arena[:24].view(torch.float32).eq(1).all()
    assert arena[24:].eq(0).all()
    rows = typed(arena[:96], torch.bfloat16, (6, 8))
    assert rows.shape == (6, 8)
