"""Linear attention by the gated delta rule, and the causal convolution before it, over the rows of several sequences.

Native where the extension is built, else `reference.py`; for tensors in CPU memory. Every wrong argument is a
ValueError that names it. ``threads`` None stands for torch.get_num_threads(). The result of a row is bit for bit
independent of the other sequences, of the number of threads, and of where the rows of its sequence are cut into calls.

Legend: B sequences, T rows of all of them, C channels, K taps, Hk heads of queries and keys, H heads of values (a
multiple of Hk), Dk and Dv their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moelight.kernels import arguments, native, reference
from moelight.kernels.arguments import FLOATS, as_dlpack, check_offsets, check_tensor, lend, lend_given, stored

MOST_TAPS = 16


def cpu_causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Sequence[Tensor],
    starts: Tensor,
    *,
    silu: bool,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Depthwise convolution of each sequence over its rows and those before them -> `out`, or a new [T, C].

    x        [T, C]: float32, bfloat16 or float16; there may be a gap between rows
    weight   [C, K], dtype of x, K at most `MOST_TAPS`; the last tap is that of the row itself
    bias     [C], dtype of x
    states   of each sequence [K - 1, C], dtype of x: the rows before its first one, at the end its last ones
    starts   int32 [B + 1]: sequence b has rows starts[b] to starts[b + 1]
    silu     apply SiLU to the result, rounded to the dtype of x before it and after it
    """
    threads, extension = arguments.check_threads(threads), native.extension()
    if extension is None:
        rows, channels = check_tensor("x", x, FLOATS, (None, None))
        _, taps = check_tensor("weight", weight, x.dtype, (channels, None), gap=False)
        if not 1 <= taps <= MOST_TAPS:
            raise ValueError(f"weight: must have 1 to {MOST_TAPS} taps, has shape {list(weight.shape)}")
        if bias is not None:
            check_tensor("bias", bias, x.dtype, (channels,), gap=False)
        if out is not None:
            check_tensor("out", out, x.dtype, (rows, channels))
        bounds = _checked(states, starts, rows, x.dtype, (taps - 1, channels))
        return stored(reference.causal_conv(x, weight, bias, states, bounds, silu=silu), out)
    lent, added = lend(x=x, weight=weight), lend_given(bias=bias)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    extension.causal_conv(*lent, *added, _lent(states), *lend(starts=starts), silu, *lend(out=out), threads)
    return out


def cpu_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Sequence[Tensor],
    starts: Tensor,
    *,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Each row in turn corrects what its sequence's state predicts of its value, and asks it -> `out`, or a new [T, H,
    Dv]: S <- exp(decay) S; S <- S + k (beta (v - S^T k))^T; S^T q, with k and q of length 1, q over the root of Dk
    (Yang et al., Gated Delta Networks, arXiv 2412.06464, equation 10; a decay for each row of S: arXiv 2510.26692).

    q, k     [T, Hk, Dk]: float32, bfloat16 or float16; there may be a gap between rows
    v        [T, H, Dv], dtype of q
    decay    [T, H, 1 or Dk] float32: logarithms, at most 0
    beta     [T, H] float32
    states   of each sequence [H, Dk, Dv] float32, in place
    starts   int32 [B + 1]: sequence b has rows starts[b] to starts[b + 1]
    """
    threads, extension = arguments.check_threads(threads), native.extension()
    if extension is None:
        rows, key_heads, key_dim = check_tensor("q", q, FLOATS, (None, None, None))
        check_tensor("k", k, q.dtype, (rows, key_heads, key_dim))
        _, heads, value_dim = check_tensor("v", v, q.dtype, (rows, None, None))
        if not key_heads or heads % key_heads:
            raise ValueError(f"v: its heads must be a multiple of those of q, has shape {list(v.shape)}")
        wide = check_tensor("decay", decay, torch.float32, (rows, heads, None))[2]
        if wide not in (1, key_dim):
            raise ValueError(f"decay: must have 1 or {key_dim} numbers a head, has shape {list(decay.shape)}")
        check_tensor("beta", beta, torch.float32, (rows, heads))
        if out is not None:
            check_tensor("out", out, q.dtype, (rows, heads, value_dim))
        bounds = _checked(states, starts, rows, torch.float32, (heads, key_dim, value_dim))
        return stored(reference.delta_rule(q, k, v, decay, beta, states, bounds), out)
    lent = lend(q=q, k=k, v=v, decay=decay, beta=beta)
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype)
    extension.delta_rule(*lent, _lent(states), *lend(starts=starts, out=out), threads)
    return out


def _lent(states: Sequence[Tensor]) -> list[object]:
    return [as_dlpack("states", state) for state in states]


def _checked(
    states: Sequence[Tensor], starts: Tensor, rows: int, dtype: torch.dtype, shape: Sequence[int]
) -> list[int]:
    check_tensor("starts", starts, torch.int32, (None,), gap=False)
    bounds = check_offsets("starts", starts, rows)
    if len(states) != len(bounds) - 1:
        raise ValueError(f"states: must be {len(bounds) - 1}, one a sequence, are {len(states)}")
    for state in states:
        check_tensor("states", state, dtype, shape, gap=False)
    if len({state.data_ptr() for state in states}) < len(states) and shape[0]:
        raise ValueError("states: two sequences have the same one")
    return bounds
