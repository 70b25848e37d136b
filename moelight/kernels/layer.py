"""Decoder layers as one call, or one as a call on each side of its attention, for few tokens on the CPU; the extension
alone.

Each call is the kernels of `norm`, `ffn`, `attention` and `routing` one after the other, with their results to the bit.
Nothing is left to do between them, so with few tokens, where weights are read in the time that a few calls from Python
take, the memory is not idle and the threads of the kernels do not fall asleep.

Legend: T tokens, H hidden, Hq query heads, Hkv key/value heads, D head size, E experts, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moelight.hrm.costs import WHOLE_LAYERS_TOKENS
from moelight.kernels import arguments, native
from moelight.kernels.activations import Activation
from moelight.kernels.arguments import as_dlpack, lend, lend_given
from moelight.kernels.caching_allocator import RESULTS
from moelight.kernels.ffn import Tensors, export
from moelight.kernels.matrices import Weights

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


class DecoderLayer:
    """One layer with experts: attention of grouped queries with half rotations, a softmax router.

    input_norm, post_norm   [H], of one dtype, as all other weights and all activations: float32, bfloat16 or float16
    qkv, qkv_bias           [(Hq + 2 Hkv) D, H], and a number for each row
    q_norm, k_norm          [D], of every query and key; or [Hq D] and [Hkv D], of all of a token; or neither
    o, o_bias               [H, Hq D], and a number for each row
    router                  [E, H]; ``top_k``, ``normalize`` and ``round_weights`` are those of `cpu_route`

    Every wrong argument is a ValueError that names it; so is a missing extension.
    """

    def __init__(
        self,
        *,
        input_norm: Tensor,
        qkv: Tensor,
        o: Tensor,
        post_norm: Tensor,
        router: Tensor,
        eps: float,
        head_dim: int,
        top_k: int,
        normalize: bool,
        round_weights: bool,
        qkv_bias: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        o_bias: Tensor | None = None,
    ) -> None:
        first, rest = lend(input_norm=input_norm, qkv=qkv), lend(post_norm=post_norm, router=router)
        lent = lend_given(qkv_bias=qkv_bias, q_norm=q_norm, k_norm=k_norm)
        out = [as_dlpack("o", o), *lend_given(o_bias=o_bias)]
        eps = arguments.check_number("eps", eps, 0)
        how = (eps, head_dim, top_k, bool(normalize), bool(round_weights))
        self.native = _extension().DecoderLayer(*first, *lent, *out, *rest, *how)
        self._rows, self._head_dim, self.top_k = qkv.shape[0], head_dim, top_k

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
    cos: Tensor,
    sin: Tensor,
    caches: Sequence[PagedCache],
    block_tables: Tensor,
    seq_lens: Tensor,
    experts: Sequence[BoundExperts],
    *,
    rows: Tensor | None = None,
    threads: int | None = None,
) -> None:
    """hidden [T, H] through ``layers``, one after the other, in place, each with its cache and its experts.

    Row t is the last token of sequence t, whose key and value are written to each cache first.

    cos, sin      [T, D] as for `DecoderLayer.before_attention`
    block_tables  int32 [T, max_blocks], seq_lens int32 [T], that token counted, as for `cpu_gqa_decode`
    rows          [T top_k, H]: memory to work in; None: allocated

    Every wrong argument is a ValueError that names it.
    """
    if not len(layers) == len(caches) == len(experts):
        raise ValueError(f"layers: are {len(layers)}, with {len(caches)} caches and {len(experts)} groups of experts")
    lent = lend(hidden=hidden, cos=cos, sin=sin, block_tables=block_tables, seq_lens=seq_lens)
    room = _room(hidden, max((layer.top_k for layer in layers), default=0), rows)
    bound = (
        [expert.native for expert in layers],
        [expert.native for expert in caches],
        [expert.native for expert in experts],
    )
    _extension().decode_layers(*bound, *lent, room, arguments.check_threads(threads))


def _room(hidden: Tensor, top_k: int, rows: Tensor | None) -> object:
    if rows is None:
        rows = RESULTS.empty((len(hidden) * top_k, hidden.shape[1]), hidden.dtype)
    return as_dlpack("rows", rows)


def _extension() -> Any:
    extension = native.extension()
    if extension is None:
        raise ValueError(f"a decoder layer in one call needs the extension: {native.reason()}")
    return extension
