"""Which sequences ride in the next pass, and in which micro-batch: the paper's Algorithm 2, mended, on passes.

Knows requests, KV blocks and token counts; refuses to know tensors, schedules and text. Every request is in exactly
one place: waiting, alive, or finished.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from moelight.core.errors import InputError
from moelight.core.policy import Policy
from moelight.core.request import Request
from moelight.engine.prefix_cache import PrefixCache
from moelight.hrm.footprint import kv_buffer_tokens, pass_tokens
from moelight.memory.kv import BlockPool

# Of a prompt, where the rest of it attends on a slower processor than the whole would.
LEAST_SHARE = 0.5


@dataclass(kw_only=True, slots=True, eq=False)
class RunningSequence:
    """One request in progress, as far as passes have been launched.

    Attributes:
        keys: of the full blocks of its prompt.
        cached: its first tokens, which others compute or have computed.
        place: where the newest token is in the pool of tokens, while it is alive.
        computed: its first tokens, whose keys and values are in ``blocks`` once what was launched is done.
        chosen: tokens that were chosen, or will be by what was launched.
        generated: those of them that have arrived.
        finished: it has ended; what still arrives is dropped.
        sample: which of the request's answers it is.
    """

    request: Request
    seed: int
    max_tokens: int
    sample: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: tuple[bytes, ...] = ()
    cached: int = 0
    place: int = -1
    computed: int = 0
    chosen: int = 0
    generated: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Those of its prompt that are computed: all, or all but the last where no token follows it."""
        tokens = len(self.request.token_ids)
        return tokens if self.max_tokens > 0 else max(1, tokens - 1)

    @property
    def waiting_tokens(self) -> int:
        """Tokens not in the cache yet: the rest of the prompt, or the newest token."""
        return self.prompt_tokens + self.chosen - self.computed


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceChunk:
    """What one generation brings to one micro-batch: ``count`` tokens from position ``start``. It stays true while its
    generation goes on."""

    generation: RunningSequence
    start: int
    count: int

    @property
    def decodes(self) -> bool:
        """It is a generated token."""
        return self.start >= len(self.generation.request.token_ids)

    @property
    def completes(self) -> bool:
        """After it every token is in the cache, so the next one can be chosen."""
        return self.start + self.count >= self.generation.prompt_tokens

    @property
    def scored(self) -> range:
        """The prompt's positions that are to be scored and follow one of its tokens."""
        request = self.generation.request
        if request.sampling.prompt_logprobs is None:
            return range(0)
        first, last = max(request.scored_from, self.start + 1), min(self.start + self.count, len(request.token_ids) - 1)
        return range(first, max(first, last + 1))

    @property
    def earlier(self) -> int:
        """How many tokens were chosen before the one that follows a piece that completes."""
        return self.start + self.count - len(self.generation.request.token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """A part of the prompt; nothing where it decodes: that token is in the pool."""
        return self.generation.request.token_ids[self.start : self.start + self.count]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchPlan:
    """The pieces of one micro-batch, generated tokens first. ``prefill_only``: none needs the cache."""

    pieces: tuple[SequenceChunk, ...]
    prefill_only: bool

    @property
    def tokens(self) -> int:
        """Rows of the micro-batch."""
        return sum(piece.count for piece in self.pieces)


@dataclass(kw_only=True, slots=True)
class Admitted:
    """How many sequences were admitted so far, and their tokens: of prompts, those of them that were in the cache, and
    the most that answers may have."""

    sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0


class Batcher:
    """Admits, packs and retires. A request holds KV blocks for its longest possible answer from its admission on, so
    nothing alive is ever pushed out. Whoever waits is taken from the source when there is room, and one ahead, so that
    it is known whether more will come: `busy` and `waiting` may ask the source.

    It runs ahead of the tokens: `launched` takes it that every sequence goes on, and lets go of those that end for
    sure, for the lanes do what was launched in order. `next_pass` changes nothing but whom it admits, so its answer may
    be dropped and asked for again when a sequence has ended early. ``policy`` may change between passes, within the
    allocation: fewer sequences than are alive come about as they end.
    """

    def __init__(
        self,
        policy: Policy,
        pool: BlockPool,
        *,
        discrete: bool,
        window: int | None = None,
        prefix_caching: bool = False,
    ) -> None:
        """``window``: the positions that the model's attention sees, if not all. ``prefix_caching``: prompts that begin
        alike share the blocks of what they have in common."""
        self.policy, self._pool, self._discrete, self._window = policy, pool, discrete, window
        self._allotted = policy
        self._buffer_tokens = int(kv_buffer_tokens(policy)) if policy.attention_device == "gpu" else None
        self._source: Iterator[RunningSequence] = iter(())
        self._first: RunningSequence | None = None  # taken from the source, and not admitted yet
        self.admitted = Admitted()
        self._running: dict[RunningSequence, None] = {}
        # Across a link, prompts at their beginning attend on the device, and the rest of others on the host.
        least = LEAST_SHARE if discrete and policy.attention_device == "cpu" else 0.0
        self._prefix_cache = PrefixCache(
            pool, block_size=policy.kv_block_size, enabled=prefix_caching, least_share=least
        )
        self._places = list(range(places(policy, pool.blocks) - 1, -1, -1))

    def add(self, generations: Iterable[RunningSequence]) -> None:
        """Queue more work, served in this order, and asked for no sooner than there is room for it."""
        self._source = chain(self._source, generations)

    @property
    def busy(self) -> bool:
        """Something is waiting or alive."""
        return bool(self._running) or self.waiting

    @property
    def waiting(self) -> bool:
        """Something has not been admitted yet."""
        return self._ahead() is not None

    @property
    def running(self) -> Collection[RunningSequence]:
        """Admitted and not finished, in the order of admission."""
        return self._running.keys()

    def blocks_for(self, tokens: int) -> int:
        """KV blocks a request holds while it is alive, if it may reach ``tokens``."""
        return -(-tokens // self.policy.kv_block_size)

    def check_buffer(self, tokens: int) -> None:
        """Refuse a request that may reach ``tokens`` where the device attends, and its buffer for the contexts of one
        micro-batch is too small for this one alone.

        Raises:
            InputError: says how much there is, and what would do.
        """
        policy, room = self._allotted, self._buffer_tokens
        need = tokens if self._window is None else min(tokens, self._window - 1 + policy.micro_batch_tokens)
        if room is None or need <= room:
            return
        least = -(-4 * need * policy.batch_size // (5 * policy.kv_tokens))
        more = f"a micro_batch_size of {least}" if need <= policy.kv_tokens else f"kv_tokens of {need}"
        raise InputError(
            f"prompt and completion may reach {tokens} tokens, a buffer for the contexts of one micro-batch holds "
            f"{room}; lower max_tokens, or take {more} or more",
            code="kv_capacity_exceeded",
        )

    def next_pass(self) -> list[MicroBatchPlan]:
        """Every sequence that decodes, then as many prompt tokens as the pass, N and the cache allow; under static
        admission either what is left of the batch's prompts, or the whole batch decodes."""
        room = max(pass_tokens(self.policy), len(self._running))
        static = self.policy.admission == "static"
        prompts: list[SequenceChunk] = []
        if static:
            self._admit_batch()
        prefills = static and any(not generation.chosen for generation in self._running)
        going = [
            generation
            for generation in self._running
            if not ((prefills and generation.chosen) or self._prefix_cache.waiting(generation))
        ]
        # Those that decode first: who waited for another's prompt may have much to compute, and was admitted earlier.
        decoding = [_piece(generation, generation.waiting_tokens) for generation in going if generation.chosen]
        room -= len(decoding)
        for generation in going:
            if not generation.chosen:
                count = min(generation.waiting_tokens, room)
                prompts.append(_piece(generation, count))
                room -= count
        while not static and room > 0 and (admitted := self._admit()) is not None:
            if self._prefix_cache.waiting(admitted):
                continue
            count = min(admitted.waiting_tokens, room)
            prompts.append(_piece(admitted, count))
            room -= count
        whole, rest = self._cut([piece for piece in prompts if piece.count])
        loads = [self._load([piece]) for piece in whole]
        if not self._discrete:
            return loads + self._pack(decoding + rest)
        prefill_only = [piece for piece in rest if piece.start == 0]
        cached = decoding + [piece for piece in rest if piece.start]
        return loads + self._pack(prefill_only) + self._pack(cached, in_buffer=True)

    def launched(self, loads: Sequence[MicroBatchPlan]) -> None:
        """``loads`` are on their way. Of a sequence that ends with them, blocks and place are free for the next pass:
        its lanes work in order, so nothing of these is overwritten before it was read."""
        for load in loads:
            for piece in load.pieces:
                generation = piece.generation
                generation.computed += piece.count
                if not piece.decodes:
                    self._prefix_cache.computed(generation, before=piece.start)
                if piece.completes:
                    generation.chosen += generation.max_tokens > 0
                    if generation.chosen == generation.max_tokens:
                        self.retire(generation)

    def retire(self, generation: RunningSequence) -> None:
        """Free the blocks and the place of a generation; nothing to do where they have been freed."""
        if generation in self._running:
            del self._running[generation]
            self._pool.release(generation.blocks)
            self._places.append(generation.place)

    def clear(self, *, failed: bool = False) -> None:
        """Forget everything that is not finished, and where more would come from. ``failed``: what was launched may
        not have been computed, so nothing is known of the cache."""
        self._source, self._first = iter(()), None
        self._prefix_cache.clear()
        if failed:
            self._pool.forget_all()
        for generation in list(self._running):
            self.retire(generation)

    def _admit_batch(self) -> None:
        """The next N sequences, or as many as the cache holds, once the last of the batch before has finished."""
        if not self._running:
            while self._admit() is not None:
                pass

    def _ahead(self) -> RunningSequence | None:
        """Who is admitted next."""
        if self._first is None:
            self._first = next(self._source, None)
        return self._first

    def _admit(self) -> RunningSequence | None:
        if len(self._running) >= self.policy.batch_size or (first := self._ahead()) is None:
            return None
        shared = self._prefix_cache.find(first)
        need = self.blocks_for(len(first.request.token_ids) + first.max_tokens) - len(shared)
        if need > self._pool.free_beside(shared):
            return None
        self._pool.share(shared)
        self._prefix_cache.admit(first, shared, self._pool.take(need))
        first.place = self._places.pop()
        self._running[first], self._first = None, None
        self.admitted.sequences += 1
        self.admitted.prompt_tokens += len(first.request.token_ids)
        self.admitted.cached_tokens += first.cached
        self.admitted.answer_tokens += first.max_tokens
        return first

    def _cut(self, prompts: list[SequenceChunk]) -> tuple[list[SequenceChunk], list[SequenceChunk]]:
        """Pieces that fill a micro-batch alone, in order, and the remainders, which come after them."""
        whole, rest, most = [], [], self.policy.micro_batch_tokens
        for piece in prompts:
            start, left = piece.start, piece.count
            while left > most:
                whole.append(SequenceChunk(generation=piece.generation, start=start, count=most))
                start, left = start + most, left - most
            rest.append(SequenceChunk(generation=piece.generation, start=start, count=left))
        return whole, rest

    def _pack(self, pieces: list[SequenceChunk], *, in_buffer: bool = False) -> list[MicroBatchPlan]:
        """``in_buffer``: where the device attends, all that these pieces see must fit its buffer together."""
        parts = partition(
            pieces,
            max_items=self.policy.micro_batch_size,
            max_tokens=self.policy.micro_batch_tokens,
            max_seen=self._buffer_tokens if in_buffer else None,
            seen=lambda piece: self._buffered(piece.start, piece.count),
        )
        return [self._load(part) for part in parts]

    def _buffered(self, start: int, count: int) -> int:
        """Places in the buffer for ``count`` tokens after ``start`` earlier ones."""
        return count + (start if self._window is None else min(start, self._window - 1))

    def _load(self, pieces: list[SequenceChunk]) -> MicroBatchPlan:
        prefill_only = self._discrete and all(piece.start == 0 for piece in pieces)
        return MicroBatchPlan(
            pieces=tuple(sorted(pieces, key=lambda piece: not piece.decodes)), prefill_only=prefill_only
        )


def places(policy: Policy, blocks: int) -> int:
    """Sequences that can be alive at a time under any policy of the allocation of this one: each brings a token to a
    pass, and holds one of the ``blocks`` of the cache."""
    return min(int(pass_tokens(policy)), blocks)


def partition(
    pieces: Sequence[SequenceChunk],
    *,
    max_items: int,
    max_tokens: int,
    max_seen: int | None = None,
    seen: Callable[[SequenceChunk], int] = lambda piece: piece.start + piece.count,
) -> list[list[SequenceChunk]]:
    """Algorithm 2 (appendix A.2), mended: longest first, each into the lightest partition that has room.

    The published form tries one partition and drops what does not fit; here every partition is tried, then a new one
    is opened, so each piece lands in exactly one. Equal token counts are balanced by context length. With
    ``max_seen``, the ``seen`` tokens of a partition are bounded too; a piece above the bound is alone.
    """
    tokens = sum(piece.count for piece in pieces)
    least = max(-(-len(pieces) // max_items), -(-tokens // max_tokens))
    if max_seen is not None:
        least = max(least, min(len(pieces), -(-sum(map(seen, pieces)) // max_seen)))
    ordered = sorted(pieces, key=lambda piece: (-piece.count, -piece.start))
    if least <= 1:
        return [ordered] if ordered else []
    parts: list[list[SequenceChunk]] = [[] for _ in range(least)]
    everything_seen = [0] * least
    lightest = [(0, 0, at) for at in range(least)]  # a heap of (tokens, context, place in ``parts``)
    for piece in ordered:
        too_full, mine = [], 0 if max_seen is None else seen(piece)
        while lightest:
            load = heapq.heappop(lightest)
            at = load[2]
            room = len(parts[at]) < max_items and load[0] + piece.count <= max_tokens
            if room and (max_seen is None or not parts[at] or everything_seen[at] + mine <= max_seen):
                break
            too_full.append(load)
        else:
            load = (0, 0, len(parts))
            parts.append([])
            everything_seen.append(0)
        at = load[2]
        parts[at].append(piece)
        everything_seen[at] += mine
        heapq.heappush(lightest, (load[0] + piece.count, load[1] + piece.start, at))
        for full in too_full:
            heapq.heappush(lightest, full)
    return [part for part in parts if part]


def _piece(generation: RunningSequence, count: int) -> SequenceChunk:
    return SequenceChunk(generation=generation, start=generation.computed, count=count)
