"""Routing on the CPU: the experts of each token, rows sorted by expert, and the weighted sum back.

Selects the implementation: the extension where it is built, else `reference.py`. Does not depend on the weights
of experts. Every wrong argument is a ValueError that names it.

Legend: T tokens, E experts, k experts per token, H hidden size, R = T * k routed rows (token * k + rank).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moelight.kernels import checks, native, reference
from moelight.kernels.dlpack import as_dlpack

MOST_EXPERTS = 1 << 16
_MOST_ROWS = (1 << 31) - 1


class SortedRows(NamedTuple):
    """Routed rows sorted by expert, then token; all int32.

    ``order`` [R] lists the routed rows, ``token`` [R] the token of each, and ``position`` [T, k] the index in ``order``
    of routed row (token, rank). Expert e owns ``offsets[e]`` to ``offsets[e + 1]``.
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
    threads        None for torch.get_num_threads()

    Weights are the softmax over all E logits in float32. Of equal logits the lowest id wins. The result is bit for bit
    independent of instruction set, number of threads and other tokens. A token with a logit that is not a number, or
    infinite, gets the first k experts and weights that are not numbers.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape or stride.
    """
    _, _, threads = checks.check_scalars(1.0, None, threads)
    extension = native.extension()
    lent = _export("logits", logits)
    if extension is None:
        _floats("logits", logits)
    tokens, experts = logits.shape
    if experts > MOST_EXPERTS:
        raise ValueError(f"logits: at most {MOST_EXPERTS} experts are routed, has {experts}")
    _whole("top_k", top_k, 1, experts)
    if extension is None:
        return reference.route(logits, top_k, normalize=normalize, round_weights=round_weights)
    weights = torch.empty(tokens, top_k, dtype=torch.float32)
    ids = torch.empty(tokens, top_k, dtype=torch.int32)
    extension.route(
        lent, top_k, bool(normalize), bool(round_weights), as_dlpack("weights", weights), as_dlpack("ids", ids), threads
    )
    return weights, ids


def cpu_sort_by_expert(ids: Tensor, experts: int) -> SortedRows:
    """ids int32 [T, k], each from 0 to ``experts`` - 1 -> the routed rows by expert, then token, then rank.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride or id.
    """
    extension = native.extension()
    lent_ids = _export("ids", ids)
    if extension is None:
        checks._layout("ids", ids, 2, torch.int32)
    _whole("experts", experts, 0, MOST_EXPERTS)
    tokens, top_k = ids.shape
    rows = tokens * top_k
    if rows > _MOST_ROWS:
        raise ValueError(f"ids: has too many rows: shape {list(ids.shape)}")
    if extension is None:
        _range("ids", ids, 0, experts)
        return SortedRows(*reference.sort_by_expert(ids, experts))
    found = SortedRows(
        order=torch.empty(rows, dtype=torch.int32),
        token=torch.empty(rows, dtype=torch.int32),
        position=torch.empty(tokens, top_k, dtype=torch.int32),
        offsets=torch.empty(experts + 1, dtype=torch.int32),
    )
    lent = (as_dlpack(name, tensor) for name, tensor in zip(found._fields, found, strict=True))
    extension.sort_by_expert(lent_ids, experts, *lent)
    return found


def cpu_gather_rows(
    x: Tensor, token_of_row: Tensor, *, out: Tensor | None = None, threads: int | None = None
) -> Tensor:
    """x [T, H] float32, bfloat16 or float16, token_of_row int32 [R] -> `out`, or a new [R, H].

    `out` may have a gap between its rows; it shares no memory with `x`. ``threads`` is None for
    torch.get_num_threads().

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride or token.
    """
    _, _, threads = checks.check_scalars(1.0, None, threads)
    extension = native.extension()
    if extension is None:
        _floats("x", x)
        checks._layout("token_of_row", token_of_row, 1, torch.int32)
        out = _output(out, x, token_of_row.shape[0])
        _range("token_of_row", token_of_row, 0, x.shape[0])
        return out.copy_(reference.gather_rows(x, token_of_row))
    rows, tokens = _export("x", x), as_dlpack("token_of_row", token_of_row)
    if out is None:
        out = torch.empty(token_of_row.numel(), x.shape[1], dtype=x.dtype)
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
    threads   None for torch.get_num_threads()

    A token is summed in float32 over its ranks in order, so that ids in ascending order are summed in that order, and
    rounded to the dtype of `rows`; then it is added to `out`, as `out += ...` would. The result is bit for bit
    independent of instruction set, number of threads and other tokens.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride or position.
    """
    _, _, threads = checks.check_scalars(1.0, None, threads)
    if residual and out is None:
        raise ValueError("out: must hold the residual")
    extension = native.extension()
    if extension is None:
        _floats("rows", rows)
        checks._layout("position", position, 2, torch.int32)
        checks._layout("weights", weights, 2, torch.float32)
        checks._shape("weights", weights, tuple(position.shape))
        out = _output(out, rows, position.shape[0])
        _range("position", position, -(1 << 31), rows.shape[0])
        return reference.scatter_sum(rows, position, weights, out, residual=residual)
    lent, places = _export("rows", rows), _export("position", position)
    if out is None:
        out = torch.empty(position.shape[0], rows.shape[1], dtype=rows.dtype)
    extension.scatter_sum(lent, places, as_dlpack("weights", weights), as_dlpack("out", out), bool(residual), threads)
    return out


def _export(name: str, tensor: Tensor) -> object:
    """A matrix exported to the extension, which checks everything but the number of dimensions."""
    lent = as_dlpack(name, tensor)
    if tensor.ndim != 2:
        raise ValueError(f"{name}: must have 2 dimensions, has shape {list(tensor.shape)}")
    return lent


def _whole(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}: must be an integer from {least} to {most}, is {value!r}")


def _floats(name: str, tensor: Tensor) -> None:
    checks._tensor(name, tensor)
    if tensor.dtype not in checks.FLOATS:
        raise ValueError(f"{name}: must be float32, bfloat16 or float16, is {tensor.dtype}")
    checks._layout(name, tensor, 2, tensor.dtype)


def _output(out: Tensor | None, like: Tensor, rows: int) -> Tensor:
    if out is None:
        return torch.empty(rows, like.shape[1], dtype=like.dtype)
    checks._layout("out", out, 2, like.dtype)
    checks._shape("out", out, (rows, like.shape[1]))
    if out.numel() and like.numel() and _begin(out) < _end(like) and _begin(like) < _end(out):
        raise ValueError("out: shares memory with the rows it is made from")
    return out


def _begin(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + ((len(tensor) - 1) * tensor.stride(0) + tensor.shape[1]) * tensor.element_size()


def _range(name: str, index: Tensor, least: int, rows: int) -> None:
    if index.numel() and not least <= int(index.min()) <= int(index.max()) < rows:
        raise ValueError(f"{name}: has entries from {int(index.min())} to {int(index.max())}, there are {rows} rows")
