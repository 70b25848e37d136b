"""Products of ragged rows with weights: native on a CPU where the extension is built, else through torch.

Three facts determine the use of torch (docs/log.md). Torch compiles and caches a kernel of about 0.6 MiB for every new
shape, so row counts are rounded up to a coarse grid. Torch repacks the right-hand operand at every call, so with few
rows the rows are the right-hand operand. And without matrix tiles (AMX), 16-bit products run at half the rate of
float32 ones, so with many rows the weights are widened slab by slab. The choice depends on the row count and the
processor alone, so a machine gives the same tokens every time.

Legend: R rows, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moelight.hrm.costs import EXPERT_ROWS, ExpertWorkspace
from moelight.hrm.footprint import SLAB_BYTES
from moelight.kernels import native
from moelight.kernels.activations import SHRINK
from moelight.kernels.caching_allocator import RESULTS
from moelight.kernels.ffn import cpu_expert_ffn, cpu_linear
from moelight.kernels.matrices import Stack, floats_of
from moelight.kernels.stored_weight import StoredWeight, linear_stored, product_of_all, served, stored_product, widened

Joined = Tensor | Sequence[StoredWeight]  # weights below one another: of one matrix, or as they are stored
_STEPS = ((4, 1), (64, 4), (256, 8), (1024, 16))
_COARSEST = 32
_ROWS_ON_THE_RIGHT = range(12, 49)
_ROWS_TO_WIDEN = 64
_SLAB_NUMBERS = SLAB_BYTES // 4


def padded_rows(rows: int) -> int:
    """Smallest row count on the grid that is at least ``rows``; at most 7 above it up to 256 rows, 31 beyond."""
    step = next((step for limit, step in _STEPS if rows <= limit), _COARSEST)
    return -(-rows // step) * step


def rows_computed(x: Tensor, rows: int | None = None) -> int:
    """Rows of a product of ``rows`` rows (None: all) like x [R, in]: on the grid where torch's CPU kernels serve."""
    rows = x.shape[0] if rows is None else rows
    return padded_rows(rows) if native.on_cpu(x) and not native.available() else rows


