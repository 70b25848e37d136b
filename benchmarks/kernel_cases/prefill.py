"""Prefill attention over packed prompts: bound by products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import torch
from peers.common import agree, random_huge
from torch import Tensor
from torch.nn import functional

from kernel_cases.setting import Setting, here
from kernel_cases.turns import Case, Contender, Timed
from moelight.kernels.attention import cpu_prefill_attention

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
TITLE = f"prefill attention, causal, {Q_HEADS}/{KV_HEADS} heads of {DIM}, bf16"


def cases(setting: Setting) -> Iterator[Case]:
    """Even, long and ragged prompts."""
    ragged = torch.randint(32, 993, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    for name, lengths in (("16 x 512", [512] * 16), ("1 x 4096", [4096]), ("16 x 32..992", ragged)):
        yield _case(f"prefill {name}", lengths, setting)


def _case(name: str, lengths: list[int], setting: Setting) -> Case:
    prompts = Prompts(lengths, setting)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return Case(
        name=name,
        contenders=[
            Contender(name="moelight", make=prompts.ours, flop=4 * DIM * Q_HEADS * pairs),
            Contender(name="torch SDPA each", make=prompts.sdpa_each, ratio_bar=1.0),
        ],
    )


class Prompts:
    """Queries, keys and values of packed prompts."""

    def __init__(self, lengths: list[int], setting: Setting) -> None:
        self.setting = setting
        self.cuts = torch.tensor([0, *lengths]).cumsum(0)

    @cached_property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the output."""
        tokens = int(self.cuts[-1])
        q, k, v = (random_huge((tokens, heads, DIM)) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        return q, k, v, torch.empty_like(q)

    def ours(self) -> Timed:
        q, k, v, out = self.operands
        cuts = self.cuts.to(torch.int32)
        timed = here(lambda: cpu_prefill_attention(q, k, v, cuts, DIM**-0.5, out=out, threads=self.setting.threads))
        first = int(self.cuts[1])
        agree(out[:first], self._sdpa(0, first))
        return timed

    def sdpa_each(self) -> Timed:
        """One call a prompt, written where ours is."""
        out = self.operands[3]

        def once() -> None:
            for begin, end in pairwise(self.cuts.tolist()):
                out[begin:end] = self._sdpa(begin, end)

        return here(once)

    def _sdpa(self, begin: int, end: int) -> Tensor:
        q, k, v = (part[begin:end].transpose(0, 1)[None] for part in self.operands[:3])
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
