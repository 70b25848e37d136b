"""A whole job as a few kinds of passes: how often each comes, and how many tokens of which sort it carries.

N sequences are alive at a time; each brings its prompt in one pass and one token in every pass after (DESIGN of the
pass). A pass carries at most N + R tokens, decoding sequences first, so prompts that do not fit one pass come in
cohorts, pass after pass, and a slot that falls free is refilled at the next pass. So a job is a row of waves of
``gen_len`` passes; or, where prompts take longer than that, one stream of cohorts. All counts may be arrays over many
candidates; none is rounded but the number of full waves, as averages over long jobs need none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moelight.profiles.workload import Workload

KINDS = ("first prompts", "prompts", "decode", "last prompts", "overlap", "last decode", "drain")


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """``count`` passes with ``decode_tokens`` sequences that decode, at a context of ``context`` tokens each, and
    ``prompt_tokens`` of prompts of ``prompt_len`` each. Arrays may hold several kinds of passes, one along the first
    dimension."""

    count: Any
    decode_tokens: Any
    prompt_tokens: Any
    context: Any
    prompt_len: Any

    @property
    def prompts(self) -> Any:
        """Prompts in a pass."""
        return self.prompt_tokens / self.prompt_len

    def kind(self, index: Any) -> Passes:
        """One of several kinds, or some of them."""
        count, decode, prompt = (a[index] for a in (self.count, self.decode_tokens, self.prompt_tokens))
        return passes(count, decode, prompt, context=self.context, prompt_len=self.prompt_len)


def passes(count: Any, decode_tokens: Any, prompt_tokens: Any, *, context: float, prompt_len: float) -> Passes:
    """`Passes` from anything numpy understands."""
    return Passes(
        count=np.asarray(count, dtype=float),
        decode_tokens=np.asarray(decode_tokens, dtype=float),
        prompt_tokens=np.asarray(prompt_tokens, dtype=float),
        context=context,
        prompt_len=prompt_len,
    )


def cache_tokens(workload: Workload, sequences: Any, block_size: int, context: int) -> Any:
    """Tokens of cache that ``sequences`` need at a time: each the average length of ``workload`` and a block that is
    not quite full, and all together room for the longest one. ``context`` is the most tokens of a sequence."""
    average, longest = _lengths(workload, context)
    return np.maximum(sequences * average, longest) + block_size * sequences


def cached_sequences(workload: Workload, tokens: Any, block_size: int, context: int) -> Any:
    """The most sequences whose `cache_tokens` are at most ``tokens``; 0 where not even the longest one fits."""
    average, longest = _lengths(workload, context)
    return np.maximum(np.minimum(tokens // (average + block_size), (tokens - longest) // block_size), 0)


def _lengths(workload: Workload, context: int) -> tuple[int, int]:
    """Tokens of an average sequence and of the longest one, at their end."""
    average, longest = (length + workload.gen_len for length in (workload.prompt_len, workload.max_prompt_len))
    return min(average, context), min(longest, context)


def passes_of(workload: Workload, batch_size: Any, riding: Any) -> Passes:
    """The `KINDS` of passes that serve ``workload`` with at most ``batch_size`` sequences alive, and R = ``riding``.

    The first cohorts start together with nothing; those of every later wave take the places of the wave before. What
    full waves leave of the requests is a last, smaller wave, which starts while the last full one runs out. Exact in
    sum: every prompt is brought once, and every sequence decodes ``gen_len`` - 1 times.
    """
    requests, gen = workload.num_requests, workload.gen_len
    running = np.minimum(np.asarray(batch_size, dtype=float), requests)
    waves = np.floor(requests / running)
    rest = requests - waves * running
    wave = _Wave.of(workload, running, batch_size, riding)
    cohorts, size = wave.cohorts, wave.size
    last = np.where(rest > 0, np.maximum(1.0, rest / size), 0.0)
    left = cohorts - last
    overlap = np.where(rest > 0, np.maximum(left - 1.0, 0.0), 0.0)
    running_out = (running * (cohorts - 1.0) - overlap * size * left) / 2.0  # tokens of the wave before the last one
    each = running_out / np.maximum(last, 1.0) + (rest - rest / np.maximum(last, 1.0)) / 2.0
    draining = np.where(rest > 0, last, cohorts) - 1.0, np.where(rest > 0, rest, running) / 2.0
    nothing = np.zeros_like(running)
    in_waves = (
        (cohorts, wave.first, wave.prompts),
        ((waves - 1.0) * cohorts, wave.refilling, wave.prompts),
        (waves * (gen - cohorts), running, nothing),
        (last, each, rest * workload.prompt_len / np.maximum(last, 1.0)),
        (overlap, rest + size * left / 2.0, nothing),
        (np.where(rest > 0, gen - last - overlap, 0.0), rest, nothing),
        (*draining, nothing),
    )
    streaming = _streaming(workload, requests / size, size, nothing)
    return _chosen(cohorts > gen, _stacked(workload, streaming), _stacked(workload, in_waves))


def static_passes_of(workload: Workload, batch_size: Any, riding: Any) -> Passes:
    """`passes_of` under static admission: a batch's prompts in as few passes as hold them, then ``gen_len`` - 1 passes
    in which all of it decodes; what full batches leave is a last, smaller one."""
    requests, more = workload.num_requests, workload.gen_len - 1.0
    running = np.minimum(np.asarray(batch_size, dtype=float), requests)
    waves = np.floor(requests / running)
    rest = requests - waves * running
    room = np.asarray(riding, dtype=float) + batch_size
    nothing = np.zeros_like(running)

    def prefill(times: Any, sequences: Any) -> tuple[Any, Any, Any]:
        tokens = sequences * workload.prompt_len
        count = np.maximum(np.ceil(tokens / room), 1.0)
        return times * count, nothing, tokens / count

    last, none = np.where(rest > 0, 1.0, 0.0), (nothing, nothing, nothing)
    decode, last_decode = (waves * more, running, nothing), (last * more, rest, nothing)
    return _stacked(workload, (prefill(waves, running), none, decode, prefill(last, rest), none, last_decode, none))


def _streaming(workload: Workload, cohorts: Any, size: Any, nothing: Any) -> tuple[tuple[Any, Any, Any], ...]:
    """Kinds of passes where cohorts come one after the other from first to last, and each decodes beside the next
    ``gen_len`` - 1: ``cohorts`` in all."""
    gen, prompts, none = workload.gen_len, size * workload.prompt_len, (nothing, nothing, nothing)
    ramp = gen + nothing, size * (gen - 1.0) / 2.0, prompts
    steady = np.maximum(cohorts - gen, 0.0), size * (gen - 1.0), prompts
    return ramp, steady, none, none, none, none, (gen - 1.0 + nothing, size * gen / 2.0, nothing)


def decode_pass(workload: Workload, batch_size: Any) -> Passes:
    """The pass in which every slot decodes."""
    running = np.minimum(np.asarray(batch_size, dtype=float), workload.num_requests)
    return _passes(workload, np.ones_like(running), running, np.zeros_like(running))


def steady_passes(workload: Workload, batch_size: Any, riding: Any, *, spread: Any = 1.0) -> Passes:
    """Two kinds of passes, with prompts and without, that together bring N prompts and decode N answers to their end,
    in a job in full swing: every place that falls free is refilled. The prompts come in as many passes as they need,
    and in ``spread`` passes at least: sequences that began apart end apart.

    Where prompts would take longer than answers, every pass has some, and fewer than N are alive.
    """
    running, gen = np.asarray(batch_size, dtype=float), float(workload.gen_len)
    wave = _Wave.of(workload, running, running, riding)
    streaming = wave.cohorts > gen
    cohorts = np.clip(np.maximum(wave.cohorts, spread), 1.0, gen)
    size = np.where(streaming, wave.size, running / cohorts)
    count = np.where(streaming, wave.cohorts, cohorts)
    rows = (
        (count, np.where(streaming, size * (gen - 1.0), running - size), size * workload.prompt_len),
        (np.where(streaming, 0.0, gen - cohorts), running, np.zeros_like(running)),
    )
    return _stacked(workload, rows)


def bounding_passes(workload: Workload, sequences: tuple[Any, Any], riding: tuple[Any, Any]) -> tuple[Passes, Any]:
    """Kinds of passes that together take no longer than the job does, for any N in the range ``sequences`` and any R in
    ``riding``, where a pass takes no less with more in it, and no less than its part with a part in it. And how many
    passes there are besides, each of one of the first three kinds: a wave takes ``gen_len`` passes, but in how many of
    them prompts ride depends on N and R.

    Where all these N make the same number of full waves, every kind of `passes_of` comes at least as often as here and
    carries at least as much. Elsewhere a last wave takes at least its share of a full one. The third kind decodes with
    all slots; it is the only one whose number of micro-batches is that of the policy. One single candidate is exact.
    """
    requests, gen = workload.num_requests, workload.gen_len
    least, most = (np.asarray(bound, dtype=float) for bound in sequences)
    few, many = riding
    slow, fast = _Wave.of(workload, least, least, few), _Wave.of(workload, least, least, many)
    longest, widest = _Wave.of(workload, most, most, few), _Wave.of(workload, most, most, many)
    first, refilling = np.minimum(slow.first, fast.first), np.minimum(slow.refilling, fast.refilling)
    waves = np.floor(requests / most)
    alike = np.floor(requests / least) == waves
    rest = np.where(alike, np.maximum(requests - waves * most, 0.0), 0.0)
    mixed = (rest > 0) & (longest.cohorts > gen)
    last = np.where(rest > 0, np.maximum(np.where(mixed, 0.0, 1.0), rest / widest.size), 0.0)
    most_last = np.maximum(1.0, (requests - waves * least) / slow.size)
    begun = np.where(alike, fast.cohorts, np.minimum(2.0 * longest.cohorts, requests / widest.size))
    refills = np.where(alike, (waves - 1.0) * fast.cohorts, np.maximum(requests / widest.size - begun, 0.0))
    decoding = np.where(alike, waves, requests / most) * np.maximum(gen - longest.cohorts, 0.0)
    overlap = np.where((rest > 0) & ~mixed, np.maximum(fast.cohorts - most_last - 1.0, 0.0), 0.0)
    after = np.where((rest > 0) & ~mixed, np.maximum(gen - most_last - overlap, 0.0), 0.0)
    drain = np.where(rest > 0, np.where(mixed, gen, last), np.where(alike, np.minimum(fast.cohorts, gen), 1.0)) - 1.0
    draining = np.where(rest > 0, rest / 2.0, first)
    nothing = np.zeros_like(first)
    in_waves = (
        (begun, first, slow.prompts),
        (refills, refilling, slow.prompts),
        (decoding, least, nothing),
        (last, first, np.minimum(rest, slow.size) * workload.prompt_len),
        (overlap, np.maximum(first, rest), nothing),
        (after, rest, nothing),
        (drain, np.where(mixed, np.minimum(draining, first), draining), nothing),
    )
    streaming = _streaming(workload, requests / widest.size, slow.size, nothing)
    bounds = _chosen(fast.cohorts > gen, _stacked(workload, streaming), _stacked(workload, in_waves))
    single = (least == most) & (np.asarray(few) == np.asarray(many))
    more = np.where(alike, waves, requests / most) * gen - begun - refills - decoding
    more = np.where(single | (fast.cohorts > gen), 0.0, np.maximum(more, 0.0))
    return _chosen(single, passes_of(workload, most, many), bounds), more


def bounding_static_passes(
    workload: Workload, sequences: tuple[Any, Any], riding: tuple[Any, Any]
) -> tuple[Passes, Any]:
    """`bounding_passes` of `static_passes_of`: prompts at the rate of passes as full as any may be, decode passes as
    few as the most sequences need, each of the fewest. One single candidate is exact."""
    requests, more = workload.num_requests, workload.gen_len - 1.0
    least, most = (np.asarray(bound, dtype=float) for bound in sequences)
    waves = np.floor(requests / most)
    alike = np.floor(requests / least) == waves
    rest = np.where(alike, np.maximum(requests - waves * most, 0.0), 0.0)
    fullest = np.minimum(np.asarray(riding[1], dtype=float) + most, most * workload.prompt_len)
    nothing = np.zeros_like(least)
    none = (nothing, nothing, nothing)
    rows = (
        (requests * workload.prompt_len / fullest, nothing, fullest),
        none,
        (np.where(alike, waves, requests / most) * more, least, nothing),
        none,
        none,
        (np.where(rest > 0, more, 0.0), rest, nothing),
        none,
    )
    single = (least == most) & (np.asarray(riding[0]) == np.asarray(riding[1]))
    return _chosen(single, static_passes_of(workload, most, riding[1]), _stacked(workload, rows)), nothing


def _chosen(condition: Any, these: Passes, those: Passes) -> Passes:
    """``these`` passes where ``condition`` holds, ``those`` elsewhere."""
    names = ("count", "decode_tokens", "prompt_tokens")
    return replace(those, **{name: np.where(condition, getattr(these, name), getattr(those, name)) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wave:
    """``running`` sequences whose prompts come in ``cohorts`` of ``size`` sequences and ``prompts`` tokens, one a pass.
    Beside them decode ``first`` sequences on average where nothing was alive before, ``refilling`` where slots were."""

    running: Any
    cohorts: Any
    size: Any
    prompts: Any
    first: Any
    refilling: Any

    @classmethod
    def of(cls, workload: Workload, running: Any, batch_size: Any, riding: Any) -> _Wave:
        """The largest cohort beside which all others of the wave decode: a p + alive - a <= N + R; or, where there
        are more than ``gen_len`` of them, those still decoding: a p + a (n - 1) <= N + R."""
        gen, prompt_len = workload.gen_len, workload.prompt_len
        room = np.asarray(riding, dtype=float) + batch_size
        beside_all = (room - running) / max(prompt_len - 1.0, 1e-9)
        size = np.minimum(running, np.maximum(beside_all, room / (prompt_len + gen - 1.0)))
        cohorts = running / size
        streams = size * (gen - 1.0)
        return cls(
            running=running,
            cohorts=cohorts,
            size=size,
            prompts=size * prompt_len,
            first=np.where(cohorts > gen, streams * (1.0 - gen / (2.0 * cohorts)), (running - size) / 2.0),
            refilling=np.where(cohorts > gen, streams, running - size),
        )


def _stacked(workload: Workload, rows: Iterable[tuple[Any, Any, Any]]) -> Passes:
    """From ``(count, decode tokens, prompt tokens)`` of each kind."""
    return _passes(workload, *(np.stack(np.broadcast_arrays(*column)) for column in zip(*rows, strict=True)))


def _passes(workload: Workload, count: Any, decode_tokens: Any, prompt_tokens: Any) -> Passes:
    context = workload.prompt_len + workload.gen_len / 2
    return passes(count, decode_tokens, prompt_tokens, context=context, prompt_len=float(workload.prompt_len))
