"""Leaf modules of a graph on our kernels: linear layers, root-mean-square norms and gated feed-forward layers.

A linear layer is known by its class; a norm or a feed-forward layer by its numbers, whatever its class is called: its
own forward is compared with the kernel's function on random weights. What is not recognised stays as it is, and so do
routers: the choice of experts is that of transformers. The result of a row does not depend on the other rows.

Legend: R rows, H inputs of a module, I intermediate.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moelight.kernels import native
from moelight.kernels.ffn import cpu_expert_ffn
from moelight.kernels.norm import rms_norm, rms_norm_mixed
from moelight.kernels.products import linear, parts
from moelight.kernels.reference import rms_norm as plain_norm

Forward = Callable[[Tensor], Tensor]
_WIDTHS = (8, 16)  # H and I of a feed-forward layer on trial
_ACTIVATIONS: Mapping[str, Forward] = {  # of `cpu_expert_ffn`
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
_MOST_UNEQUAL = 0.02  # of bfloat16 results of a norm: float32 sums in another order round to another number at times
_SIZES = ("in_features", "out_features", "layer_idx")  # that change no function
_FAILURES = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


def use_kernels(module: nn.Module) -> None:
    """Let the leaves of ``module`` compute by our kernels wherever their parameters are when they are called."""
    known: dict[Any, Callable[[Any], Forward] | None] = {}
    for part in module.modules():
        if "forward" in vars(part):
            continue  # it has been given another one already
        if type(part).forward is nn.Linear.forward:
            part.forward = _linear_of(part)
            continue
        key = _key(part)
        if key is not None and key not in known:
            known[key] = _norm_of(part) if part._parameters else _feed_forward_of(part)
        if key is not None and (make := known[key]) is not None:
            part.forward = make(part)


def _key(part: nn.Module) -> Any:
    """What is the same for modules that compute alike, of one that may be recognised; else None."""
    children = [(name, *_said(child), getattr(child, "bias", None) is None) for name, child in part.named_children()]
    shapes = [(name, each.shape) for name, each in part._parameters.items() if each is not None]
    vector = [name for name, _ in shapes] == ["weight"] and len(shapes[0][1]) == 1 and not children
    products = sum(type(child).forward is nn.Linear.forward for child in part.children())
    if not vector and (shapes or products not in (2, 3) or _has_other_weights(part)):
        return None
    return _said(part), tuple(children), tuple(shapes)


def _said(part: nn.Module) -> tuple[Any, ...]:
    """The class of ``part`` and its numbers, texts and functions."""
    said = (bool, int, float, str)
    own = [(name, each) for name, each in vars(part).items() if isinstance(each, said) or callable(each)]
    return type(part), tuple((name, each) for name, each in own if name not in _SIZES)


def _has_other_weights(part: nn.Module) -> bool:
    others = (child for child in part.children() if type(child).forward is not nn.Linear.forward)
    return any(tensor is not None for child in others for tensor in (*child.parameters(), *child.buffers()))


def _linear_of(part: Any) -> Forward:
    def forward(x: Tensor) -> Tensor:
        weight, bias = part._parameters["weight"], part._parameters["bias"]
        return linear(_rows(x), weight, bias).view(*x.shape[:-1], weight.shape[0])

    return forward


def _rows(x: Tensor) -> Tensor:
    """x [..., H] -> [R, H], without gaps in a row."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _norm_of(part: Any) -> Callable[[Any], Forward] | None:
    """What makes the forward of norms like ``part``, if it is one of root mean squares."""
    generator = torch.Generator().manual_seed(0)
    size = part.weight.shape[0]
    weight = torch.rand(size, generator=generator, dtype=torch.float32) + 0.5
    x = torch.randn((4, size), generator=generator) * torch.tensor((1e-3, 0.03, 1.0, 30.0)).unsqueeze(1)
    epsilons = {each for each in vars(part).values() if isinstance(each, float)}
    if (expected := _tried(part, {"weight": weight}, {}, x)) is None:
        return None
    for shift in (0.0, 1.0):
        for eps in epsilons:
            if torch.allclose(plain_norm(x, weight + shift, eps), expected, rtol=1e-5, atol=0):
                half, narrow = weight.bfloat16(), x.bfloat16()
                theirs = _tried(part, {"weight": half}, {}, narrow)
                return None if theirs is None else _rounding(shift, eps, half, narrow, theirs)
    return None


