"""State of sequences between passes beside the paged KV cache, and modules that run once per sequence to use it.

A module with recurrent state (linear attention, Mamba, short convolutions), or a whole attention module whose keys only
transformers' own cache can hold, runs inside a segment: its rows are split by sequence, and each part is computed with
the cache in that sequence's `State`. Does not depend on how a run is suspended.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moelight.models.graph.delta import DeltaModule
from moelight.models.graph.forwards import cache_argument


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """The properties of a module with its own recurrent state.

    Attributes:
        mixer: it is the mixer of its layer; else a part of one whose attention suspends the run.
        opaque: it holds attention, which needs a mask and computes itself.
        stepwise: after a context it takes one row at a time.
        returns: how many values it returns; the first is of hidden states, the others may be None.
        own_mask: its mask is the one that the graph gives it.
        all_positions: it takes the rotary embedding of the whole sequence, not of the rows alone.
        cache: name of the cache class in the family's module; transformers' `DynamicCache` if None.
    """

    mixer: bool = True
    opaque: bool = False
    stepwise: bool = False
    returns: int = 1
    own_mask: bool = False
    all_positions: bool = False
    cache: str | None = None


class State:
    """Recurrent state and opaque caches of one sequence; empty for a graph of attention alone.

    Attributes:
        cache: transformers' cache of the whole model, of which stateful modules use their layers; None before the
            first pass.
        begun: the stateful modules that have run.
        tensors: of modules that our kernels compute, the states of their functions in order.
    """

    def __init__(self) -> None:
        self.cache: Any = None
        self.begun: set[StatefulModule] = set()
        self.tensors: dict[tuple[Any, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the state keeps."""
        tensors = {id(tensor): tensor for tensor in (*_tensors(self.cache, set()), *self.tensors.values())}
        return sum(tensor.nbytes for tensor in tensors.values())


class PerSequence(list):
    """One value a sequence, in place of a tensor that a stateful module hands to the next one."""