def parts(first: int, count: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of ``count`` rows, cut so that each part fits a `Workspace`."""
    for start in range(first, first + count, EXPERT_ROWS):
        yield start, min(EXPERT_ROWS, first + count - start)


def linear_stacked(x: Tensor, stack: Stack, bias: Tensor | None = None, *, activations: str = "auto") -> Tensor:
    """`linear` of all rows of ``stack``; of quantised matrices, on the CPU, each with ``activations`` where it has
    integers."""
    if (floats := floats_of(stack)) is not None:
        return linear(x, floats, bias)
    return stored_product(x, stack, bias, activations=activations)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [R, in], weight [out, in], bias [out] -> [R, out] in x's dtype; float32 if the weights are of another."""
    if isinstance(weight, StoredWeight):
        return linear_stored(x, weight, bias)
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        if native.on_cpu(x) and native.available():
            return cpu_linear(x.float(), weight, None if bias is None else bias.float())
        return _linear_widened(x, weight, bias, torch.float32)
    if native.on_cpu(x) and native.available():
        return cpu_linear(x, weight, bias)
    rows, padded = x.shape[0], rows_computed(x)
    if padded != rows:
        wide = torch.zeros((padded, x.shape[1]), dtype=x.dtype, device=x.device)
        wide[:rows] = x
        return linear(wide, weight, bias)[:rows]
    return _linear_widened(x, weight, bias, x.dtype) if _widens(x) else functional.linear(x, weight, bias)


def linear_of_all(x: Tensor, weights: Joined) -> Tensor:
    """`linear` of x and ``weights``, below one another."""
    return linear(x, weights) if isinstance(weights, Tensor) else product_of_all(x, weights)


def _linear_widened(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`linear` in float32, the weights widened slab by slab -> [R, out] in ``dtype``."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    widened = x.float()
    step = max(1, _SLAB_NUMBERS // weight.shape[1])
    for first in range(0, weight.shape[0], step):
        slab = slice(first, first + step)
        product = torch.mm(widened, weight[slab].float().t())
        out[:, slab] = product if bias is None else product.add_(bias[slab])
    return out


class Workspace:
    """Buffers that experts use one after another, cut from the ``work`` arena. Sizes: `ExpertWorkspace`.

    ``inputs`` and ``rows`` [R, H] share their memory: inputs of the experts, and their outputs, which are float32 in
    mixed precision.
    """

    def __init__(
        self, arena: Tensor, sizes: ExpertWorkspace, hidden: int, dtype: torch.dtype, *, mixed: bool = False
    ) -> None:
        """``arena`` uint8; ``hidden`` is H; ``dtype``: of inputs and activations."""
        cuts, start = [], 0
        for size in (sizes.rows_bytes, sizes.wide_bytes, sizes.narrow_bytes):
            cuts.append(arena[start : start + size])
            start += size
        results = torch.float32 if mixed else dtype
        self.rows = _front(cuts[0], sizes.rows_bytes // (hidden * results.itemsize), hidden, results)
        self.inputs = _front(cuts[0], len(self.rows), hidden, dtype)
        self._wide, self._narrow = cuts[1], cuts[2]

    def wide(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """View [rows, columns] of the larger buffer."""
        return _front(self._wide, rows, columns, dtype)

    def room_for(self, columns: int) -> int:
        """Rows of ``columns`` that fit into the larger buffer, at most as many as those of ``rows``."""
        return min(len(self.rows), self._wide.numel() // (columns * self.inputs.element_size()))

    def narrow(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """View [rows, columns] of the smaller buffer."""
        return _front(self._narrow, rows, columns, dtype)


def feed_forward_stored(
    x: Tensor, inward: Sequence[StoredWeight], outward: StoredWeight, *, activation: str
) -> Tensor | None:
    """Feed-forward with a gated ``activation`` on the CPU: x [R, H], the gate and up of ``inward`` (one weight has
    both), ``outward`` [H, I] -> [R, H]; None if they are not stored as one expert is."""
    dtype = x.dtype
    (gate, *up), *rest = [matrix for weight in inward for matrix in weight.stack], *outward.stack
    if len(up) > 1 or len(rest) > 1:
        return None
    (down,) = rest
    x = widened(x)
    sides = served(outward.activations, gate, *up), served(outward.activations, down)
    out = RESULTS.empty(x.shape, x.dtype)
    for start, count in parts(0, len(x)):
        some, offsets = slice(start, start + count), torch.tensor((0, count), dtype=torch.int32)
        cpu_expert_ffn(
            x[some],
            (gate,),
            (down,),
            offsets,
            up=up or None,
            activation=activation,
            activations=sides,
            out=out[some],
        )
    return out.to(dtype)


def feed_forward_stacked(x: Tensor, gate_up: Stack, down: Stack, *, activations: str = "auto") -> Tensor:
    """`feed_forward` on the CPU by stacks of which at least one is quantised; gate and up are matrices of one then."""
    (gate, *up), (narrow,) = gate_up, down
    sides = served(activations, *gate_up), served(activations, narrow)
    offsets = torch.tensor((0, x.shape[0]), dtype=torch.int32)
    return cpu_expert_ffn(x, (gate,), (narrow,), offsets, up=up or None, activations=sides)


def feed_forward(x: Tensor, gate_up: Tensor, down: Tensor, space: Workspace, *, wide: bool = False) -> Tensor:
    """Feed-forward with gated SiLU: x [R, H], gate_up [2I, H] (gate rows first), down [H, I] -> [R, H] in the dtype of
    ``space.rows``.

    R is at most `EXPERT_ROWS` and, for torch on a CPU, on the grid. ``wide``: float16 does not hold the weights, which
    are computed in float32; mixed precision does so on the CPU in any case.
    """
    rows, width, mixed = x.shape[0], down.shape[1], space.rows.dtype != x.dtype
    if native.on_cpu(x) and native.available():
        inputs = x.float() if mixed else x
        return cpu_expert_ffn(inputs, (gate_up,), (down,), torch.tensor((0, rows), dtype=torch.int32))
    if wide or (mixed and native.on_cpu(x)) or _widens(x):
        return _feed_forward_widened(x, gate_up, down, space)
    if mixed:
        return feed_forward_shrunk(x, gate_up, down, space)
    if native.on_cpu(x) and rows in _ROWS_ON_THE_RIGHT:
        upright = space.wide(2 * width, rows, x.dtype)
        torch.mm(gate_up, x.t(), out=upright)
        gate = functional.silu(upright[:width], inplace=True)
        return torch.mm(down, gate.mul_(upright[width:])).t()
    both, active = space.wide(rows, 2 * width, x.dtype), space.narrow(rows, width, x.dtype)
    torch.mm(x, gate_up.t(), out=both)
    torch.ops.aten.silu.out(both[:, :width], out=active)
    active.mul_(both[:, width:])
    return torch.mm(active, down.t())


def feed_forward_shrunk(x: Tensor, gate_up: Tensor, down: Tensor, space: Workspace) -> Tensor:
    """`feed_forward` of float16 rows in mixed precision -> float32: weights are rounded to float16, one matrix at a
    time, and the activation is multiplied by `SHRINK`, so that its range ends at 2^20."""
    rows, width = x.shape[0], down.shape[1]
    both, active = space.wide(rows, 2 * width, x.dtype), space.narrow(rows, width, x.dtype)
    torch.mm(x, gate_up.to(x.dtype).t(), out=both)
    torch.ops.aten.silu.out(both[:, :width], out=active)
    active.mul_(SHRINK).mul_(both[:, width:])
    return torch.mm(active, down.to(x.dtype).t()).float().mul_(1 / SHRINK)


def _feed_forward_widened(x: Tensor, gate_up: Tensor, down: Tensor, space: Workspace) -> Tensor:
    """`feed_forward` in float32, the weights widened slab by slab; the larger buffer holds the activation [R, I]."""
    (rows, hidden), width = x.shape, down.shape[1]
    active = space.wide(rows, width, torch.float32)
    widened = x.float()
    step = max(1, _SLAB_NUMBERS // (2 * hidden))
    for first in range(0, width, step):
        some = min(step, width - first)
        slab = torch.cat((gate_up[first : first + some], gate_up[width + first : width + first + some])).float()
        product = torch.mm(widened, slab.t())
        gate = functional.silu(product[:, :some], inplace=True)
        torch.mul(gate, product[:, some:], out=active[:, first : first + some])
    mixed = space.rows.dtype != x.dtype  # the buffer has room for x's dtype only
    out = space.rows.new_empty((rows, hidden)) if mixed else space.narrow(rows, hidden, x.dtype)
    step = max(1, _SLAB_NUMBERS // width)
    for first in range(0, hidden, step):
        out[:, first : first + step] = torch.mm(active, down[first : first + step].float().t())
    return out


def _widens(x: Tensor) -> bool:
    if x.shape[0] < _ROWS_TO_WIDEN or not native.on_cpu(x) or x.element_size() != 2:
        return False
    return not (native.has_fast_bfloat16() if x.dtype == torch.bfloat16 else native.has_tiles())


def _front(buffer: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return buffer[: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)
