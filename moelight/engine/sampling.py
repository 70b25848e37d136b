"""From logits to the next token, which depends only on its sequence's logits, seed and position.

Order of operations, as in vLLM: biases, minimum number of tokens, penalties, grammar mask; then temperature, min-p,
top-k, top-p. Legend: S rows, V vocabulary, K likeliest tokens requested.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moelight.core.request import SamplingParams
from moelight.kernels.device import Device

DRAW_BYTES = 64  # per sampled logit: float64 value, sorted copy, id, and the workspace of the sort
CHANGE_BYTES = 32  # per changed logit: two float32 copies and the expanded mask
FREE_BYTES = 1 << 20  # working memory that is not announced to the arenas
NOT_FINITE = -1  # token id of a row whose logits are not finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Changes to one row of logits before its token is chosen. ``seen``: how often the sequence generated each token
    (0: only in the prompt), for ``penalties`` (repetition, frequency, presence). ``allowed``: uint32 [V / 32], bit
    mask; None: all tokens."""

    biases: Mapping[int, float] = field(default_factory=dict)
    forbidden: Collection[int] = ()
    seen: Mapping[int, int] = field(default_factory=dict)
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    allowed: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Scores of one token per row: ``logprobs`` float32 [S], ``ranks`` int64 [S], and the likeliest tokens ``top_ids``
    int64 [S, K] with ``top_logprobs`` float32 [S, K]. In host memory; complete once the pass has been collected."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def next_tokens(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    places: Sequence[int],
    *,
    likeliest: Tensor | None = None,
) -> Tensor:
    """One token id per row of ``logits`` float32 [S, V] -> int64 [S], on their device and without waiting for it.

    Row s follows ``params[s]``; its random number is a function of ``seeds[s]`` and ``places[s]`` (tokens generated
    before), not of batch or schedule. ``likeliest``: those of `likeliest_tokens`, if known, which become the result.
    """
    tokens = likeliest_tokens(logits)[0] if likeliest is None else likeliest
    drawn = [row for row, how in enumerate(params) if not how.greedy]
    for rows in blocks(drawn, logits, DRAW_BYTES):
        draws = [uniform(seeds[row], places[row]) for row in rows]
        index = to_device(np.asarray(rows), logits)
        tokens[index] = _draw(logits[index], [params[row] for row in rows], draws)
    return tokens


def likeliest_tokens(logits: Tensor, *, discrete: bool = True) -> tuple[Tensor, Tensor]:
    """The argmax of each row of ``logits`` float32 [S, V] -> int64 [S], the first of equal ones, or of NaNs; and bool
    [S], true for rows with a NaN or without a finite maximum. On their device, without waiting for it; ``discrete``
    False: the host computed them."""
    if discrete:
        likeliest = logits.argmax(dim=-1)  # treats NaN as the largest value
        return likeliest, logits.gather(1, likeliest.unsqueeze(1)).squeeze(1).isfinite().logical_not_()
    rows = logits.numpy()  # whose argmax takes a tenth of the time of torch's, and does the same
    tokens = rows.argmax(axis=1)
    lost = ~np.isfinite(rows[np.arange(len(rows)), tokens])
    return torch.from_numpy(tokens), torch.from_numpy(lost)


def blocks(rows: Sequence[int], logits: Tensor, logit_bytes: int) -> Iterator[Sequence[int]]:
    """Split ``rows``: at ``logit_bytes`` per logit, no part needs more memory than ``logits`` float32 [S, V]."""
    least = FREE_BYTES // (logits.shape[1] * logit_bytes)
    max_rows = max(1, least, len(logits) * 4 // logit_bytes)
    return (rows[first : first + max_rows] for first in range(0, len(rows), max_rows))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox) keyed by ``seed`` at counter ``position``."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def sample_seed(seed: int, sample: int) -> int:
    """The key of sample ``sample`` of a request with ``seed`` (below 2**64)."""
    return seed + (sample << 64)


def attempt_seed(seed: int, attempt: int) -> int:
    """The key of attempt ``attempt`` at a sample whose key is ``seed`` (below 2**96)."""
    return seed + (attempt << 96)


def change(logits: Tensor, changes: Sequence[Change]) -> None:
    """Apply ``changes[s]`` to row s of ``logits`` float32 [S, V], in place and without waiting for their device."""
    biased = [(row, token, bias) for row, row_change in enumerate(changes) for token, bias in row_change.biases.items()]
    if biased:
        rows, tokens, biases = to_device(np.array(biased, dtype=np.float64).T.copy(), logits)
        logits.index_put_((rows.long(), tokens.long()), biases.float(), accumulate=True)
    forbidden = [
        (row, token)
        for row, row_change in enumerate(changes)
        for token in row_change.forbidden
        if token < logits.shape[1]
    ]
    if forbidden:
        rows, tokens = to_device(np.array(forbidden, dtype=np.int64).T.copy(), logits)
        logits.index_put_((rows, tokens), torch.full((), -torch.inf, device=logits.device))
    _penalise(logits, changes)
    masked = [row for row, row_change in enumerate(changes) if row_change.allowed is not None]
    if masked:
        bits = np.stack([row_change.allowed for row_change in changes if row_change.allowed is not None]).view(np.int32)
        places = torch.arange(32, dtype=torch.int32, device=logits.device)
        words = to_device(bits, logits).unsqueeze(2)
        barred = (words >> places).bitwise_and_(1).flatten(1)[:, : logits.shape[1]] == 0
        index = to_device(np.asarray(masked), logits)
        logits[index] = logits[index].masked_fill_(barred, -torch.inf)


