"""Expert cache, eviction policies, predictors and placement of misses. Works on keys and counters only, not on
bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moelight.experts.cache import ExpertCache

__all__ = ["ExpertCache"]


def __getattr__(name: str) -> Any:
    """Import `ExpertCache` on first use, so that a caller that only reads a policy needs no numpy."""
    if name == "ExpertCache":
        from moelight.experts.cache import ExpertCache

        return ExpertCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
