"""Pools the final hidden states of a prompt to its embedding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from moelight.core.errors import InputError
from moelight.core.request import Completion, PoolingParams
from moelight.kernels.device import Device

_LEAST_NORM = 1e-12  # as in torch.nn.functional.normalize


def pool_rows(hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """The sums float64 [len(counts), H] of so many consecutive rows of ``hidden`` [sum(counts), H], in host memory;
    they are complete once the pass has been collected.

    In float64 the sum of a prompt has, but for the last bits, no trace of how passes cut the prompt.
    """
    sums = hidden.double()
    if len(counts) < len(hidden):
        sums = torch.stack([part.sum(0) for part in sums.split(list(counts))])
    return Device(hidden.device).host_memory(sums.shape, torch.float64).copy_(sums, non_blocking=True)


class Pooling:
    """The pooled hidden states of one prompt, part after part."""

    def __init__(self, params: PoolingParams) -> None:
        self._params = params
        self._sums: list[Tensor] = []
        self._count = 0

    def add(self, sums: Tensor, count: int) -> None:
        """Add ``sums`` float64 [H] of ``count`` rows, which may not be complete yet."""
        self._sums.append(sums)
        self._count += count

    @property
    def finite(self) -> bool:
        """True if every number is finite; valid once the prompt has been computed."""
        return all(bool(sums.isfinite().all()) for sums in self._sums)

    def embedding(self) -> np.ndarray:
        """float32 [dimensions]: the mean of the rows, cut, then normalized."""
        mean = np.sum([sums.numpy() for sums in self._sums], axis=0) / self._count
        mean = mean[: self._params.dimensions]
        if self._params.normalize:
            mean = mean / max(float(np.linalg.norm(mean)), _LEAST_NORM)
        return mean.astype(np.float32)


def stack_embeddings(completions: Iterable[Completion], count: int, dimensions: int) -> np.ndarray:
    """The embeddings of ``count`` completions by their index, float32 [count, dimensions]; raises InputError for one
    that ended in an error."""
    result = np.empty((count, dimensions), dtype=np.float32)
    for completion in completions:
        if completion.embedding is None:
            message = f"prompt {completion.index}: {completion.stop_reason}"
            raise InputError(message, code=completion.error_code or "error")
        result[completion.index] = completion.embedding
    return result
