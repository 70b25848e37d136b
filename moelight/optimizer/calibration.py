"""Calibrate the cost model by measured passes: the busy seconds of each lane over the ledger's for the same passes.

The ledger's speeds, scaled by these ratios, price every other policy. ``adapter`` chooses among policies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moelight.core.dtypes import DType
from moelight.core.policy import Policy
from moelight.hrm.cost_model import CostModel
from moelight.hrm.estimate import cost_model_of, placement_counts
from moelight.hrm.footprint import WHOLE_EXPERTS, Sizes
from moelight.hrm.machine_model import Speeds, slowed
from moelight.hrm.pass_cost import PassCost, pass_cost
from moelight.hrm.placement import place
from moelight.hrm.schedule_time import pass_s
from moelight.hrm.workload_model import Passes
from moelight.profiles.model import ModelProfile

KINDS = ("prompts", "decode")  # passes with prompts, and without
LANES = ("disk", "stage", "h2d", "d2h", "device", "cpu")
NEWEST = 0.5  # the weight of the newest window in a belief
_ROUNDS = 3  # lanes that share a memory slow each other: corrected together, in a few rounds
_FURTHEST = 100.0  # limit of a correction factor, which is unstable for a lane that is barely used


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """One measured pass: its tokens, its seconds, and the busy seconds of each lane.

    ``context`` is the average number of cached tokens of a decoding sequence; ``prompts`` the number of prompts or
    prompt chunks.
    """

    decode_tokens: int
    context: float
    prompts: int
    prompt_tokens: int
    seconds: float
    busy_s: Mapping[str, float]

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return "prompts" if self.prompts else "decode"

    @property
    def rows(self) -> int:
        """Sequences in the pass."""
        return self.decode_tokens + self.prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class Belief:
    """Correction factors for one kind of pass: ``slower`` is measured over planned seconds by lane, ``stretch`` the
    factor by which a pass takes longer than its lanes explain."""

    slower: Mapping[str, float] = field(default_factory=dict)
    stretch: float = 1.0

    def blended(self, newer: Belief) -> Belief:
        """The mean of this belief and ``newer`` on a logarithmic scale; lanes absent here take the newer factor."""

        def mean(old: float, new: float) -> float:
            return math.exp((1 - NEWEST) * math.log(old) + NEWEST * math.log(new))

        slower = {lane: mean(self.slower.get(lane, factor), factor) for lane, factor in newer.slower.items()}
        return Belief(slower={**self.slower, **slower}, stretch=mean(self.stretch, newer.stretch))


class Pricing:
    """Prices passes of one model under policies that share an allocation, with speeds corrected by a `Belief`."""

    def __init__(self, model: ModelProfile, policy: Policy, speeds: Speeds, dtype: DType) -> None:
        """``policy`` is resolved; ``dtype`` is that of computation, weights and cache."""
        self._cost_model, self._order = cost_model_of(model, policy, speeds, dtype), policy.schedule
        self._placed = placement_counts(place(model, policy), policy)
        self._made: dict[str, tuple[Belief, CostModel]] = {}

    def seconds(self, sizes: Sizes, passes: Passes, kind: str, belief: Belief) -> Any:
        """Predicted seconds of each of ``passes``, all of one ``kind``."""
        return belief.stretch * pass_s(self._order, self._cost(sizes, passes, self._believed(kind, belief)))

    def learn(self, policy: Policy, ran: Sequence[Passed], belief: Belief) -> Belief:
        """A new belief from passes of one kind that ``ran`` under ``policy``, starting from ``belief``."""
        passes = passes_that_ran(ran)
        measured = {lane: sum(each.busy_s.get(lane, 0.0) for each in ran) for lane in LANES}
        slower = dict(belief.slower)
        for _ in range(_ROUNDS):
            cost_model = self._slowed(slower)
            predicted = _busy_s(cost_model, self._cost(policy, passes, cost_model))
            for lane, seconds in predicted.items():
                if seconds > 0 and measured[lane] > 0:
                    found = slower.get(lane, 1.0) * measured[lane] / seconds
                    slower[lane] = min(max(found, 1 / _FURTHEST), _FURTHEST)
        took = sum(each.seconds for each in ran)
        each_s = pass_s(self._order, self._cost(policy, passes, self._slowed(slower)))
        explained = float(np.sum(np.broadcast_to(each_s, np.shape(passes.count))))
        stretch = min(max(took / explained, 1 / _FURTHEST), _FURTHEST) if took > 0 and explained > 0 else 1.0
        return Belief(slower=slower, stretch=stretch)

    def lanes(self, policy: Policy, ran: Sequence[Passed]) -> dict[str, float]:
        """Planned busy seconds of each lane for the passes that ``ran``."""
        return _busy_s(self._cost_model, self._cost(policy, passes_that_ran(ran), self._cost_model))

    def _believed(self, kind: str, belief: Belief) -> CostModel:
        kept = self._made.get(kind)
        if kept is None or kept[0] is not belief:
            kept = self._made[kind] = belief, self._slowed(belief.slower)
        return kept[1]

    def _slowed(self, by: Mapping[str, float]) -> CostModel:
        return replace(self._cost_model, speeds=slowed(self._cost_model.speeds, by))

    def _cost(self, sizes: Sizes, passes: Passes, cost_model: CostModel) -> PassCost:
        """The cost of passes packed as the batcher packs them: full micro-batches of the sequences present."""
        decode, prompts, cut = passes.decode_tokens, passes.prompts, np.asarray(sizes.micro_batch_tokens, dtype=float)
        rows = decode + (0.0 if cost_model.discrete else prompts)
        rows = np.maximum(np.where(rows > 0, rows, prompts), 1.0)
        tokens = np.maximum(passes.prompt_tokens + (0.0 if cost_model.discrete else decode), 1.0)
        return pass_cost(
            cost_model,
            passes,
            self._placed,
            running=rows,
            batches=np.ceil(rows / sizes.micro_batch_size),
            prompt_tokens=tokens / np.ceil(tokens / cut),
            whole=self._order in WHOLE_EXPERTS,
            look_ahead=sizes.look_ahead,
        )


def passes_that_ran(ran: Sequence[Passed]) -> Passes:
    """Convert measured passes to the ledger's `Passes`, one entry each."""
    table = np.array([(p.decode_tokens, p.prompt_tokens, p.context, p.prompts) for p in ran], dtype=float)
    decode, prompt, context, prompts = table.T
    return Passes(
        count=np.ones(len(ran)),
        decode_tokens=decode,
        prompt_tokens=prompt,
        context=context,
        prompt_len=prompt / np.maximum(prompts, 1.0) + (prompts == 0),
    )


def _busy_s(cost_model: CostModel, cost: PassCost) -> dict[str, float]:
    """Busy seconds of each lane. Without a GPU, disk reads and computation slow each other while they overlap."""
    busy = {lane: cost.lanes[lane] for lane in LANES if lane in cost.lanes}
    if not cost_model.discrete:
        kept = {"cpu": cost_model.speeds.under_disk, "disk": cost_model.speeds.disk_under_cpu}
        busy = {lane: own + np.minimum(cost.waits[lane], own * (1.0 / kept[lane] - 1.0)) for lane, own in busy.items()}
    shape = np.shape(cost.count)  # a value that is the same in every pass may be a scalar
    return {lane: float(np.sum(np.broadcast_to(seconds, shape))) for lane, seconds in busy.items()}
