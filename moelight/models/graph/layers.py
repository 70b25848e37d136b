"""Decoder layers of the usual form on our kernels: q, k and v are one product, norms and rotary embedding of all heads
are computed in place, and a residual sum within the norm that follows it. Layers with biases, with norms that are
rounded once, or with norms of their results too, are left to the leaves, unless one call computes all layers
(`UsualLayer.bound`).

All layers of a dense graph of that form are one native call where few rows decode, and two each in a short prompt: the
run passes them by, and embedding, final norm and head remain the graph's. Its kernels are those of the phases in their
order, and its results theirs to the bit.

Attention and layers are recognised by their numbers, as `leaves` are; what is not recognised stays as it is, and so do
all blocks of experts. At every call it is asked again whether the kernels serve what is given.

Legend: T rows, H hidden, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from moelight.kernels import native
from moelight.kernels.activations import activation_of
from moelight.kernels.arguments import FLOATS
from moelight.kernels.layer import BoundExperts, DecoderLayer, LayerProduct
from moelight.kernels.matrices import INT8, Weight
from moelight.kernels.norm import cpu_rms_norm, finish_heads
from moelight.kernels.products import Joined, linear, linear_of_all
from moelight.kernels.reference import rms_norm as plain_norm
from moelight.kernels.reference import rotate as plain_rotation
from moelight.kernels.stored_weight import served, stored_of, widens
from moelight.models.graph.effects import Attend, Ended, LayersPassed
from moelight.models.graph.families import ATTENTION
from moelight.models.graph.forwards import CACHES
from moelight.models.graph.leaves import (
    FAILURES,
    FeedForward,
    NormForm,
    as_one_matrix,
    described,
    norms_of,
    product_of,
    tried,
    use_leaf_kernels,
)
from moelight.models.graph.model import GivenHidden, GraphModel, GraphRun, MixerKind, running
from moelight.models.graph.state import State

_HIDDEN, _ROWS = 8, 3  # H and T on trial
_FIRST_POSITION = 5000  # on trial, far from the beginning
_LARGE = 100.0  # a factor of inputs on trial, beyond the limits of those that clip


def use_kernels(module: nn.Module) -> None:
    """Let leaves, attention and decoder layers of ``module`` compute by our kernels wherever their parameters are when
    they are called."""
    norms = norms_of(module)
    attention = {part: usual for part in module.modules() if (usual := _attention_of(part, norms)) is not None}
    orders: dict[Any, tuple[str, ...] | None] = {}
    layers: list[tuple[Any, list[Any]]] = []
    for part in module.modules():
        children = list(part.children())
        if len(children) not in (4, 6) or len(part._modules) != len(children) or part._parameters:
            continue
        if attention.keys().isdisjoint(children) or "forward" in vars(part):
            continue
        key = (
            described(part),
            tuple((name, child in attention, child in norms) for name, child in part.named_children()),
        )
        if key not in orders:
            mixers, normed = (
                [name for name in part._modules if part._modules[name] in of] for of in (attention, norms)
            )
            orders[key] = _order_of(part, mixers, normed)
        if (order := orders[key]) is not None:
            layers.append((part, [part._modules[name] for name in order]))
    use_leaf_kernels(module)
    for part, (first, mixer, second, block, *more) in layers:
        forms = {norm: norms[norm] for norm in (first, second, *more)}
        part.forward = UsualLayer(part, first, attention[mixer], second, block, tuple(more), forms)


Bound = tuple[DecoderLayer, BoundExperts]


@dataclass(frozen=True, slots=True, eq=False)
class UsualAttention:
    """Attention of the usual form.

    Attributes:
        products: of q, k, v and the output.
        norms: of each head of the queries and of the keys, or of all of them together (``per_projection``); none: there
            are none. ``form``: theirs.
        like: its effect on trial, whose heads, scale, window and limits are those of every effect.
    """

    part: Any
    products: tuple[Any, ...]
    norms: tuple[Any, ...]
    per_projection: bool
    form: NormForm
    like: Attend

    @property
    def plain(self) -> bool:
        """Whether there are no biases, and no norms that are rounded once."""
        return not self.form.once and all(product._parameters["bias"] is None for product in self.products)

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
                cpu_rms_norm(some, weight, self.form.eps, out=some)
            weights = []
        heads = qkv.view(len(x), queries + 2 * keys, size)
        norms = (weights[0], weights[1]) if weights else None
        finish_heads(heads, cos, sin, queries=queries, keys=keys, norms=norms, eps=self.form.eps)
        q, k, v = heads.split((queries, keys, keys), dim=1)
        effect = Attend(len(run.kinds), q, k, v, like.scale, like.window, softcap=like.softcap)
        run.kinds.append(MixerKind.ATTENTION)
        return linear(run.suspend(self.part, effect).flatten(1), self.products[3]._parameters["weight"])


@dataclass(frozen=True, slots=True, eq=False)
class UsualLayer:
    """The forward of a layer.

    Attributes:
        first, second: the norms before attention and before the block.
        after: the norms of their results, or none.
        forms: of all norms.
    """

    part: Any
    first: Any
    attention: UsualAttention
    second: Any
    block: Any
    after: tuple[Any, ...]
    forms: Mapping[Any, NormForm]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [1, T, H] -> [1, T, H]."""
        run = running()
        if run.layers is not None and not args and self._passes(hidden_states, run, run.layers, **kwargs):
            last = len(run.layers.parts) == run.layers.count
            return run.suspend(self.part, run.layers)[None] if last else hidden_states
        first, second = self.first._parameters["weight"], self.second._parameters["weight"]
        if args or (matrix := self._matrix(hidden_states, first, second, **kwargs)) is None:
            return type(self.part).forward(self.part, hidden_states, *args, **kwargs)
        cos, sin = kwargs["position_embeddings"]
        sums = hidden_states[0].clone(memory_format=torch.contiguous_format)
        mixed = self.attention(cpu_rms_norm(sums, first, self.forms[self.first].eps), matrix, cos[0], sin[0])
        for hook in self.attention.part._forward_hooks.values():
            hook(self.attention.part, (), (mixed[None], None))
        output = self.block(cpu_rms_norm(sums, second, self.forms[self.second].eps, add=mixed)[None])
        return sums[None].add_(output[0] if isinstance(output, tuple) else output)

    def _matrix(self, hidden: Tensor, *norms: Tensor, **arguments: Any) -> Joined | None:
        """The matrix of `UsualAttention.matrix`, if the kernels compute all of the layer but the block."""
        if self.after or not self.attention.plain or any(form.once for form in self.forms.values()):
            return None
        if (angles := self._angles(hidden, **arguments)) is None or not native.on_cpu(hidden) or not native.available():
            return None
        if any(norm.dtype != hidden.dtype or not native.on_cpu(norm) for norm in norms):
            return None
        return self.attention.matrix(hidden, *angles) if running().repeats(*angles) else None

    def _angles(
        self,
        hidden: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor] | None:
        """The cosines and sines [1, T, D] of a call, if it says nothing else."""
        cached = any(others.get(name) is not None for name in CACHES)
        if not isinstance(position_embeddings, tuple) or attention_mask is not None or cached:
            return None
        if len(position_embeddings) != 2 or hidden.dtype not in FLOATS or len(hidden) != 1:
            return None
        return position_embeddings

    def _passes(self, hidden: Tensor, run: GraphRun, layers: LayersPassed, **arguments: Any) -> bool:
        """Pass the layer by, whose input ``hidden`` must be that of the first layer; False if it is not as usual. What
        comes with the angles of the layer before is not looked at again."""
        if layers.hidden is None:
            layers.hidden = hidden
        if hidden is not layers.hidden or self.attention.part._forward_hooks:
            return False
        angles = arguments.get("position_embeddings")
        if not layers.angles or angles is not layers.angles[-1]:
            if (angles := self._angles(hidden, **arguments)) is None or not run.repeats(*angles):
                return False
            cos, sin = angles
            if cos.shape != (1, hidden.shape[1], self.attention.like.q.shape[2]) or sin.shape != cos.shape:
                return False
        layers.angles.append(angles)
        layers.parts.append(self)
        return True

    @property
    def feed_forward(self) -> FeedForward | None:
        """The block, if it is one that one expert computes."""
        forward = vars(self.block).get("forward")
        return forward if isinstance(forward, FeedForward) else None

    def bound(self, dtype: torch.dtype) -> Bound | None:
        """The layer with the weights that its modules have now, for activations of ``dtype``; None if `decode_layers`
        does not compute it."""
        attention, block = self.attention, self.feed_forward
        forms = [*self.forms.values(), *((attention.form,) if attention.norms else ())]
        norms = [norm._parameters["weight"] for norm in (*self.forms, *attention.norms)]
        if block is None or len({form.eps for form in forms}) > 1 or any(norm.dtype != dtype for norm in norms):
            return None
        qkv, o = _projection(attention.products[:3], dtype), _projection(attention.products[3:], dtype)
        experts = _experts(block, dtype)
        if qkv is None or o is None or experts is None:
            return None
        weights: dict[str, Any] = {}
        names = ("input_norm", "post_norm", "attention_norm", "block_norm")
        for name, norm in zip(names, (self.first, self.second, *self.after), strict=False):
            weights[name] = self.forms[norm].weight(norm)
        for name, norm in zip(("q_norm", "k_norm"), attention.norms, strict=False):
            weights[name] = attention.form.weight(norm)
        bound, wide = experts
        how: dict[str, Any] = {"eps": forms[0].eps, "head_dim": attention.like.q.shape[2], "wide_block": wide}
        return DecoderLayer(dtype=dtype, qkv=qkv, o=o, **weights, **how), bound


