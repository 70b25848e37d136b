"""Routing on the CPU: the experts of each token, rows sorted by expert, and the weighted sum back.

Native where the extension is built, else `reference.py`. Every wrong argument is a ValueError that names it.
``threads`` None stands for torch.get_num_threads().

Legend: T tokens, E experts, k experts per token, H hidden size, R = T * k routed rows (token * k + rank).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moelight.kernels import arguments, native, reference
from moelight.kernels.arguments import FLOATS, as_dlpack, check_integer, check_tensor, lend
from moelight.kernels.caching_allocator import RESULTS

MOST_EXPERTS = 1 << 16
_MOST_ROWS = (1 << 31) - 1


class SortedRows(NamedTuple):
    """Routed rows sorted by expert, then token; all int32.

    ``order`` [R] lists the routed rows, ``token`` [R] the token of each, and ``position`` [T, k] the index in ``order``
    of routed row (token, rank). Expert e has ``offsets[e]`` to ``offsets[e + 1]``.
    """

    order: Tensor
    token: Tensor
    position: Tensor
    offsets: Tensor


def cpu_route(
    logits: Tensor, top_k: int, *, normalize: bool, round_weights: bool = False, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights float32 [T, k] and ids int32 [T, k] of the k most likely experts, ids ascending.

    logits         float32, bfloat16 or float16; E up to 65536
    normalize      a token's weights are divided by their sum
    round_weights  the weights are rounded to the dtype of the logits, as models in that dtype do

    Weights are the softmax over all E logits in float32. Of equal logits the lowest id wins. The result is bit for bit
    independent of instruction set, number of threads and other tokens. A token with a logit that is not a number, or
    infinite, gets the first k experts and weights that are not numbers.
    """
    threads = arguments.check_threads(threads)
    extension = native.extension()
    lent = _export("logits", logits)
    if extension is None:
        check_tensor("logits", logits, FLOATS, (None, None))
    tokens, experts = logits.shape
    if experts > MOST_EXPERTS:
        raise ValueError(f"logits: at most {MOST_EXPERTS} experts are routed, has {experts}")
    check_integer("top_k", top_k, 1, experts)
    if extension is None:
        return reference.route(logits, top_k, normalize=normalize, round_weights=round_weights)
    weights = torch.empty(tokens, top_k, dtype=torch.float32)
    ids = torch.empty(tokens, top_k, dtype=torch.int32)
    into = lend(weights=weights, ids=ids)
    extension.route(lent, top_k, bool(normalize), bool(round_weights), *into, threads)
    return weights, ids


def cpu_sort_by_expert(ids: Tensor, experts: int) -> SortedRows:
    """ids int32 [T, k], each from 0 to ``experts`` - 1 -> the routed rows by expert, then token, then rank."""
    extension = native.extension()
    lent_ids = _export("ids", ids)
    if extension is None:
        check_tensor("ids", ids, torch.int32, (None, None))
    check_integer("experts", experts, 0, MOST_EXPERTS)
    tokens, top_k = ids.shape
    rows = tokens * top_k
    if rows > _MOST_ROWS:
        raise ValueError(f"ids: has too many rows: shape {list(ids.shape)}")
    if extension is None:
        arguments.check_indices("ids", ids, experts)
        return SortedRows(*reference.sort_by_expert(ids, experts))
    result = SortedRows(
        order=torch.empty(rows, dtype=torch.int32),
        token=torch.empty(rows, dtype=torch.int32),
        position=torch.empty(tokens, top_k, dtype=torch.int32),
        offsets=torch.empty(experts + 1, dtype=torch.int32),
    )
    extension.sort_by_expert(lent_ids, experts, *lend(**result._asdict()))
    return result


def cpu_gather_rows(
    x: Tensor, token_of_row: Tensor, *, out: Tensor | None = None, threads: int | None = None
) -> Tensor:
    """x [T, H] float32, bfloat16 or float16, token_of_row int32 [R] -> `out`, or a new [R, H].

    `out` may have a gap between its rows; it shares no memory with `x`.
    """
    threads = arguments.check_threads(threads)
    extension = native.extension()
    if extension is None:
        check_tensor("x", x, FLOATS, (None, None))
        check_tensor("token_of_row", token_of_row, torch.int32, (None,))
        out = _output(out, x, token_of_row.shape[0])
        arguments.check_indices("token_of_row", token_of_row, x.shape[0])
        return out.copy_(x.index_select(0, token_of_row.long()))
    rows, tokens = _export("x", x), as_dlpack("token_of_row", token_of_row)
    if out is None:
        out = RESULTS.empty((token_of_row.numel(), x.shape[1]), x.dtype)
    extension.gather_rows(rows, tokens, as_dlpack("out", out), threads)
    return out


def cpu_scatter_sum(
    rows: Tensor,
    position: Tensor,
    weights: Tensor,
    out: Tensor | None = None,
    *,
    residual: bool = False,
    threads: int | None = None,
) -> Tensor:
    """Each token's rows, weighted and summed -> `out`, or a new [T, H].

    rows      [R, H]: float32, bfloat16 or float16
    position  int32 [T, k]: the row of (token, rank); a negative position adds nothing
    weights   float32 [T, k]
    out       [T, H], dtype of rows, sharing no memory with it; needed if ``residual``
    residual  the sum is added to the contents of `out`, else it replaces them

    A token is summed in float32 over its ranks in order, and rounded to the dtype of `rows`; then it is added to `out`,
    as `out += ...` would. The result is bit for bit independent of instruction set, number of threads and other tokens.
    """
    threads = arguments.check_threads(threads)
    if residual and out is None:
        raise ValueError("out: must hold the residual")
    extension = native.extension()
    if extension is None:
        check_tensor("rows", rows, FLOATS, (None, None))
        check_tensor("weights", weights, torch.float32, check_tensor("position", position, torch.int32, (None, None)))
        out = _output(out, rows, position.shape[0])
        arguments.check_indices("position", position, rows.shape[0], least=-(1 << 31))
        return reference.scatter_sum(rows, position, weights, out, residual=residual)
    lent, places = _export("rows", rows), _export("position", position)
    if out is None:
        out = RESULTS.empty((position.shape[0], rows.shape[1]), rows.dtype)
    extension.scatter_sum(lent, places, as_dlpack("weights", weights), as_dlpack("out", out), bool(residual), threads)
    return out


def _export(name: str, tensor: Tensor) -> object:
    """A matrix exported to the extension, which checks everything but the number of dimensions."""
    lent = as_dlpack(name, tensor)
    if tensor.ndim != 2:
        raise ValueError(f"{name}: must have 2 dimensions, has shape {list(tensor.shape)}")
    return lent


def _output(out: Tensor | None, like: Tensor, rows: int) -> Tensor:
    if out is None:
        return torch.empty(rows, like.shape[1], dtype=like.dtype)
    check_tensor("out", out, like.dtype, (rows, like.shape[1]))
    (begin, end), (first, last) = _span(out), _span(like)
    if out.numel() and like.numel() and begin < last and first < end:
        raise ValueError("out: shares memory with the rows it is made from")
    return out


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and after the last one."""
    size = (len(tensor) - 1) * tensor.stride(0) + tensor.shape[1]
    return tensor.data_ptr(), tensor.data_ptr() + size * tensor.element_size()
