"""Decode attention over the paged cache: bound by reading keys and values once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial

import torch
from peers.common import agree, attended, block_tables, huge, random_huge, sets_for, turns
from torch import Tensor
from torch.nn import functional

from kernel_cases.setting import Setting, here
from kernel_cases.turns import Case, Contender, Timed
from moelight.kernels.attention import cpu_gqa_decode

HEADS = Q_HEADS, KV_HEADS, DIM = 32, 8, 128
BLOCK = 32
SCALE = DIM**-0.5
LINK_BYTES_PER_S = 12e9  # PCIe 3.0 x16, as T4-class cards have it
TITLE = (
    f"decode attention, {Q_HEADS}/{KV_HEADS} heads of {DIM}, bf16 queries, blocks of {BLOCK}, at random places unless "
    f"said; the link is {LINK_BYTES_PER_S / 1e9:.0f} GB/s"
)


def cases(setting: Setting) -> Iterator[Case]:
    """Even and ragged contexts, many short ones and a long one."""
    generator = torch.Generator().manual_seed(0)
    ragged = torch.randint(32, 993, (64,), generator=generator).tolist()
    for name, lengths in (
        ("16 x 512", [512] * 16),
        ("16 x 2048", [2048] * 16),
        ("64 x 512", [512] * 64),
        ("64 x 2048", [2048] * 64),
        ("1 x 32768", [32768]),
        ("64 x 32..992", ragged),
    ):
        yield _case(f"decode {name}", lengths, setting)


def _case(name: str, lengths: list[int], setting: Setting) -> Case:
    values = 2 * KV_HEADS * DIM * sum(lengths)
    context = Context(lengths, setting)
    asked = {"lengths": lengths, "heads": HEADS, "block": BLOCK, "gib": setting.gib}
    ragged, usual = len(set(lengths)) > 1, lengths[0] in {512, 2048}
    return Case(
        name=name,
        contenders=[
            Contender(name="moelight", make=context.ours, nbytes=2 * values, share_bar=0.90 if usual else 0.0),
            Contender(name="moelight in order", make=context.ours_in_order, nbytes=2 * values),
            Contender(
                name="moelight int8",
                make=context.ours_int8,
                nbytes=values + 4 * values / DIM,
                over="moelight",
                ratio_bar=1.7,
            ),
            Contender(name="torch SDPA padded", make=context.padded, ratio_bar=2.0 if ragged else 0.0),
            Contender(name="torch SDPA each", make=context.sdpa_each, ratio_bar=1.3 if ragged else 0.0),
            Contender(name="vLLM", make=partial(setting.vllm.timed, "decode", asked), ratio_bar=1.0),
            Contender(name="IPEX", make=partial(setting.ipex.timed, "decode", asked)),
            Contender(name="the link", make=lambda: lambda times: times * 2 * values / LINK_BYTES_PER_S),
        ],
    )


class Context:
    """Sets of equally shaped caches over one flat memory, which SDPA sees as contiguous sequences."""

    def __init__(self, lengths: list[int], setting: Setting) -> None:
        self.lengths, self.setting = lengths, setting
        self.blocks = [-(-length // BLOCK) for length in lengths]
        self.sets = sets_for(4 * sum(self.blocks) * KV_HEADS * BLOCK * DIM, setting.gib)
        self.q = torch.randn(len(lengths), Q_HEADS, DIM).to(torch.bfloat16)
        self.lens = torch.tensor(lengths, dtype=torch.int32)

    @cached_property
    def cache(self) -> tuple[Tensor, Tensor]:
        """Keys and values [blocks, Hkv, P, D]."""
        shape = (self.sets * sum(self.blocks), KV_HEADS, BLOCK, DIM)
        return random_huge(shape), random_huge(shape)

    def ours(self) -> Timed:
        keys, values = self.cache
        return self._decode(keys, values, torch.randperm(len(keys), dtype=torch.int32))

    def ours_in_order(self) -> Timed:
        """Blocks one after the other, as the engine hands them out while no sequence has ended."""
        keys, values = self.cache
        return self._decode(keys, values, torch.arange(len(keys), dtype=torch.int32))

    def ours_int8(self) -> Timed:
        """As many bytes again, so twice the sets; all scales are one number."""
        sets = 2 * self.sets
        shape = (sets * sum(self.blocks), KV_HEADS, BLOCK, DIM)
        scales = huge(shape[:3], torch.float32).fill_(1 / 64)
        keys, values = (random_huge(shape, torch.int8) for _ in range(2))
        return self._decode(keys, values, torch.randperm(len(keys), dtype=torch.int32), scales, scales.clone())

    def _decode(self, keys: Tensor, values: Tensor, blocks: Tensor, *scales: Tensor) -> Timed:
        order = blocks.view(-1, sum(self.blocks))
        tables, turn = [block_tables(row, self.blocks) for row in order], turns(len(order))
        k_scale, v_scale = scales or (None, None)
        out = torch.empty_like(self.q)

        def once() -> None:
            cpu_gqa_decode(
                self.q,
                keys,
                values,
                tables[next(turn)],
                self.lens,
                SCALE,
                k_scale=k_scale,
                v_scale=v_scale,
                out=out,
                threads=self.setting.threads,
            )

        timed = here(once)
        first = tables[0][0, : self.blocks[0]].long()
        k, v = (part[first].float() * (1 / 64 if scales else 1) for part in (keys, values))
        agree(out[0], attended(self.q[0], *(self._rows(part) for part in (k, v))))
        return timed

    def _rows(self, blocks: Tensor) -> Tensor:
        """[n, Hkv, P, D] -> [Hkv, L, D] of the first sequence."""
        return blocks.transpose(0, 1).reshape(KV_HEADS, -1, DIM)[:, : self.lengths[0]]

    def sdpa_each(self) -> Timed:
        """One call a sequence on contiguous keys and values, the query heads of a group folded into the query rows."""
        flat_k, flat_v = (part.view(-1) for part in self.cache)
        ends = torch.tensor([0, *(KV_HEADS * DIM * length for length in self.lengths)]).cumsum(0).tolist()
        queries = self.q.view(len(self.lengths), 1, KV_HEADS, -1, DIM)
        out, turn = torch.empty_like(queries), turns(len(flat_k) // ends[-1])

        def once() -> None:
            base = next(turn) * ends[-1]
            for b, length in enumerate(self.lengths):
                at = slice(base + ends[b], base + ends[b + 1])
                k, v = (flat[at].view(1, KV_HEADS, length, DIM) for flat in (flat_k, flat_v))
                out[b] = functional.scaled_dot_product_attention(queries[b], k, v)

        return here(once)

    def padded(self) -> Timed:
        """One call for all, every sequence as long as the longest, the rest masked; groups folded as above."""
        batch, longest = len(self.lengths), max(self.lengths)
        flat_k, flat_v = (part.view(-1) for part in self.cache)
        size = batch * KV_HEADS * longest * DIM
        if len(flat_k) < 2 * size:
            flat_k, flat_v = (random_huge((2 * size,)) for _ in range(2))
        mask = None
        if len(set(self.lengths)) > 1:
            seen = (torch.arange(longest) < self.lens[:, None]).view(batch, 1, 1, longest)
            mask = torch.zeros(seen.shape, dtype=self.q.dtype).masked_fill(~seen, float("-inf"))
        q, turn = self.q.view(batch, KV_HEADS, -1, DIM), turns(len(flat_k) // size)

        def once() -> None:
            at = next(turn) * size
            k, v = (flat[at : at + size].view(batch, KV_HEADS, longest, DIM) for flat in (flat_k, flat_v))
            functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        return here(once)
