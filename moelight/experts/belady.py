"""Belady's eviction, for replay only: it knows the future, and no other of the same capacity finds more."""

from __future__ import annotations

from moelight.experts.eviction import Setting
from moelight.experts.ranked import Entry, Ranked

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
            self.replace(entry, self.entry_of(key, score))
        else:
            self.enter(key, score)
        return True

    def entry_of(self, key: int, score: float) -> Entry:
        return (-self._next_use(key), key, key)

    def unpin(self, key: int) -> None:
        del self.pinned[key]
        self.enter(key, 1.0)
