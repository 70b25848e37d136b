"""Placement of the missing experts of one layer: transferred first, or computed where the pages are stored.

Pure arithmetic over arrays; the caller supplies the seconds of a transfer and of a computation, from the ledger
(``hrm``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moelight.core.errors import ConfigError, did_you_mean
from moelight.experts.policy import MODES
from moelight.experts.predict import Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class MissPlacement:
    """Indices into the array of missing experts.

    Attributes:
        fetched: int64, experts to transfer, in order of transfer.
        computed: int64, experts computed where they are stored; most tokens first.
        link_s: seconds until the last transfer has arrived.
        cpu_s: seconds until the last of the other experts is computed.
    """

    fetched: Ints
    computed: Ints
    link_s: float
    cpu_s: float

    @property
    def seconds(self) -> float:
        """Seconds until the layer can continue; transfers and computation overlap."""
        return max(self.link_s, self.cpu_s)


def fetch_order(tokens: Ints, *, priority_routing: bool) -> Ints:
    """Return the transfer order of missing experts: as given, or by descending ``tokens`` [n] (ties as given), so that
    most work can begin soonest."""
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
    """Choose for each missing expert to transfer it or to compute it where it is stored.

    ``hybrid`` takes the least time over all subsets. Transfers cost the same each, so for any number of transfers the
    experts with the highest computation cost are transferred, and one pass over the n + 1 splits finds the best. Of
    equally fast splits it takes the one with the most transfers, because transferred pages may become resident.

    Args:
        tokens: int64 [n], tokens of each missing expert.
        fetch_s: seconds of one page over the link or from the disk; pages are transferred one after the other.
        cpu_s: float64 [n], seconds to compute each expert where it is stored; experts are computed one after the other.
        fixed_s: seconds that the hidden states take to the CPU and back, once, if anything is computed there.
        mode: ``gpu_only`` transfers all, ``cpu_fallback`` none.
        offload_threshold_s: in ``hybrid``, transfers that take no longer are never avoided.
        priority_routing: the order of transfers, as in `fetch_order`.

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
    """Return how many of the most expensive experts to transfer, in [0, n]."""
    n = len(descending_s)
    computing = np.zeros(n + 1)
    computing[:n] = fixed_s + np.cumsum(descending_s[::-1])[::-1]
    seconds = np.maximum(fetch_s * np.arange(n + 1), computing)
    return n - int(np.argmin(seconds[::-1]))
