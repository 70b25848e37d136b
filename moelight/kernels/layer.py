"""Decoder layers as one call, or one as a call on each side of its attention, for few tokens on the CPU; the extension
alone. A layer has routed experts, or one feed-forward block for all tokens.

Each call is the kernels of `norm`, `ffn`, `attention` and `routing` one after the other, with their results to the bit.
Nothing is left to do between them, so with few tokens, where weights are read in the time that a few calls from Python
take, the memory is not idle and the threads of the kernels do not fall asleep.

Legend: T tokens, H hidden, Hq query heads, Hkv key/value heads, D head size, E experts, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelight.hrm.costs import WHOLE_LAYERS_TOKENS
from moelight.kernels import arguments, native
from moelight.kernels.activations import Activation
from moelight.kernels.arguments import FLOATS, as_dlpack, lend, lend_given
from moelight.kernels.caching_allocator import RESULTS
from moelight.kernels.ffn import Tensors, export
from moelight.kernels.matrices import Weight, Weights, lend_weight

# More tokens are computed kernel by kernel: what lies between two of them would be memory that no plan announces.
MOST_TOKENS = WHOLE_LAYERS_TOKENS


class PagedCache:
    """The cache of a layer for `decode_layers`, checked once, whose memory stays in use as long as this object.

    k_cache, v_cache, k_scale, v_scale, ``scale``, ``window`` and ``softcap`` are those of `cpu_gqa_decode`.
    """

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Raises ValueError where `cpu_gqa_decode` does, and without the extension."""
        lent, scales = lend(k_cache=k_cache, v_cache=v_cache), lend_given(k_scale=k_scale, v_scale=v_scale)
        how = arguments.check_window(window) or 0, arguments.check_softcap(softcap) or 0.0
        self.native = _extension().PagedCache(*lent, arguments.check_number("scale", scale), *how, *scales)


class BoundExperts:
    """The experts of a layer, checked once, whose memory stays in use as long as this object.

    Arguments are those of `cpu_expert_ffn`, for rows [T, ``hidden``]; an expert that is None has no rows.
    """

    def __init__(
        self,
        hidden: int,
        gate_up: Weights,
        down: Weights,
        *,
        activation: Activation,
        up: Weights | None = None,
        interleaved: bool = False,
        gate_up_bias: Tensors | None = None,
        up_bias: Tensors | None = None,
        down_bias: Tensors | None = None,
        activations: str | tuple[str, str] = "auto",
    ) -> None:
        """Raises ValueError where `cpu_expert_ffn` does, and without the extension."""
        biases = {"gate_up_bias": gate_up_bias, "up_bias": up_bias, "down_bias": down_bias}
        rest = [None if bias is None else export(name, bias) for name, bias in biases.items()]
        by = (activation.curve, activation.alpha, activation.limit, activation.shift, activation.late)
        pairing = "interleaved" if interleaved else "joined" if activation.gated else "ungated"
        second = None if up is None else export("up", up)
        matrices = export("gate_up", gate_up), second, export("down", down)
        by_side = (activations, activations) if isinstance(activations, str) else activations
        self.native = _extension().bind_experts(hidden, *matrices, by, pairing, *rest, by_side)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerProduct:
    """The product of tokens with matrices of as many columns, below one another.

    Attributes:
        weights: floats of the dtype of the tokens, or quantised.
        biases: of each matrix, a number for each row, or None; empty: none has.
        activations: of each matrix, as of `cpu_linear`; empty: auto.
        wide: tokens are widened to float32, and results rounded once.
    """

    weights: Sequence[Weight]
    biases: Sequence[Tensor | None] = ()
    activations: Sequence[str] = ()
    wide: bool = False

    @property
    def rows(self) -> int:
        """The number of columns of the result."""
        return sum(weight.shape[0] for weight in self.weights)

    def lent(self, name: str) -> tuple[list[object], bool]:
        """The extension's arguments."""
        count = len(self.weights)
        parts = zip(self.weights, self.biases or (None,) * count, self.activations or ("auto",) * count, strict=True)
        return [(lend_weight(name, weight), *lend_given(bias=bias), by) for weight, bias, by in parts], self.wide