def usual_layers(graph: GraphModel) -> list[UsualLayer]:
    """The layers of ``graph``, whose weights outside pages are in place, if a run on a CPU may pass all of them by;
    else none."""
    plain = bool(graph.pages) and not graph.stateful and set(graph.mixers) == {MixerKind.ATTENTION}
    if not plain or not native.on_cpu(next(graph.module.parameters())) or not native.available():
        return []
    rows = torch.arange(_ROWS)
    run = graph.start(rows, rows, [(State(), _ROWS)], together=True)
    try:
        effect: object = run.resume(None)
        if not isinstance(effect, LayersPassed) or effect.hidden is None:
            return []
        ended = run.resume(effect.hidden[0])
    except FAILURES:
        return []
    finally:
        run.close()
    parts = [part for part in effect.parts if isinstance(part, UsualLayer) and part.feed_forward is not None]
    return parts if isinstance(ended, Ended) and len(parts) == effect.count else []


def _projection(products: Sequence[nn.Module], dtype: torch.dtype) -> LayerProduct | None:
    """Linear layers of one input as `linear` and `linear_of_all` compute them."""
    weights: list[Any] = [product._parameters["weight"] for product in products]
    biases = [product._parameters["bias"] for product in products]
    if any(weight.dtype != dtype or not native.on_cpu(weight) for weight in weights):
        return None
    stored = stored_of(weights)
    if not stored:
        joined = as_one_matrix(*weights) if biases == [None] * len(biases) else None
        return (
            LayerProduct(weights=(joined,))
            if isinstance(joined, Tensor)
            else LayerProduct(weights=weights, biases=biases)
        )
    if len(stored) < len(weights):
        return None
    matrices: list[Weight] = []
    parts: list[Tensor | None] = []
    activations: list[str] = []
    for weight, bias in zip(stored, biases, strict=True):
        first = 0
        for matrix in weight.stack:
            matrices.append(matrix)
            parts.append(None if bias is None else bias[first : first + matrix.rows])
            activations.append(served(weight.activations, matrix))
            first += matrix.rows
    wide = widens(dtype) and any(form != INT8 for form in activations)
    return LayerProduct(weights=matrices, biases=parts, activations=activations, wide=wide)


