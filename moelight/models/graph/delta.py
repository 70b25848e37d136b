"""Modules of linear attention by the gated delta rule on our kernels, over the rows of all sequences at once.

A module keeps its own forward, within which two functions that it calls are ours: the causal convolution and the rule.
Both are known by their numbers, and so is the whole: of random sequences in parts it must give what the module's own
forward gives of each sequence at once. What is not recognised stays as it is.

Legend: T rows of all sequences, H hidden, C channels, K taps, Hk and Hv heads of keys and values, Dk and Dv their size.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moelight.kernels import native
from moelight.kernels.arguments import FLOATS
from moelight.kernels.delta import MOST_TAPS, cpu_causal_conv, cpu_delta_rule
from moelight.kernels.reference import causal_conv as plain_conv
from moelight.kernels.reference import delta_rule as plain_rule
from moelight.models.graph.forwards import cache_argument, calling, undecorated
from moelight.models.graph.leaves import FAILURES, described

_SILU = ("silu", "swish")
_PARTS = (((0, 7), (1, 4)), ((1, 1), (0, 1)), ((0, 4),))  # on trial: sequences and their rows in each pass


class Keeps(Protocol):
    """The recurrent state of a sequence: tensors by module and index of the function that they belong to."""

    tensors: dict[tuple[Any, int], Tensor]


class DeltaModule:
    """The forward of ``module`` over rows of several sequences, whose states are computed with where they lie."""

    def __init__(self, module: Any, functions: Mapping[str, Callable[..., Any]]) -> None:
        """``functions``: in place of those that its forward calls by these names."""
        self._module = module
        self._forward = calling(undecorated(type(module).forward), functions)

    @staticmethod
    def serves(hidden: Tensor) -> bool:
        """Whether the kernels compute with ``hidden``."""
        return native.on_cpu(hidden) and native.available() and hidden.dtype in FLOATS

    def __call__(self, sequences: Sequence[tuple[Keeps, int]], hidden: Tensor) -> Any:
        """hidden [1, T, H], consecutive rows of ``sequences`` -> [1, T, H]."""
        _now.rows = _Ragged(self._module, sequences)
        try:
            return self._forward(self._module, hidden, _NO_CACHE, None)
        finally:
            _now.rows = None


def delta_module(module: Any, cache: dict[Any, Mapping[str, Callable[..., Any]] | None]) -> DeltaModule | None:
    """``module`` on our kernels, if it is one of the gated delta rule; ``cache``: what was found of others like it."""
    if not native.available():
        return None
    key = described(module), tuple((name, parameter.shape) for name, parameter in module.named_parameters())
    if key not in cache:
        cache[key] = _functions_of(module)
    return None if (functions := cache[key]) is None else DeltaModule(module, functions)


class _Ragged:
    """The rows of one call: each function in turn asks for the states of their sequences."""

    def __init__(self, module: Any, sequences: Sequence[tuple[Keeps, int]]) -> None:
        self._module, self._states, self._asked = module, [state for state, _ in sequences], 0
        self.starts = torch.tensor([*accumulate((count for _, count in sequences), initial=0)], dtype=torch.int32)

    def states(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """One of each sequence, zeros at its beginning."""
        key, self._asked = (self._module, self._asked), self._asked + 1
        for state in self._states:
            if key not in state.tensors:
                state.tensors[key] = torch.zeros(shape, dtype=dtype)
        return [state.tensors[key] for state in self._states]


class _Now(threading.local):
    rows: _Ragged | None = None


_now = _Now()


class _NoCache:
    """In place of transformers' cache: a first pass, of which nothing is kept."""

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return recurrent_states

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False

    has_previous_state = is_recording_past


_NO_CACHE = _NoCache()


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any) -> Tensor:
    """transformers' causal convolution: x [1, C, T], weight [C, K], bias [C] -> [1, C, T]."""
    rows, taps = _now.rows, weight.shape[1]
    if rows is None or activation not in (None, *_SILU) or taps > MOST_TAPS:
        raise NotImplementedError("a convolution of another kind")
    inputs = x[0].t().to(weight.dtype)
    inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
    states = rows.states((taps - 1, len(weight)), weight.dtype)
    result = cpu_causal_conv(inputs, weight.contiguous(), bias, states, rows.starts, silu=activation is not None)
    return result.to(x.dtype).t()[None]


def _rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """transformers' gated delta rule: query and key [1, T, Hk, Dk], value [1, T, Hv, Dv], g [1, T, Hv] or [1, T, Hv,
    Dk], beta [1, T, Hv] -> [1, T, Hv, Dv], and no state: that stays with the sequences."""
    if (rows := _now.rows) is None or not use_qk_l2norm_in_kernel:
        raise NotImplementedError("a delta rule of another kind")
    decay = g[0].float() if g.ndim == 4 else g[0].float().unsqueeze(-1)
    states = rows.states((value.shape[2], key.shape[3], value.shape[3]), torch.float32)
    q, k, v = (_dense(tensor[0]) for tensor in (query, key, value))
    result = cpu_delta_rule(q, k, v, decay.contiguous(), beta[0].float().contiguous(), states, rows.starts)
    return result[None], torch.empty(0)


