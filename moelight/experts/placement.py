"""Where the missing experts of one layer are computed: fetched first, or where their pages lie.

Pure arithmetic over arrays. What a fetch and a product cost is the caller's to say, from the ledger (``hrm``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moelight.core.errors import ConfigError, did_you_mean
from moelight.experts.policy import MODES
from moelight.experts.predict import Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class MissPlacement:
    """Places in the array of missing experts.

    Attributes:
        fetched: int64, in the order in which they are fetched.
        computed: int64, computed where they lie; the busiest first.
        link_s: until the last fetch has arrived. cpu_s: until the last of the others is computed.
    """

    fetched: Ints
    computed: Ints
    link_s: float
    cpu_s: float

    @property
    def seconds(self) -> float:
        """Until the layer can go on: both at once."""
        return max(self.link_s, self.cpu_s)


def fetch_order(tokens: Ints, *, priority_routing: bool) -> Ints:
    """Places of missing experts in the order in which to fetch them: as they stand, or those with the most ``tokens``
    [n] first (equal ones as they stand), so that most work can begin soonest."""
    return np.argsort(-tokens, kind="stable") if priority_routing else np.arange(len(tokens))


def place_misses(
    tokens: Ints,
    *,
    fetch_s: float,
    cpu_s: Floats,
    fixed_s: float = 0.0,
    mode: str = "gpu_only",
    offload_threshold_s: float = 0.0,
    priority_routing: bool = False,
) -> MissPlacement:
    """Fetch each of the missing experts, or compute it where it lies.

    ``hybrid`` takes least time of all subsets: fetches cost the same each, so whichever number of them is fetched, it
    is those that are dearest to compute, and one pass over the n + 1 splits finds the best. Of equally fast ones it
    takes the one with the most fetches, because what was fetched may stay.

    Args:
        tokens: int64 [n], of each missing expert.
        fetch_s: seconds of one page over the link or from the disk; one after the other.
        cpu_s: float64 [n], seconds to compute each for its tokens where it lies; one after the other.
        fixed_s: seconds that hidden states take there and back, once, if anything is computed there.
        mode: ``gpu_only`` fetches all, ``cpu_fallback`` none.
        offload_threshold_s: in ``hybrid``, fetches that take no longer are never avoided.
        priority_routing: the order of fetches, as in `fetch_order`.

    Raises:
        ConfigError: an unknown mode.
        ValueError: arrays of different lengths.
    """
    if mode not in MODES:
        raise ConfigError(f"unknown schedule mode {mode!r}{did_you_mean(mode, MODES)}; known: {', '.join(MODES)}")
    if tokens.shape != cpu_s.shape or tokens.ndim != 1:
        raise ValueError(f"tokens {tokens.shape} and cpu_s {cpu_s.shape} must be of one length")
    n = len(tokens)
    dearest = np.lexsort((-tokens, -cpu_s))
    if mode == "cpu_fallback":
        kept = 0
    elif mode == "gpu_only" or fetch_s <= offload_threshold_s:
        kept = n
    else:
        kept = _best_split(cpu_s[dearest], fetch_s, fixed_s)
    fetched, computed = np.sort(dearest[:kept]), dearest[kept:]
    return MissPlacement(
        fetched=fetched[fetch_order(tokens[fetched], priority_routing=priority_routing)],
        computed=computed[fetch_order(tokens[computed], priority_routing=True)],
        link_s=fetch_s * kept,
        cpu_s=fixed_s + float(cpu_s[computed].sum()) if kept < n else 0.0,
    )


def _best_split(descending_s: Floats, fetch_s: float, fixed_s: float) -> int:
    """How many of the dearest are fetched, [0, n]."""
    n = len(descending_s)
    computing = np.zeros(n + 1)
    computing[:n] = fixed_s + np.cumsum(descending_s[::-1])[::-1]
    seconds = np.maximum(fetch_s * np.arange(n + 1), computing)
    return n - int(np.argmin(seconds[::-1]))
