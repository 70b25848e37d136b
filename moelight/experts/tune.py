"""Search for the policy with the least estimated time on a recorded trace, for each amount of memory.

For each capacity the search runs in rounds: each eviction with its parameters, with one cache or a budget per layer, on
the first eighth of the trace; the best of each eviction on half of it, since some learn longer than others; the best of
all with each predictor and budget; the last few on the whole trace. The search is deterministic: there are no random
draws, and the first of equally fast policies wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal

from moelight.experts.policy import EVICTIONS, CacheRules, Capacity, ExpertPolicy, PerLayerRules, PrefetchRules
from moelight.experts.replay import Outcome, Replay, Shape
from moelight.experts.timing import MachineCosts
from moelight.experts.trace import TraceRow

# Shares of each layer's experts that are tried, beside the largest possible one.
SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
# A replay cannot hint next_router, and lookahead predicts the next layer alone in a replay, as history does.
PREDICTORS = ("previous", "frequency", "history", "affinity")
BUDGETS = (2, 4, 8)
# Shares of the trace that the rounds replay. 1,600 rows take some seconds in all.
FIRST, SECOND, PREDICTING = 1 / 8, 1 / 2, 1 / 4
LEAST_PASSES = 8  # least length of a round: caches are cold before
MOST_ROWS = 20_000  # a longer trace is cut; the last round then takes a second for each candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The fastest policy found for one capacity, and its replay of the trace. ``on_front``: True if no policy with less
    memory is as fast."""

    policy: ExpertPolicy
    outcome: Outcome
    on_front: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Result of the search: one entry per capacity, by memory; the fastest of them; and the number of replays."""

    found: tuple[Tuned, ...]
    best: Tuned
    replays: int
    rows: int

    @property
    def front(self) -> tuple[Tuned, ...]:
        """Entries of the Pareto front of memory and time."""
        return tuple(each for each in self.found if each.on_front)


def tune_policy(
    rows: Sequence[TraceRow], shape: Shape, machine: MachineCosts, *, most_slots: int | None = None
) -> Tuning:
    """Search policies for at most ``most_slots`` experts (None: all), equally many in each layer.

    Raises:
        ValueError: no rows, or less than one slot for each layer.
    """
    rows = rows[:MOST_ROWS]
    most = shape.num_experts if most_slots is None else min(shape.num_experts, most_slots // len(shape.layers))
    if not rows or most < 1:
        raise ValueError(f"{len(rows)} rows, and room for {most} experts of a layer")
    counts = {max(1, round(share * shape.num_experts)) for share in SHARES}
    search = _TuneSearch(rows, shape, machine)
    found: list[Tuned] = []
    for count in sorted({each for each in counts if each < most} | {most}):
        policy, outcome = search.best(count, found[-1].policy if found else None)
        faster = all(_seconds(outcome) < _seconds(each.outcome) for each in found)
        found.append(Tuned(policy=policy, outcome=outcome, on_front=faster))
    best = min(found, key=lambda each: _seconds(each.outcome))
    return Tuning(found=tuple(found), best=best, replays=search.replays, rows=len(rows))


def share_of(count: int, num_experts: int) -> Capacity:
    """Return ``count`` of the ``num_experts`` of every layer as a percentage that yields exactly ``count`` slots per
    layer, for a shared cache and for layer budgets."""
    exact = Decimal(100 * count) / num_experts
    return Capacity(value=float(exact.quantize(Decimal("0.0001"), rounding=ROUND_CEILING)), unit="percent")


def uniform_layers(count: int) -> PerLayerRules:
    """Return rules with a budget of ``count`` for every layer."""
    rules = PerLayerRules(allocation="uniform")
    return replace(rules, min_capacity=min(rules.min_capacity, count), max_capacity=max(rules.max_capacity, count))


def _seconds(outcome: Outcome) -> float:
    return outcome.total_s or 0.0


class _TuneSearch:
    """Replays policies on parts of one trace and counts the replays."""

    def __init__(self, rows: Sequence[TraceRow], shape: Shape, machine: MachineCosts) -> None:
        self._rows, self._shape, self._machine = rows, shape, machine
        self._scored = any(row.scores is not None for row in rows)
        self.replays = 0

    def best(self, count: int, before: ExpertPolicy | None) -> tuple[ExpertPolicy, Outcome]:
        """Return the best policy with ``count`` experts of each layer; ``before``, the best with less memory, enters
        the last round."""
        kinds: dict[tuple[str, ...], list[ExpertPolicy]] = {}
        for policy in self._structures(count):
            kinds.setdefault(policy.cache.eviction, []).append(policy)
        left = self._fastest([self._fastest(kind, FIRST, 1)[0] for kind in kinds.values()], SECOND, 2)
        if count < self._shape.num_experts:
            left += self._fastest(list(self._predicting(left[0])), PREDICTING, 1)
        if before is not None:
            left.append(self._with_room(before, count))
        ran = [(policy, self._run(policy, 1.0)) for policy in left]
        return min(ran, key=lambda pair: _seconds(pair[1]))

    def _with_room(self, policy: ExpertPolicy, count: int) -> ExpertPolicy:
        capacity = share_of(count, self._shape.num_experts)
        per_layer = None if policy.per_layer is None else uniform_layers(count)
        return replace(
            policy, name=f"tuned_{count}", cache=replace(policy.cache, capacity=capacity), per_layer=per_layer
        )

    def _fastest(self, policies: list[ExpertPolicy], part: float, kept: int) -> list[ExpertPolicy]:
        """Return the ``kept`` fastest policies on the first ``part`` of the trace."""
        if len(policies) <= kept:
            return policies
        seconds = [_seconds(self._run(policy, part)) for policy in policies]
        order = sorted(range(len(policies)), key=lambda place: (seconds[place], place))
        return [policies[place] for place in order[:kept]]

    def _run(self, policy: ExpertPolicy, part: float) -> Outcome:
        """Replay ``policy`` over the first ``part`` of the trace."""
        self.replays += 1
        least = LEAST_PASSES * len(self._shape.layers)
        run = Replay(policy, self._shape, self._machine)
        for row in self._rows[: max(least, round(part * len(self._rows)))]:
            run.step(row)
        return run.outcome()

    def _structures(self, count: int) -> Iterator[ExpertPolicy]:
        """Yield eviction policies per layer and over all layers; with a GPU, each with and without computing misses on
        the CPU."""
        # hybrid never takes longer for a batch than gpu_only or cpu_fallback.
        modes = ("gpu_only", "hybrid") if self._machine.discrete else ("gpu_only",)
        layers, capacity = len(self._shape.layers), share_of(count, self._shape.num_experts)
        for mode in modes:
            for per_layer in (uniform_layers(count), None):
                window = 100 * (1 if per_layer else layers)
                for rules in _orders(capacity, window, scored=self._scored):
                    # The language requires a predictor beside score (V15).
                    scores = PrefetchRules(strategy="previous", budget=BUDGETS[0])
                    yield ExpertPolicy(
                        name=f"tuned_{count}",
                        cache=rules,
                        prefetch=scores if "score" in rules.eviction else PrefetchRules(),
                        schedule=self._machine.schedule(mode),
                        per_layer=per_layer,
                    )
                    if count == self._shape.num_experts:  # nothing is ever evicted
                        break

    def _predicting(self, policy: ExpertPolicy) -> Iterator[ExpertPolicy]:
        for strategy in PREDICTORS:
            for budget in BUDGETS:
                prefetch = PrefetchRules(strategy=strategy, budget=min(budget, self._shape.num_experts))
                if prefetch != policy.prefetch:
                    yield replace(policy, prefetch=prefetch)


def _orders(capacity: Capacity, window: int, *, scored: bool) -> Iterator[CacheRules]:
    """Yield each eviction with the parameters that are tried."""
    rules = CacheRules(capacity=capacity)
    for name in EVICTIONS:
        eviction = (name,)
        if name == "lfu":
            yield from (replace(rules, eviction=eviction, frequency_decay=decay) for decay in (0.8, 0.95))
        elif name == "score":
            alphas = (0.1, 0.3) if scored else ()
            yield from (replace(rules, eviction=eviction, score_ema_alpha=alpha) for alpha in alphas)
        elif name == "frequency_threshold":
            yield replace(rules, eviction=eviction, freq_window=window, freq_threshold=1.0 / window)
        else:
            yield replace(rules, eviction=eviction)
    yield replace(rules, eviction=("lfu", "lru"))
