"""The experts that tokens were routed to: of one pass as its routers choose them, and of one sequence for its
answer."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from moelight.core.errors import InputError
from moelight.core.request import SamplingParams
from moelight.profiles.model import ModelProfile

NOT_COMPUTED = -1  # in place of the experts of a token that no pass computed


def check_routing(sampling: SamplingParams, model: ModelProfile) -> None:
    """Raise InputError if experts are to be returned, and ``model`` has none."""
    if sampling.return_routed_experts and model.dense:
        raise InputError(
            "return_routed_experts: the model has no experts",
            field="return_routed_experts",
            code="unsupported_parameter",
        )


class PassRouting:
    """The experts of one pass, layer by layer; its lanes' threads record, and it is read once the pass has landed."""

    def __init__(self) -> None:
        self._ids: defaultdict[int, dict[int, np.ndarray]] = defaultdict(dict)

    def record(self, micro_batch: int, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:  # noqa: ARG002
        """Keep the ``ids`` [T, k] of ``layer`` for the tokens of ``micro_batch``."""
        self._ids[micro_batch][layer] = ids.astype(np.int16)

    def of(self, micro_batch: int) -> np.ndarray:
        """int16 [T, layers with experts, k] of the tokens of ``micro_batch``."""
        layers = self._ids[micro_batch]
        return np.stack([layers[layer] for layer in sorted(layers)], axis=1)


class SequenceRouting:
    """The experts of one sequence, by position."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, np.ndarray]] = []

    def put(self, start: int, experts: np.ndarray) -> None:
        """Keep ``experts`` int16 [T, layers, k] of the tokens from position ``start`` on, in place of earlier ones."""
        self._parts.append((start, experts.copy()))

    def experts(self) -> np.ndarray:
        """int16 [tokens, layers, k]; `NOT_COMPUTED` for tokens that were not."""
        length = max(start + len(part) for start, part in self._parts)
        result = np.full((length, *self._parts[0][1].shape[1:]), NOT_COMPUTED, dtype=np.int16)
        for start, part in self._parts:
            result[start : start + len(part)] = part
        return result
