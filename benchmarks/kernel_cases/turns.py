"""How contenders take turns under a roof that is measured beside them, and what is said of each.

Legend of a case: the bytes that must come from memory and the flop that must be done make its roof, the longer of
bytes / read rate and flop / product rate, both measured in the same round. Ratios are taken within a round, and their
median counts, so that a slow minute of a shared machine falls on no side.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runner.roofs import Roofs
from runner.threads import PAUSE_S, spread

SLOW_S = 1.0  # who takes longer for one operation, and is not the first, takes part in the first rounds only
SLOW_ROUNDS = 3

Timed = Callable[[int], float]  # does so many operations, says the seconds of all


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way of doing a case. ``make`` allocates the operands and does it once; what it gives is called in turns.

    ``nbytes``, and ``flop`` in products of ``numbers``, give it a roof; 0 and 0 for what has none. ``over`` names the
    contender whose time is divided by this one's (ours in another form), or is empty: then this one's time is divided
    by the case's first contender's (theirs). The bars are what the share of the roof and that ratio should reach.
    """

    name: str
    make: Callable[[], Timed]
    nbytes: float = 0.0
    flop: float = 0.0
    product_dtype: str = "bfloat16"
    over: str = ""
    share_bar: float = 0.0
    ratio_bar: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Contenders over the same shapes; the first is ours, of which the others are multiples."""

    name: str
    contenders: list[Contender]


@dataclass(kw_only=True)
class Row:
    """What is said of one contender in one case."""

    case: str
    who: str
    ms: float = 0.0
    gb_per_s: float = 0.0
    gflop_per_s: float = 0.0
    share: float = 0.0
    ratio: float = 0.0
    of: str = ""
    rounds: int = 0
    below: list[str] = field(default_factory=list)
    unable: str = ""


class UnfitError(Exception):
    """A contender that cannot do a case, with the reason."""


def race(case: Case, roofs: Roofs, rounds: int, turn_s: float) -> list[Row]:
    """Everybody once to warm up, then ``rounds`` rounds, every other one backwards."""
    timed: dict[str, Timed] = {}
    repeats: dict[str, int] = {}
    slow: set[str] = set()
    absent: dict[str, str] = {}
    for contender in case.contenders:
        try:
            timed[contender.name] = contender.make()
        except UnfitError as reason:
            absent[contender.name] = str(reason)
            continue
        first = min(timed[contender.name](1) for _ in range(2))
        repeats[contender.name] = max(1, round(turn_s / first))
        if first > SLOW_S and contender is not case.contenders[0]:
            slow.add(contender.name)
    spread()
    samples: dict[str, list[float]] = {name: [] for name in timed}
    reads: list[float] = []
    products: dict[str, list[float]] = {contender.product_dtype: [] for contender in case.contenders}
    for number in range(rounds):
        reads.append(roofs.read_seconds_per_byte())
        for product, selected in products.items():
            selected.append(roofs.seconds_per_flop(product))
        for name in timed if number % 2 == 0 else reversed(timed):
            if name not in slow or number < SLOW_ROUNDS:
                time.sleep(PAUSE_S)
                samples[name].append(timed[name](repeats[name]) / repeats[name])
    return [_row(case, contender, samples, absent, reads, products) for contender in case.contenders]


def _row(
    case: Case,
    contender: Contender,
    samples: dict[str, list[float]],
    absent: dict[str, str],
    reads: list[float],
    products: dict[str, list[float]],
) -> Row:
    if contender.name in absent:
        return Row(case=case.name, who=contender.name, unable=absent[contender.name])
    selected = samples[contender.name]
    took = statistics.median(selected)
    row = Row(case=case.name, who=contender.name, ms=took * 1e3, rounds=len(selected))
    if contender.nbytes:
        row.gb_per_s = contender.nbytes / took / 1e9
    if contender.flop:
        row.gflop_per_s = contender.flop / took / 1e9
    if contender.nbytes or contender.flop:
        row.share = _median_ratio(_roofs_s(contender, reads, products), selected)
    first = case.contenders[0].name
    if contender.over in samples and contender.over:
        row.ratio, row.of = _median_ratio(samples[contender.over], selected), f"x {contender.over}"
    elif contender.name != first and not contender.over and first in samples:
        row.ratio = _median_ratio(selected, samples[first])
    if row.share and row.share < contender.share_bar:
        row.below.append(f"share < {contender.share_bar:.2f}")
    if row.ratio and row.ratio < contender.ratio_bar:
        maximum = _median_ratio(selected, _roofs_s(case.contenders[0], reads, products))
        limit = f", and the roof allows {maximum:.2f}" if not contender.over and maximum < contender.ratio_bar else ""
        row.below.append(f"ratio < {contender.ratio_bar:.1f}{limit}")
    return row


def _roofs_s(contender: Contender, reads: list[float], products: dict[str, list[float]]) -> list[float]:
    """Seconds of each round's roof, by its seconds per byte and per flop."""
    pairs = zip(reads, products[contender.product_dtype], strict=True)
    return [max(contender.nbytes * pair, contender.flop * flop) for pair, flop in pairs]


def _median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b if b else 0.0 for a, b in zip(above, below, strict=False))


HEADING = f"{'case':<30}{'who':<19}{'ms':>10}{'GB/s':>8}{'GF/s':>8}{'roof':>7}{'ratio':>8}"


def line(row: Row) -> str:
    """A row of the table."""
    start = f"{row.case:<30}{row.who:<19}"
    if row.unable:
        return f"{start}  {row.unable}"
    cells = [
        f"{row.ms:>10.3f}",
        f"{row.gb_per_s:>8.1f}" if row.gb_per_s else " " * 8,
        f"{row.gflop_per_s:>8.0f}" if row.gflop_per_s else " " * 8,
        f"{row.share:>7.0%}" if row.share else " " * 7,
        f"{row.ratio:>8.2f}" if row.ratio else " " * 8,
    ]
    notes = [row.of, "BELOW: " + ", ".join(row.below) if row.below else ""]
    return (start + "".join(cells) + "  " + "; ".join(note for note in notes if note)).rstrip()


def rounded(row: Row) -> dict[str, Any]:
    """For JSON: what is known of a row, in four digits."""
    return {
        key: float(f"{value:.4g}") if isinstance(value, float) else value
        for key, value in vars(row).items()
        if value not in (0, 0.0, "", [])
    }
