"""Decoder layers of the usual form on our kernels: q, k and v are one product, norms and rotary embedding of all heads
are computed in place, and a residual sum within the norm that follows it.

Attention and layers are recognised by their numbers, as `leaves` are; what is not recognised stays as it is, and so do
all blocks of experts. At every call it is asked again whether the kernels serve what is given.

Legend: T rows, H hidden, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from moelight.kernels import native
from moelight.kernels.arguments import FLOATS
from moelight.kernels.norm import cpu_rms_norm, finish_heads
from moelight.kernels.products import Joined, linear, linear_of_all
from moelight.kernels.reference import rms_norm as plain_norm
from moelight.kernels.reference import rotate as plain_rotation
from moelight.models.graph.effects import Attend, Ended
from moelight.models.graph.families import ATTENTION
from moelight.models.graph.forwards import CACHES
from moelight.models.graph.leaves import (
    FAILURES,
    as_one_matrix,
    described,
    product_of,
    tried,
    twice_rounded_norms,
    use_leaf_kernels,
)
from moelight.models.graph.model import GivenHidden, GraphRun, MixerKind, running

_HIDDEN, _ROWS = 8, 3  # H and T on trial
_FIRST_POSITION = 5000  # on trial, far from the beginning
_LARGE = 100.0  # a factor of inputs on trial, beyond the limits of those that clip


def use_kernels(module: nn.Module) -> None:
    """Let leaves, attention and decoder layers of ``module`` compute by our kernels wherever their parameters are when
    they are called."""
    norms = twice_rounded_norms(module)
    attention = {part: usual for part in module.modules() if (usual := _attention_of(part, norms)) is not None}
    orders: dict[Any, tuple[str, ...] | None] = {}
    layers = []
    for part in module.modules():
        children = list(part.children())
        if len(children) != 4 or len(part._modules) != 4 or part._parameters or "forward" in vars(part):
            continue
        if attention.keys().isdisjoint(children):
            continue
        key = described(part), tuple((name, child in attention) for name, child in part.named_children())
        if key not in orders:
            orders[key] = _order_of(part)
        if (order := orders[key]) is not None:
            layers.append((part, [part._modules[name] for name in order]))
    use_leaf_kernels(module)
    for part, (first, mixer, second, block) in layers:
        if mixer in attention and first in norms and second in norms:
            part.forward = _UsualLayer(part, first, attention[mixer], second, block, (norms[first], norms[second]))


@dataclass(frozen=True, slots=True)
class _UsualAttention:
    """Attention of the usual form.

    Attributes:
        products: of q, k, v and the output, without biases.
        norms: of each head of the queries and of the keys, or of all of them together (``per_projection``); None: there
            are none. ``eps``: what they add under their roots.
        like: its effect on trial, whose heads, scale, window and limits are those of every effect.
    """

    part: Any
    products: tuple[Any, ...]
    norms: tuple[Any, ...]
    per_projection: bool
    eps: float
    like: Attend

    def matrix(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Joined | None:
        """The matrix of q, k and v [(Hq + 2 Hkv) D, H], if the kernels compute all of the attention with it."""
        dtype, angles = hidden.dtype, (1, hidden.shape[1], self.like.q.shape[2])
        if any(tensor.shape != angles or tensor.dtype != dtype or not tensor.is_contiguous() for tensor in (cos, sin)):
            return None
        weights = [tensor._parameters["weight"] for tensor in (*self.products, *self.norms)]
        if any(weight.dtype != dtype or weight.device != hidden.device for weight in weights):
            return None
        return as_one_matrix(*weights[:3])

    def __call__(self, x: Tensor, matrix: Joined, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, H], ``matrix`` [(Hq + 2 Hkv) D, H], cos and sin [T, D] -> [T, H]."""
        run, like = running(), self.like
        queries, keys, size = like.q.shape[1], like.k.shape[1], like.q.shape[2]
        qkv = linear_of_all(x, matrix)
        weights = [norm._parameters["weight"] for norm in self.norms]
        if weights and self.per_projection:
            for some, weight in zip(qkv.split((queries * size, keys * size, keys * size), 1), weights, strict=False):
                cpu_rms_norm(some, weight, self.eps, out=some)
            weights = []
        heads = qkv.view(len(x), queries + 2 * keys, size)
        norms = (weights[0], weights[1]) if weights else None
        finish_heads(heads, cos, sin, queries=queries, keys=keys, norms=norms, eps=self.eps)
        q, k, v = heads.split((queries, keys, keys), dim=1)
        effect = Attend(len(run.kinds), q, k, v, like.scale, like.window, softcap=like.softcap)
        run.kinds.append(MixerKind.ATTENTION)
        return linear(run.suspend(self.part, effect).flatten(1), self.products[3]._parameters["weight"])


