"""Which engine of a cluster holds which rows, and how many it is given next. Independent of Ray and of clocks: the
driver of a job passes seconds of its clock, the simulation those of a virtual one.

An engine holds as many rows as fill its passes and a few seconds more, but at most its share of the work that is left,
so that all engines end together. Shares are those of the engines' speeds: planned ones, then measured ones. An idle
engine is given rows that another one has not begun; a lease that is late is given to a second engine. A row is done
once: at its first result.

A row that was in an engine that died has died once more. Those that died are spread: beside rows that never did, an
engine holds at most as many that died once as the root of the rows of that engine, or one that died twice. So the third
death of a row that ends its engine has one suspect, and passes stay full.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from moelight.batch.rows import BadRow, Row

MOST_DEATHS = 3
EXCHANGE_S = 1.0
_EXCHANGE_COST_S, _EXCHANGE_SHARE = 1.5e-3, 0.25  # of the driver's time: `benchmarks/jobs.py`
_MOST_VICTIMS = 64  # engines among which an idle one looks for rows


def exchange_interval_s(engines: int) -> float:
    """Seconds between two exchanges with an engine that has enough: exchanges that carry nothing take at most
    `_EXCHANGE_SHARE` of the driver's time, however many engines there are."""
    return max(EXCHANGE_S, _EXCHANGE_COST_S / _EXCHANGE_SHARE * engines)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseSizes:
    """How much an engine is given, in seconds of its work; the defaults are from `benchmarks/jobs.py`.

    Attributes:
        ahead_s: beyond its passes; at least as many rows as fill them once more.
        least_s: the least that a new lease adds, and that is worth stealing.
        slack: a lease is late after this many times the seconds that its engine needs for all that it holds ...
        late_s: ... and this many seconds.
    """

    ahead_s: float = 4.0
    least_s: float = 0.5
    slack: float = 4.0
    late_s: float = 60.0


@dataclass(kw_only=True, slots=True, eq=False)
class LeasedRow:
    """A row of the input: its line, not read yet, or the row of a table. ``tokens`` are estimated, of the prompt and of
    the answers; ``deaths`` is the number of engines that died while they held it."""

    number: int
    line: int
    payload: bytes | Row | BadRow
    tokens: float
    deaths: int = 0
    holders: int = 0


@dataclass(kw_only=True, slots=True)
class _Lease:
    row_numbers: set[int]
    due_s: float
    again: bool = False  # its rows were given to others


@dataclass(kw_only=True, slots=True)
class _Holder:
    """An engine: ``batch_rows`` fill its passes, ``tokens_per_s`` is its speed, ``queued`` rows it has not begun."""

    batch_rows: int
    tokens_per_s: float
    planned: float
    measured: bool = False
    queued: int = 0
    tokens: float = 0.0
    held: dict[int, LeasedRow] = field(default_factory=dict)
    died: list[int] = field(default_factory=lambda: [0] * MOST_DEATHS)  # rows held, by their deaths
    leases: list[_Lease] = field(default_factory=list)


