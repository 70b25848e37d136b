"""Linear layers: one weight matrix after another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from peers.common import agree, random_huge, sets_for, turns
from torch import Tensor
from torch.nn import functional

from kernel_cases.setting import Setting, here
from kernel_cases.turns import Case, Contender, Timed
from moelight.kernels.ffn import cpu_linear

SIDE = 4096
TITLE = f"linear, {SIDE} x {SIDE}, bf16 tokens"


def cases(setting: Setting) -> Iterator[Case]:
    """From one token to many."""
    for tokens in (1, 16, 64, 1024):
        roof = {"nbytes": SIDE * SIDE * 2 + 4 * tokens * SIDE, "flop": 2 * SIDE * SIDE * tokens}
        contenders = [
            Contender(name="moelight", make=partial(_ours, tokens, setting), **roof),
            Contender(name="torch linear", make=partial(_torch, tokens, setting), ratio_bar=1.0),
        ]
        yield Case(name=f"linear {tokens} tokens", contenders=contenders)


def _weights(setting: Setting) -> list[Tensor]:
    return list(random_huge((sets_for(2 * SIDE * SIDE, setting.gib), SIDE, SIDE), std=0.02))


def _ours(tokens: int, setting: Setting) -> Timed:
    weights, x = _weights(setting), torch.randn(tokens, SIDE).to(torch.bfloat16)
    out, turn = torch.empty_like(x), turns(len(weights))
    timed = here(lambda: cpu_linear(x, weights[next(turn)], out=out, threads=setting.threads))
    agree(out[:1], x[:1].float() @ weights[0].float().t())
    return timed


def _torch(tokens: int, setting: Setting) -> Timed:
    weights = _weights(setting)
    x, turn = torch.randn(tokens, SIDE).to(torch.bfloat16), turns(len(weights))
    return here(lambda: functional.linear(x, weights[next(turn)]))
