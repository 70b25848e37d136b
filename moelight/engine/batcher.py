"""The batcher: admits sequences, packs the next pass into micro-batches (the paper's Algorithm 2, corrected), and keeps
the prefix cache. Depends only on requests, KV blocks, token counts and the clock."""

from __future__ import annotations

import bisect
import hashlib
import heapq
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from operator import attrgetter
from typing import NamedTuple

from moelight.core.errors import InputError
from moelight.core.policy import Policy
from moelight.core.request import Request
from moelight.engine.window_blocks import WindowBlocks, WindowTable
from moelight.hrm.footprint import kv_buffer_tokens, pass_tokens
from moelight.paging.kv import BlockPool
from moelight.profiles.rope import ByLength
from moelight.profiles.workload import EXPECTED_GEN_LEN

KEY_BYTES = 16
NOT_ADMITTED = 1 << 62
LENGTH_WEIGHT = 8  # finished answers that the planned length weighs as much as
MOST_WAITS = 2  # bounds chains of rows that each extend the row before: every link delays its row by a pass
MIN_PREFIX_SHARE = 0.5  # of a prompt, where the rest of it attends on a slower processor than the whole would
WAIT_SHARE = 0.25  # of a prompt; a shorter prefix, such as the head of a chat template, is not worth waiting a pass for


