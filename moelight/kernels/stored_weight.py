"""Weights of linear layers and embeddings that stay as the checkpoint stores them, in the place of parameters.

A `StoredWeight` is a tensor to torch, of the weight's shape and of the dtype that is computed in, so that modules of
transformers hold it as they hold any parameter. Products and rows are computed from the stored bytes; any other
operation of torch is given the unpacked values, which no one keeps.

Legend: R rows (outputs), C columns (inputs), T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.utils._pytree import tree_map

from moelight.formats.matrix import Matrix
from moelight.hrm.footprint import DEQUANTISED_ROWS
from moelight.kernels import native
from moelight.kernels.caching_allocator import RESULTS
from moelight.kernels.gpu import stored_linear
from moelight.kernels.gpu.pages import ExpertTable
from moelight.kernels.matrices import INT8, Stack, multiply, no_integers
from moelight.kernels.quantized import dense_values, integer_product, row_blocks, stacked_rows

_NUMBERS_ON_DEVICE = 1 << 22  # of a matrix that are unpacked at a time: few launches, little memory
# Functions of torch that read no values.
_ATTRIBUTES, _SIZES = ("__get__", "__set__"), ("__len__", "size", "dim", "numel", "element_size")
_OF_THE_TENSOR = {*_ATTRIBUTES, *_SIZES, "__repr__", "detach", "requires_grad_", "is_floating_point", "is_complex"}


class StoredWeight(Tensor):
    """A weight [R, C] whose values are those of the matrices of ``stack``, below one another. ``activations``: those
    that its products take where a matrix has integers, as `Policy` says."""

    stack: Stack
    activations: str
    sizes: tuple[int, int]
    _kind: tuple[torch.dtype, torch.device]
    _tables: dict[int, ExpertTable | None]

    @staticmethod
    def of(stack: Stack, dtype: torch.dtype, activations: str = "auto") -> StoredWeight:
        """The weight of ``stack`` in computations of ``dtype``."""
        device = next(iter(stack[0].tensors.values())).device
        sizes = sum(matrix.rows for matrix in stack), stack[0].columns
        made = Tensor._make_wrapper_subclass(StoredWeight, sizes, dtype=dtype, device=device)
        made.stack, made.activations, made.sizes = stack, activations, sizes
        made._kind, made._tables = (dtype, device), {}
        return made

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # asked for at every call, and torch's own is slow here
        return self._kind[0]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._kind[1]

    def table(self, index: int) -> ExpertTable | None:
        """What a GPU multiplies matrix ``index`` of the stack by; None if Triton does not."""
        if index not in self._tables:
            self._tables[index] = stored_linear.matrix_table(self.stack[index])
        return self._tables[index]

    def values(self) -> Tensor:
        """The values [R, C], unpacked."""
        parts = [dense_values(matrix, self.dtype).to(self.dtype) for matrix in self.stack]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows ``indices`` (int64, any shape) -> [..., C]; only they are unpacked."""
        out = torch.empty((indices.numel(), self.sizes[1]), dtype=self.dtype, device=self.device)
        if len(self.stack) > 1 or not native.on_cpu(out):
            out.copy_(self.values()[indices.flatten()])
        else:
            stacked_rows(self.stack, indices.flatten(), out)
        return out.view(*indices.shape, self.sizes[1])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and not kwargs and isinstance(args[1], StoredWeight):
            x, weight, *bias = args
            rows = x.reshape(-1, x.shape[-1])
            return linear_stored(rows, weight, *bias).view(*x.shape[:-1], weight.sizes[0])
        if func in (functional.embedding, torch.embedding):
            indices, weight = args[:2] if func is functional.embedding else args[1::-1]
            return weight.rows(indices)  # nobody's indices are weights
        named = dict(kwargs or {})
        if getattr(func, "__name__", "") not in _OF_THE_TENSOR:
            args, named = tree_map(_unpacked, (tuple(args), named))
            return func(*args, **named)
        return super().__torch_function__(func, types, args, named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a function of the module
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.alias):
            weight = args[0]
            return StoredWeight.of(weight.stack, weight.dtype, weight.activations)
        args, kwargs = tree_map(_unpacked, (args, kwargs or {}))
        return func(*args, **kwargs)


def as_parameter(tensor: Tensor) -> Tensor:
    """``tensor`` as modules of torch hold their weights."""
    return tensor if isinstance(tensor, StoredWeight) else Parameter(tensor, requires_grad=False)


def stored_of(weights: Iterable[Tensor]) -> list[StoredWeight]:
    """Those of ``weights`` that stay as they are stored."""
    return [weight for weight in weights if isinstance(weight, StoredWeight)]


def _unpacked(value: Any) -> Any:
    return value.values() if isinstance(value, StoredWeight) else value


