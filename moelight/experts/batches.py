"""Validation and reduction of a batch of routed tokens to its distinct experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moelight.experts.access import FloatArray, IntArray


def flat_ids(ids: ArrayLike, num_experts: int) -> IntArray:
    """Return the experts of ``[tokens, k]`` as one int64 row.

    Raises:
        ValueError: wrong shape, not integers, or an id outside ``num_experts``.
    """
    given = np.asarray(ids)
    if given.ndim != 2:
        raise ValueError(f"ids: expected [tokens, k], not shape {list(given.shape)}")
    if given.dtype.kind not in "iu" and given.size:
        raise ValueError(f"ids: expected integers, not {given.dtype}")
    flat: IntArray = np.ascontiguousarray(given, np.int64).reshape(-1)
    # Viewed as unsigned, negative ids are the largest, so one maximum finds both kinds of error.
    if flat.size and int(flat.view(np.uint64).max()) >= num_experts:
        raise ValueError(f"ids: {int(flat.min())} to {int(flat.max())} are not all among the {num_experts} experts")
    return flat


def mass_of(scores: ArrayLike, flat: IntArray, shape: tuple[int, ...], num_experts: int) -> FloatArray:
    """Return the summed router weight of each expert, float64 [num_experts]; ``scores`` has the ``shape`` of the ids.

    Raises:
        ValueError: wrong shape, or weights that are not finite.
    """
    given: NDArray[np.float64] = np.ascontiguousarray(scores, np.float64)
    if given.shape != shape:
        raise ValueError(f"scores: expected the shape of ids, {list(shape)}, not {list(given.shape)}")
    mass: FloatArray = np.bincount(flat, weights=given.reshape(-1), minlength=num_experts).astype(
        np.float64, copy=False
    )
    if not np.isfinite(mass).all():
        raise ValueError("scores: not all are finite numbers")
    return mass
