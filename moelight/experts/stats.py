"""Expert statistics of a run as one JSON object: overall, per layer, before and after warm-pinning, and stalls.

A rate without accesses is reported as such.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moelight.core.errors import ConfigError
from moelight.core.paths import write_whole
from moelight.experts.adapt import AdaptRules
from moelight.experts.predict import Ints, likeliest
from moelight.experts.prefetch import Prefetcher
from moelight.experts.sizing import SlotPlan
from moelight.experts.warm import WarmPin
from moelight.experts.windowed_stats import Monitor

FORMAT = "moelight expert stats 1"
TOP = 3  # experts named for each layer


def layer_stats(hits: Ints, misses: Ints) -> list[dict[str, Any]]:
    """Return one entry per layer of ``hits`` and ``misses`` int64 [L, E]; a layer without accesses carries a note."""
    return [_layer(layer, hits[layer], misses[layer]) for layer in range(len(hits))]


def _layer(layer: int, hits: Ints, misses: Ints) -> dict[str, Any]:
    counts = hits + misses
    accesses = int(counts.sum())
    if accesses == 0:
        return {"layer": layer, "accesses": 0, "hit_rate": None, "note": "no accesses"}
    top = likeliest(counts, TOP)
    return {
        "layer": layer,
        "accesses": accesses,
        "hits": int(hits.sum()),
        "misses": int(misses.sum()),
        "hit_rate": float(hits.sum() / accesses),
        "distinct": int((counts > 0).sum()),
        "top": [{"expert": int(expert), "accesses": int(counts[expert])} for expert in top],
    }


def expert_stats(
    *,
    hits: Ints,
    misses: Ints,
    policy: str | None = None,
    cache: Mapping[str, Any] | None = None,
    pinned: Sequence[tuple[int, int]] = (),
    warm: WarmPin | None = None,
    prefetcher: Prefetcher | None = None,
    monitor: Monitor | None = None,
    adapting: AdaptRules | None = None,
    sizing: SlotPlan | None = None,
    stalls: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return all statistics of a run for JSON; absent parts are null.

    Args:
        hits: int64 [L, E].
        misses: int64 [L, E].
        policy: name of the policy.
        cache: further fields of the cache.
        pinned: (layer, expert) of all pinned experts.
        warm, prefetcher, monitor, adapting, sizing: the components of the run, if any.
        stalls: stall seconds by cause.
    """
    total_hits, total_misses = int(hits.sum()), int(misses.sum())
    accesses = total_hits + total_misses
    return {
        "format": FORMAT,
        "policy": policy,
        "overall": {
            "accesses": accesses,
            "hits": total_hits,
            "misses": total_misses,
            "hit_rate": total_hits / accesses if accesses else 0.0,
        },
        "cache": dict(cache) if cache is not None else None,
        "layers": layer_stats(hits, misses),
        "pinned": [{"layer": int(layer), "expert": int(expert)} for layer, expert in sorted(pinned)],
        "warm_pin": warm.as_dict(total_hits, total_misses) if warm is not None else None,
        "predictor": _predictor(prefetcher) if prefetcher is not None else None,
        "stalls": dict(stalls) if stalls is not None else None,
        "monitor": {"now": monitor.now(), "notes": list(monitor.notes)} if monitor is not None else None,
        "adaptations": adapting.as_dict() if adapting is not None else None,
        "sizing": sizing.as_dict() if sizing is not None else None,
    }


def _predictor(prefetcher: Prefetcher) -> dict[str, Any]:
    rules = prefetcher.rules
    quality = {name: found.as_dict() for name, found in prefetcher.qualities.items() if name != "none"}
    return {"strategy": rules.strategy, "budget": rules.budget, "quality": quality}


def save_stats(stats: Mapping[str, Any], path: Path) -> None:
    """Write ``stats`` to ``path`` atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_whole(path, json.dumps(stats, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from None
