"""Codes of matrices of GPTQ and AWQ turned in their memory, as a thread that reads pages does it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from peers.common import random_huge, sets_for, turns

from kernel_cases.setting import Setting, here
from kernel_cases.turns import Case, Contender, Timed
from moelight.formats.awq import awq
from moelight.formats.format import Format
from moelight.formats.gptq import gptq
from moelight.kernels.repack import turn

TITLE = "matrices repacked, one thread; the roof is reading once and writing once, both at the read rate of all threads"
SHAPES = ((768, 2048), (14336, 4096))
FORMATS = {
    "gptq int4": gptq(bits=4, group=128),
    "gptq int8": gptq(bits=8, group=128),
    "awq": awq(group=128),
}


def cases(setting: Setting) -> Iterator[Case]:
    """The gates of a small expert, and of one of Mixtral 8x7B."""
    for rows, columns in SHAPES:
        for name, stored in FORMATS.items():
            part = stored.tensors(rows, columns)[0]
            ours = Contender(name="moelight", make=partial(_ours, stored, part.shape, setting), nbytes=2 * part.nbytes)
            theirs = Contender(name="torch t()", make=partial(_torch, part.shape, setting))
            yield Case(name=f"repack {name} {rows}x{columns}", contenders=[ours, theirs])


def _ours(stored: Format, shape: tuple[int, int], setting: Setting) -> Timed:
    table = stored.repack_table(stored.names[0], shape, 4)
    assert table is not None, "codes are turned"
    size = 4 * shape[0] * shape[1]
    sets = sets_for(size, setting.gib)
    parts, at = list(random_huge((sets, size), torch.uint8)), turns(sets)
    return here(lambda: turn(parts[next(at)], table))


def _torch(shape: tuple[int, int], setting: Setting) -> Timed:
    """Words as rows into other memory: no codes of AWQ are put in order."""
    size = 4 * shape[0] * shape[1]
    sets = sets_for(2 * size, setting.gib)
    parts, at = list(random_huge((sets, size), torch.uint8)), turns(sets)
    out = torch.empty(shape[::-1], dtype=torch.int32)

    def once() -> None:
        out.copy_(parts[next(at)].view(torch.int32).view(shape).t())

    return here(once)
