"""Policies within the rules, drawn at random."""

from __future__ import annotations

from hypothesis import strategies as st

from moelight.experts.policy import (
    ALLOCATIONS,
    EVICTIONS,
    METRICS,
    MODES,
    OPERATORS,
    STRATEGIES,
    Action,
    AdaptRule,
    CacheRules,
    Capacity,
    ExpertPolicy,
    MonitorRules,
    PerLayerRules,
    PrefetchRules,
    ScheduleRules,
)

_SHARES = st.floats(min_value=0, max_value=1)
_OPEN_SHARES = st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True)
_ABOVE_ZERO = st.floats(min_value=1e-6, max_value=1e6)
_COUNTS = st.integers(min_value=1, max_value=10**6)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
# Room for every budget and pin drawn below, so that V3 and V10 hold.
_CAPACITIES = st.one_of(
    st.builds(Capacity, value=st.integers(64, 512)),
    st.builds(Capacity, value=st.floats(min_value=0, max_value=100, exclude_min=True), unit=st.just("percent")),
    st.builds(Capacity, value=st.integers(1, 1 << 62), unit=st.just("bytes")),
)
_BUDGETS = st.integers(1, 64)
# `score` needs a strategy at all times; whether the rules say so is the corpus's business.
_EVICTIONS = st.lists(st.sampled_from([e for e in EVICTIONS if e != "score"]), min_size=1, max_size=2).map(tuple)
_TEXTS = st.text(st.characters(blacklist_categories=("C", "Z")), min_size=1, max_size=12)


def _cache(threshold: float | None) -> st.SearchStrategy[CacheRules]:
    return st.builds(
        CacheRules,
        capacity=_CAPACITIES,
        eviction=_EVICTIONS,
        pin=st.lists(st.integers(0, 511), max_size=4).map(tuple),
        frequency_decay=_OPEN_SHARES,
        freq_threshold=_SHARES,
        freq_window=_COUNTS,
        score_ema_alpha=st.floats(min_value=0, max_value=1, exclude_min=True),
        memory_threshold=st.just(threshold),
        memory_headroom=st.floats(min_value=0, max_value=threshold or 0.9, exclude_min=True),
        memory_budget_gb=_ABOVE_ZERO,
        expert_size_gb=_ABOVE_ZERO,
        ttl=st.none() | _COUNTS,
        warm_pin=st.none() | _COUNTS,
        profile=st.none() | _TEXTS,
    )


_ACTIONS = {
    "capacity": _CAPACITIES,
    "eviction": _EVICTIONS,
    "frequency_decay": _OPEN_SHARES,
    "prefetch_strategy": st.sampled_from(STRATEGIES),
    "prefetch_budget": _BUDGETS,
    "schedule_mode": st.sampled_from(MODES),
}


def _setting(name: str) -> st.SearchStrategy[Action]:
    return st.builds(Action, kind=st.just("set"), name=st.just(name), value=_ACTIONS[name])


def _rules(actions: st.SearchStrategy[Action], **fixed: object) -> st.SearchStrategy[AdaptRule]:
    return st.builds(
        AdaptRule,
        metric=st.sampled_from(METRICS),
        op=st.sampled_from(OPERATORS),
        threshold=st.floats(min_value=0, max_value=10),
        action=actions,
        **{"accesses": _COUNTS, **{key: st.just(value) for key, value in fixed.items()}},
    )


_EXPLICIT = _rules(
    st.one_of(
        *(_setting(name) for name in _ACTIONS),
        st.just(Action(kind="trigger", name="memory_pressure")),
        NAMES.map(lambda name: Action(kind="rebalance", name=name)),
    )
)


@st.composite
def policies(draw: st.DrawFn) -> ExpertPolicy:
    """A policy that breaks no rule."""
    threshold = draw(st.none() | st.floats(min_value=0.01, max_value=1))
    mode = draw(st.sampled_from(MODES))
    least = draw(st.integers(0, 64))
    implied = [draw(_rules(_setting(name), accesses=1, conditional=True)) for name in _ACTIONS if draw(st.booleans())]
    return ExpertPolicy(
        name=draw(NAMES),
        cache=draw(_cache(threshold)),
        prefetch=draw(
            st.builds(
                PrefetchRules,
                strategy=st.sampled_from(STRATEGIES),
                lookahead=_COUNTS,
                budget=_BUDGETS,
                affinity_threshold=_SHARES,
                history_window=_COUNTS,
            )
        ),
        schedule=draw(
            st.builds(
                ScheduleRules,
                mode=st.just(mode),
                offload_threshold_ms=_ABOVE_ZERO,
                overlap=st.just(True),
                priority_routing=st.booleans(),
            )
        ),
        monitor=draw(
            st.none()
            | st.builds(
                MonitorRules,
                metrics=st.lists(st.sampled_from(METRICS), min_size=1, max_size=2).map(tuple),
                window=_COUNTS,
                log_interval=_COUNTS,
            )
        ),
        per_layer=draw(
            st.none()
            | st.builds(
                PerLayerRules,
                allocation=st.sampled_from(ALLOCATIONS),
                entropy_window=_COUNTS,
                min_capacity=st.just(least),
                max_capacity=st.integers(max(1, least), 512),
                rebalance_interval=st.integers(0, 10**6),
                total_budget=st.none() | _COUNTS,
            )
        ),
        adapt=(*implied, *draw(st.lists(_EXPLICIT, max_size=3))),
    )
