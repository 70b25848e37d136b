"""The effects with which a run of a module graph suspends itself. Does not depend on transformers, nor on how an effect
is served.

Legend: T rows of the micro-batch, H hidden, Hq query heads, Hkv key/value heads, D head size of queries and keys, Dv of
values, R size of a latent, Rr of a rotated key, k experts per token. Tensors have the dtype and device of the module;
they are views that the graph does not write again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Attend:
    """Causal attention over the cache of mixer ``layer``; resume with [T, Hq, Dv].

    Attributes:
        layer: number of the mixer effect in the order of the graph.
        q: [T, Hq, D], after the rotary embedding and norms; so is ``k``.
        k: [T, Hkv, D], to be appended to the cache.
        v: [T, Hkv, Dv].
        scale: of the products of queries and keys.
        window: a row at position p sees keys p - window + 1 … p; all up to p if None.
        chunk: a row at position p sees no key before p // chunk * chunk; None: no such border.
        sinks: one logit a query head [Hq], which takes part in the softmax and has no value.
        softcap: c of c · tanh(logit / c), applied to scaled logits.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None = None
    sinks: Tensor | None = None
    softcap: float | None = None
    chunk: int | None = None


@dataclass(slots=True)
class Latents:
    """Causal latent attention over the cache of mixer ``layer``, which keeps latents; resume with [T, Hq, R].

    A cached row is a latent c [R] and a rotated key r [Rr], shared by all heads. The logit of a position is
    scale · (q · c + q_rope · r), and the result of a head the sum of softmax weights times c: what
    `kernels.attention.cpu_mla_decode` computes and `cpu_mla_append` keeps. The graph itself multiplies queries and
    results by the matrices that expand latents to keys and values. R + Rr numbers a token instead of Hq · (D + Dv).

    Attributes:
        layer: number of the mixer effect in the order of the graph.
        q: [T, Hq, R], queries times the matrix that expands latents to keys.
        q_rope: [T, Hq, Rr], after the rotary embedding.
        latent: [T, R + Rr], to be appended to the cache: c, then r.
        scale: of the logits.
    """

    layer: int
    q: Tensor
    q_rope: Tensor
    latent: Tensor
    scale: float


@dataclass(slots=True)
class MixerPassed:
    """Mixer ``layer``, which keeps a state of its own, has run; resume with None. Only in a graph that runs by pages:
    what follows needs the next one."""

    layer: int


@dataclass(slots=True)
class Experts:
    """The mixture of routed experts after mixer ``layer``; resume with [T, H] in the dtype of ``x``.

    Attributes:
        layer: number of the mixer effect that it follows.
        index: number of this effect in the order of the graph, as in ``GraphModel.experts`` and ``forms``.
        x: [T, H], what each chosen expert is applied to.
        ids: integers [T, k]; an id that is not below the number of experts adds nothing.
        weights: float32 [T, k], factors of the experts' outputs, as the family's router gave them.
    """

    layer: int
    index: int
    x: Tensor
    ids: Tensor
    weights: Tensor


@dataclass(slots=True)
class LayersPassed:
    """All layers, in one call; resume with the hidden states [T, H] that the last of them gives. Only in a run whose
    layers are passed by.

    Attributes:
        count: of layers.
        hidden: [1, T, H], before the first of them.
        angles: cosines and sines [1, T, D] of each layer so far.
        parts: the layers so far.
    """

    count: int
    hidden: Tensor | None = None
    angles: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    parts: list[object] = field(default_factory=list)


@dataclass(slots=True)
class Ended:
    """The end of a run: ``hidden`` [T, H] after the final norm."""

    hidden: Tensor


Effect = Attend | Latents | MixerPassed | Experts | Ended  # of a run whose layers are computed one by one
