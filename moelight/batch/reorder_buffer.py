"""Rows that are finished before their turn, in memory at first and then in a file.

Depends on numbers, bytes and offsets, not on durability.
"""

from __future__ import annotations

from moelight.batch.append import AppendFile

# number, offset, size, failed
Place = tuple[int, int, int, bool]


class ReorderBuffer:
    """Waiting rows by number. ``held_bytes`` of them are in memory, the others at recorded places of ``file``."""

    def __init__(self, file: AppendFile | None = None, places: list[Place] | None = None) -> None:
        self.file = file
        self.held_bytes = 0
        self._held: dict[int, tuple[bytes, bool]] = {}
        self._places = {number: (offset, size, failed) for number, offset, size, failed in places or []}

    def __len__(self) -> int:
        return len(self._held) + len(self._places)

    @property
    def filed_bytes(self) -> int:
        """Bytes of ``file`` that belong to waiting rows."""
        return sum(size for _, size, _ in self._places.values())

    def hold(self, number: int, data: bytes, *, failed: bool) -> None:
        """Add the finished row ``number``."""
        self._held[number] = (data, failed)
        self.held_bytes += len(data)

    def take(self, number: int) -> tuple[bytes, bool] | None:
        """Remove row ``number`` and return its bytes and whether it failed; None if it is not in the buffer."""
        held = self._held.pop(number, None)
        if held is not None:
            self.held_bytes -= len(held[0])
            return held
        place = self._places.pop(number, None)
        if place is None or self.file is None:
            return None
        return self.file.read(place[0], place[1]), place[2]

    def spill(self, file: AppendFile) -> list[Place]:
        """Move the rows in memory to ``file``; return their places."""
        self.file = file
        new: list[Place] = []
        for number, (data, failed) in self._held.items():
            new.append((number, file.end + file.held, len(data), failed))
            file.append(data)
        file.flush()
        self._places.update((number, (offset, size, failed)) for number, offset, size, failed in new)
        self._held.clear()
        self.held_bytes = 0
        return new

    def move(self, file: AppendFile) -> list[Place]:
        """Move all rows to ``file``, which is empty; return their places. The old file is no longer used."""
        moved: list[Place] = []
        for number, (offset, size, failed) in self._places.items():
            assert self.file is not None
            moved.append((number, file.end + file.held, size, failed))
            file.append(self.file.read(offset, size))
        self._places = {number: (offset, size, failed) for number, offset, size, failed in moved}
        return moved + self.spill(file)