def _experts(block: FeedForward, dtype: torch.dtype) -> tuple[BoundExperts, bool] | None:
    """``block`` as the only expert of a layer, and whether its tokens are widened; None where `FeedForward` has several
    products."""
    inward, outward = block.weights
    weights, activation = [*inward, outward], activation_of(block.activation)
    if any(weight.dtype != dtype or not native.on_cpu(weight) for weight in weights):
        return None
    stored = stored_of(weights)
    if not stored:
        both = inward[0] if len(inward) == 1 else as_one_matrix(*inward)
        if not isinstance(both, Tensor):
            return None
        return BoundExperts(len(outward), (both,), (outward,), activation=activation), False
    if len(stored) < len(weights):
        return None
    (gate, *up), (down, *more) = (matrix for weight in stored[:-1] for matrix in weight.stack), stored[-1].stack
    if len(up) > 1 or more:
        return None
    by = stored[-1].activations
    sides = served(by, gate, *up), served(by, down)
    how: dict[str, Any] = {"up": up or None, "activation": activation, "activations": sides}
    return BoundExperts(down.rows, (gate,), (down,), **how), widens(dtype)


def _attention_of(part: Any, norms: Mapping[nn.Module, NormForm]) -> UsualAttention | None:
    """``part`` as attention of the usual form, if it is."""
    children = list(part.children())
    products = tuple(child for child in children if type(child).forward is nn.Linear.forward)
    normed = tuple(child for child in children if child in norms)
    if (len(products), len(children)) not in ((4, 4), (4, 6)) or len(products) + len(normed) != len(children):
        return None
    if part._parameters or "forward" in vars(part) or type(part).__name__ in ATTENTION:
        return None
    size, forms = getattr(part, "head_dim", None), {norms[norm] for norm in normed}
    if not isinstance(size, int) or len(forms) > 1:
        return None
    outputs = [product.weight.shape[0] for product in products]
    generator = torch.Generator().manual_seed(0)
    shapes = [*((count, _HIDDEN) for count in outputs[:3]), (_HIDDEN, outputs[0])]
    linears = [
        product_of(
            torch.randn(shape, generator=generator),
            None if product.bias is None else torch.randn(shape[0], generator=generator) * _LARGE,
        )
        for product, shape in zip(products, shapes, strict=True)
    ]
    weights = [torch.rand(norm.weight.shape, generator=generator) + 0.5 for norm in normed]
    trial = _Trial(part, dict(zip(products, linears, strict=True)), size)
    for norm, weight in zip(normed, weights, strict=True):
        trial.children[norm] = copy.copy(norm)
        trial.children[norm]._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    x = torch.randn((_ROWS, _HIDDEN), generator=generator) * _LARGE
    if (result := trial.run(x)) is None:
        return None
    effect, out = result
    per_projection = bool(normed) and normed[0].weight.shape[0] != size
    made = UsualAttention(part, products, normed, per_projection, (NormForm(0.0), *forms)[-1], effect)
    return made if _agrees(made, linears, weights, x, trial, out) else None


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
    made: UsualAttention, linears: list[nn.Linear], weights: list[Tensor], x: Tensor, trial: _Trial, out: Tensor
) -> bool:
    """Whether the effect and the result ``out`` [T, H] of a trial are what ``made`` computes."""
    size, form = trial.cos.shape[1], made.form
    q, k, v = (product(x) for product in linears[:3])
    factors = [weight + form.shift for weight in weights]
    if weights and made.per_projection:
        q, k = (plain_norm(tensor, weight, form.eps) for tensor, weight in zip((q, k), factors, strict=True))
    q, k, v = (tensor.unflatten(1, (-1, size)) for tensor in (q, k, v))
    if weights and not made.per_projection:
        q, k = (plain_norm(tensor, weight, form.eps) for tensor, weight in zip((q, k), factors, strict=True))
    q, k = (plain_rotation(tensor, trial.cos, trial.sin) for tensor in (q, k))
    attended = linears[3](trial.attended.flatten(1))
    pairs = ((made.like.q, q), (made.like.k, k), (made.like.v, v), (out, attended))
    return all(one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-3) for one, other in pairs)


