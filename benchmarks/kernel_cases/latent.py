"""Latent attention in the absorbed form: few heads are bound by reading the cache, many by products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from peers.common import agree, block_tables, random_huge, sets_for, turns
from torch import Tensor
from torch.nn import functional

from kernel_cases.setting import Setting, here
from kernel_cases.turns import Case, Contender, Timed
from moelight.kernels.attention import cpu_mla_decode

LATENT, ROTARY, BLOCK = 512, 64, 32
ROW = LATENT + ROTARY
SCALE = 192**-0.5
TITLE = f"latent decode attention, {LATENT} + {ROTARY}, bf16, blocks of {BLOCK} at random places"


def cases(setting: Setting) -> Iterator[Case]:
    """DeepSeek-V2-Lite's heads and DeepSeek-V3's."""
    for heads in (16, 128):
        for batch, length in ((64, 512), (16, 2048)):
            yield _case(heads, batch, length, setting)


def _case(heads: int, batch: int, length: int, setting: Setting) -> Case:
    context = Context(heads, batch, length, setting)
    tokens = batch * length
    return Case(
        name=f"latent {heads}h {batch} x {length}",
        contenders=[
            Contender(
                name="moelight",
                make=context.ours,
                nbytes=2 * tokens * ROW,
                flop=2 * tokens * heads * (ROW + LATENT),
            ),
            Contender(name="torch SDPA each", make=context.sdpa_each, ratio_bar=1.0),
        ],
    )


class Context:
    """Sets of equally shaped caches over one flat memory."""

    def __init__(self, heads: int, batch: int, length: int, setting: Setting) -> None:
        self.batch, self.length, self.setting = batch, length, setting
        self.sets = sets_for(2 * batch * length * ROW, setting.gib)
        self.q = torch.randn(batch, heads, ROW).to(torch.bfloat16)

    @cached_property
    def cache(self) -> Tensor:
        return random_huge((self.sets * self.batch * self.length // BLOCK, BLOCK, ROW))

    def ours(self) -> Timed:
        order = torch.randperm(len(self.cache), dtype=torch.int32).view(self.sets, -1)
        tables = [block_tables(row, [self.length // BLOCK] * self.batch) for row in order]
        lens = torch.full((self.batch,), self.length, dtype=torch.int32)
        latent, rotary = (part.contiguous() for part in self.q.split((LATENT, ROTARY), dim=2))
        out, turn = torch.empty_like(latent), turns(self.sets)

        def once() -> None:
            at = tables[next(turn)]
            cpu_mla_decode(latent, rotary, self.cache, at, lens, SCALE, out=out, threads=self.setting.threads)

        timed = here(once)
        rows = self.cache[tables[0][0].long()].view(-1, ROW).float()
        weights = torch.softmax(self.q[0].float() @ rows.t() * SCALE, dim=1)
        agree(out[0], weights @ rows[:, :LATENT])
        return timed

    def sdpa_each(self) -> Timed:
        """One call a sequence on contiguous rows, the heads as query rows of one head."""
        sequences = self.cache.view(self.sets, self.batch, 1, 1, self.length, ROW)
        q, turn = self.q[:, None, None], turns(self.sets)

        def once() -> None:
            for query, rows in zip(q, sequences[next(turn)], strict=True):
                functional.scaled_dot_product_attention(query, rows, rows[..., :LATENT], scale=SCALE)

        return here(once)
