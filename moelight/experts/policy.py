"""Expert policy as a value: cache, prefetch and placement rules, with the fields of the ``.moe`` language. `lang`
parses and formats these objects; `lang.builder.check_expert_policy` checks objects that were built otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

from moelight.core.errors import ConfigError
from moelight.core.units import format_bytes

EVICTIONS = ("lru", "lfu", "slru", "score", "frequency_threshold", "reuse")
# `fallback` is a keyword of the language for lfu | lru.
FALLBACK = ("lfu", "lru")
STRATEGIES = ("none", "affinity", "history", "lookahead", "previous", "frequency", "next_router")
MODES = ("gpu_only", "cpu_fallback", "hybrid")
ALLOCATIONS = ("uniform", "entropy")
METRICS = ("hit_rate", "eviction_rate")
PRESSURE_THRESHOLD = 0.9  # of the memory budget, if the policy gives none


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Cache capacity: ``value`` slots, percent of all experts, or bytes."""

    value: float
    unit: str = "slots"

    def slots(self, experts: int, page_bytes: int | None) -> int:
        """Capacity in slots, at most ``experts``, for ``experts`` experts of ``page_bytes`` each; raises ConfigError
        for a capacity in bytes without ``page_bytes``, or smaller than one expert."""
        if self.unit == "slots":
            return min(int(self.value), experts)
        if self.unit == "percent":
            return max(1, min(int(experts * self.value / 100.0), experts))
        if not page_bytes:
            raise ConfigError(f"capacity {self}: how many experts that is depends on the model; name one")
        count = min(int(self.value // page_bytes), experts)
        if count < 1:
            raise ConfigError(f"capacity {self} holds no expert of {format_bytes(page_bytes)}; allow more")
        return count

    def __str__(self) -> str:
        if self.unit == "bytes":
            return format_bytes(int(self.value))
        return f"{self.value:g}%" if self.unit == "percent" else f"{self.value:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRules:
    """Block ``cache``.

    Attributes:
        eviction: one of `EVICTIONS`, or two: the second retains what the first evicts.
        pin: experts that are never evicted, in every layer, as far as they fit.
        frequency_decay, freq_threshold, freq_window, score_ema_alpha: parameters of ``lfu``, ``frequency_threshold``
            and ``score``.
        memory_threshold, memory_headroom: shares of ``memory_budget_gb``; above the first, experts are evicted down to
            the second (None: never).
        expert_size_gb: size of one expert, used for memory pressure alone.
        ttl: accesses after which an expert without an access is evicted (None: never).
        warm_pin: accesses after which the most used residents are pinned (None: never).
        profile: file of counts to start from.
    """

    capacity: Capacity
    eviction: tuple[str, ...] = ("lru",)
    pin: tuple[int, ...] = ()
    frequency_decay: float = 0.95
    freq_threshold: float = 0.05
    freq_window: int = 100
    score_ema_alpha: float = 0.3
    memory_threshold: float | None = None
    memory_headroom: float = 0.7
    memory_budget_gb: float = 16.0
    expert_size_gb: float = 1.2
    ttl: int | None = None
    warm_pin: int | None = None
    profile: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchRules:
    """Block ``prefetch``: ``strategy`` predicts at most ``budget`` experts of a coming layer."""

    strategy: str = "none"
    lookahead: int = 1
    budget: int = 4
    affinity_threshold: float = 0.3
    history_window: int = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRules:
    """Block ``schedule``: where a missing expert is computed. In ``hybrid``, an expert whose transfer takes longer than
    ``offload_threshold_ms`` may be computed where it is stored, if that is estimated to be faster."""

    mode: str = "gpu_only"
    offload_threshold_ms: float = 50.0
    overlap: bool = True
    priority_routing: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorRules:
    """Block ``monitor``: metrics over the last ``window`` accesses, noted every ``log_interval`` accesses."""

    metrics: tuple[str, ...] = ("hit_rate",)
    window: int = 100
    log_interval: int = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayerRules:
    """Block ``per_layer``: a budget for each layer, in all ``total_budget`` slots (None: layers x capacity)."""

    allocation: str = "entropy"
    entropy_window: int = 200
    min_capacity: int = 2
    max_capacity: int = 64
    rebalance_interval: int = 500
    total_budget: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """Action of a rule: ``set`` a key to ``value`` (a `Capacity` for ``capacity``, the tuple of `CacheRules` for
    ``eviction``, else a word or a number), ``trigger`` an event, or ``rebalance`` the budgets of the layers."""

    kind: str
    name: str
    value: Capacity | tuple[str, ...] | str | float | int | None = None


ACTION_KEYS = ("eviction", "capacity", "frequency_decay", "prefetch_strategy", "prefetch_budget", "schedule_mode")
TRIGGERS = ("memory_pressure",)
OPERATORS = ("<", ">", "<=", ">=", "!=")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptRule:
    """``when metric op threshold for accesses``: once the condition has held for that many consecutive accesses,
    execute ``action``, and not again before ``cooldown`` accesses. ``conditional``: written
    ``key = A : B when ...``."""

    metric: str
    op: str
    threshold: float
    action: Action
    accesses: int = 1
    cooldown: int = 50
    conditional: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPolicy:
    """One policy of a ``.moe`` file. ``per_layer`` None: one cache shared by all layers."""

    name: str
    cache: CacheRules
    prefetch: PrefetchRules = field(default_factory=PrefetchRules)
    schedule: ScheduleRules = field(default_factory=ScheduleRules)
    monitor: MonitorRules | None = None
    per_layer: PerLayerRules | None = None
    adapt: tuple[AdaptRule, ...] = ()

    def slots(self, num_layers: int, num_experts: int, page_bytes: int | None = None) -> int:
        """Total capacity in slots, all layers together, with ``num_layers`` MoE layers; errors as `Capacity.slots`."""
        layers = self.per_layer
        if layers is not None and layers.total_budget is not None:
            return min(layers.total_budget, num_layers * num_experts)
        return self.slots_of(self.cache.capacity, num_layers, num_experts, page_bytes)

    def slots_of(self, capacity: Capacity, num_layers: int, num_experts: int, page_bytes: int | None = None) -> int:
        """`slots` with another ``capacity``, of the shared cache or of each layer, as a rule sets it."""
        if self.per_layer is None:
            return capacity.slots(num_layers * num_experts, page_bytes)
        return num_layers * capacity.slots(num_experts, page_bytes)


# Default policy of an engine; the reasons are in docs/guides/expert-policies.md.
DEFAULT_POLICY = ExpertPolicy(
    name="default",
    cache=CacheRules(capacity=Capacity(value=25.0, unit="percent"), eviction=("reuse",)),
    prefetch=PrefetchRules(strategy="next_router"),
    schedule=ScheduleRules(mode="hybrid", offload_threshold_ms=1e-3),
    per_layer=PerLayerRules(allocation="uniform", min_capacity=1, max_capacity=4096),
)
