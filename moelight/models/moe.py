"""Router and experts of one layer: sort tokens by expert, run each expert once over its rows, sum the weighted results.

Legend: T tokens, E experts, k experts per token, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from moelight.formats.experts import MATRICES
from moelight.hrm.costs import EXPERT_ROWS
from moelight.kernels import native
from moelight.kernels.activations import SILU, Activation
from moelight.kernels.device import Device
from moelight.kernels.ffn import cpu_expert_ffn
from moelight.kernels.gpu import routing as gpu_routing
from moelight.kernels.gpu import serving
from moelight.kernels.gpu.grouped import expert_ffn
from moelight.kernels.gpu.pages import ALIGNMENT_BYTES, ExpertTable
from moelight.kernels.matrices import Weight, matrix_of
from moelight.kernels.products import Workspace, padded_rows
from moelight.kernels.ranks import Ranks
from moelight.kernels.reference import route_topk
from moelight.kernels.routing import cpu_gather_rows, cpu_route, cpu_scatter_sum, cpu_sort_by_expert
from moelight.models.expert import Expert, ExpertFunction, LayerExperts, expert_arguments, in_torch
from moelight.profiles.model import RouterSpec

Experts: TypeAlias = LayerExperts | ExpertTable  # of a layer; a table for grouped kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """Input of the experts: ``x`` [T, H], ``weights`` float32 [T, k], ``ids`` [T, k] in ascending order. ``resume``: of
    a dense layer: computes it with its page (`LayerExperts.install`), in place of all else. ``elsewhere``: an id that
    is the number of the layer's experts is that of one which another rank computes."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    resume: Callable[[LayerExperts], None] | None = None
    elsewhere: bool = False

    def on_rank(self, ranks: Ranks | None, experts: int) -> Routed:
        """As rank ``ranks.rank`` has them, which computes ``experts`` of the layer, numbered from 0."""
        if ranks is None:
            return self
        ids = self.ids - ranks.rank * experts
        return replace(self, ids=ids.masked_fill((ids < 0) | (ids >= experts), experts), elsewhere=True)