class _Stub(nn.Module):
    """In place of a child of a layer: ``function`` of its first argument."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor | None = None, **named: Any) -> Any:
        return self.function(named["hidden_states"] if x is None else x)


def _order_of(part: Any, mixers: Sequence[str], norms: Sequence[str]) -> tuple[str, ...] | None:
    """The names of the first norm, the attention, the second norm and the block of a layer, and of the norms of both
    results if there are four, if ``part`` is one that adds both results to the residual stream. ``mixers`` and
    ``norms``: the names of its attention and its norms."""
    blocks = [name for name in part._modules if name not in (*mixers, *norms)]
    if len(mixers) != 1 or len(blocks) != 1 or len(norms) not in (2, 4):
        return None
    functions: tuple[Callable[[Tensor], Any], ...] = (torch.sin, torch.tanh, torch.atan, torch.sigmoid)
    after = functions[2:] if len(norms) > 2 else (torch.clone, torch.clone)
    x = torch.randn((1, _ROWS, _HIDDEN), generator=torch.Generator().manual_seed(0))
    sums = x + after[0](torch.cos(2 * torch.sin(x)))
    expected = sums + after[1](torch.exp(torch.tanh(sums)))
    for first, second, *more in permutations(norms):
        stubs = {name: _Stub(function) for name, function in zip((first, second, *more), functions, strict=False)}
        stubs |= {mixers[0]: _Stub(lambda x: ((2 * x).cos(), None)), blocks[0]: _Stub(torch.exp)}
        output = tried(part, {}, stubs, x)
        if output is not None and output.shape == x.shape and torch.allclose(output, expected, rtol=1e-5, atol=1e-6):
            return first, mixers[0], second, blocks[0], *more
    return None
