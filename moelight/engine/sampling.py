"""From logits to the next token. A sampled token depends on its request's seed and position alone.

Knows rows of logits and sampling parameters; refuses to know sequences and text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moelight.core.request import SamplingParams

DRAW_BYTES = 64  # of a logit that is drawn from: in float64, sorted, with its id, and what sorting takes


def next_tokens(
    logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], places: Sequence[int]
) -> Tensor:
    """One token id per row of ``logits`` float32 [S, V] -> int64 [S], on their device and without waiting for it.

    Row s follows ``params[s]``; its random number is a function of ``seeds[s]`` and ``places[s]`` (how many tokens the
    request has already generated), so neither the batch nor the order of work can change it.
    """
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, how in enumerate(params) if not how.greedy]
    most = max(1, len(params) * 4 // DRAW_BYTES)  # so that drawing takes no more memory than the logits
    for first in range(0, len(drawn), most):
        rows = drawn[first : first + most]
        numbers = [uniform(seeds[row], places[row]) for row in rows]
        index = _there(np.asarray(rows), logits)
        tokens[index] = _draw(logits[index], [params[row] for row in rows], numbers)
    return tokens


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox) keyed by ``seed`` at counter ``place``."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=place)).random())


def _draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> Tensor:
    """Temperature, then top-k, then top-p (vLLM's order), then the inverse of the cumulative distribution at the row's
    number; row by row, so that no row depends on another."""
    vocabulary = logits.shape[1]
    limits = [how.top_k if 0 < how.top_k < vocabulary else vocabulary for how in params]
    temperatures = [how.temperature for how in params]
    columns = np.array([temperatures, [how.top_p for how in params], numbers, limits], dtype=np.float64)
    temperature, top_p, number, limit = (column.unsqueeze(1) for column in _there(columns, logits))
    scaled = logits.double()
    scaled -= scaled.amax(dim=1, keepdim=True)
    scaled /= temperature  # at most 0, so no temperature is too small
    ordered, ids = torch.sort(scaled, dim=1, descending=True, stable=True)
    if min(limits) < vocabulary:
        ordered.masked_fill_(torch.arange(vocabulary, device=logits.device) >= limit, -torch.inf)
    cumulative = torch.softmax(ordered, dim=1).cumsum(1)
    nucleus = torch.searchsorted(cumulative, top_p).clamp_(max=vocabulary - 1)
    last = torch.where(top_p < 1, nucleus, vocabulary - 1).minimum(limit.long() - 1)
    chosen = torch.searchsorted(cumulative, number * cumulative.gather(1, last), right=True).minimum(last)
    return ids.gather(1, chosen).squeeze(1)


def _there(numbers: np.ndarray, beside: Tensor) -> Tensor:
    """``numbers`` on the device of ``beside``, which is not waited for."""
    host = torch.from_numpy(numbers)
    return host if beside.device.type == "cpu" else host.pin_memory().to(beside.device, non_blocking=True)