def _dense(heads: Tensor) -> Tensor:
    """heads [T, heads, D] without gaps in a row."""
    return heads if heads[:1].is_contiguous() else heads.contiguous()


def _functions_of(module: Any) -> Mapping[str, Callable[..., Any]] | None:
    """By name what takes the place of functions that the forward of ``module`` calls, if it computes the same so."""
    original = undecorated(
        type(module).forward
    )  # is called with the module, hidden states, cache and mask in this order
    if [*inspect.signature(original).parameters][2:4] != [cache_argument(original), "attention_mask"]:
        return None
    called = {name: original.__globals__[name] for name in original.__code__.co_names if name in original.__globals__}
    functions: dict[str, Callable[..., Any]] = {}
    for name, function in called.items():
        if callable(function) and _is_conv(function):
            functions[name] = _conv
        elif callable(function) and _is_rule(function):
            functions[name] = _rule
    return functions if _rule in functions.values() and _agrees(module, functions) else None


def _is_conv(function: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((5, 6), (6, 3), (6,)))
    result = _asked(function, x.t()[None], weight, bias, activation="silu")
    expected = plain_conv(x, weight, bias, [torch.zeros(2, 6)], (0, 5), silu=True)
    return isinstance(result, Tensor) and _close(result, expected.t()[None])


def _is_rule(function: Any) -> bool:
    """Whether it is the rule with a decay for each head, or for each row of its state."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((5, 2, size), generator=generator) for size in (4, 4, 6))
    beta = torch.rand((5, 2), generator=generator)
    for shape in ((5, 2), (5, 2, 4)):
        decay = -torch.rand(shape, generator=generator)
        arguments = (tensor[None] for tensor in (q, k, v))
        asked = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        result = _asked(function, *arguments, g=decay[None], beta=beta[None], **asked)
        state = torch.zeros((2, 4, 6))
        expected = plain_rule(q, k, v, decay.view(5, 2, -1), beta, [state], (0, 5))
        if isinstance(result, tuple) and len(result) == 2 and _close(result[0], expected[None]):
            return _close(result[1], state[None])
    return False


def _asked(function: Any, *arguments: Any, **named: Any) -> Any:
    try:
        with torch.inference_mode():
            return function(*arguments, **named)
    except FAILURES:
        return None


def _close(result: Any, expected: Tensor) -> bool:
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return False
    return torch.allclose(result, expected, rtol=1e-3, atol=1e-4)


class _Folded:
    """In place of the product of a linear layer: every input has a part in some output, and every output has one."""

    def __init__(self, outputs: int, inputs: int, generator: torch.Generator) -> None:
        padded = -(-max(outputs, inputs) // outputs) * outputs
        self._outputs, self._inputs = outputs, torch.arange(padded) % inputs
        self._factors = torch.randn(padded, generator=generator)

    def __call__(self, x: Tensor) -> Tensor:
        return (x[..., self._inputs] * self._factors).unflatten(-1, (-1, self._outputs)).sum(-2)


def _on_trial(module: Any) -> Any:
    """A copy of ``module`` in float32 with random numbers, without the matrices of its linear layers."""
    made = copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
    generator = torch.Generator().manual_seed(0)
    for part in made.modules():
        part.__dict__.pop("forward", None)
        if type(part).forward is nn.Linear.forward:
            part.forward = _Folded(part.out_features, part.in_features, generator)
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None:
                values = torch.rand(parameter.shape, generator=generator) - 0.5
                part._parameters[name] = nn.Parameter(values, requires_grad=False)
    return made


class _Sequence:
    def __init__(self) -> None:
        self.tensors: dict[tuple[Any, int], Tensor] = {}


def _agrees(module: Any, functions: Mapping[str, Callable[..., Any]]) -> bool:
    """Whether ``module`` gives with ``functions`` what it gives without them, of sequences in parts."""
    sizes = [child.weight.shape[1] for child in module.children() if type(child).forward is nn.Linear.forward]
    if not sizes:
        return False
    trial, hidden = _on_trial(module), getattr(module, "hidden_size", sizes[0])
    ours, sequences = DeltaModule(trial, functions), (_Sequence(), _Sequence())
    lengths = [sum(rows for part in _PARTS for number, rows in part if number == sequence) for sequence in range(2)]
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn((length, hidden), generator=generator) for length in lengths]
    expected = [_asked(type(module).forward, trial, x[None]) for x in inputs]
    results: list[list[Tensor]] = [[], []]
    done = [0, 0]
    for part in _PARTS:
        rows = torch.cat([inputs[number][done[number] : done[number] + count] for number, count in part])
        result = _asked(ours, [(sequences[number], count) for number, count in part], rows[None])
        if not isinstance(result, Tensor) or result.shape != (1, *rows.shape):
            return False
        for (number, count), piece in zip(part, result[0].split([count for _, count in part]), strict=True):
            results[number].append(piece)
            done[number] += count
    return all(
        isinstance(one, Tensor) and _close(torch.cat(other)[None] / one.abs().max(), one / one.abs().max())
        for one, other in zip(expected, results, strict=True)
    )
