"""A whole job as a few kinds of passes: the number of passes of each kind, and the tokens of one pass.

N sequences run at a time; each takes one pass for its prompt and generates one token in every later pass. A pass has at
most N + R tokens, decoding sequences first, so prompts that do not fit one pass are split into cohorts, one per pass,
and a freed slot is refilled in the next pass: a series of waves of ``gen_len`` passes, or, if prompts take longer, one
stream of cohorts. Counts may be arrays over candidates; only the number of full waves is rounded.
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
    """``count`` passes with ``decode_tokens`` decoding sequences at ``context`` tokens each, and ``prompt_tokens`` of
    prompts of ``prompt_len`` each; arrays hold several kinds along the first dimension."""

    count: Any
    decode_tokens: Any
    prompt_tokens: Any
    context: Any
    prompt_len: Any

    @property
    def prompts(self) -> Any:
        """Prompts per pass."""
        return self.prompt_tokens / self.prompt_len

    def kind(self, index: Any) -> Passes:
        return replace(self, **{name: getattr(self, name)[index] for name in TOKEN_COUNTS})


TOKEN_COUNTS = ("count", "decode_tokens", "prompt_tokens")


def cache_tokens(workload: Workload, sequences: Any, block_size: int, context: int) -> Any:
    """Cache tokens of ``sequences`` sequences: the average length and one partly filled block each, and together room
    for the longest sequence. ``context``: the most tokens of a sequence."""
    average, longest = _lengths(workload, context)
    return np.maximum(sequences * average, longest) + block_size * sequences


def cached_sequences(workload: Workload, tokens: Any, block_size: int, context: int) -> Any:
    """The most sequences whose `cache_tokens` are at most ``tokens``; 0 if not even the longest one fits."""
    average, longest = _lengths(workload, context)
    return np.maximum(np.minimum(tokens // (average + block_size), (tokens - longest) // block_size), 0)


def _lengths(workload: Workload, context: int) -> tuple[int, int]:
    """Final lengths, in tokens, of the average sequence and of the longest one."""
    average, longest = workload.prompt_len + workload.gen_len, workload.max_prompt_len + workload.longest_answer
    return min(average, context), min(longest, context)


def passes_of(workload: Workload, batch_size: Any, prefill: Any) -> Passes:
    """The `KINDS` of passes that serve ``workload`` with at most ``batch_size`` running sequences, and R = ``prefill``.

    The first cohorts start on an empty machine; later cohorts take the slots of the wave before. The requests that full
    waves leave over are a last, smaller wave, begun while the last full wave drains. Exact in sum: every prompt is
    processed once, and every sequence decodes ``gen_len`` - 1 times.
    """
    requests, gen = workload.num_requests, workload.gen_len
    running = np.minimum(np.asarray(batch_size, dtype=float), requests)
    waves = np.floor(requests / running)
    rest = requests - waves * running
    wave = _Wave.of(workload, running, batch_size, prefill)
    cohorts, size = wave.cohorts, wave.size
    last = np.where(rest > 0, np.maximum(1.0, rest / size), 0.0)
    left = cohorts - last
    overlap = np.where(rest > 0, np.maximum(left - 1.0, 0.0), 0.0)
    running_out = (running * (cohorts - 1.0) - overlap * size * left) / 2.0  # tokens of the wave before the last
    decoding = running_out / np.maximum(last, 1.0) + (rest - rest / np.maximum(last, 1.0)) / 2.0
    draining = np.where(rest > 0, last, cohorts) - 1.0, np.where(rest > 0, rest, running) / 2.0
    nothing = np.zeros_like(running)
    in_waves = (
        (cohorts, wave.first, wave.prompts),
        ((waves - 1.0) * cohorts, wave.refilling, wave.prompts),
        (waves * (gen - cohorts), running, nothing),
        (last, decoding, rest * workload.prompt_len / np.maximum(last, 1.0)),
        (overlap, rest + size * left / 2.0, nothing),
        (np.where(rest > 0, gen - last - overlap, 0.0), rest, nothing),
        (*draining, nothing),
    )
    streaming = _streaming(workload, requests / size, size, nothing)
    return _chosen(cohorts > gen, _stacked(workload, streaming), _stacked(workload, in_waves))


def static_passes_of(workload: Workload, batch_size: Any, prefill: Any) -> Passes:
    """`passes_of` under static admission: the prompts of a batch in as few passes as hold them, then ``gen_len`` - 1
    passes in which the whole batch decodes; the requests left over are a last, smaller batch."""
    requests, more = workload.num_requests, workload.gen_len - 1.0
    running = np.minimum(np.asarray(batch_size, dtype=float), requests)
    waves = np.floor(requests / running)
    rest = requests - waves * running
    room = np.asarray(prefill, dtype=float) + batch_size
    nothing = np.zeros_like(running)

    def prompts(times: Any, sequences: Any) -> tuple[Any, Any, Any]:
        tokens = sequences * workload.prompt_len
        count = np.maximum(np.ceil(tokens / room), 1.0)
        return times * count, nothing, tokens / count

    last, none = np.where(rest > 0, 1.0, 0.0), (nothing, nothing, nothing)
    decode, last_decode = (waves * more, running, nothing), (last * more, rest, nothing)
    return _stacked(workload, (prompts(waves, running), none, decode, prompts(last, rest), none, last_decode, none))


def _streaming(workload: Workload, cohorts: Any, size: Any, nothing: Any) -> tuple[tuple[Any, Any, Any], ...]:
    """Kinds of passes of ``cohorts`` cohorts without a break, each decoding beside the next ``gen_len`` - 1 cohorts."""
    gen, prompts, none = workload.gen_len, size * workload.prompt_len, (nothing, nothing, nothing)
    ramp = gen + nothing, size * (gen - 1.0) / 2.0, prompts
    steady = np.maximum(cohorts - gen, 0.0), size * (gen - 1.0), prompts
    return ramp, steady, none, none, none, none, (gen - 1.0 + nothing, size * gen / 2.0, nothing)


def decode_pass(workload: Workload, batch_size: Any) -> Passes:
    """The pass in which every slot decodes."""
    return _stacked(workload, [(1.0, np.minimum(batch_size, workload.num_requests), 0.0)]).kind(0)


def steady_passes(workload: Workload, batch_size: Any, prefill: Any, *, spread: Any = 1.0) -> Passes:
    """Two kinds of passes, with prompts and without, that together process N prompts and decode N answers, every free
    slot refilled. Prompts take at least ``spread`` passes, since sequences that began in different passes end in
    different passes; if they take longer than answers, every pass has some, and fewer than N sequences run."""
    running, gen = np.asarray(batch_size, dtype=float), float(workload.gen_len)
    wave = _Wave.of(workload, running, running, prefill)
    streaming = wave.cohorts > gen
    cohorts = np.clip(np.maximum(wave.cohorts, spread), 1.0, gen)
    size = np.where(streaming, wave.size, running / cohorts)
    count = np.where(streaming, wave.cohorts, cohorts)
    rows = (
        (count, np.where(streaming, size * (gen - 1.0), running - size), size * workload.prompt_len),
        (np.where(streaming, 0.0, gen - cohorts), running, np.zeros_like(running)),
    )
    return _stacked(workload, rows)


def bounding_passes(workload: Workload, sequences: tuple[Any, Any], prefill: tuple[Any, Any]) -> tuple[Passes, Any]:
    """Kinds of passes whose total time is a lower bound of the job's, for any N in ``sequences`` and R in ``prefill``,
    if more tokens in a pass never take less time; and the number of further passes, each of one of the first three
    kinds.

    If all these N make the same number of full waves, `passes_of` has at least as many passes of every kind, each with
    at least as many tokens; otherwise a last wave counts as at least its share of a full one. Only the third kind, in
    which all slots decode, has the policy's number of micro-batches. Exact for a single candidate.
    """
    requests, gen = workload.num_requests, workload.gen_len
    least, maximum = (np.asarray(bound, dtype=float) for bound in sequences)
    few, many = prefill
    slow, fast = _Wave.of(workload, least, least, few), _Wave.of(workload, least, least, many)
    longest, widest = _Wave.of(workload, maximum, maximum, few), _Wave.of(workload, maximum, maximum, many)
    first, refilling = np.minimum(slow.first, fast.first), np.minimum(slow.refilling, fast.refilling)
    waves = np.floor(requests / maximum)
    alike = np.floor(requests / least) == waves
    rest = np.where(alike, np.maximum(requests - waves * maximum, 0.0), 0.0)
    mixed = (rest > 0) & (longest.cohorts > gen)
    last = np.where(rest > 0, np.maximum(np.where(mixed, 0.0, 1.0), rest / widest.size), 0.0)
    most_last = np.maximum(1.0, (requests - waves * least) / slow.size)
    begun = np.where(alike, fast.cohorts, np.minimum(2.0 * longest.cohorts, requests / widest.size))
    refills = np.where(alike, (waves - 1.0) * fast.cohorts, np.maximum(requests / widest.size - begun, 0.0))
    decoding = np.where(alike, waves, requests / maximum) * np.maximum(gen - longest.cohorts, 0.0)
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
    single = (least == maximum) & (np.asarray(few) == np.asarray(many))
    more = np.where(alike, waves, requests / maximum) * gen - begun - refills - decoding
    more = np.where(single | (fast.cohorts > gen), 0.0, np.maximum(more, 0.0))
    return _chosen(single, passes_of(workload, maximum, many), bounds), more


def bounding_static_passes(
    workload: Workload, sequences: tuple[Any, Any], prefill: tuple[Any, Any]
) -> tuple[Passes, Any]:
    """`bounding_passes` of `static_passes_of`: prompts at the rate of the fullest possible passes; decode passes as few
    as the most sequences need, each with the fewest tokens. Exact for a single candidate."""
    requests, more = workload.num_requests, workload.gen_len - 1.0
    least, maximum = (np.asarray(bound, dtype=float) for bound in sequences)
    waves = np.floor(requests / maximum)
    alike = np.floor(requests / least) == waves
    rest = np.where(alike, np.maximum(requests - waves * maximum, 0.0), 0.0)
    fullest = np.minimum(np.asarray(prefill[1], dtype=float) + maximum, maximum * workload.prompt_len)
    nothing = np.zeros_like(least)
    none = (nothing, nothing, nothing)
    prompts = (requests * workload.prompt_len / fullest, nothing, fullest)
    decode = (np.where(alike, waves, requests / maximum) * more, least, nothing)
    last_decode = (np.where(rest > 0, more, 0.0), rest, nothing)
    rows = (prompts, none, decode, none, none, last_decode, none)
    single = (least == maximum) & (np.asarray(prefill[0]) == np.asarray(prefill[1]))
    return _chosen(single, static_passes_of(workload, maximum, prefill[1]), _stacked(workload, rows)), nothing


def _chosen(condition: Any, these: Passes, those: Passes) -> Passes:
    chosen = {name: np.where(condition, getattr(these, name), getattr(those, name)) for name in TOKEN_COUNTS}
    return replace(those, **chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wave:
    """Sequences whose prompts run in ``cohorts`` of ``size`` sequences and ``prompts`` tokens, one per pass; on average
    ``first`` sequences decode beside each if no slot was in use before, else ``refilling``."""

    cohorts: Any
    size: Any
    prompts: Any
    first: Any
    refilling: Any

    @classmethod
    def of(cls, workload: Workload, running: Any, batch_size: Any, prefill: Any) -> _Wave:
        """The wave of ``running`` sequences with the largest cohort a that fits a pass beside all other sequences:
        a p + running - a <= N + R; or, with more than ``gen_len`` cohorts n, beside those still decoding:
        a p + a (n - 1) <= N + R."""
        gen, prompt_len = workload.gen_len, workload.prompt_len
        room = np.asarray(prefill, dtype=float) + batch_size
        beside_all = (room - running) / max(prompt_len - 1.0, 1e-9)
        size = np.minimum(running, np.maximum(beside_all, room / (prompt_len + gen - 1.0)))
        cohorts = running / size
        streams = size * (gen - 1.0)
        return cls(
            cohorts=cohorts,
            size=size,
            prompts=size * prompt_len,
            first=np.where(cohorts > gen, streams * (1.0 - gen / (2.0 * cohorts)), (running - size) / 2.0),
            refilling=np.where(cohorts > gen, streams, running - size),
        )


def _stacked(workload: Workload, rows: Iterable[tuple[Any, Any, Any]]) -> Passes:
    """`Passes` from ``(count, decode tokens, prompt tokens)`` of each kind."""
    columns = (_filled(column) for column in zip(*rows, strict=True))
    return Passes(
        **dict(zip(TOKEN_COUNTS, columns, strict=True)),
        context=workload.prompt_len + workload.gen_len / 2,
        prompt_len=float(workload.prompt_len),
    )


def _filled(values: tuple[Any, ...]) -> Any:
    """One array of ``values``, which are numbers or arrays of one shape, along its first dimension."""
    stacked = np.empty((len(values), *np.broadcast(*values).shape))
    for index, value in enumerate(values):
        stacked[index] = value
    return stacked
