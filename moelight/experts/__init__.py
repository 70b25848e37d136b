"""Which experts stay near, which come next, and where a missing one is computed. Keys and counters only; no bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moelight.experts.cache import ExpertCache

__all__ = ["ExpertCache"]


def __getattr__(name: str) -> Any:
    """`ExpertCache` when it is asked for: whoever only reads a policy needs no numpy."""
    if name == "ExpertCache":
        from moelight.experts.cache import ExpertCache

        return ExpertCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
