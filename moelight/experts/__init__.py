"""Expert cache, eviction policies, predictors and placement of misses, on keys and counters alone, not on bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moelight.experts.cache import ExpertCache

__all__ = ["ExpertCache"]


def __getattr__(name: str) -> Any:
    """Import `ExpertCache` on first use: reading a policy needs no numpy."""
    if name == "ExpertCache":
        from moelight.experts.cache import ExpertCache

        return ExpertCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