def linear_stored(x: Tensor, weight: StoredWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, C] of the weight's dtype, contiguous within rows -> x weight^T + bias [T, R]."""
    if not native.on_cpu(x):
        return _product_on_device(x, weight, bias)
    return _product_on_cpu(x, weight.stack, bias, weight.activations)


def product_of_all(x: Tensor, weights: Sequence[StoredWeight]) -> Tensor:
    """`linear_stored` of x [T, C] and all ``weights``, below one another."""
    if not native.on_cpu(x):
        return torch.cat([linear_stored(x, weight) for weight in weights], dim=1)
    stack = tuple(matrix for weight in weights for matrix in weight.stack)
    return _product_on_cpu(x, stack, None, weights[0].activations)


def _product_on_cpu(x: Tensor, stack: Stack, bias: Tensor | None, activations: str) -> Tensor:
    """`stored_product` in float32 where values are unpacked to floats, rounded to x's dtype."""
    forms = [served(activations, matrix) for matrix in stack]
    inputs = widened(x) if any(form != INT8 for form in forms) else x
    result = _product_of_forms(inputs, stack, bias, forms)
    return result if inputs is x else result.to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """x in float32 where it is bfloat16 and the values of a matrix are unpacked to floats anyway (AVX2): they are then
    not rounded to bfloat16, which takes as long as the product with one token."""
    return x.float() if widens(x.dtype) else x


def widens(dtype: torch.dtype) -> bool:
    """Whether `widened` widens tensors of ``dtype``."""
    return dtype == torch.bfloat16 and native.isa() == "avx2"


def stored_product(x: Tensor, stack: Stack, bias: Tensor | None = None, *, activations: str = "auto") -> Tensor:
    """x [T, C] on the CPU times all rows of ``stack``, plus ``bias`` -> [T, R], with ``activations`` where a matrix has
    integers: by our kernels, else with the values of some rows at a time."""
    return _product_of_forms(x, stack, bias, [served(activations, matrix) for matrix in stack])


def _product_of_forms(x: Tensor, stack: Stack, bias: Tensor | None, forms: Sequence[str]) -> Tensor:
    """`stored_product` with the activations ``forms``, one for each matrix."""
    out = RESULTS.empty((x.shape[0], sum(matrix.rows for matrix in stack)), x.dtype)
    first = 0
    for matrix, form in zip(stack, forms, strict=True):
        columns = slice(first, first + matrix.rows)
        some, part = None if bias is None else bias[columns], out if len(stack) == 1 else out[:, columns]
        if native.available():
            multiply(x, matrix, some, activations=form, out=part)
        else:
            _by_blocks(x, matrix, some, form, part)
        first += matrix.rows
    return out


def _product_on_device(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """`linear_stored` on a GPU: by Triton, which unpacks as it loads, else with the values of some rows at a time."""
    results, first, served_there = [], 0, stored_linear.serves(x.device, x.dtype)
    for index, matrix in enumerate(weight.stack):
        some = None if bias is None else bias[first : first + matrix.rows]
        results.append(x.new_empty((x.shape[0], matrix.rows)))
        table = weight.table(index) if served_there else None
        if table is None:
            _by_blocks(x, matrix, some, "auto", results[-1])
        else:
            stored_linear.stored_linear(x, table, results[-1])
            if some is not None:
                results[-1] += some
        first += matrix.rows
    return results[0] if len(results) == 1 else torch.cat(results, dim=1)


def _by_blocks(x: Tensor, matrix: Matrix[Tensor], bias: Tensor | None, activations: str, out: Tensor) -> None:
    """x times ``matrix``, plus ``bias``, into ``out``, some rows of the matrix at a time; in float32 on the CPU."""
    if activations == INT8:
        sums = integer_product(x, matrix)
        out.copy_(sums if bias is None else sums + bias.float())
        return
    dtype = torch.float32 if native.on_cpu(x) else x.dtype
    inputs = x.to(dtype)
    max_rows = DEQUANTISED_ROWS if native.on_cpu(x) else max(DEQUANTISED_ROWS, _NUMBERS_ON_DEVICE // matrix.columns)
    for begin, values in row_blocks(matrix, dtype=x.dtype, max_rows=max_rows):
        rows = slice(begin, begin + len(values))
        out[:, rows] = functional.linear(inputs, values.to(dtype), None if bias is None else bias[rows].to(dtype))


def served(activations: str, *matrices: Matrix[Tensor]) -> str:
    """``activations``, or auto where one of ``matrices`` has no integers in the order of its columns."""
    rounds = activations == INT8 and all(no_integers(matrix) is None for matrix in matrices)
    return activations if rounds else "auto"
