"""Policies within one allocation: the sizes that may change between passes without larger memory regions.

``adapter`` chooses among these policies by speed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moelight.core.dtypes import DType
from moelight.core.errors import ConfigError
from moelight.core.policy import MOST_LOOK_AHEAD, Policy
from moelight.hrm.footprint import fixed_bytes, pass_tokens
from moelight.profiles.model import ModelProfile

FIELDS = ("batch_size", "micro_batch_size", "micro_batch_tokens", "prompt_micro_batches", "look_ahead")
Values = tuple[int, ...]  # of `FIELDS`

# Regions whose size depends on `FIELDS` without bounding them: the batcher fills the region it has.
_NO_BOUND = ("kv_buffer",)
_SIZES = tuple(2.0 ** (quarter / 4) for quarter in range(-8, 9))
_PARTS = (*range(1, 9), 10, 12, 16)
_PROMPTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_CUTS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyCandidates:
    """Policies that differ from ``of`` in `FIELDS`, as arrays. Has the attributes of a policy that memory and time
    depend on."""

    of: Policy
    batch_size: Any
    micro_batch_size: Any
    micro_batch_tokens: Any
    prompt_micro_batches: Any
    look_ahead: Any

    @classmethod
    def made(cls, of: Policy, rows: Collection[Values]) -> PolicyCandidates:
        """Make candidates from the values of `FIELDS` of each policy."""
        columns = np.array(list(rows), dtype=np.int64).T
        return cls(of=of, **dict(zip(FIELDS, columns, strict=True)))

    @property
    def kv_tokens(self) -> int:
        return self.of.kv_tokens

    @property
    def kv_block_size(self) -> int:
        return self.of.kv_block_size

    @property
    def attention_device(self) -> str:
        return self.of.attention_device

    @property
    def ffn_device(self) -> str:
        return self.of.ffn_device

    @property
    def schedule(self) -> str:
        return self.of.schedule

    @property
    def admission(self) -> str:
        return self.of.admission

    @property
    def residents(self) -> str:
        return self.of.residents

    @property
    def discrete(self) -> bool:
        return self.of.discrete


class Allocation:
    """The memory regions allocated for ``policy``, which is resolved; those of `FIELDS` in ``fixed`` do not change."""

    def __init__(self, model: ModelProfile, policy: Policy, dtype: DType, *, fixed: Collection[str] = ()) -> None:
        self.policy, self._fixed = policy, frozenset(fixed)
        self._model, self._dtype = model, dtype
        self._bytes = fixed_bytes(model, policy, dtype=dtype, kv_dtype=dtype)
        self._most = int(pass_tokens(policy))

    def holds(self, candidates: PolicyCandidates | Policy) -> Any:
        """True, for each candidate, if no region would have to be larger."""
        needed = fixed_bytes(self._model, candidates, dtype=self._dtype, kv_dtype=self._dtype)
        fits = np.asarray(pass_tokens(candidates) <= self._most)
        fits = fits & (candidates.micro_batch_tokens <= self.policy.micro_batch_tokens)
        for key, size in needed.items():
            if key[0] not in _NO_BOUND:
                fits = fits & (size <= self._bytes[key])
        return fits

    def check(self, policy: Policy) -> None:
        """Refuse a policy that is outside this allocation.

        Raises:
            ConfigError: ``policy`` differs in more than `FIELDS`, or a region would have to be larger.
        """
        same = replace(policy, **{name: getattr(self.policy, name) for name in FIELDS})
        if same != self.policy or not bool(self.holds(policy)):
            raise ConfigError(f"not within what was allocated for {self.policy}: {policy}")

    def neighbours(self, values: Values, *, most_running: int) -> list[Values]:
        """The values of all fitting policies that differ in one respect from ``values``; ``values`` itself is first."""
        found = {values: None}
        for each in self._lines(values, most_running):
            n, mu, tokens, prompts, _ = each
            changed = (name for name, old, new in zip(FIELDS, values, each, strict=True) if old != new)
            if 1 <= mu <= tokens and min(n, prompts) >= 1 and self._fixed.isdisjoint(changed):
                found[each] = None
        rows = list(found)
        fits = np.broadcast_to(self.holds(PolicyCandidates.made(self.policy, rows)), len(rows))
        return [row for row, fit in zip(rows, fits, strict=True) if fit or row == values]

    def _lines(self, values: Values, most_running: int) -> Iterator[Values]:
        n, mu, tokens, prompts, ahead = values
        parts = -(-n // mu)
        sizes = {round(n * factor) for factor in _SIZES} | {self.policy.batch_size, most_running}
        for size in sorted(size for size in sizes if size <= max(n, most_running)):
            cut = size if parts == 1 else mu
            rides = min(prompts, (self._most - size) // tokens)
            yield from ((size, width, tokens, rides, ahead) for width in {mu, min(cut, tokens), -(-size // parts)})
        yield from ((n, -(-n // part), tokens, prompts, ahead) for part in _PARTS)
        for cut in _CUTS:
            width = self.policy.micro_batch_tokens // cut
            yield from ((n, mu, width, count, ahead) for count in _PROMPTS)
        if self.policy.discrete and self.policy.schedule == "cgopipe":
            yield from ((n, mu, tokens, prompts, ahead) for ahead in range(1, MOST_LOOK_AHEAD + 1))


def values_of(policy: Policy) -> Values:
    """The values of `FIELDS` in ``policy``."""
    return tuple(getattr(policy, name) for name in FIELDS)


def with_values(policy: Policy, values: Values) -> Policy:
    """``policy`` with ``values`` of `FIELDS`."""
    n, mu, tokens, prompts, ahead = values
    return replace(
        policy,
        batch_size=n,
        micro_batch_size=mu,
        micro_batch_tokens=tokens,
        prompt_micro_batches=prompts,
        look_ahead=ahead,
    )