@dataclass(frozen=True, slots=True)
class _UsualLayer:
    """The forward of a layer; ``eps`` of its two norms."""

    part: Any
    first: Any
    attention: _UsualAttention
    second: Any
    block: Any
    eps: tuple[float, float]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [1, T, H] -> [1, T, H]."""
        first, second = self.first._parameters["weight"], self.second._parameters["weight"]
        if args or (matrix := self._matrix(hidden_states, first, second, **kwargs)) is None:
            return type(self.part).forward(self.part, hidden_states, *args, **kwargs)
        cos, sin = kwargs["position_embeddings"]
        sums = hidden_states[0].clone(memory_format=torch.contiguous_format)
        mixed = self.attention(cpu_rms_norm(sums, first, self.eps[0]), matrix, cos[0], sin[0])
        for hook in self.attention.part._forward_hooks.values():
            hook(self.attention.part, (), (mixed[None], None))
        output = self.block(cpu_rms_norm(sums, second, self.eps[1], add=mixed)[None])
        return sums[None].add_(output[0] if isinstance(output, tuple) else output)

    def _matrix(
        self,
        hidden: Tensor,
        *norms: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        **others: Any,
    ) -> Joined | None:
        """The matrix of `_UsualAttention.matrix`, if the kernels compute all of the layer but the block."""
        cached = any(others.get(name) is not None for name in CACHES)
        if not isinstance(position_embeddings, tuple) or attention_mask is not None or cached:
            return None
        if not native.on_cpu(hidden) or not native.available() or hidden.dtype not in FLOATS or len(hidden) != 1:
            return None
        if any(norm.dtype != hidden.dtype or not native.on_cpu(norm) for norm in norms):
            return None
        return self.attention.matrix(hidden, *position_embeddings) if running().repeats(*position_embeddings) else None


def _attention_of(part: Any, norms: Mapping[nn.Module, float]) -> _UsualAttention | None:
    """``part`` as attention of the usual form, if it is."""
    children = list(part.children())
    products = tuple(child for child in children if type(child).forward is nn.Linear.forward)
    normed = tuple(child for child in children if child in norms)
    if (len(products), len(children)) not in ((4, 4), (4, 6)) or len(products) + len(normed) != len(children):
        return None
    if part._parameters or "forward" in vars(part) or type(part).__name__ in ATTENTION:
        return None
    size, eps = getattr(part, "head_dim", None), {norms[norm] for norm in normed}
    if not isinstance(size, int) or any(product.bias is not None for product in products) or len(eps) > 1:
        return None
    outputs = [product.weight.shape[0] for product in products]
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn((count, _HIDDEN), generator=generator) for count in outputs[:3]]
    matrices.append(torch.randn((_HIDDEN, outputs[0]), generator=generator))
    weights = [torch.rand(norm.weight.shape, generator=generator) + 0.5 for norm in normed]
    trial = _Trial(part, dict(zip(products, map(product_of, matrices), strict=True)), size)
    for norm, weight in zip(normed, weights, strict=True):
        trial.children[norm] = copy.copy(norm)
        trial.children[norm]._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    x = torch.randn((_ROWS, _HIDDEN), generator=generator) * _LARGE
    if (result := trial.run(x)) is None:
        return None
    effect, out = result
    per_projection, once = bool(normed) and normed[0].weight.shape[0] != size, (0.0, *eps)[-1]
    made = _UsualAttention(part, products, normed, per_projection, once, effect)
    return made if _agrees(made, matrices, weights, x, trial, out) else None


class _Trial:
    """One run of the forward of attention ``part`` with other ``children``, on random angles and attention."""

    def __init__(self, part: Any, children: dict[Any, Any], size: int) -> None:
        """``size``: D."""
        generator = torch.Generator().manual_seed(1)
        self.part, self.children = part, children
        self.cos, self.sin = (torch.randn((_ROWS, size // 2), generator=generator).repeat(1, 2) for _ in range(2))
        self.attended = torch.empty(0)

    def run(self, x: Tensor) -> tuple[Attend, Tensor] | None:
        """The effect for x [T, H], and the result; None if there is none or another one."""
        trial, positions = copy.copy(self.part), torch.arange(_FIRST_POSITION, _FIRST_POSITION + len(x))
        trial.__dict__["_modules"] = {name: self.children.get(child) for name, child in self.part._modules.items()}

        def body(**_: object) -> GivenHidden:
            angles = self.cos[None], self.sin[None]
            arguments = {"hidden_states": x[None], "position_embeddings": angles, "position_ids": positions[None]}
            return GivenHidden(type(trial).forward(trial, **arguments, attention_mask=None)[0])

        run = GraphRun(body, positions, positions, ())
        try:
            effect = run.resume(None)
            if not isinstance(effect, Attend) or effect.q.shape[1:] != (effect.q.shape[1], self.cos.shape[1]):
                return None
            if effect.sinks is not None or effect.chunk is not None or effect.v.shape != effect.k.shape:
                return None
            self.attended = torch.randn(effect.q.shape, generator=torch.Generator().manual_seed(2))
            ended = run.resume(self.attended)
        except FAILURES:
            return None
        finally:
            run.close()
        return (effect, ended.hidden) if isinstance(ended, Ended) else None


def _agrees(
    made: _UsualAttention, matrices: list[Tensor], weights: list[Tensor], x: Tensor, trial: _Trial, out: Tensor
) -> bool:
    """Whether the effect and the result ``out`` [T, H] of a trial are what ``made`` computes."""
    size = trial.cos.shape[1]
    q, k, v = (x @ matrix.t() for matrix in matrices[:3])
    if weights and made.per_projection:
        q, k = (plain_norm(tensor, weight, made.eps) for tensor, weight in zip((q, k), weights, strict=True))
    q, k, v = (tensor.unflatten(1, (-1, size)) for tensor in (q, k, v))
    if weights and not made.per_projection:
        q, k = (plain_norm(tensor, weight, made.eps) for tensor, weight in zip((q, k), weights, strict=True))
    q, k = (plain_rotation(tensor, trial.cos, trial.sin) for tensor in (q, k))
    pairs = ((made.like.q, q), (made.like.k, k), (made.like.v, v), (out, trial.attended.flatten(1) @ matrices[3].t()))
    return all(one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-3) for one, other in pairs)


class _Stub(nn.Module):
    """In place of a child of a layer: ``function`` of its first argument."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor | None = None, **named: Any) -> Any:
        return self.function(named["hidden_states"] if x is None else x)


def _order_of(part: Any) -> tuple[str, ...] | None:
    """The names of the first norm, the attention, the second norm and the block of a layer, if ``part`` is one that
    adds both results to the residual stream."""
    functions: tuple[Callable[[Tensor], Any], ...] = (torch.sin, lambda x: ((2 * x).cos(), None), torch.tanh, torch.exp)
    x = torch.randn((1, _ROWS, _HIDDEN), generator=torch.Generator().manual_seed(0))
    sums = x + torch.cos(2 * torch.sin(x))
    expected = sums + torch.exp(torch.tanh(sums))
    for names in permutations(part._modules):
        stubs = {name: _Stub(function) for name, function in zip(names, functions, strict=True)}
        output = tried(part, {}, stubs, x)
        if output is not None and output.shape == x.shape and torch.allclose(output, expected, rtol=1e-5, atol=1e-6):
            return names
    return None
