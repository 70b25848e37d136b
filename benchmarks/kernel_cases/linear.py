"""Linear layers: one weight matrix after another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from peers.common import agree, huge, random_huge, sets_for, turns, unpacked
from torch import Tensor
from torch.nn import functional

from kernel_cases.setting import Setting, here
from kernel_cases.turns import Case, Contender, Timed
from moelight.kernels.ffn import cpu_linear

SIDE = 4096
GROUP = 128
INTEGER_SCALE = 0.02 / 64
INTEGERS_UP_TO = 64
TITLE = f"linear, {SIDE} x {SIDE}, bf16 tokens; int8 with a scale a row, int4 with one for every {GROUP} inputs"
KINDS = {"int8": 1 + 4 / SIDE, "int4": 0.5 + 4 / GROUP}  # bytes a number, with its scales


def cases(setting: Setting) -> Iterator[Case]:
    """From one token to many."""
    for tokens in (1, 16, 64, 1024):
        work = partial(_contender, tokens=tokens, setting=setting)
        contenders = [Contender(name="moelight", make=partial(_ours, tokens, setting), **_roof(2, tokens))]
        if tokens <= INTEGERS_UP_TO:
            contenders += [work(*kind) for kind in KINDS.items()]
        contenders.append(Contender(name="torch linear", make=partial(_torch, tokens, setting), ratio_bar=1.0))
        yield Case(name=f"linear {tokens} tokens", contenders=contenders)


def _contender(kind: str, item: float, *, tokens: int, setting: Setting) -> Contender:
    return Contender(
        name=f"moelight {kind}",
        make=partial(_ours, tokens, setting, kind),
        over="moelight",
        **_roof(item, tokens),
    )


def _roof(item: float, tokens: int) -> dict[str, float]:
    return {"nbytes": SIDE * SIDE * item + 4 * tokens * SIDE, "flop": 2 * SIDE * SIDE * tokens}


def _ours(tokens: int, setting: Setting, kind: str = "") -> Timed:
    if not kind:
        return _timed(tokens, _weights(setting), setting)
    packed, dtype = (2, torch.uint8) if kind == "int4" else (1, torch.int8)
    group = GROUP if kind == "int4" else None
    sets = sets_for(SIDE * SIDE / packed, setting.gib)
    weights = list(random_huge((sets, SIDE, SIDE // packed), dtype))
    scale = huge((SIDE, SIDE // GROUP) if group else (SIDE,), torch.float32).fill_(INTEGER_SCALE)
    return _timed(tokens, weights, setting, scale=scale, group_size=group)


def _weights(setting: Setting) -> list[Tensor]:
    return list(random_huge((sets_for(2 * SIDE * SIDE, setting.gib), SIDE, SIDE), std=0.02))


def _timed(tokens: int, weights: list[Tensor], setting: Setting, **options: object) -> Timed:
    x = torch.randn(tokens, SIDE).to(torch.bfloat16)
    out, turn = torch.empty_like(x), turns(len(weights))
    timed = here(lambda: cpu_linear(x, weights[next(turn)], out=out, threads=setting.threads, **options))
    plain = unpacked(weights[0], INTEGER_SCALE) if options else weights[0].float()
    agree(out[:1], x[:1].float() @ plain.t())
    return timed


def _torch(tokens: int, setting: Setting) -> Timed:
    weights = _weights(setting)
    x, turn = torch.randn(tokens, SIDE).to(torch.bfloat16), turns(len(weights))
    return here(lambda: functional.linear(x, weights[next(turn)]))