def route_tokens(logits: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights float32 [T, k] and ids int32 [T, k] of the k most likely experts, in ascending order of
    ids; the lowest id wins a tie."""
    if native.on_cpu(logits):
        return cpu_route(logits, spec.top_k, normalize=spec.normalize, round_weights=spec.weights_in_model_dtype)
    if serving.serves(logits.device, logits.dtype)[0]:
        rounds = spec.weights_in_model_dtype
        return gpu_routing.route(logits, spec.top_k, normalize=spec.normalize, weights_in_model_dtype=rounds)
    weights, ids = route_topk(logits, spec.top_k, spec.normalize)
    if spec.weights_in_model_dtype:
        weights = weights.to(logits.dtype).float()
    ids, rank = ids.sort(dim=-1)
    return weights.gather(-1, rank), ids.to(torch.int32)


def grouped_pages(
    experts: Sequence[Expert], dtype: torch.dtype, activations: Sequence[Activation | None] = (SILU,)
) -> ExpertTable | None:
    """The pages of ``experts``, if the grouped kernels compute with them where they are, on rows of ``dtype`` and by
    all of the layers' ``activations``; else None. Waits for the device: called at loading."""
    first = next((tensor for expert in experts for tensor in matrix_of(expert.gate_up).tensors.values()), None)
    if first is None or not Device(first.device).cuda or not serving.serves(first.device, dtype)[0]:
        return None
    return table_of(experts, activations)


def table_of(experts: Sequence[Expert], activations: Sequence[Activation | None]) -> ExpertTable | None:
    """The pages of ``experts``; None if the grouped kernels do not compute with them or by all ``activations``."""
    present = [activation for activation in activations if activation is not None]
    if not present or len(present) < len(activations):
        return None
    arguments = expert_arguments(experts)
    matrices = [weight for name in MATRICES for weight in arguments.get(name, ())]
    if any(tensor.data_ptr() % ALIGNMENT_BYTES for weight in matrices for tensor in matrix_of(weight).tensors.values()):
        return None
    if (up := experts[0].up) is not None and _stored_as(experts[0].gate_up) != _stored_as(up):
        return None
    return ExpertTable.of(**arguments, activation=present[0])


def _stored_as(weight: Weight) -> object:
    """Return the properties that gate and up must share for the grouped kernels."""
    matrix = matrix_of(weight)
    return matrix.stored, [tensor.dtype for tensor in matrix.tensors.values()]


def _natively(x: Tensor, function: ExpertFunction) -> bool:
    """True if the native kernels compute ``function``."""
    return native.on_cpu(x) and native.available() and function.activation is not None


def moe_forward(
    routed: Routed, experts: Experts, space: Workspace, *, into: Tensor | None = None, wide: bool = False
) -> Tensor:
    """The experts of ``routed`` -> [T, H] in the dtype of ``space.rows``, added to ``into`` if given; T at most the
    capacity of ``space``. An expert that is None is computed elsewhere and adds nothing. ``wide``: float16 does not
    hold some expert; devices compute all of them in float32.

    The experts of a token are summed in float32 in the order of their ids, so a token's result does not depend on the
    other tokens of the batch beyond the rounding of each product.
    """
    if isinstance(experts, ExpertTable):
        return grouped_forward(routed, experts, space, into, wide=wide)
    if routed.resume is not None:
        routed.resume(experts)
        return routed.x
    if _natively(routed.x, experts.function):
        return SplitMoE(routed, experts, frozenset(), space).end(into)
    sums = torch.zeros(routed.x.shape, dtype=torch.float32, device=routed.x.device)
    add_experts(sums, routed, experts, space, most_rows=routed.x.shape[0], wide=wide)
    result = sums.to(space.rows.dtype)
    return result if into is None else into.add_(result)


class SplitMoE:
    """`moe_forward` in two steps: the constructor computes the experts not in ``late``, `end` the ``late`` ones, which
    may become resident meanwhile. Without native kernels, `end` does all work. The sums do not depend on ``late``.

    Rows are sorted: experts not in ``late``, ``late`` ones, both by layout, then experts computed elsewhere, which are
    skipped. The T k rows of ``space`` from ``first_row`` on are in use until `end` returns.
    """

    def __init__(
        self,
        routed: Routed,
        experts: LayerExperts,
        late: frozenset[int],
        space: Workspace,
        first_row: int = 0,
    ) -> None:
        self._whole = routed, experts, space
        self._native = _natively(routed.x, experts.function)
        if not self._native:
            return
        ids = routed.ids
        ranked = sorted((index in late, expert.layout_id, index) for index, expert in enumerate(experts) if expert)
        order = [index for _, _, index in ranked]
        self._there = sum(not is_late for is_late, _, _ in ranked)
        if order != list(range(len(experts))):
            position = torch.full((len(experts),), len(order), dtype=torch.int32)
            position[order] = torch.arange(len(order), dtype=torch.int32)
            ids = position[ids.long()]
        by_expert = cpu_sort_by_expert(ids, len(order) + 1)
        self._offsets = by_expert.offsets[: len(order) + 1]
        self._cuts, self._position = self._offsets.tolist(), by_expert.position
        self._experts = [experts[index] for index in order]
        count = self._cuts[-1]
        rows = space.rows[first_row : first_row + count]
        self._rows = cpu_gather_rows(routed.x.to(rows.dtype), by_expert.token[:count], out=rows)
        self._compute(0, self._there)

    def end(self, into: Tensor | None) -> Tensor:
        """Compute the remaining experts; return the weighted sums [T, H], added to ``into`` if given."""
        if not self._native:
            return moe_forward(*self._whole, into=into)
        self._compute(self._there, len(self._experts))
        position, count = self._position, self._cuts[-1]
        if count < position.numel():
            position = torch.where(position < count, position, -1)
        return cpu_scatter_sum(self._rows, position, self._whole[0].weights, into, residual=into is not None)

    def _compute(self, first: int, last: int) -> None:
        start, end = self._cuts[first], self._cuts[last]
        if start < end:
            offsets = self._offsets[first : last + 1] - start
            function = self._whole[1].function
            _expert_ffn_in_place(self._rows[start:end], self._experts[first:last], function, offsets)


def _expert_ffn_in_place(
    rows: Tensor, experts: Sequence[Expert | None], function: ExpertFunction, offsets: Tensor
) -> None:
    """``offsets`` int32 [E + 1]: the rows of each expert; one that is None has none. Neighbours of one layout are one
    call."""
    first, ids = 0, [0 if expert is None else expert.layout_id for expert in experts]
    for last in range(1, len(experts) + 1):
        if last < len(experts) and ids[last] == ids[first]:
            continue
        some = rows
        if last - first < len(experts):
            start, end = offsets[[first, last]].tolist()
            some = rows[start:end]
        if len(some):
            _alike_in_place(some, experts[first:last], function, offsets[first : last + 1] - offsets[first])
        first = last


def _alike_in_place(rows: Tensor, experts: Sequence[Expert | None], function: ExpertFunction, offsets: Tensor) -> None:
    assert function.activation is not None
    # Exporting the weights of an expert without rows to the kernel would cost as much as those of a busy one.
    busy = [expert if count else None for expert, count in zip(experts, offsets.diff().tolist(), strict=True)]
    cpu_expert_ffn(rows, **expert_arguments(busy), activation=function.activation, offsets=offsets, out=rows)
    if function.finish is not None:
        rows.copy_(function.finish(rows))


def grouped_forward(
    routed: Routed,
    pages: ExpertTable,
    space: Workspace,
    into: Tensor | None = None,
    sums: Tensor | None = None,
    *,
    wide: bool = False,
    some: range | None = None,
) -> Tensor:
    """`moe_forward` by grouped GPU kernels, a few launches for all experts; the host reads no number of rows.

    The rows of all experts are computed in parts that fit ``space``, so T may exceed its capacity and each expert's
    weights are read about once. ``sums`` float32 [T, H] is overwritten by the sums between parts; None: allocated where
    there are several. The result does not depend on the parts.

    ``some``: only these experts, in number, whose sums continue ``sums`` unless they are the first, and are the result
    if they are the last.
    """
    tokens, places, offsets = gpu_routing.by_expert(routed.ids, pages.experts + routed.elsewhere)
    if routed.elsewhere:
        places, offsets = places.masked_fill(routed.ids >= pages.experts, -1), offsets[:-1]
    out = torch.empty_like(routed.x, dtype=space.rows.dtype) if into is None else into
    count, max_rows, begun, ends = tokens.numel(), space.room_for(pages.width), None, True
    if some is not None:
        begun, ends = sums if some.start else None, some.stop == pages.experts
        places = places.masked_fill((routed.ids < some.start) | (routed.ids >= some.stop), -1)
        offsets = offsets.clamp(offsets[some.start], offsets[some.stop])
    for first in range(0, count, max_rows):
        last = min(first + max_rows, count)
        rows = expert_ffn(
            routed.x,
            pages,
            offsets if count <= max_rows else offsets.clamp(first, last).sub_(first),
            tokens=tokens[first:last],
            out=space.rows[: last - first],
            scratch=space.wide(last - first, pages.width, routed.x.dtype),
            mean_rows=count / min(count, pages.experts),
            wide=wide,
        )
        complete = ends and last == count
        if not complete and sums is None:
            sums = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        to, add = (out, into is not None) if complete else (sums, False)
        gpu_routing.combine(rows, routed.weights, places, out=to, add=add, first=first, begun=begun)
        begun = sums
    return out


def add_experts(
    sums: Tensor,
    routed: Routed,
    experts: LayerExperts,
    space: Workspace,
    *,
    most_rows: int,
    wide: bool = False,
) -> None:
    """sums float32 [T, H] += the experts of ``routed``, expert by expert; T may exceed the capacity of ``space``. From
    zero sums, the result equals that of `moe_forward` exactly. For the CPU, and for devices without grouped kernels,
    where it reads the rows of each expert on the host.

    ``most_rows``: rows computed at a time; with native CPU kernels, rows weighted and added at a time. ``wide`` as for
    `moe_forward`.
    """
    if _natively(routed.x, experts.function):
        _accumulate_natively(sums, routed, experts, space, min(most_rows, EXPERT_ROWS))
        return
    top_k, ids, weights = routed.ids.shape[1], routed.ids.flatten(), routed.weights.flatten()
    order = ids.argsort(stable=True)  # rows, token * k + rank, by expert, then token
    chosen = order.split(torch.bincount(ids, minlength=len(experts)).tolist())
    for expert, routed_rows in zip(experts, chosen, strict=True):
        if expert is None or not routed_rows.numel():
            continue
        for part in routed_rows.split(min(most_rows, EXPERT_ROWS)):
            # torch keeps a kernel, and memory for it, of each number of rows
            padded = padded_rows(part.numel()) if native.on_cpu(routed.x) else part.numel()
            tokens, rows = part // top_k, space.inputs[:padded]
            torch.index_select(routed.x, 0, tokens, out=rows[: part.numel()])
            out = in_torch(expert, experts.function, rows, space, wide=wide)
            out = out[: part.numel()]
            sums.index_add_(0, tokens, out.float() * weights[part].unsqueeze(1))


def _accumulate_natively(sums: Tensor, routed: Routed, experts: LayerExperts, space: Workspace, most_rows: int) -> None:
    """In chunks of as many rows as ``space`` holds, across experts."""
    by_expert = cpu_sort_by_expert(routed.ids, len(experts))
    here = torch.tensor([expert is not None for expert in experts])
    counts = by_expert.offsets.diff()
    mask = here.repeat_interleave(counts)
    token, share = by_expert.token[mask], routed.weights.flatten()[by_expert.order[mask].long()]
    offsets = torch.zeros_like(by_expert.offsets)
    torch.cumsum(counts * here, 0, out=offsets[1:])
    for begin in range(0, len(token), len(space.rows)):
        chunk = token[begin : begin + len(space.rows)]
        rows = space.rows[: len(chunk)]
        if rows.dtype == routed.x.dtype:
            cpu_gather_rows(routed.x, chunk, out=rows)
        else:
            rows.copy_(cpu_gather_rows(routed.x, chunk))
        _expert_ffn_in_place(rows, experts, experts.function, offsets.clamp(begin, begin + len(chunk)) - begin)
        shares = share[begin : begin + len(chunk)].unsqueeze(1)
        for first in range(0, len(chunk), most_rows):
            part = slice(first, first + most_rows)
            sums.index_add_(0, chunk[part], rows[part].float().mul_(shares[part]))
