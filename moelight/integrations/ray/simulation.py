"""A job on a cluster on a virtual clock: the lease book itself, engines as passes of constant time, failures, slow
nodes, and a driver that takes time. Without Ray and without a model.

An engine has ``batch_rows`` places; a row that is begun holds one for as long as its answer is, whatever the other
places do: where weights are streamed, a pass takes the same time full or not. The driver is one server: each exchange
and each row takes it seconds, and heartbeats of engines take their share of it all the time. Large jobs are simulated
in bundles of rows that are leased, begun and ended together.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field, replace

from moelight.core.errors import ConfigError
from moelight.integrations.ray.leases import LeaseBook, LeasedRow, LeaseSizes, exchange_interval_s

_MOST_BUNDLES = 60_000
_LEAST_PLACES = 4  # of an engine, in bundles


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedCluster:
    """The cluster and the job.

    Attributes:
        nodes: engines, one each.
        batch_rows: sequences in a pass of an engine.
        row_s: seconds that a row of mean length takes in a pass that is refilled.
        spread: of the lengths of answers: 0: all are equal, 1: exponential.
        slow_share: the share of nodes that are ``slow_factor`` as fast.
        jitter: the standard deviation of the nodes' speeds, which their plans do not know.
        failures_per_hour: of each node; its engine is back after ``back_s`` and the loading of the model.
        load_s: until an engine can begin.
        exchange_s, row_driver_s: the driver's time for an exchange, and for a row of it.
        latency_s: from the driver to an engine, and back.
    """

    nodes: int
    rows: int
    batch_rows: int
    row_s: float
    row_tokens: float = 256.0
    spread: float = 0.5
    slow_share: float = 0.0
    slow_factor: float = 0.5
    jitter: float = 0.05
    failures_per_hour: float = 0.0
    back_s: float = 60.0
    load_s: float = 0.0
    exchange_s: float = 1.5e-3
    row_driver_s: float = 2.5e-5
    latency_s: float = 2e-3
    sizes: LeaseSizes = field(default_factory=LeaseSizes)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("nodes", "rows", "batch_rows", "row_s", "row_tokens"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"simulated cluster: {name} must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterRun:
    """The result of a simulated job: ``seconds`` in all, ``ideal_s`` if every place of every engine were at work to the
    end, the share of the time that the driver worked, the rows that were begun more than once, and the failures."""

    seconds: float
    ideal_s: float
    driver_share: float
    redone_rows: int
    failures: int
    exchanges: int
    stolen_rows: int

    @property
    def efficiency(self) -> float:
        return self.ideal_s / self.seconds


@dataclass(kw_only=True, slots=True)
class _SimulatedEngine:
    """``born`` counts its lives: events of an earlier one are void. As in `LeaseQueue.results`, the exchange that began
    at ``heard_s`` ends at ``low`` rows in the queue, if there are results or it was ``fed``."""

    speed: float
    born: int = 0
    running: dict[int, float] = field(default_factory=dict)
    queue: deque[LeasedRow] = field(default_factory=deque)
    finished: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    exchanging: bool = False
    alive: bool = False
    heard_s: float = 0.0
    low: int = 0
    fed: bool = False


class ClusterSimulation:
    """One run; `run` returns its figures."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._bundle = self._bundle_of(cluster)
        # Of a longer job, the steady middle is repeated.
        self._whole_rows = cluster.rows
        max_rows = max(_MOST_BUNDLES, 16 * cluster.nodes * _LEAST_PLACES) * self._bundle
        self._at = cluster = replace(cluster, rows=min(cluster.rows, max_rows))
        self._draw = random.Random(cluster.seed)
        count = math.ceil(cluster.rows / self._bundle)
        self._places = max(1, round(cluster.batch_rows / self._bundle))
        # A bundle holds its place as long as a row does, and there are as many times fewer places; what they hold more
        # than the passes, or less, is a matter of time.
        self._row_s = cluster.row_s * self._places * self._bundle / cluster.batch_rows
        tokens = cluster.row_tokens * self._bundle
        rows = (LeasedRow(number=n, line=n + 1, payload=b"", tokens=tokens) for n in range(count))
        self._book = LeaseBook(rows, count=count, row_tokens=tokens, sizes=cluster.sizes)
        self._rate = self._places * tokens / self._row_s
        self._engines = [self._engine() for _ in range(cluster.nodes)]
        self._events: list[tuple[float, int, str, int, int]] = []
        self._made = 0
        self._driver_free_s = self._driver_busy_s = 0.0
        self._interval_s = exchange_interval_s(cluster.nodes)
        self._exchanges = self._failures = self._begun = self._stolen = 0
        self._count = count

    @staticmethod
    def _bundle_of(cluster: SimulatedCluster) -> int:
        largest = max(1, min(cluster.batch_rows // _LEAST_PLACES, cluster.rows // (cluster.nodes * 64)))
        return min(math.ceil(cluster.rows / _MOST_BUNDLES), largest)

    def run(self) -> ClusterRun:
        """Simulate until the last row is done."""
        at = self._at
        # Bundles make few exchanges: one an interval is counted by the clock, earlier ones as they come.
        heartbeats = at.nodes * at.exchange_s / self._interval_s
        self._slowed = 1.0 / (1.0 - heartbeats)
        for number in range(at.nodes):
            self._event(at.load_s, "up", number)
            self._event(self._failure_s(), "down", number)
        now_s = next_late_s = 0.0
        middle: list[float] = []  # when three quarters and a quarter of the rows were left
        while not self._book.finished:
            if len(middle) < 2 and self._book.unfinished <= self._count * (3 - 2 * len(middle)) // 4:
                middle.append(now_s)
            now_s, _, kind, number, born = heapq.heappop(self._events)
            engine = self._engines[number]
            if now_s >= next_late_s:
                self._book.late(now_s)
                next_late_s = now_s + max(1.0, at.row_s / 10)
            if kind == "down":
                self._down(number, engine, now_s)
            elif born == engine.born:
                getattr(self, f"_{kind}")(number, engine, now_s)
        total = sum(engine.speed for engine in self._engines)
        repeated = (self._whole_rows - at.rows) / (at.rows / 2)
        return ClusterRun(
            seconds=now_s + (repeated * (middle[1] - middle[0]) if repeated else 0.0),
            ideal_s=self._whole_rows * at.row_s / (at.batch_rows * total),
            driver_share=min(1.0, heartbeats + self._driver_busy_s / max(now_s, 1e-9) * (1 - heartbeats)),
            redone_rows=round((self._begun - self._count) * self._bundle * self._whole_rows / at.rows),
            failures=round(self._failures * self._whole_rows / at.rows),
            exchanges=self._exchanges,
            stolen_rows=self._stolen * self._bundle,
        )

    def _engine(self) -> _SimulatedEngine:
        at, draw = self._at, self._draw
        slow = at.slow_factor if draw.random() < at.slow_share else 1.0
        return _SimulatedEngine(speed=slow * max(0.1, draw.gauss(1.0, at.jitter)))

    def _failure_s(self) -> float:
        rate = self._at.failures_per_hour / 3600
        return self._draw.expovariate(rate) if rate else math.inf

    def _event(self, at_s: float, kind: str, number: int) -> None:
        if at_s < math.inf:
            self._made += 1
            heapq.heappush(self._events, (at_s, self._made, kind, number, self._engines[number].born))

    def _up(self, number: int, engine: _SimulatedEngine, now_s: float) -> None:
        engine.alive = True
        self._book.join(str(number), batch_rows=self._places, tokens_per_s=self._rate)
        self._exchange(number, engine, now_s)

    def _down(self, number: int, engine: _SimulatedEngine, now_s: float) -> None:
        self._event(now_s + self._failure_s(), "down", number)
        if not engine.alive:
            return
        self._failures += 1
        self._book.leave(str(number), died=False)
        self._engines[number] = _SimulatedEngine(speed=engine.speed, born=engine.born + 1)
        self._event(now_s + self._at.back_s + self._at.load_s, "up", number)
        for other, idle in enumerate(self._engines):
            if idle.alive and not idle.queue and len(idle.running) < self._places:
                self._exchange(other, idle, now_s)

    def _exchange(self, number: int, engine: _SimulatedEngine, now_s: float) -> None:
        """An engine calls: the driver takes its results and leases rows, one engine after another."""
        if engine.exchanging:
            return
        engine.exchanging = True
        begin_s = max(now_s + self._at.latency_s / 2, self._driver_free_s)
        engine.sent, engine.finished = engine.finished, []
        cost_s = self._at.row_driver_s * len(engine.sent) * self._bundle
        if now_s - engine.heard_s < self._interval_s:
            cost_s += self._at.exchange_s
        cost_s *= self._slowed
        self._driver_free_s = begin_s + cost_s
        self._driver_busy_s += cost_s
        self._exchanges += 1
        self._event(begin_s + cost_s + self._at.latency_s / 2, "given", number)

    def _given(self, number: int, engine: _SimulatedEngine, now_s: float) -> None:
        """The driver's answer has arrived."""
        name = str(number)
        engine.exchanging = False
        for done in engine.sent:
            self._book.returned(name, done, spent=None)
        engine.sent = []
        self._book.measure(name, tokens_per_s=self._rate * engine.speed, queued=len(engine.queue))
        leased = self._book.lease(name, now_s)
        if not leased and not engine.queue and len(engine.running) < self._places:
            leased = self._steal(name, now_s)
        engine.queue += leased
        engine.heard_s, engine.low, engine.fed = now_s, len(engine.queue) // 2, bool(engine.queue)
        self._go_on(number, engine, now_s)

    def _steal(self, name: str, now_s: float) -> list[LeasedRow]:
        victim = self._book.victim(name)
        if victim is None:
            return []
        other = self._engines[int(victim[0])]
        count = min(len(other.queue), max(1, round(victim[1] / (self._at.row_tokens * self._bundle))))
        back = [other.queue.pop().number for _ in range(count)]
        self._book.give_back(victim[0], back)
        self._stolen += count
        return self._book.lease(name, now_s)

    def _begin(self, number: int, engine: _SimulatedEngine, now_s: float) -> None:
        """Fill the free places from the queue."""
        at = self._at
        while engine.queue and len(engine.running) < self._places:
            row = engine.queue.popleft()
            length = (1 - at.spread) + at.spread * self._draw.expovariate(1.0)
            end_s = now_s + self._row_s * length / engine.speed
            engine.running[row.number] = end_s
            self._begun += 1
            self._event(end_s, "ended", number)

    def _ended(self, number: int, engine: _SimulatedEngine, now_s: float) -> None:
        for row in [row for row, end_s in engine.running.items() if end_s <= now_s]:
            del engine.running[row]
            engine.finished.append(row)
        self._go_on(number, engine, now_s)

    def _go_on(self, number: int, engine: _SimulatedEngine, now_s: float) -> None:
        """Begin rows, and end the exchange if it is time."""
        self._begin(number, engine, now_s)
        low = len(engine.queue) <= engine.low and (engine.finished or engine.fed)
        if low or now_s - engine.heard_s >= self._interval_s:
            self._exchange(number, engine, now_s)