class PrefixCache:
    """Common prefixes of prompts, computed once. A full block is found by the digest of all tokens up to its end.

    An admitted sequence promises the new blocks of its prompt; a sequence that shares them waits until the passes that
    compute them are launched. It waits only for sequences admitted before it, so the first one never waits.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        enabled: bool,
        least_share: float,
        by_length: ByLength | None = None,
        windows: WindowBlocks | None = None,
    ) -> None:
        """``least_share``: shorter prefixes, as a share of the prompt, are not reused. ``windows``: blocks of layers
        that attend to the last positions only; None without such layers."""
        self._pool, self._size, self._by_length, self._windows = pool, block_size, by_length, windows
        self._enabled, self._least_share = enabled, least_share
        self._promised: dict[int, RunningSequence] = {}

    def find(self, sequence: RunningSequence) -> list[int]:
        """Return, in order, the blocks of the longest known prefix of a prompt; promised blocks only if the wait is
        worthwhile. At least one token, and every token whose logits are scored, whose hidden state is pooled or whose
        experts are returned, remain to be computed."""
        if not self._enabled:
            return []
        request = sequence.request
        prompt, rule = len(request.token_ids), self._by_length
        if rule is not None and rule.crosses(prompt, prompt + sequence.max_tokens):
            return []  # its blocks are written anew
        if not sequence.keys:
            regime = 0 if rule is None else rule.regime(prompt)
            sequence.keys = keys_of(request.token_ids[: sequence.prompt_tokens], self._size, regime)
        limit = sequence.prompt_tokens - 1
        if request.sampling.return_routed_experts:
            return []
        if request.pooling is not None:
            limit = request.pooled.start
        elif request.sampling.prompt_logprobs is not None:
            limit = min(limit, request.scored_from - 1)
        blocks: list[int] = []
        cached = 0
        waits: dict[RunningSequence, int] = {}
        for key in islice(sequence.keys, limit // self._size):
            block = self._pool.find(key)
            if block is None:
                break
            if (owner := self._promised.get(block)) is not None:
                if owner not in waits:
                    waits[owner] = 1 + self._waits(owner)
                if waits[owner] > MOST_WAITS:
                    break
            blocks.append(block)
            cached += not waits
        if (len(blocks) - cached) * self._size < WAIT_SHARE * len(request.token_ids):
            del blocks[cached:]
        del blocks[len(self.find_window(sequence, blocks)) :]
        return blocks if len(blocks) * self._size >= self._least_share * len(request.token_ids) else []

    def find_computed(self, sequence: RunningSequence) -> list[int]:
        """As `find`, for a sequence that is computed again: blocks that no launched pass computes yet are left out."""
        blocks = list(takewhile(lambda block: block not in self._promised, self.find(sequence)))
        return blocks[: len(self.find_window(sequence, blocks))]

    def find_window(self, sequence: RunningSequence, shared: Sequence[int]) -> Sequence[int]:
        """The blocks of windows behind the longest part of the prefix ``shared`` for which they are all found, as
        `WindowBlocks.open` takes them: as many as blocks of that part."""
        if self._windows is None:
            return shared
        owners = [self._promised.get(block) for block in shared]
        return self._windows.find(sequence.keys, [None if owner is None else owner.window for owner in owners])

    def admit(self, sequence: RunningSequence, shared: Sequence[int], new_blocks: Sequence[int]) -> None:
        """Assign ``shared``, the blocks returned by `find`, and the new blocks ``new_blocks``, which ``sequence``
        promises."""
        sequence.blocks = [*shared, *new_blocks]
        sequence.cached = sequence.computed = len(shared) * self._size
        for key, block in zip(islice(sequence.keys, len(shared), None), new_blocks, strict=False):
            if self._pool.name(block, key):
                self._promised[block] = sequence

    def waiting(self, sequence: RunningSequence) -> bool:
        """True if the sequence shares blocks that no launched pass computes yet."""
        return bool(self._promised and self._awaited(sequence))

    def computed(self, sequence: RunningSequence, before: int) -> None:
        """Record that a launched pass raises the cached tokens from ``before`` to ``sequence.computed``."""
        for block in sequence.blocks[before // self._size : sequence.computed // self._size]:
            self._promised.pop(block, None)
        if self._windows is not None and sequence.window is not None:
            self._windows.computed(sequence.window, before, sequence.computed)

    def clear(self, *, failed: bool = False) -> None:
        """Drop all promised blocks; they will not be computed. ``failed``: all blocks."""
        for block in self._promised:
            self._pool.forget(block)
        self._promised.clear()
        if failed:
            self._pool.forget_all()
        if self._windows is not None:
            self._windows.clear(failed=failed)

    def _awaited(self, sequence: RunningSequence) -> set[RunningSequence]:
        if sequence.computed != sequence.cached:  # the sequence has begun
            return set()
        shared = islice(sequence.blocks, sequence.cached // self._size)
        return {self._promised[block] for block in shared if block in self._promised}

    def _waits(self, sequence: RunningSequence) -> int:
        """Number of passes that must be launched one after another before ``sequence`` can begin."""
        return max((1 + self._waits(owner) for owner in self._awaited(sequence)), default=0)


def keys_of(token_ids: Sequence[int], block_size: int, regime: int = 0) -> tuple[bytes, ...]:
    """One key of `KEY_BYTES` per full block of a prompt; equal keys: equal tokens in the block and in all before it, at
    positions stretched alike."""
    tokens, step = memoryview(array("q", token_ids)).cast("B"), 8 * block_size
    digest, keys = hashlib.blake2b(digest_size=KEY_BYTES, salt=regime.to_bytes(8, "little")), []
    for end in range(step, len(tokens) + 1, step):
        digest.update(tokens[end - step : end])
        keys.append(digest.digest())
    return tuple(keys)


@dataclass(kw_only=True, slots=True, eq=False)
class RunningSequence:
    """One sequence in progress, as of the last launched pass.

    Attributes:
        cached: leading prompt tokens taken from the prefix cache; ``keys`` are the keys of its full blocks.
        slot: slot of the newest token in the token pool, while the sequence is running.
        computed: leading tokens whose keys and values are in ``blocks`` once all launched passes are done.
        chosen: number of tokens chosen by all launched passes; ``generated`` are those collected so far.
        attempt: how often the answer was generated before, and had not the structure asked for; ``discarded``: the
            tokens of those attempts.
        anew: so many generated tokens are, or were, computed a second time, with the prompt (`ByLength`, or after the
            sequence was suspended).
        grows: blocks are reserved for the expected length of the answer, and added one by one beyond it; else for
            ``max_tokens``.
        window: its blocks in layers that attend to the last positions only; None without such layers, or while it is
            not running.
        number: place in the order of first admission; `NOT_ADMITTED` before it.
        reserved: generated tokens for which blocks were reserved at the first admission.
        arrival_s: when the request was taken, on the clock of `time.perf_counter`; ``scheduled_s``: when it was first
            admitted; ``first_token_s``: when its first token was collected.
    """

    request: Request
    seed: int
    max_tokens: int
    sample: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: tuple[bytes, ...] = ()
    cached: int = 0
    slot: int = -1
    computed: int = 0
    chosen: int = 0
    generated: list[int] = field(default_factory=list)
    finished: bool = False
    attempt: int = 0
    discarded: int = 0
    anew: int = 0
    grows: bool = False
    window: WindowTable | None = None
    number: int = NOT_ADMITTED
    reserved: int = 0
    arrival_s: float = field(default_factory=time.perf_counter)
    scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens to compute: all, or all but the last if the prompt is only scored."""
        tokens = len(self.request.token_ids)
        return tokens if self.max_tokens > 0 or self.request.pooling is not None else max(1, tokens - 1)

    @property
    def waiting_tokens(self) -> int:
        """Tokens not in the cache yet: the rest of the prompt, or the newest token."""
        return self.prompt_tokens + self.chosen - self.computed

    @property
    def fills(self) -> bool:
        """True while the prompt, or all that is computed anew, is not in the cache."""
        return not self.chosen or self.computed < self.prompt_tokens + self.anew


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceChunk:
    """The tokens of one sequence in one micro-batch: ``count`` from position ``start``; valid while it is running.

    Attributes:
        anew: so many generated tokens are computed as if they belonged to the prompt.
        newest: of a decoding chunk whose tokens the host has: the newest token, and the drafts after it. Empty: the one
            token is in the token pool.
    """

    sequence: RunningSequence
    start: int
    count: int
    anew: int = 0
    newest: tuple[int, ...] = ()

    @property
    def decodes(self) -> bool:
        return not self.anew and self.start >= len(self.sequence.request.token_ids)

    @property
    def reaches(self) -> int:
        """The length of the sequence that its positions follow: all of the prompt, whatever part this is."""
        return max(len(self.sequence.request.token_ids) + self.anew, self.start + self.count)

    @property
    def completes(self) -> bool:
        """True if every token is in the cache after this chunk, so that the next token can be chosen."""
        return self.start + self.count >= self.sequence.prompt_tokens + self.anew

    @property
    def scored(self) -> range:
        """Prompt positions to score whose preceding token is in this chunk."""
        request = self.sequence.request
        if request.sampling.prompt_logprobs is None or request.pooling is not None or self.anew:
            return range(0)
        first, last = max(request.scored_from, self.start + 1), min(self.start + self.count, len(request.token_ids) - 1)
        return range(first, max(first, last + 1))

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.newest[1:]

    @property
    def samples(self) -> int:
        """The number of last rows that are followed by a chosen token: one, and one for each draft."""
        return 1 + len(self.drafts) if self.completes and self.sequence.max_tokens else 0

    @property
    def pooled(self) -> range:
        """Prompt positions in this chunk whose final hidden states are pooled."""
        positions = self.sequence.request.pooled
        first, end = max(positions.start, self.start), min(positions.stop, self.start + self.count)
        return range(first, max(first, end))

    @property
    def earlier(self) -> int:
        """Number of tokens chosen before the first one that follows a completing chunk."""
        return self.start + self.count - len(self.drafts) - len(self.sequence.request.token_ids)

    def accepted(self, tokens: Sequence[int]) -> int:
        """The number of first drafts that are the tokens chosen, ``tokens`` after each row that samples."""
        pairs = zip(self.drafts, tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt tokens of the chunk; of a decoding chunk ``newest``."""
        if self.decodes:
            return self.newest
        tokens = self.sequence.request.token_ids
        if self.anew:
            tokens = (*tokens, *self.sequence.generated[: self.anew])
        return tokens[self.start : self.start + self.count]


class SampledRow(NamedTuple):
    """The row of ``chunk`` that samples its token number ``at``; those before are the drafts of the chunk, if they are
    accepted."""

    chunk: SequenceChunk
    at: int

    @property
    def earlier(self) -> int:
        """Number of tokens chosen before, if the drafts are accepted."""
        return self.chunk.earlier + self.at

    @property
    def behind(self) -> tuple[int, ...]:
        """The drafts up to this row."""
        return self.chunk.drafts[: self.at]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchPlan:
    """The chunks of one micro-batch, generated tokens first, those without drafts before the others. ``prefill_only``:
    no chunk reads the cache."""

    chunks: tuple[SequenceChunk, ...]
    prefill_only: bool

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def continues(self) -> bool:
        """True if a chunk begins behind tokens of an earlier micro-batch of this pass (a prompt cut in two)."""
        return any(chunk.start > chunk.sequence.computed for chunk in self.chunks)


@dataclass(kw_only=True, slots=True)
class Admitted:
    """Totals over all admitted sequences; ``answer_tokens`` are those for which KV blocks were reserved: the most that
    they may generate, or the expected ones. ``suspended`` counts suspensions."""

    sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    suspended: int = 0


class AnswerLengths:
    """The expected length of answers that nothing but the context limits: ``planned`` at first, then learned. All
    tokens so far over the finished answers estimate the mean, since those that end first are the short ones."""

    def __init__(self, planned: int) -> None:
        self._planned, self.tokens, self.ended = planned, 0, 0

    @property
    def expected(self) -> int:
        if not self.ended:
            return self._planned
        return -(-(LENGTH_WEIGHT * self._planned + self.tokens) // (LENGTH_WEIGHT + self.ended))


# The drafts of sequences that decode, for each of them and in all at most so many, beside so many tokens of prompts.
Propose = Callable[[Sequence[tuple[RunningSequence, int]], int, int], Mapping[RunningSequence, Sequence[int]]]


class Batcher:
    """Admits, packs and retires sequences. ``policy`` may be replaced between passes, within the allocation.

    A sequence with ``max_tokens`` holds the KV blocks for its longest answer from admission on. One without (``grows``)
    is admitted with blocks for an answer of the expected length, and takes one more where it needs one. If none is
    free, the youngest sequences that grow are suspended: their blocks are free, and they are admitted again before all
    that follow them, when their prompts and generated tokens are computed once more. The oldest one is never suspended
    for a younger one, and the cache holds the longest sequence (`Engine.check`), so every sequence ends.

    `launched` retires sequences that certainly finish; `next_pass` changes no state but admissions, suspensions and
    blocks, so its result may be dropped.
    """

    def __init__(
        self,
        policy: Policy,
        pool: BlockPool,
        *,
        discrete: bool,
        window: int | None = None,
        prefix_caching: bool = False,
        by_length: ByLength | None = None,
        expected_len: int = EXPECTED_GEN_LEN,
        windows: WindowBlocks | None = None,
    ) -> None:
        """``expected_len``: the expected length of answers without ``max_tokens``, before any is finished; ``windows``:
        blocks of layers that attend to the last positions only, if there are such layers."""
        self.policy = self._allotted = policy
        self._pool, self._discrete, self._window, self._by_length = pool, discrete, window, by_length
        self._windows = windows
        self._buffer_tokens = int(kv_buffer_tokens(policy)) if policy.attention_device == "gpu" else None
        self._source: Iterator[RunningSequence | None] = iter(())
        self._requeued: list[RunningSequence] = []  # by number
        self._first: RunningSequence | None = None  # taken from the source, not admitted yet
        self.admitted = Admitted()
        self.lengths = AnswerLengths(expected_len)
        self._running: dict[RunningSequence, None] = {}
        self._growing: dict[RunningSequence, None] = {}  # those of them that grow
        # With attention on the CPU beside a GPU, a prompt's first chunk attends on the GPU, later ones on the CPU.
        least = MIN_PREFIX_SHARE if discrete and policy.attention_device == "cpu" else 0.0
        self._prefix_cache = PrefixCache(
            pool,
            policy.kv_block_size,
            enabled=prefix_caching,
            least_share=least,
            by_length=by_length,
            windows=windows,
        )
        self._places = list(range(places(policy, pool.blocks) - 1, -1, -1))

    def add(self, sequences: Iterable[RunningSequence | None]) -> None:
        """Append sequences to the queue; they are read and admitted in order, when there is capacity. A None among them
        is no sequence at present: the next one is read later."""
        self._source = chain(self._source, sequences)

    def requeue(self, sequence: RunningSequence) -> None:
        """Put ``sequence`` before all that are younger and not running."""
        bisect.insort(self._requeued, sequence, key=attrgetter("number"))

    @property
    def windows(self) -> WindowBlocks | None:
        """Blocks of layers that attend to the last positions only; None without such layers."""
        return self._windows

    @property
    def requeued(self) -> bool:
        """True if a requeued sequence has not been admitted yet."""
        return bool(self._requeued)

    @property
    def busy(self) -> bool:
        return bool(self._running) or self.waiting

    @property
    def waiting(self) -> bool:
        """True if any sequence has not been admitted yet."""
        if self._first is None and not self._requeued:
            self._first = next(self._source, None)
        return bool(self._requeued) or self._first is not None

    @property
    def running(self) -> Collection[RunningSequence]:
        """Admitted, unfinished sequences in the order of admission."""
        return self._running.keys()

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.policy.kv_block_size)

    def check_buffer(self, tokens: int) -> None:
        """Raise InputError if ``tokens`` of one request exceed the device's context buffer of one micro-batch."""
        policy, room = self._allotted, self._buffer_tokens
        need = tokens if self._window is None else min(tokens, self._window - 1 + policy.micro_batch_tokens)
        if room is None or need <= room:
            return
        least = -(-4 * need * policy.batch_size // (5 * policy.kv_tokens))
        more = f"a micro_batch_size of {least}" if need <= policy.kv_tokens else f"kv_tokens of {need}"
        raise InputError(
            f"prompt and completion may reach {tokens} tokens, a buffer for the contexts of one micro-batch holds "
            f"{room}; set a lower max_tokens, or take {more} or more",
            code="kv_capacity_exceeded",
        )

    def next_pass(self, propose: Propose | None = None) -> list[MicroBatchPlan]:
        """Every decoding sequence, then as many prompt tokens as the pass, N and the cache allow. Under static
        admission a pass holds either the batch's remaining prompt tokens or its decoding sequences. Empty while all
        sequences are to be computed anew and their newest tokens have not been collected.

        ``propose``: all tokens have been collected, and decoding sequences bring drafts in what is left of the pass.
        """
        static = self.policy.admission == "static"
        self._grow()
        self._free_behind_windows()
        if static and not self._running:  # the next N sequences, or as many as the cache holds
            while self._admit() is not None:
                pass
        ready = [sequence for sequence in self._running if self._ready(sequence)]
        prefills = static and any(sequence.fills for sequence in ready)
        going = [
            sequence
            for sequence in ready
            if not ((prefills and not sequence.fills) or self._prefix_cache.waiting(sequence))
        ]
        # Decoding sequences first: an earlier one that waited for another's prompt may have many tokens to compute.
        decoding = [running for running in going if not running.fills]
        room = max(pass_tokens(self.policy), len(self._running)) - len(decoding)
        full_chunks: list[SequenceChunk] = []  # as large as a micro-batch
        rest: list[SequenceChunk] = []
        coming = iter([running for running in going if running.fills])
        while (sequence := next(coming, None) or (None if static or room <= 0 else self._admit())) is not None:
            if self._prefix_cache.waiting(sequence):
                continue
            count, limit = min(sequence.waiting_tokens, room), self.policy.micro_batch_tokens
            room -= count
            self._extend_window(sequence, count)
            for begin in range(0, count, limit):
                size = min(limit, count - begin)
                chunk = SequenceChunk(
                    sequence=sequence, start=sequence.computed + begin, count=size, anew=sequence.anew
                )
                (full_chunks if begin + size < count else rest).append(chunk)
        plans = [self._plan([chunk]) for chunk in full_chunks]
        prompt_tokens = sum(chunk.count for chunk in (*full_chunks, *rest))
        decoded = self._decoded(decoding, propose, int(room), prompt_tokens)
        if not self._discrete:
            return plans + self._pack(decoded + rest)
        prefill_only = [chunk for chunk in rest if chunk.start == 0]
        cached = decoded + [chunk for chunk in rest if chunk.start]
        return plans + self._pack(prefill_only) + self._pack(cached, in_buffer=True)

    def _decoded(
        self, decoding: Sequence[RunningSequence], propose: Propose | None, room: int, prompt_tokens: int
    ) -> list[SequenceChunk]:
        """One row of every sequence of ``decoding``, and its drafts: in all at most ``room``, and of no sequence more
        than it may generate, its blocks hold and a micro-batch takes."""
        if propose is None:
            if self._windows is not None:
                for running in decoding:
                    self._extend_window(running, 1)
            return [SequenceChunk(sequence=running, start=running.computed, count=1) for running in decoding]
        size = self.policy.kv_block_size
        limits = [
            min(
                running.max_tokens - running.chosen,
                len(running.blocks) * size - running.computed,
                self.policy.micro_batch_tokens,
                *(() if self._windows is None else (size,)),
            )
            - 1
            for running in decoding
        ]
        assert all(len(running.generated) == running.chosen for running in decoding), "drafts follow collected tokens"
        drafts = propose(list(zip(decoding, limits, strict=True)), room, prompt_tokens)
        for running in decoding if self._windows is not None else ():
            self._extend_window(running, 1 + len(drafts.get(running, ())))
        return [
            SequenceChunk(
                sequence=running,
                start=running.computed,
                count=1 + len(drafts.get(running, ())),
                newest=(running.generated[-1], *drafts.get(running, ())),
            )
            for running in decoding
        ]

    def _free_behind_windows(self) -> None:
        """Free the blocks that no token of a running sequence sees any more, in layers with a window. The next pass may
        write them, since lanes run in order."""
        for running in self._running if self._windows is not None else ():
            if self._windows is not None and running.window is not None:
                self._windows.advance(running.window, running.computed, decodes=not running.fills)

    def _extend_window(self, sequence: RunningSequence, count: int) -> None:
        """Add the blocks for the next ``count`` tokens of ``sequence`` in layers with a window."""
        if self._windows is not None and sequence.window is not None:
            keys = () if sequence.anew or not sequence.fills else sequence.keys
            self._windows.extend(sequence.window, sequence.computed + count, keys)

    def launched(self, plans: Sequence[MicroBatchPlan]) -> None:
        """Record that ``plans`` were launched. Blocks and token slots of sequences that finish are free for the next
        pass, since lanes run in order."""
        for plan in plans:
            for chunk in plan.chunks:
                sequence = chunk.sequence
                sequence.computed += chunk.count - len(chunk.drafts)
                if not chunk.decodes and not chunk.anew:
                    self._prefix_cache.computed(sequence, before=chunk.start)
                if chunk.completes:
                    sequence.chosen += sequence.max_tokens > 0
                    self.lengths.tokens += sequence.grows
                    if sequence.chosen == sequence.max_tokens:
                        self.retire(sequence)

    def accept(self, sequence: RunningSequence, count: int) -> None:
        """Record that the last pass of ``sequence`` accepted ``count`` drafts; the others are computed for nothing, and
        their keys and values are written over."""
        sequence.computed += count
        sequence.chosen += count
        self.lengths.tokens += count * sequence.grows

    def _ready(self, sequence: RunningSequence) -> bool:
        """False if tokens of ``sequence`` must arrive before it goes on: at the border where its positions are
        stretched anew, all of it is computed a second time."""
        rule = self._by_length
        if rule is None or not rule.anew or not sequence.chosen or sequence.computed != rule.border:
            return True
        if len(sequence.request.token_ids) + sequence.anew > rule.border:  # computed as a longer one already
            return True
        if len(sequence.generated) < sequence.chosen:
            return False
        sequence.anew, sequence.computed = sequence.chosen, 0
        return True

    def retire(self, sequence: RunningSequence) -> None:
        """Free the blocks and the token slot of a finished sequence; no effect if it was retired before."""
        if sequence in self._running:
            self._release(sequence)
            self.lengths.ended += sequence.grows
        elif sequence in self._requeued:  # suspended while its last token was on the way
            self._requeued.remove(sequence)
            self.lengths.ended += sequence.grows

    def _release(self, sequence: RunningSequence) -> None:
        del self._running[sequence]
        self._growing.pop(sequence, None)
        self._pool.release(sequence.blocks)
        if self._windows is not None and sequence.window is not None:
            self._windows.close(sequence.window)
            sequence.window = None
        self._places.append(sequence.slot)

    def _grow(self) -> None:
        """Add the block for the next token of every sequence that has none for it; oldest first, and the youngest are
        suspended if no block is free."""
        size = self.policy.kv_block_size
        full = [
            growing for growing in self._growing if not growing.fills and growing.computed >= len(growing.blocks) * size
        ]
        for sequence in sorted(full, key=attrgetter("number")):
            while sequence in self._growing and not self._pool.free:
                # A prompt in progress has promised its blocks to others, and may be scored; it needs none.
                self._suspend(max((growing for growing in self._growing if growing.chosen), key=attrgetter("number")))
            if sequence in self._growing:
                sequence.blocks += self._pool.take(1)

    def _suspend(self, sequence: RunningSequence) -> None:
        """Free the blocks of ``sequence``, which goes on when it is admitted again; its tokens in flight still arrive.
        The blocks may be written by the next pass, since lanes run in order."""
        self._release(sequence)
        sequence.blocks, sequence.slot = [], -1
        self.admitted.suspended += 1
        self.requeue(sequence)

    def clear(self, *, failed: bool = False) -> None:
        """Drop all unfinished sequences and the source. ``failed``: the contents of the cache are invalid too."""
        self._source, self._first = iter(()), None
        self._requeued.clear()
        self._prefix_cache.clear(failed=failed)
        for sequence in list(self._running):
            self._release(sequence)

    def _admit(self) -> RunningSequence | None:
        """Admit the first sequence that waits; None if there is none, or it has to go on waiting."""
        if len(self._running) >= self.policy.batch_size or not self.waiting:
            return None
        first = self._requeued[0] if self._requeued else self._first
        if first is None or len(first.generated) < first.chosen:  # tokens of a suspended one are on the way
            return None
        first.grows = first.grows and self._repeatable(first)
        shared = self._prefix_cache.find_computed(first) if first.chosen else self._prefix_cache.find(first)
        reserved = self._reserved(first)
        need = self.blocks_for(len(first.request.token_ids) + reserved) - len(shared)
        if need > self._pool.free_beside(shared):
            return None
        if self._windows is not None:
            prompt, cached = len(first.request.token_ids), len(shared) * self.policy.kv_block_size
            held = self._windows.need(prompt + first.max_tokens, prompt + first.chosen - cached)
            if not self._windows.fits(held):
                return None
            first.window = self._windows.open(held, self._prefix_cache.find_window(first, shared))
        if self._requeued:
            del self._requeued[0]
        else:
            self._first = None
        self._pool.share(shared)
        new_blocks = self._pool.take(need)
        first.slot = self._places.pop()
        if first.scheduled_s is None:
            first.scheduled_s = time.perf_counter()
        self._running[first] = None
        if first.grows:
            self._growing[first] = None
        if first.chosen:
            first.blocks, first.anew = [*shared, *new_blocks], first.chosen
            first.computed = len(shared) * self.policy.kv_block_size
        else:
            self._prefix_cache.admit(first, shared, new_blocks)
            self._count(first, reserved)
        self._extend_window(first, min(first.waiting_tokens, int(pass_tokens(self._allotted))))
        return first

    def _repeatable(self, sequence: RunningSequence) -> bool:
        """Whether all tokens of ``sequence``, computed at once, have the keys and values that they had one by one."""
        longest = len(sequence.request.token_ids) + sequence.max_tokens
        return self._by_length is None or self._by_length.repeatable(longest)

    def _count(self, sequence: RunningSequence, reserved: int) -> None:
        if sequence.number == NOT_ADMITTED:
            sequence.number = self.admitted.sequences
        sequence.reserved = reserved
        self.admitted.sequences += 1
        self.admitted.prompt_tokens += len(sequence.request.token_ids)
        self.admitted.cached_tokens += sequence.cached
        self.admitted.answer_tokens += reserved

    def _reserved(self, sequence: RunningSequence) -> int:
        """Generated tokens for which ``sequence`` gets blocks at admission: all that it may have, or as many more as an
        answer is expected to have."""
        if not sequence.grows:
            return sequence.max_tokens
        return min(sequence.max_tokens, sequence.chosen + self.lengths.expected)

    def _pack(self, chunks: list[SequenceChunk], *, in_buffer: bool = False) -> list[MicroBatchPlan]:
        """``in_buffer``: with attention on the device, the contexts of a micro-batch must fit its buffer."""
        parts = partition(
            chunks,
            max_items=self.policy.micro_batch_size,
            max_tokens=self.policy.micro_batch_tokens,
            max_seen=self._buffer_tokens if in_buffer else None,
            seen=lambda chunk: self._buffered(chunk.start, chunk.count),
        )
        return [self._plan(part) for part in parts]

    def _buffered(self, start: int, count: int) -> int:
        """Buffer slots for ``count`` tokens after ``start`` earlier ones."""
        return count + (start if self._window is None else min(start, self._window - 1))

    def _plan(self, chunks: list[SequenceChunk]) -> MicroBatchPlan:
        chunks.sort(key=lambda chunk: (not chunk.decodes, chunk.count > 1 and chunk.decodes))
        prefill_only = self._discrete and all(chunk.start == 0 for chunk in chunks)
        return MicroBatchPlan(chunks=tuple(chunks), prefill_only=prefill_only)


def places(policy: Policy, blocks: int) -> int:
    """Most sequences that can run at a time under any policy within the allocation of ``policy``."""
    return min(int(pass_tokens(policy)), blocks)


def partition(
    chunks: Sequence[SequenceChunk],
    *,
    max_items: int,
    max_tokens: int,
    max_seen: int | None = None,
    seen: Callable[[SequenceChunk], int] = lambda chunk: chunk.start + chunk.count,
) -> list[list[SequenceChunk]]:
    """Algorithm 2 (appendix A.2), corrected: longest first, each into the lightest partition that has capacity, else
    into a new one; the published form drops what does not fit the one partition that it tries. Ties are broken by
    context length. ``max_seen`` bounds the ``seen`` tokens of a partition too; a chunk above the bound is alone."""
    tokens = sum(chunk.count for chunk in chunks)
    least = max(-(-len(chunks) // max_items), -(-tokens // max_tokens))
    if max_seen is not None:
        least = max(least, min(len(chunks), -(-sum(map(seen, chunks)) // max_seen)))
    ordered = sorted(chunks, key=lambda chunk: (-chunk.count, -chunk.start))
    if least <= 1:
        return [ordered] if ordered else []
    parts: list[list[SequenceChunk]] = [[] for _ in range(least)]
    everything_seen = [0] * least
    lightest = [(0, 0, at) for at in range(least)]  # a heap of (tokens, context, place in ``parts``)
    for chunk in ordered:
        too_full, chunk_seen = [], 0 if max_seen is None else seen(chunk)
        while lightest:
            tokens, context, at = heapq.heappop(lightest)
            room = len(parts[at]) < max_items and tokens + chunk.count <= max_tokens
            if room and (max_seen is None or not parts[at] or everything_seen[at] + chunk_seen <= max_seen):
                break
            too_full.append((tokens, context, at))
        else:
            tokens, context, at = 0, 0, len(parts)
            parts.append([])
            everything_seen.append(0)
        parts[at].append(chunk)
        everything_seen[at] += chunk_seen
        for entry in (*too_full, (tokens + chunk.count, context + chunk.start, at)):
            heapq.heappush(lightest, entry)
    return [part for part in parts if part]