def _rounding(shift: float, eps: float, weight: Tensor, x: Tensor, expected: Tensor) -> Callable[[Any], Forward] | None:
    """Whether bfloat16 results are rounded once, or before they are multiplied by the weight too."""
    once = plain_norm(x.float(), weight.float() + shift, eps).to(x.dtype)
    if expected.dtype != x.dtype:
        return None
    if _unequal(once, expected) <= _MOST_UNEQUAL:
        return partial(_norm_once, shift=shift, eps=eps)
    if not shift and _unequal(plain_norm(x, weight, eps), expected) <= _MOST_UNEQUAL:
        return partial(_norm_twice, eps=eps)
    return None


def _unequal(a: Tensor, b: Tensor) -> float:
    return float((a != b).float().mean())


def _norm_once(part: Any, shift: float, eps: float) -> Forward:
    def forward(x: Tensor) -> Tensor:
        weight = part._parameters["weight"]
        if x.is_meta:
            return torch.empty_like(x)
        weight = weight.float() + shift if shift else weight
        return rms_norm_mixed(_rows(x), weight, eps, x.dtype).view(x.shape)

    return forward


def _norm_twice(part: Any, eps: float) -> Forward:
    own = part.forward

    def forward(x: Tensor) -> Tensor:
        weight = part._parameters["weight"]
        if x.is_meta or weight.dtype != x.dtype:
            return own(x)
        return rms_norm(_rows(x), weight, eps).view(x.shape)

    return forward


def _feed_forward_of(part: Any) -> Callable[[Any], Forward] | None:
    """What makes the forward of feed-forward layers like ``part``, if it is gated and has no biases."""
    products = [name for name, child in part._modules.items() if type(child).forward is nn.Linear.forward]
    if any(part._modules[name].bias is not None for name in products):
        return None
    generator = torch.Generator().manual_seed(0)
    hidden, width = _WIDTHS
    gate_up = torch.randn((2 * width, hidden), generator=generator)
    down, x = torch.randn((hidden, width), generator=generator), torch.randn((4, hidden), generator=generator)
    gate, up = gate_up.split(width)
    inward = (gate, up) if len(products) == 3 else (gate_up,)
    for names in permutations(products):
        weights = dict(zip(names, (*inward, down), strict=True))
        found = _tried(part, {}, {name: _product(weight) for name, weight in weights.items()}, x)
        for activation, of in _ACTIVATIONS.items():
            expected = functional.linear(of(functional.linear(x, gate)) * functional.linear(x, up), down)
            if found is not None and found.shape == x.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                return partial(_feed_forward, names=names, activation=activation)
    return None


def _product(weight: Tensor) -> nn.Linear:
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def _feed_forward(part: Any, names: tuple[str, ...], activation: str) -> Forward:
    """``names``: of gate, up and down, or of both and down."""
    own, products = part.forward, [part._modules[name] for name in names]

    def forward(x: Tensor) -> Tensor:
        *inward, down = [each._parameters["weight"] for each in products]
        if not native.on_cpu(x) or not native.available() or down.dtype != x.dtype:
            return own(x)
        gate_up = inward[0] if len(inward) == 1 else _joined(*inward)
        if gate_up is None:
            return own(x)
        rows = _rows(x)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        for start, count in parts(0, len(rows)):
            some, offsets = slice(start, start + count), torch.tensor((0, count), dtype=torch.int32)
            cpu_expert_ffn(rows[some], (gate_up,), (down,), offsets, activation=activation, out=out[some])
        return out.view(x.shape)

    return forward


def _joined(gate: Tensor, up: Tensor) -> Tensor | None:
    """gate [I, H] and up [I, H] as one view [2I, H], if they lie so."""
    if gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr() or gate.dtype != up.dtype:
        return None
    if up.storage_offset() != gate.storage_offset() + gate.numel():
        return None
    return gate.as_strided((2 * gate.shape[0], gate.shape[1]), (gate.shape[1], 1))


def _tried(part: nn.Module, weights: Mapping[str, Tensor], children: Mapping[str, nn.Module], x: Tensor) -> Any:
    """The module's own forward of ``x`` with other parameters and children; None if it does not compute so."""
    trial = copy.copy(part)
    parameters = {name: nn.Parameter(each, requires_grad=False) for name, each in weights.items()}
    trial.__dict__.update(_parameters=parameters, _modules={**part._modules, **children})
    try:
        with torch.inference_mode():
            found = type(part).forward(trial, x)
    except _FAILURES:
        return None
    return found if isinstance(found, Tensor) else None