class StatefulModule:
    """The forward of ``module`` over the rows of several sequences, each with the cache of its own state."""

    def __init__(self, module: Any, spec: StateSpec, decoder: Any, together: DeltaModule | None = None) -> None:
        """``together``: computes all sequences at once, where it serves what is given."""
        self.spec = spec
        self._rows_together = together
        self._module = module
        self._decoder = decoder
        self._forward = module.forward
        self._signature = inspect.signature(module.forward)
        self._first = next(iter(self._signature.parameters))
        self._cache_name = cache_argument(module.forward)

    def __call__(self, sequences: Sequence[tuple[State, int]], *args: Any, **kwargs: Any) -> Any:
        """The module's own result for all rows: tensors [1, T, ...] joined, others one a sequence."""
        arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        arguments |= arguments.pop("kwargs", {})
        if self._rows_together is not None and self._rows_together.serves(arguments[self._first]):
            return self._rows_together(sequences, arguments[self._first])
        total = sum(count for _, count in sequences)
        joined = [number for number, (state, count) in enumerate(sequences) if count == 1 and self._joins(state)]
        results: dict[int, Any] = {}
        if len(joined) > 1:
            starts = list(accumulate((count for _, count in sequences), initial=0))
            rows = slice(None) if len(joined) == total else [starts[number] for number in joined]
            result = self._together([sequences[number][0] for number in joined], arguments, rows, total)
            if len(joined) == total:
                return _turned(result)
            results = {number: _turned(_row(result, row)) for row, number in enumerate(joined)}
        start = 0
        for number, (state, count) in enumerate(sequences):
            if number not in results:
                selected = {name: _part(argument, number, start, count, total) for name, argument in arguments.items()}
                results[number] = self._one(state, selected, count)
            start += count
        return _joined([results[number] for number in range(len(sequences))], apart=self.spec.opaque)

    def _joins(self, state: State) -> bool:
        """Whether a row of ``state`` can be computed in one batch with rows of other sequences."""
        return self in state.begun and not self.spec.opaque and self.spec.cache is None

    def _together(
        self, states: list[State], arguments: dict[str, Any], rows: slice | list[int], total: int
    ) -> Tensor | tuple[Tensor, ...]:
        """One row of each of several sequences as one batch [n, 1, ...], whose states are joined before and parted
        after."""
        number = self._module.layer_idx
        layers = [state.cache.layers[number] for state in states]
        layer, cache = copy.copy(layers[0]), copy.copy(states[0].cache)
        for name in ("conv_states", "recurrent_states"):
            columns = {
                index: [getattr(cached_layer, name)[index] for cached_layer in layers] for index in getattr(layer, name)
            }
            setattr(layer, name, {i: None if column[0] is None else torch.cat(column) for i, column in columns.items()})
        cache.layers = [*cache.layers]
        cache.layers[number] = layer
        batch_state = State()
        batch_state.cache = cache
        result = self._call(
            batch_state, {name: _stacked(argument, rows, total) for name, argument in arguments.items()}, 1
        )
        for name in ("conv_states", "recurrent_states"):
            for index, joined in getattr(layer, name).items():
                if joined is not None:
                    torch._foreach_copy_(
                        [getattr(cached_layer, name)[index] for cached_layer in layers], list(joined.split(1))
                    )
        return result

    def _one(self, state: State, arguments: dict[str, Any], count: int) -> Any:
        if state.cache is None:
            state.cache = self._new_cache()
        continues = self in state.begun
        state.begun.add(self)
        if count > 1 and self.spec.stepwise and continues:
            steps = [
                {name: _part(argument, 0, row, 1, count) for name, argument in arguments.items()}
                for row in range(count)
            ]
            return _joined([self._call(state, step, 1) for step in steps], apart=False)
        return self._call(state, arguments, count)

    def _call(self, state: State, arguments: dict[str, Any], count: int) -> Any:
        if self._cache_name is not None:
            arguments[self._cache_name] = state.cache
        hidden = arguments[self._first]
        if self.spec.all_positions:
            past = state.cache.get_query_offset(self._module.layer_idx)
            positions = torch.arange(past + count, device=hidden.device)[None]
            arguments["position_embeddings"] = self._decoder.rotary_emb(hidden, positions)
        if "relative_distance" in self._signature.parameters:
            rows, keys = self._positions(state, hidden, count)
            arguments["relative_distance"] = rows - keys
        if "attention_mask" in self._signature.parameters and not self.spec.own_mask:
            arguments["attention_mask"] = self._mask(state, hidden, count) if self.spec.opaque else None
        try:
            return self._forward(**arguments)
        except (NotImplementedError, RuntimeError):
            if not hidden.is_meta:
                raise
            # Its shapes depend on values, or it has buffers with values.
            outputs = (torch.zeros_like(hidden), *[None] * (self.spec.returns - 1))
            return outputs if self.spec.returns > 1 else outputs[0]

    def _new_cache(self) -> Any:
        if self.spec.cache is not None:
            return getattr(sys.modules[type(self._module).__module__], self.spec.cache)()
        from transformers import DynamicCache

        return DynamicCache(config=self._decoder.config)

    def _mask(self, state: State, hidden: Tensor, count: int) -> Tensor:
        """Return the additive attention mask of the last ``count`` rows [1, 1, n, L]: causal, within the module's
        window."""
        rows, keys = self._positions(state, hidden, count)
        seen = keys <= rows
        window = getattr(self._module, "sliding_window", None)
        if window is not None:
            seen &= keys > rows - window
        lowest = torch.finfo(hidden.dtype).min
        return torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device).masked_fill(~seen, lowest)[None, None]

    def _positions(self, state: State, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the positions of the last ``count`` rows [n, 1], and of the keys that the module's layer has for them
        [L]."""
        layer = self._module.layer_idx
        length, offset = state.cache.get_mask_sizes(count, layer)
        first = state.cache.get_query_offset(layer)
        rows = torch.arange(first, first + count, device=hidden.device)[:, None]
        return rows, torch.arange(offset, offset + length, device=hidden.device)


def own_config(module: Any) -> None:
    """Let attention within ``module`` be transformers' eager one, whatever the rest of the graph uses."""
    for part in module.modules():
        if hasattr(part, "config"):
            part.config = copy.copy(part.config)
            part.config._attn_implementation = "eager"


def _part(value: Any, number: int, start: int, count: int, total: int) -> Any:
    """Slice an argument for ``total`` rows to rows ``start`` to ``start + count`` of sequence ``number``."""
    if isinstance(value, PerSequence):
        return value[number]
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, total):
        return value[:, start : start + count]
    if isinstance(value, tuple):
        return tuple(_part(item, number, start, count, total) for item in value)
    if isinstance(value, dict):
        return {name: _part(item, number, start, count, total) for name, item in value.items()}
    return value


def _stacked(value: Any, rows: slice | list[int], total: int) -> Any:
    """Select ``rows`` of an argument for ``total`` rows as a batch: tensors [1, total, ...] -> [n, 1, ...]."""
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, total):
        return value[0, rows].unsqueeze(1)
    if isinstance(value, tuple):
        return tuple(_stacked(item, rows, total) for item in value)
    return value


def _row(result: Tensor | tuple[Tensor, ...], row: int) -> Tensor | tuple[Tensor, ...]:
    """One of a batch of results [n, 1, ...]."""
    if isinstance(result, Tensor):
        return result[row : row + 1]
    return tuple(item[row : row + 1] for item in result)


def _turned(result: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """A batch of results [n, 1, ...] as rows [1, n, ...]."""
    if isinstance(result, Tensor):
        return result.transpose(0, 1)
    return tuple(item.transpose(0, 1) for item in result)


def _joined(results: list[Any], *, apart: bool) -> Any:
    """Results of consecutive rows as one: tensors [1, n, ...] joined; with ``apart``, those beside the first are kept
    one a sequence."""
    if isinstance(results[0], Tensor):
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)
    columns = list(zip(*results, strict=True))
    rest = [
        None if column[0] is None else PerSequence(column) if apart else torch.cat(column, dim=1)
        for column in columns[1:]
    ]
    return (torch.cat(columns[0], dim=1), *rest)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors within caches of transformers, their layers, and plain containers."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and isinstance(value, dict | list | tuple):
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, seen)
    elif id(value) not in seen and value is not None:
        from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

        seen.add(id(value))
        if isinstance(value, Cache | CacheLayerMixin | LinearAttentionCacheLayerMixin):
            yield from _tensors(vars(value), seen)
