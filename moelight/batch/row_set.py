"""Sets of row numbers, small enough for tens of millions. Knows nothing of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_FULL = 0xFF


class RowSet:
    """A set of whole numbers from 0 as bits: ten million take 1.25 MB."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bits) and self._bits[place] >> (number & 7) & 1 == 1

    def add(self, number: int) -> None:
        """``number`` belongs to the set."""
        self.add_range(number, number)

    def add_range(self, first: int, last: int) -> None:
        """All of ``first`` to ``last`` belong to the set, both ends included."""
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
        """The least number below ``total`` that is not in the set."""
        full = len(self._bits) - len(self._bits.lstrip(b"\xff"))
        return next((number for number in range(full * 8, min(total, full * 8 + 8)) if number not in self), None)


def row_ranges(numbers: Iterable[int]) -> list[int | list[int]]:
    """``numbers`` in order, runs of them as ``[first, last]``: ``[[0, 3], 7]``."""
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
