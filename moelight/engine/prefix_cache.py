"""Prefix cache: finds the KV blocks that hold the beginning of a prompt and shares them between sequences.

Depends only on token ids, blocks and running sequences, not on passes and micro-batches.
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
MOST_WAITS = 2  # bounds chains of rows that each extend the row before: every link delays its row by a pass
WAIT_SHARE = 0.25  # of a prompt; a shorter prefix, such as the head of a chat template, is not worth waiting a pass for


class PrefixCache:
    """Computes a prefix that prompts have in common once. The key of a full block of a prompt is the digest of all
    tokens up to the block's end; the pool finds blocks by key.

    On admission a sequence promises the blocks of its prompt that the pool does not hold yet. Another sequence may
    share promised blocks; it waits until the passes that compute them have been launched, which suffices because lanes
    run tasks in order. A sequence only waits for sequences admitted before it, so the longest-running sequence never
    waits.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, enabled: bool = True, least_share: float = 0.0) -> None:
        """``least_share``: shorter prefixes, as a share of the prompt, are not reused."""
        self._pool, self._size = pool, block_size
        self._enabled, self._least_share = enabled, least_share
        self._promised: dict[int, RunningSequence] = {}

    def find(self, sequence: RunningSequence) -> list[int]:
        """Return, in order, the blocks of the longest known prefix of a prompt, promised blocks included if the wait is
        worthwhile. The prefix leaves at least one token uncomputed, and every token whose logits are scored."""
        if not self._enabled:
            return []
        request = sequence.request
        if not sequence.keys:
            sequence.keys = keys_of(request.token_ids[: sequence.prompt_tokens], self._size)
        most = sequence.prompt_tokens - 1
        if request.sampling.prompt_logprobs is not None:
            most = min(most, request.scored_from - 1)
        blocks: list[int] = []
        known = 0
        waits: dict[RunningSequence, int] = {}
        for key in islice(sequence.keys, most // self._size):
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

    def admit(self, sequence: RunningSequence, shared: Sequence[int], own: Sequence[int]) -> None:
        """Assign ``shared``, the blocks returned by `find`, and ``own`` to ``sequence``, which promises the new
        blocks it will compute."""
        sequence.blocks = [*shared, *own]
        sequence.cached = sequence.computed = len(shared) * self._size
        for key, block in zip(islice(sequence.keys, len(shared), None), own, strict=False):
            if self._pool.name(block, key):
                self._promised[block] = sequence

    def waiting(self, sequence: RunningSequence) -> bool:
        """True if the sequence shares blocks that no launched pass computes yet."""
        return bool(self._promised and self._awaited(sequence))

    def computed(self, sequence: RunningSequence, before: int) -> None:
        """Record that a launched pass raises the cached tokens of ``sequence`` from ``before`` to
        ``generation.computed``."""
        for block in sequence.blocks[before // self._size : sequence.computed // self._size]:
            self._promised.pop(block, None)

    def clear(self) -> None:
        """Forget all promised blocks; they will not be computed."""
        for block in self._promised:
            self._pool.forget(block)
        self._promised.clear()

    def _awaited(self, sequence: RunningSequence) -> set[RunningSequence]:
        """The sequences whose promised blocks ``sequence`` waits for."""
        if sequence.computed != sequence.cached:  # the sequence has begun
            return set()
        shared = islice(sequence.blocks, sequence.cached // self._size)
        return {self._promised[block] for block in shared if block in self._promised}

    def _waits(self, sequence: RunningSequence) -> int:
        """Number of passes that must be launched one after another before ``sequence`` can begin."""
        return max((1 + self._waits(owner) for owner in self._awaited(sequence)), default=0)


def keys_of(token_ids: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """A key of `KEY_BYTES` for each full block of a prompt: keys are equal if the block and all blocks before it hold
    the same tokens."""
    tokens, step = memoryview(array("q", token_ids)).cast("B"), 8 * block_size
    digest, keys = hashlib.blake2b(digest_size=KEY_BYTES), []
    for end in range(step, len(tokens) + 1, step):
        digest.update(tokens[end - step : end])
        keys.append(digest.digest())
    return tuple(keys)