def _penalise(logits: Tensor, changes: Sequence[Change]) -> None:
    seen = [(row, row_change) for row, row_change in enumerate(changes) if row_change.seen]
    if not seen:
        return
    lengths = [len(row_change.seen) for _, row_change in seen]
    rows = np.repeat([row for row, _ in seen], lengths)
    tokens = np.concatenate(
        [np.fromiter(row_change.seen.keys(), np.int64, len(row_change.seen)) for _, row_change in seen]
    )
    counts = np.concatenate(
        [np.fromiter(row_change.seen.values(), np.float32, len(row_change.seen)) for _, row_change in seen]
    )
    penalties = np.repeat(np.array([row_change.penalties for _, row_change in seen], dtype=np.float32), lengths, axis=0)
    row, token = to_device(np.stack([rows, tokens]), logits)
    columns = np.concatenate([penalties.T, counts[None]])
    repetition, frequency, presence, count = to_device(columns, logits)
    values = logits[row, token]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * count
    values -= presence * (count > 0)
    logits.index_put_((row, token), values)


def score(logits: Tensor, tokens: Tensor, top: int) -> Scores:
    """Log-probabilities of ``tokens`` int64 [S] and of the ``top`` likeliest tokens (-1: all) under the unchanged
    ``logits`` float32 [S, V], without waiting for their device."""
    vocabulary = logits.shape[1]
    top = vocabulary if top < 0 else min(top, vocabulary)
    count = len(logits)
    scores = Scores(
        logprobs=_room(logits, torch.float32, count),
        ranks=_room(logits, torch.int64, count),
        top_ids=_room(logits, torch.int64, count, top),
        top_logprobs=_room(logits, torch.float32, count, top),
    )
    for rows in blocks(range(count), logits, DRAW_BYTES if top else CHANGE_BYTES):
        at = slice(rows[0], rows[-1] + 1)
        part, chosen = logits[at], tokens[at].unsqueeze(1)
        logprobs = torch.log_softmax(part, dim=1)
        likeliest = torch.topk(logprobs, top, dim=1)
        scores.logprobs[at].copy_(logprobs.gather(1, chosen).squeeze(1), non_blocking=True)
        scores.ranks[at].copy_(_ranks(part, chosen), non_blocking=True)
        scores.top_ids[at].copy_(likeliest.indices, non_blocking=True)
        scores.top_logprobs[at].copy_(likeliest.values, non_blocking=True)
    return scores


def _ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """1-based ranks of ``tokens`` int64 [S, 1] by descending logit, ties by ascending id -> int64 [S]."""
    chosen = logits.gather(1, tokens)
    before = (logits == chosen) & (torch.arange(logits.shape[1], device=logits.device) < tokens)
    return (before | (logits > chosen)).sum(1) + 1


def _draw(logits: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> Tensor:
    """Apply temperature, min-p, top-k and top-p, then invert the cumulative distribution at the row's number."""
    vocabulary = logits.shape[1]
    limits = [how.top_k if 0 < how.top_k < vocabulary else vocabulary for how in params]
    temperatures = [how.temperature for how in params]
    columns = np.array([temperatures, [how.top_p for how in params], draws, limits], dtype=np.float64)
    temperature, top_p, number, limit = (column.unsqueeze(1) for column in to_device(columns, logits))
    scaled = logits.double()
    scaled -= scaled.amax(dim=1, keepdim=True)
    scaled /= temperature  # at most 0, so no temperature is too small
    if any(how.min_p for how in params):
        least = np.array([math.log(how.min_p) if how.min_p else -math.inf for how in params])
        scaled.masked_fill_(scaled < to_device(least, logits).unsqueeze(1), -torch.inf)
    ordered, ids = torch.sort(scaled, dim=1, descending=True, stable=True)
    if min(limits) < vocabulary:
        ordered.masked_fill_(torch.arange(vocabulary, device=logits.device) >= limit, -torch.inf)
    cumulative = torch.softmax(ordered, dim=1).cumsum(1)
    nucleus = torch.searchsorted(cumulative, top_p).clamp_(max=vocabulary - 1)
    last = torch.where(top_p < 1, nucleus, vocabulary - 1).minimum(limit.long() - 1)
    chosen = torch.searchsorted(cumulative, number * cumulative.gather(1, last), right=True).minimum(last)
    return ids.gather(1, chosen).squeeze(1)


def to_device(values: np.ndarray, beside: Tensor) -> Tensor:
    """Copy ``values`` to the device of ``beside`` without waiting for it."""
    return Device(beside.device).landed(values)


def _room(beside: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """Host memory that receives a copy from the device of ``beside``."""
    return Device(beside.device).host_memory(shape, dtype)
