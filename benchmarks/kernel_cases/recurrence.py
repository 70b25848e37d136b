"""The gated delta rule: decode rows are bound by reading and writing states, prompts by products of float32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate

import torch
from peers.common import agree, random_huge, sets_for, turns
from torch import Tensor

from kernel_cases.setting import Setting, here
from kernel_cases.turns import Case, Contender, Timed
from moelight.kernels.delta import cpu_delta_rule

KEY_HEADS, HEADS, DIM = 16, 32, 128
TITLE = f"gated delta rule, {KEY_HEADS}/{HEADS} heads of {DIM}, bf16, states in float32"


def cases(setting: Setting) -> Iterator[Case]:
    """Qwen3-Next's heads, one row of many sequences and prompts, beside transformers' own functions in torch."""
    for batch, rows in ((16, 1), (64, 1), (8, 128)):
        work = Rows(batch, rows, setting)
        values = batch * HEADS * DIM * DIM
        yield Case(
            name=f"delta rule {batch} x {rows}",
            contenders=[
                Contender(
                    name="moelight", make=work.ours, nbytes=8 * values, flop=8 * rows * values, product_dtype="float32"
                ),
                Contender(name="transformers", make=work.theirs, ratio_bar=1.0),
            ],
        )


class Rows:
    """As many rows of each sequence, and sets of their states."""

    def __init__(self, batch: int, rows: int, setting: Setting) -> None:
        self.batch, self.rows, self.setting = batch, rows, setting
        self.sets = sets_for(4 * batch * HEADS * DIM * DIM, setting.gib)

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v, decay and beta of all sequences, [B, n, heads, ...]."""
        shape, heads = (self.batch, self.rows), (KEY_HEADS, KEY_HEADS, HEADS)
        q, k, v = (torch.randn(*shape, count, DIM).bfloat16() for count in heads)
        return q, k, v, -torch.rand(*shape, HEADS), torch.rand(*shape, HEADS)

    def states(self) -> Tensor:
        return random_huge((self.sets, self.batch, HEADS, DIM, DIM), torch.float32)

    def ours(self) -> Timed:
        q, k, v, decay, beta = (item.flatten(0, 1) for item in self.inputs)
        starts = torch.tensor([*accumulate([self.rows] * self.batch, initial=0)], dtype=torch.int32)
        states, turn = self.states(), turns(self.sets)

        def once(at: Tensor | None = None) -> Tensor:
            item = list(states[next(turn)] if at is None else at)
            return cpu_delta_rule(
                q, k, v, decay.unsqueeze(-1), beta, item, starts, threads=self.setting.threads
            ).unflatten(0, (self.batch, self.rows))

        agree(once(torch.zeros_like(states[0])), self._transformers(torch.zeros_like(states[0])))
        return here(once)

    def theirs(self) -> Timed:
        states, turn = self.states(), turns(self.sets)
        return here(lambda: self._transformers(states[next(turn)]))

    def _transformers(self, state: Tensor) -> Tensor:
        from transformers.models.qwen3_next import modeling_qwen3_next as family

        one = self.rows == 1
        rule = family.torch_recurrent_gated_delta_rule if one else family.torch_chunk_gated_delta_rule
        q, k, v, g, beta = self.inputs
        out, last = rule(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        state.copy_(last)
        return out
