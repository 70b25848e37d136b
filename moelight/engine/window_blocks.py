"""KV blocks of layers that attend to the last positions only: a sequence holds those that its next tokens see, and
frees the others. Depends only on blocks, their keys and token counts.

A sequence reserves as many blocks as it may hold at once. All reservations together are at most the pool, so a block is
free whenever a sequence needs one, and none waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moelight.core.policy import Policy
from moelight.hrm.footprint import pass_tokens, window_of, window_sequence_blocks
from moelight.paging.kv import BlockPool
from moelight.profiles.model import ModelProfile


@dataclass(kw_only=True, slots=True, eq=False)
class WindowTable:
    """The blocks of one sequence: those of its positions from block ``first`` on. It holds at most ``reserved``."""

    reserved: int
    first: int = 0
    blocks: list[int] = field(default_factory=list)


class WindowBlocks:
    """The blocks of all sequences in ``pool``, for layers of which a token attends to at most ``window`` positions, its
    own included. A pass computes at most ``pass_tokens`` tokens of a sequence."""

    def __init__(self, pool: BlockPool, *, window: int, block_size: int, pass_tokens: int) -> None:
        self.pool, self._window, self._size, self._pass_tokens = pool, window, block_size, pass_tokens
        self._least = window_sequence_blocks(window, block_size)
        self._reserved = 0
        self._promised: dict[int, WindowTable] = {}  # blocks with a key that no launched pass computes yet

    def most_running(self, running: int) -> int:
        """The number of sequences like the ``running`` ones that the pool holds."""
        return self.pool.blocks * running // max(1, self._reserved)

    def need(self, tokens: int, new: int) -> int:
        """The blocks that a sequence of at most ``tokens`` tokens reserves, of which ``new`` are computed before it
        decodes."""
        prompts = self._least + -(-min(new, self._pass_tokens) // self._size)
        return min(-(-tokens // self._size), prompts)

    def fits(self, need: int) -> bool:
        return self._reserved + need <= self.pool.blocks

    def find(self, keys: Sequence[bytes], owners: Sequence[WindowTable | None]) -> list[int]:
        """The blocks that a token behind the longest prefix sees for which they are all found: of the first
        ``len(owners)`` blocks of a prompt by ``keys``. ``owners``: who has promised the block of the other layers, for
        which a sequence waits."""
        blocks: list[int] = []
        best: list[int] = []
        for at, owner in enumerate(owners):
            block = self.pool.find(keys[at])
            promised = None if block is None else self._promised.get(block)
            if block is None or (promised is not None and promised is not owner):
                blocks.clear()
                continue
            blocks.append(block)
            seen = at + 1 - self._first((at + 1) * self._size)
            if len(blocks) >= seen:
                best = [-1] * (at + 1 - seen) + blocks[len(blocks) - seen :]
        return best

    def open(self, need: int, shared: Sequence[int]) -> WindowTable:
        """The table of a sequence that reserves ``need`` blocks and shares ``shared``, as `find` returned them."""
        self._reserved += need
        seen = [block for block in shared if block >= 0]
        self.pool.share(seen)
        return WindowTable(reserved=need, first=len(shared) - len(seen), blocks=seen)

    def extend(self, table: WindowTable, end: int, keys: Sequence[bytes] = ()) -> None:
        """Add blocks for positions below ``end``; those of full blocks of a prompt can be found by ``keys``."""
        while (at := table.first + len(table.blocks)) * self._size < end:
            (block,) = self.pool.take(1)
            table.blocks.append(block)
            if at < len(keys) and self.pool.name(block, keys[at]):
                self._promised[block] = table

    def advance(self, table: WindowTable, computed: int, *, decodes: bool) -> None:
        """Free the blocks that no token behind ``computed`` ones sees; a sequence that ``decodes`` reserves no more
        than its window takes."""
        if behind := self._first(computed) - table.first:
            self.pool.release(table.blocks[:behind])
            del table.blocks[:behind]
            table.first += behind
        if decodes and table.reserved > self._least:
            self._reserved -= table.reserved - self._least
            table.reserved = self._least

    def computed(self, table: WindowTable, before: int, computed: int) -> None:
        """Record that a launched pass raises the cached tokens from ``before`` to ``computed``."""
        first = max(0, before // self._size - table.first)
        for block in table.blocks[first : max(0, computed // self._size - table.first)]:
            if self._promised.get(block) is table:
                del self._promised[block]

    def close(self, table: WindowTable) -> None:
        self._reserved -= table.reserved
        self.pool.release(table.blocks)
        table.blocks, table.reserved = [], 0

    def clear(self, *, failed: bool) -> None:
        """Forget promised blocks, which will not be computed; ``failed``: all blocks."""
        for block in self._promised:
            self.pool.forget(block)
        self._promised.clear()
        if failed:
            self.pool.forget_all()

    def _first(self, computed: int) -> int:
        """The first block that the token behind ``computed`` ones sees."""
        return max(0, computed - self._window + 1) // self._size


def blocks_of_windows(model: ModelProfile, policy: Policy, pool: BlockPool) -> WindowBlocks | None:
    """The blocks of ``pool``, `footprint.window_blocks` of them; None without layers that have a cache of their own."""
    if (window := window_of(model, policy)) is None:
        return None
    return WindowBlocks(pool, window=window, block_size=policy.kv_block_size, pass_tokens=int(pass_tokens(policy)))
