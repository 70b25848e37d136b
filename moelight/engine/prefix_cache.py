"""Prompts that begin alike: which of the cache's blocks hold a beginning that is wanted again.

Knows token ids, blocks, and who is computing which. Refuses to know passes and micro-batches.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from moelight.memory.kv import BlockPool

if TYPE_CHECKING:
    from moelight.engine.batcher import RunningSequence

KEY_BYTES = 16
MOST_WAITS = 2  # a row that goes on where the one before it ends would else begin one pass after it, and so for all
WAIT_SHARE = 0.25  # of a prompt; a pass costs too much to wait for less, such as the head of a chat template


class PrefixCache:
    """What prompts have in common is computed once. A full block of a prompt has a key, the digest of all tokens up to
    its end, under which the pool finds it.

    A sequence promises the blocks of its prompt that nobody has when it is admitted, and may share those that are
    promised by another: then it waits until these are computed by passes that were launched, for lanes work in order.
    Whoever it waits for was admitted before it, so whoever is alive the longest never waits.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, enabled: bool = True, least_share: float = 0.0) -> None:
        """``least_share``: of a prompt; a shorter beginning is not worth having."""
        self._pool, self._size = pool, block_size
        self._enabled, self._least_share = enabled, least_share
        self._promised: dict[int, RunningSequence] = {}

    def find(self, generation: RunningSequence) -> list[int]:
        """The blocks of the longest beginning of a prompt that is known, or promised if that is worth waiting for, in
        order. At least one token of it is left over, and all whose logits are scored."""
        if not self._enabled:
            return []
        request = generation.request
        if not generation.keys:
            generation.keys = keys_of(request.token_ids[: generation.prompt_tokens], self._size)
        most = generation.prompt_tokens - 1
        if request.sampling.prompt_logprobs is not None:
            most = min(most, request.scored_from - 1)
        blocks: list[int] = []
        known = 0
        waits: dict[RunningSequence, int] = {}
        for key in islice(generation.keys, most // self._size):
            block = self._pool.find(key)
            if block is None:
                break
            if (owner := self._promised.get(block)) is not None:
                if owner not in waits:
                    waits[owner] = 1 + self._waits(owner)
                if waits[owner] > MOST_WAITS:
                    break
            blocks.append(block)
            known += not waits
        if (len(blocks) - known) * self._size < WAIT_SHARE * len(request.token_ids):
            del blocks[known:]
        return blocks if len(blocks) * self._size >= self._least_share * len(request.token_ids) else []

    def admit(self, generation: RunningSequence, shared: Sequence[int], own: Sequence[int]) -> None:
        """``generation`` holds ``shared``, which `find` named, and ``own``, and promises what it will compute."""
        generation.blocks = [*shared, *own]
        generation.cached = generation.computed = len(shared) * self._size
        for key, block in zip(islice(generation.keys, len(shared), None), own, strict=False):
            if self._pool.name(block, key):
                self._promised[block] = generation

    def waiting(self, generation: RunningSequence) -> bool:
        """Whether it shares what no pass that was launched has computed yet."""
        return bool(self._promised and self._awaited(generation))

    def computed(self, generation: RunningSequence, before: int) -> None:
        """A pass is on its way after which ``generation.computed`` tokens are in the cache, and not ``before`` only."""
        for block in generation.blocks[before // self._size : generation.computed // self._size]:
            self._promised.pop(block, None)

    def clear(self) -> None:
        """What was promised will not be computed."""
        for block in self._promised:
            self._pool.forget(block)
        self._promised.clear()

    def _awaited(self, generation: RunningSequence) -> set[RunningSequence]:
        """Whose promises it waits for."""
        if generation.computed != generation.cached:  # it has begun
            return set()
        shared = islice(generation.blocks, generation.cached // self._size)
        return {self._promised[block] for block in shared if block in self._promised}

    def _waits(self, generation: RunningSequence) -> int:
        """How many passes must be launched one after another before it can begin."""
        return max((1 + self._waits(owner) for owner in self._awaited(generation)), default=0)


def keys_of(token_ids: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """A key of `KEY_BYTES` for each full block of a prompt: equal where it and all before it hold the same tokens."""
    tokens, step = memoryview(array("q", token_ids)).cast("B"), 8 * block_size
    digest, keys = hashlib.blake2b(digest_size=KEY_BYTES), []
    for end in range(step, len(tokens) + 1, step):
        digest.update(tokens[end - step : end])
        keys.append(digest.digest())
    return tuple(keys)
