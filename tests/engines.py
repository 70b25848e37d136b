"""Engines as tests need them: told every next token, to compare logits; and in the least memory that will do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moelight.core.errors import BudgetError
from moelight.core.policy import Policy
from moelight.core.request import Request, SamplingParams
from moelight.engine.batcher import Batcher, RunningSequence, SampledRow
from moelight.engine.options import EngineOptions
from moelight.engine.pass_runner import PassRunner
from moelight.engine.planning import plan_for, resolve
from moelight.engine.window_blocks import blocks_of_windows
from moelight.models.checkpoints import open_model
from moelight.profiles.workload import Workload
from moelight.runtime.machine import find_machine

Tiny = Callable[..., Path]


def least_memory(model: Path, device: str, workload: Workload, **constraints: Any) -> dict[str, int]:
    """The smallest budgets the planner accepts, as it names them itself: arguments for `Engine.from_pretrained`."""
    source, machine = open_model(str(model)), find_machine(device)
    budgets: dict[str, int] = {}
    for tier in ("device", "host") if machine.discrete else ("host",):  # each beside plenty, or the least, of the other
        limits = {"host_memory": 1 << 50, "device_memory": None, **budgets, f"{tier}_memory": 1}
        with pytest.raises(BudgetError) as refused:
            plan_for(str(model), source, machine, EngineOptions(**constraints, **limits), workload)
        assert refused.value.tier == tier
        budgets[f"{tier}_memory"] = refused.value.needed_bytes
    return budgets


def in_turn(cases: Sequence[tuple[Any, ...]], values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Each case with one of ``values``, shifted so that every value meets every member of the cases that is in as many
    of them as there are values."""
    among, seen = list(values), [dict[Any, int]() for _ in cases[0]]
    ranks = [
        [selected.setdefault(member, len(selected)) for selected, member in zip(seen, case, strict=True)]
        for case in cases
    ]
    return [(*case, among[sum(rank) % len(among)]) for case, rank in zip(cases, ranks, strict=True)]


def all_pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few combinations of the axes' values in which every two values of different axes meet."""
    rows = list(itertools.product(*axes))
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    left, chosen = set[Any]().union(*pairs), []
    while left:
        best = max(range(len(rows)), key=lambda at: len(pairs[at] & left))
        chosen.append(rows[best])
        left -= pairs[best]
    return chosen


class Forced:
    """An engine without choice: it is told every next token and keeps the logits that would have chosen it."""

    def __init__(self, policy: Policy, *, device: str, lanes: str = "inline") -> None:
        source, machine = open_model(policy.model), find_machine(device)
        self._policy = resolve(policy, source.profile, discrete=machine.discrete)
        self._discrete = machine.discrete
        self._passes = PassRunner(source, self._policy, machine, lanes)

    def close(self) -> None:
        self._passes.close()

    def logits(self, sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int]) -> list[Tensor]:
        """For each sequence its logits float32 [len - prompt_len + 1, V] after the prompt and after every later token.

        The first ``prompt_len`` tokens arrive as a prompt, the others one by one.
        """
        windows = blocks_of_windows(self._passes.model.profile, self._policy, self._passes.window_pool)
        batcher = Batcher(self._policy, self._passes.pool, discrete=self._discrete, windows=windows)
        retained: list[list[Tensor]] = [[] for _ in sequences]
        batcher.add(
            RunningSequence(
                request=Request(index=index, token_ids=tuple(ids[:first]), sampling=SamplingParams()),
                seed=0,
                max_tokens=len(ids) - first + 1,
            )
            for index, (ids, first) in enumerate(zip(sequences, prompt_lens, strict=True))
        )

        def choose(sampled: Sequence[SampledRow], logits: Tensor) -> Tensor:
            tokens = []
            for sampled_row, row in zip(sampled, logits, strict=True):
                index = sampled_row.chunk.sequence.request.index
                retained[index].append(row.clone())
                position = prompt_lens[index] + sampled_row.earlier
                tokens.append(sequences[index][position] if position < len(sequences[index]) else 0)
            return torch.tensor(tokens)

        while batcher.busy:
            packed = self._passes.pack(batcher.next_pass())
            batcher.launched(packed.plans)
            self._passes.land(self._passes.launch(packed, choose, follows=batcher.busy))
        return [torch.stack(rows) for rows in retained]

    def by_prefixes(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits [len, V] of every position, each computed from a whole prompt that ends there."""
        prefixes = [ids[:end] for ids in sequences for end in range(1, len(ids) + 1)]
        rows = iter(self.logits(prefixes, [len(prefix) for prefix in prefixes]))
        return [torch.cat([next(rows) for _ in ids]) for ids in sequences]


@contextmanager
def forced(model: Path, *, device: str = "cpu", lanes: str = "inline", **policy: object) -> Iterator[Forced]:
    """A `Forced` engine of the checkpoint in ``model``, closed at the end."""
    devices = {"ffn_device": "cpu" if device == "cpu" else "gpu"}
    made = Forced(Policy(model=str(model), **{**devices, **policy}), device=device, lanes=lanes)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of any logit, over the largest logit of its own position; both [T, V]."""
    return float(((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).max())
