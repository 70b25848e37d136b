"""Belady's eviction, for replay only: it knows the future, and no other of the same capacity finds more."""

from __future__ import annotations

from heapq import heappop

from moelight.experts.eviction import Ranked, Setting

_NEVER = 1 << 60


class Belady(Ranked):
    """Who is asked for again last leaves, also where that is the one about to come.

    Exact for batches of one id; the batches of `Setting.future` are one access each, in order. Ranks are
    ``(-batch of the next use, key, key)``.
    """

    has_begin = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._batch = -1
        # Batches that use each key, the next one last.
        self._uses: dict[int, list[int]] = {}
        for batch in range(len(setting.future) - 1, -1, -1):
            for key in set(setting.future[batch]):
                self._uses.setdefault(key, []).append(batch)

    def begin(self) -> None:
        self._batch += 1

    def _next_use(self, key: int) -> int:
        uses = self._uses.get(key, [])
        while uses and uses[-1] <= self._batch:
            uses.pop()
        return uses[-1] if uses else _NEVER

    def touch(self, key: int, score: float) -> None:
        if key in self.rank:
            self.enter(key, score)

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        if len(self) >= self.capacity:
            entry = self.lowest()
            if entry is None or -entry[0] <= self._next_use(key):
                return False
            heappop(self._heap)
            del self.rank[entry[2]]
            self.gone.append(entry[2])
        self.enter(key, score)
        return True

    def enter(self, key: int, score: float) -> None:
        self.push((-self._next_use(key), key, key))

    def unpin(self, key: int) -> None:
        del self.pinned[key]
        self.enter(key, 1.0)
