"""The subset of Prometheus' text format that a file for node_exporter's textfile collector needs.

Counters, gauges and histograms with labels. Source: the exposition format's description, version 0.0.4.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Labels = Mapping[str, str]


class Histogram:
    """Counts of values up to each of ``bounds``, the number of values and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add ``value``."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> Iterator[tuple[str, Labels, float]]:
        """Yield the suffix, labels and value of each line; buckets are cumulative and include their bound."""
        so_far = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            so_far += count
            yield "_bucket", {"le": number_text(float(bound))}, so_far
        yield "_sum", {}, self._sum
        yield "_count", {}, so_far


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric: name, ``kind`` (``counter``, ``gauge`` or ``histogram``), help text, and samples as (suffix, labels,
    value). A counter's name ends in ``_total``."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[str, Labels, float]] = field(default=())


def exposition(families: Sequence[Metric], *, labels: Labels) -> str:
    """Return ``families`` as text. ``labels`` are added to every sample; a family without samples is omitted."""
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escaped(family.help, quotes=False)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for suffix, own, value in family.samples:
            pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in {**labels, **own}.items())
            lines.append(f"{family.name}{suffix}{{{pairs}}} {number_text(value)}")
    return "\n".join(lines) + "\n"


def number_text(value: float) -> str:
    """Return ``value`` in the number syntax of Prometheus."""
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
