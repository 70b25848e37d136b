"""Copies of pages in host memory: every byte is read once and written once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from peers.common import random_huge, sets_for, turns
from torch import Tensor

from kernel_cases.setting import Setting, here
from kernel_cases.turns import Case, Contender, Timed
from moelight.kernels.copies import copy_pages

MIB = 1 << 20
TITLE = "copies; the roof is reading once and writing once, both at the read rate"


def cases(setting: Setting) -> Iterator[Case]:
    """The pages of a small expert, and of one of Mixtral 8x7B's."""
    for size in (4 * MIB, 336 * MIB):
        work = partial(_timed, size, setting)
        ours = Contender(
            name="moelight", make=partial(work, partial(copy_pages, threads=setting.threads)), nbytes=2 * size
        )
        theirs = Contender(name="torch copy_", make=partial(work, Tensor.copy_), ratio_bar=1.0)
        yield Case(name=f"copy {size // MIB} MiB", contenders=[ours, theirs])


def _timed(size: int, setting: Setting, copy: partial[None]) -> Timed:
    sets = sets_for(2 * size, setting.gib)
    pages = list(random_huge((2 * sets, size), torch.uint8))
    turn = turns(sets)

    def once() -> None:
        at = 2 * next(turn)
        copy(pages[at], pages[at + 1])

    timed = here(once)
    assert torch.equal(pages[0], pages[1])
    return timed
