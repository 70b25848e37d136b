"""Compact sets of row numbers, for tens of millions of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_FULL = 0xFF


class RowSet:
    """A set of integers from 0, stored as bits: ten million take 1.25 MB."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bits) and self._bits[place] >> (number & 7) & 1 == 1

    def add(self, number: int) -> None:
        """Add ``number``."""
        self.add_range(number, number)

    def add_range(self, first: int, last: int) -> None:
        """Add ``first`` to ``last``, both included."""
        low, high = first >> 3, last >> 3
        if high >= len(self._bits):
            self._bits.extend(bytes(max(high + 1 - len(self._bits), len(self._bits))))
        from_first, to_last = _FULL << (first & 7) & _FULL, _FULL >> (7 - (last & 7))
        if low == high:
            self._bits[low] |= from_first & to_last
            return
        self._bits[low] |= from_first
        self._bits[low + 1 : high] = b"\xff" * (high - low - 1)
        self._bits[high] |= to_last

    def missing(self, total: int) -> int | None:
        """Return the least number below ``total`` that is not in the set; None if all are."""
        full = len(self._bits) - len(self._bits.lstrip(b"\xff"))
        return next((number for number in range(full * 8, min(total, full * 8 + 8)) if number not in self), None)


def row_ranges(numbers: Iterable[int]) -> list[int | list[int]]:
    """Return ``numbers`` sorted, with runs as ``[first, last]``: ``[[0, 3], 7]``."""
    return [first if first == last else [first, last] for first, last in _runs(numbers)]


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    first = last = -1
    for number in sorted(numbers):
        if number != last + 1 or first < 0:
            if first >= 0:
                yield first, last
            first = number
        last = number
    if first >= 0:
        yield first, last
