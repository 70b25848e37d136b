"""From logits to the next token. A sampled token depends on its request's seed and position alone.

Knows rows of logits and sampling parameters; refuses to know sequences and text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moelight.core.request import SamplingParams


def next_tokens(
    logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], places: Sequence[int]
) -> list[int]:
    """One token id per row of ``logits`` float32 [S, V].

    Row s follows ``params[s]``; its random number is a function of ``seeds[s]`` and ``places[s]`` (how many tokens the
    request has already generated), so neither the batch nor the order of work can change it.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, how in enumerate(params):
        if not how.greedy:
            tokens[row] = _draw(logits[row], how, uniform(seeds[row], places[row]))
    return tokens


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox) keyed by ``seed`` at counter ``place``."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=place)).random())


def _draw(logits: Tensor, how: SamplingParams, u: float) -> int:
    """Temperature, then top-k, then top-p (vLLM's order), then the inverse of the cumulative distribution at ``u``."""
    wide = logits.double()
    scaled = ((wide - wide.max()) / how.temperature).cpu()  # at most 0, so no temperature is too small
    ordered, ids = torch.sort(scaled, descending=True, stable=True)
    if how.top_k > 0:
        ordered = ordered[: how.top_k]
    cumulative = torch.softmax(ordered, dim=0).cumsum(0)
    if how.top_p < 1.0:
        keep = int(torch.searchsorted(cumulative, how.top_p)) + 1
        cumulative = cumulative[:keep]
    chosen = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    return int(ids[min(chosen, len(cumulative) - 1)])