class LeaseBook:
    """The rows of one job that are not done: not read yet, waiting again, or held by engines. Memory is that of the
    rows that engines hold."""

    def __init__(self, rows: Iterator[LeasedRow], *, count: int, row_tokens: float, sizes: LeaseSizes) -> None:
        """``rows`` are ``count`` in number, with ``row_tokens`` each in the mean."""
        self.sizes = sizes
        self.unfinished = count
        self._rows, self._row_tokens = rows, max(1.0, row_tokens)
        self._rows_ahead: LeasedRow | None = None
        self._exhausted = False
        # Rows to be done again: by deaths, the last list for those that can only be alone.
        self._again: list[deque[LeasedRow]] = [deque() for _ in range(MOST_DEATHS)]
        self._open: dict[int, LeasedRow] = {}
        self._holders: dict[str, _Holder] = {}
        self._queuing: dict[str, None] = {}  # engines with rows that they have not begun, the longest unheard first
        self._speed = self._planned = self._measured = 0.0  # of all engines; of those that were measured, both
        self._estimated = self._spent = 0.0
        self._crowd = 1

    @property
    def engines(self) -> list[str]:
        return list(self._holders)

    @property
    def finished(self) -> bool:
        """True if every row that was read is done, and all were read."""
        return not self._open and self._refilled() is None

    def held(self, engine: str) -> int:
        """Rows that ``engine`` holds."""
        return len(self._holders[engine].held)

    def seconds_left(self, engine: str) -> float:
        """The time that ``engine`` needs for the rows that it holds."""
        holder = self._holders[engine]
        return holder.tokens * self._scale / holder.tokens_per_s

    def share(self, engine: str) -> float:
        """The part of the work that is left which is for ``engine``, 0 to 1."""
        return self._holders[engine].tokens_per_s / max(self._speed, 1e-9)

    def join(self, engine: str, *, batch_rows: int, tokens_per_s: float) -> None:
        """Add an engine, with the speed that its plan predicts. It is corrected by what the others' plans predicted and
        what they then did."""
        planned = max(1e-9, tokens_per_s)
        if self._planned:  # what the plans of the others were wrong by
            planned *= self._measured / self._planned
        self._holders[engine] = _Holder(
            batch_rows=max(1, batch_rows), tokens_per_s=planned, planned=max(1e-9, tokens_per_s)
        )
        self._speed += planned

    def leave(self, engine: str, *, died: bool) -> list[LeasedRow]:
        """Remove an engine; its rows wait again. ``died``: by itself, not with its node and not because it was told
        to. Returns the rows that have now died too often, which are done."""
        holder = self._holders.pop(engine)
        self._queuing.pop(engine, None)
        self._speed -= holder.tokens_per_s
        condemned: list[LeasedRow] = []
        self._crowd = max(self._crowd, len(holder.held)) if died else self._crowd
        for row in holder.held.values():
            row.holders -= 1
            if died:
                self._died(row)
            if row.deaths >= MOST_DEATHS:
                condemned.append(row)
                self._close(row)
            elif not row.holders:
                self._again[row.deaths].append(row)
        return condemned

    def measure(self, engine: str, *, tokens_per_s: float, queued: int) -> None:
        """Record the speed of ``engine``, in tokens of prompts and answers, and the rows that it has not begun."""
        holder = self._holders[engine]
        self._queue(engine, queued)
        if tokens_per_s <= 0:
            return
        if not holder.measured:
            if not self._planned:  # all plans are of one planner: they err likewise, until they are measured
                ratio = tokens_per_s / holder.planned
                for other in self._holders.values():
                    other.tokens_per_s *= ratio
                self._speed *= ratio
            self._planned, self._measured = self._planned + holder.planned, self._measured + tokens_per_s
            holder.measured = True
        self._speed += tokens_per_s - holder.tokens_per_s
        holder.tokens_per_s = tokens_per_s

    def lease(self, engine: str, now_s: float) -> list[LeasedRow]:
        """The rows that ``engine`` is given now; empty if it has enough, or none are left."""
        holder, sizes = self._holders[engine], self.sizes
        lack = self._target(engine) - holder.tokens
        least = sizes.least_s * holder.tokens_per_s / self._scale
        if lack <= 0 or (holder.queued > 0 and lack < least):
            return []
        leased: list[LeasedRow] = []
        while lack > 0 and (row := self._next(holder)) is not None:
            row.holders += 1
            holder.held[row.number] = row
            holder.died[row.deaths] += 1
            holder.tokens += row.tokens
            lack -= row.tokens
            self._open[row.number] = row
            leased.append(row)
        if leased:
            due_s = now_s + sizes.late_s + sizes.slack * self.seconds_left(engine)
            holder.leases.append(_Lease(row_numbers={row.number for row in leased}, due_s=due_s))
            self._queue(engine, holder.queued + len(leased))
        return leased

    def returned(self, engine: str, number: int, *, spent: float | None = None) -> LeasedRow | None:
        """Take the result of a row; None if there was one. ``spent``: the tokens that it took."""
        row = self._open.get(number)
        if row is None:
            return None
        if spent is not None:
            self._estimated, self._spent = self._estimated + row.tokens, self._spent + spent
        if (holder := self._holders.get(engine)) is not None and holder.held.pop(number, None) is not None:
            self._dropped(holder, row)
        self._close(row)
        return row

    def give_back(self, engine: str, row_numbers: list[int]) -> None:
        """Rows that ``engine`` was asked for wait again; it has not begun them."""
        holder = self._holders[engine]
        for number in row_numbers:
            if (row := holder.held.pop(number, None)) is not None:
                self._dropped(holder, row)
                if not row.holders and number in self._open:
                    self._again[row.deaths].appendleft(row)

    def victim(self, thief: str) -> tuple[str, float] | None:
        """The engine from which ``thief``, which has nothing to begin, is to get rows, and how many tokens of them."""
        thief_s = self.seconds_left(thief)
        some = islice(self._queuing, _MOST_VICTIMS)
        victim_s, name = max(((self.seconds_left(name), name) for name in some if name != thief), default=(0.0, ""))
        if victim_s - thief_s < self.sizes.least_s:
            return None
        rates = self._holders[thief].tokens_per_s, self._holders[name].tokens_per_s
        tokens = (victim_s - thief_s) * rates[0] * rates[1] / (rates[0] + rates[1]) / self._scale
        return name, tokens

    def late(self, now_s: float, *, silent: frozenset[str] = frozenset()) -> int:
        """Let the rows of late leases, and of ``silent`` engines, wait again beside them; returns their number."""
        count = 0
        for name, holder in self._holders.items():
            for lease in holder.leases:
                if lease.again or (lease.due_s > now_s and name not in silent):
                    continue
                lease.again = True
                for number in lease.row_numbers:
                    if (row := self._open.get(number)) is not None and number in holder.held and row.holders == 1:
                        self._again[row.deaths].append(row)
                        count += 1
            holder.leases = [lease for lease in holder.leases if lease.row_numbers]
        return count

    def _queue(self, engine: str, queued: int) -> None:
        self._holders[engine].queued = queued
        self._queuing.pop(engine, None)
        if queued:
            self._queuing[engine] = None

    @property
    def _scale(self) -> float:
        """Tokens that rows take over those that were estimated; answers may end early."""
        return (self._spent + 1.0) / (self._estimated + 1.0) if self._estimated else 1.0

    def _target(self, engine: str) -> float:
        """Estimated tokens that ``engine`` should hold."""
        holder = self._holders[engine]
        passes = holder.batch_rows * self._row_tokens
        full = passes + max(passes, self.sizes.ahead_s * holder.tokens_per_s / self._scale)
        return min(full, max(self._row_tokens, self.share(engine) * self.unfinished * self._row_tokens))

    def _next(self, holder: _Holder) -> LeasedRow | None:
        """The next row for ``holder``: those that died first, as many as it may hold, then others."""
        once = max(1, math.isqrt(self._crowd))
        for deaths, max_died, apart_from in ((2, 1, 1), (1, once, 2), (0, math.inf, None)):
            waiting = self._again[deaths]
            for _ in range(len(waiting)):
                if holder.died[deaths] >= max_died or (apart_from is not None and holder.died[apart_from]):
                    break
                row = waiting.popleft()
                if row.number in holder.held:  # late there
                    waiting.append(row)
                elif row.number in self._open:
                    return row
        fresh, self._rows_ahead = self._refilled(), None
        return fresh

    def _died(self, row: LeasedRow) -> None:
        """Count a death of ``row``, wherever it is held beside."""
        for other in self._holders.values() if row.holders else ():
            if row.number in other.held:
                other.died[row.deaths] -= 1
                other.died[min(row.deaths + 1, MOST_DEATHS - 1)] += 1
        row.deaths += 1

    def _refilled(self) -> LeasedRow | None:
        """The next row that was never leased, which stays the next."""
        if self._rows_ahead is None and not self._exhausted:
            self._rows_ahead = next(self._rows, None)
            self._exhausted = self._rows_ahead is None
        return self._rows_ahead

    def _close(self, row: LeasedRow) -> None:
        """Forget a row that is done, wherever it is held."""
        self._open.pop(row.number, None)
        self.unfinished -= 1
        if row.holders:
            for holder in self._holders.values():
                if holder.held.pop(row.number, None) is not None:
                    self._dropped(holder, row)

    def _dropped(self, holder: _Holder, row: LeasedRow) -> None:
        row.holders -= 1
        holder.tokens -= row.tokens
        holder.died[min(row.deaths, MOST_DEATHS - 1)] -= 1
        for lease in holder.leases:
            lease.row_numbers.discard(row.number)