class DecoderLayer:
    """One layer: attention of grouped queries with half rotations, then experts of a softmax router, or one
    feed-forward block for all tokens.

    input_norm, post_norm       [H], of ``dtype``, as all activations: float32, bfloat16 or float16; or of float32 if
                                they are computed in float32 and rounded once. This applies to all norms
    attention_norm, block_norm  [H], of the results of attention and of the experts before they are added; or None
    qkv                         to [(Hq + 2 Hkv) D] from [H]
    q_norm, k_norm              [D], of every query and key; or [Hq D] and [Hkv D], of all of a token; or neither
    o                           to [H] from [Hq D]
    router                      [E, H]; ``top_k``, ``normalize`` and ``round_weights`` are those of `cpu_route`. None:
                                there is one expert, for all tokens, which are widened to float32 if ``wide_block``

    Every wrong argument is a ValueError that names it; so is a missing extension.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        input_norm: Tensor,
        qkv: LayerProduct,
        o: LayerProduct,
        post_norm: Tensor,
        eps: float,
        head_dim: int,
        router: Tensor | None = None,
        top_k: int = 0,
        normalize: bool = False,
        round_weights: bool = False,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        attention_norm: Tensor | None = None,
        block_norm: Tensor | None = None,
        wide_block: bool = False,
    ) -> None:
        names = FLOATS.index(dtype), as_dlpack("input_norm", input_norm), qkv.lent("qkv")
        heads, out = lend_given(q_norm=q_norm, k_norm=k_norm), o.lent("o")
        (after,), second = lend_given(attention_norm=attention_norm), as_dlpack("post_norm", post_norm)
        eps = arguments.check_number("eps", eps, 0)
        how = (bool(wide_block), eps, head_dim, top_k, bool(normalize), bool(round_weights))
        rest = lend_given(router=router, block_norm=block_norm)
        self.native = _extension().DecoderLayer(*names, *heads, out, after, second, *rest, *how)
        self._rows, self._head_dim, self.top_k = qkv.rows, head_dim, 0 if router is None else top_k

    def before_attention(self, hidden: Tensor, cos: Tensor, sin: Tensor, *, threads: int | None = None) -> Tensor:
        """hidden [T, H], cos and sin [T, D] as for `cpu_rotate` -> [T, Hq + 2 Hkv, D]: normed, multiplied, queries and
        keys normed and rotated."""
        qkv = RESULTS.empty((hidden.shape[0], self._rows), hidden.dtype)
        lent = lend(hidden=hidden, cos=cos, sin=sin, qkv=qkv)
        self.native.before_attention(*lent, arguments.check_threads(threads))
        return qkv.view(len(qkv), -1, self._head_dim)

    def after_attention(
        self,
        hidden: Tensor,
        attention: Tensor,
        experts: BoundExperts,
        *,
        rows: Tensor | None = None,
        threads: int | None = None,
    ) -> None:
        """hidden [T, H] += o(attention [T, Hq D]), then += the experts of its norm; in place. ``rows`` [T top_k, H] is
        memory to work in; None: allocated."""
        lent, room = lend(hidden=hidden, attention=attention), _room(hidden, self.top_k, rows)
        self.native.after_attention(*lent, experts.native, room, arguments.check_threads(threads))


def decode_layers(
    layers: Sequence[DecoderLayer],
    hidden: Tensor,
    angles: Sequence[tuple[Tensor, Tensor]],
    caches: Sequence[PagedCache],
    block_tables: Tensor,
    seq_lens: Tensor,
    experts: Sequence[BoundExperts],
    *,
    turns: Sequence[int] = (),
    rows: Tensor | None = None,
    threads: int | None = None,
) -> None:
    """hidden [T, H] through ``layers``, one after the other, in place, each with its cache and its experts.

    Row t is the last token of sequence t, whose key and value are written to each cache first.

    angles        pairs of cos and sin [T, D] as for `DecoderLayer.before_attention`
    turns         of each layer, its place in ``angles``; empty: all layers have the first
    block_tables  int32 [T, max_blocks], seq_lens int32 [T], that token counted, as for `cpu_gqa_decode`
    rows          [T top_k, H]: memory to work in; None: allocated

    Every wrong argument is a ValueError that names it.
    """
    if not len(layers) == len(caches) == len(experts):
        raise ValueError(f"layers: are {len(layers)}, with {len(caches)} caches and {len(experts)} groups of experts")
    turns = turns or (0,) * len(layers)
    if len(turns) != len(layers) or not all(0 <= turn < len(angles) for turn in turns):
        raise ValueError(f"turns: must be {len(layers)} places in angles, of which there are {len(angles)}")
    pairs = [tuple(lend(cos=cos, sin=sin)) for cos, sin in angles]
    x, tables = as_dlpack("hidden", hidden), lend(block_tables=block_tables, seq_lens=seq_lens)
    room = _room(hidden, max((layer.top_k for layer in layers), default=0), rows)
    bound = (
        [expert.native for expert in layers],
        [expert.native for expert in caches],
        [expert.native for expert in experts],
    )
    _extension().decode_layers(*bound, x, pairs, turns, *tables, room, arguments.check_threads(threads))


def _room(hidden: Tensor, top_k: int, rows: Tensor | None) -> object:
    if rows is None:
        rows = RESULTS.empty((len(hidden) * top_k, hidden.shape[1]), hidden.dtype)
    return as_dlpack("rows", rows)


def _extension() -> Any:
    extension = native.extension()
    if extension is None:
        raise ValueError(f"a decoder layer in one call needs the extension: {native.reason()}")
    return extension
