"""Seconds of single passes under one policy, by the ledger, at speeds corrected by passes that ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moelight.core.dtypes import DType
from moelight.core.policy import Policy
from moelight.hrm.estimate import cost_model_of, placement_counts, routed_passes
from moelight.hrm.footprint import WHOLE_EXPERTS
from moelight.hrm.machine_model import Speeds, slowed
from moelight.hrm.pass_cost import PassCost, pass_cost
from moelight.hrm.placement import place_pages
from moelight.hrm.schedule_time import pass_s
from moelight.hrm.workload_model import Passes
from moelight.profiles.model import ModelProfile

# Correction factors: measured over planned seconds by lane; under ``pass``, seconds of a pass over those that its lanes
# explain.
Belief = Mapping[str, float]
LANES = ("disk", "stage", "h2d", "d2h", "device", "cpu")
_ROUNDS = 3  # lanes that share a memory slow each other: corrected together, in a few rounds
_FURTHEST = 100.0  # limit of a correction factor, which is unstable for a lane that is barely used


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """One measured pass. ``decode_tokens``: of decoding sequences, drafts included; ``context``: average cached tokens
    of one; ``prompt_len``: average tokens of a prompt or its chunk; 1 if there is none. ``sequences`` that decode; 0:
    as many as tokens."""

    decode_tokens: int
    context: float
    prompt_tokens: int
    prompt_len: float
    seconds: float
    busy_s: Mapping[str, float]
    sequences: int = 0


def passes_that_ran(ran: Sequence[Passed]) -> Passes:
    """Convert measured passes to the ledger's `Passes`, one entry each."""
    names = ("decode_tokens", "context", "prompt_tokens", "prompt_len")
    columns = {name: np.array([getattr(run, name) for run in ran], dtype=float) for name in names}
    return Passes(count=np.ones(len(ran)), **columns)


class PassPrices:
    """Prices of passes of one model on one machine, under ``policy`` or others of its placement."""

    def __init__(self, model: ModelProfile, policy: Policy, speeds: Speeds, dtype: DType) -> None:
        """``speeds`` are those of the policy's estimate."""
        self._cost_model = cost_model_of(model, policy, speeds, dtype)
        self._placed = placement_counts(place_pages(model, policy), policy)

    def seconds(self, sizes: Policy, passes: Passes, belief: Belief, sequences: Any = None) -> Any:
        """Predicted seconds of each of ``passes`` under policies of the placement; ``sequences`` decode in them (None:
        as many as tokens)."""
        stretch = belief.get("pass", 1.0)
        seconds = stretch * pass_s(sizes.schedule, self._cost(sizes, passes, belief, sequences))
        return np.broadcast_to(seconds, np.shape(passes.count))

    def learn(self, policy: Policy, ran: Sequence[Passed], belief: Belief) -> dict[str, float]:
        """The belief that explains the passes that ran, starting from ``belief``."""

        def limited(factor: float) -> float:
            return min(max(factor, 1 / _FURTHEST), _FURTHEST)

        passes = passes_that_ran(ran)
        sequences = np.array([run.sequences or run.decode_tokens for run in ran], dtype=float)
        slower = {lane: by for lane, by in belief.items() if lane in LANES}
        for _ in range(_ROUNDS):
            for lane, seconds in self.lanes(policy, passes, slower, sequences).items():
                measured = sum(run.busy_s.get(lane, 0.0) for run in ran)
                if seconds > 0 and measured > 0:
                    slower[lane] = limited(slower.get(lane, 1.0) * measured / seconds)
        explained = float(np.sum(self.seconds(policy, passes, slower, sequences)))
        took = sum(run.seconds for run in ran)
        return {**slower, "pass": limited(took / explained) if took > 0 and explained > 0 else 1.0}

    def lanes(self, policy: Policy, passes: Passes, belief: Belief, sequences: Any = None) -> dict[str, float]:
        """Predicted busy seconds by lane of all ``passes``. Without a GPU, disk reads and computation slow each other
        while they overlap."""
        cost, speeds = self._cost(policy, passes, belief, sequences), self._cost_model.speeds
        busy = {lane: cost.lanes[lane] for lane in LANES if lane in cost.lanes}
        if not self._cost_model.discrete:
            slowed = {"cpu": speeds.under_disk, "disk": speeds.disk_under_cpu}
            busy = {
                lane: seconds + np.minimum(cost.waits[lane], seconds / slowed[lane] - seconds)
                for lane, seconds in busy.items()
            }
        return {lane: float(np.sum(np.broadcast_to(s, np.shape(cost.count)))) for lane, s in busy.items()}

    def _cost(self, sizes: Policy, passes: Passes, belief: Belief, sequences: Any) -> PassCost:
        """The cost of passes packed as the batcher packs them: full micro-batches of the sequences present."""
        cost_model = replace(self._cost_model, speeds=slowed(self._cost_model.speeds, belief))
        decode, prompts, together = passes.decode_tokens, passes.prompts, 0.0 if cost_model.discrete else 1.0
        rows, decoding = decode + together * prompts, decode if sequences is None else sequences
        rows = np.maximum(np.where(rows > 0, rows, prompts), 1.0)
        owners = decoding + together * prompts
        owners = np.maximum(np.where(owners > 0, owners, prompts), 1.0)
        batches = np.maximum(np.ceil(owners / sizes.micro_batch_size), np.ceil(decode / sizes.micro_batch_tokens))
        tokens = np.maximum(passes.prompt_tokens + together * decode, 1.0)
        routed = routed_passes(cost_model.model, sizes, decode + passes.prompt_tokens, self._placed)
        return pass_cost(
            cost_model,
            passes,
            self._placed,
            running=rows,
            batches=batches,
            prompt_tokens=tokens / np.ceil(tokens / sizes.micro_batch_tokens),
            grouped=sizes.schedule in WHOLE_EXPERTS,
            look_ahead=sizes.look_ahead,
            ring_pages=sizes.ring_pages,
            routed_only=routed,
        )
