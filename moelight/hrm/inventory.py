"""Parameters and bytes of a model by kind, from its profile alone."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.dtypes import DType, dtype_named
from moelight.hrm import costs
from moelight.profiles.model import ModelProfile
from moelight.profiles.tensor_list import StackedTensor, dense_tensors

ENDS, ATTENTION, DENSE_LAYERS, SHARED, EXPERTS = (
    "embedding and head",
    "attention, norms and routers",
    "dense layers",
    "shared experts",
    "experts",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Parameters and bytes of a model by kind, experts in ``dtype``. ``active``: parameters that one token uses,
    embedding and head included. ``page_bytes``: of the largest page; ``mean_page_bytes``: of one on average.
    ``kv_token_bytes``: over all layers; ``state_bytes`` of a sequence and ``state_token_bytes`` of each of its tokens,
    both beside the paged cache, likewise."""

    dtype: str
    parameters: dict[str, int]
    active: int
    bytes: dict[str, int]
    pages: int
    page_bytes: int
    mean_page_bytes: int
    kv_token_bytes: int
    state_bytes: int
    state_token_bytes: int

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


def inventory(model: ModelProfile, *, weight_dtype: DType | None = None, kv_dtype: DType | None = None) -> Inventory:
    """The parts of ``model``. ``weight_dtype``: of the experts; all other weights are as stored."""
    model_dtype = dtype_named(model.dtype)
    page_dtype, cache_dtype = weight_dtype or costs.page_dtype(model, model_dtype), kv_dtype or model_dtype
    parameters = dict.fromkeys((ENDS, ATTENTION, DENSE_LAYERS, SHARED), 0)
    sizes = parameters.copy()
    for tensor in dense_tensors(model):
        parameters[_kind(tensor)] += tensor.elements
        plain = tensor.elements * model_dtype.itemsize
        sizes[_kind(tensor)] += plain if model.stored is None else costs.stored_bytes(model, tensor, model_dtype)
    for stored in model.page_tensors:
        parameters[stored.kind] += stored.elements
        sizes[stored.kind] += costs.stored_page_bytes(model, stored, page_dtype)
    per_page = 0 if model.dense else costs.page_elements(model)
    pages = model.num_moe_layers * model.experts.num_experts
    active = sum(parameters.values()) + model.num_moe_layers * model.router.top_k * per_page
    page_bytes = costs.page_bytes(model, page_dtype)
    in_all = 0 if model.dense else pages * page_bytes
    if model.stored is not None and weight_dtype is None and not model.dense:  # pages may differ
        in_all = model.stored.total_bytes
    state_bytes, state_token_bytes = costs.state_bytes(model)
    return Inventory(
        dtype=page_dtype.name if model.stored is None else model.stored.name,
        parameters={**parameters, EXPERTS: pages * per_page},
        active=active,
        bytes={**sizes, EXPERTS: in_all},
        pages=pages,
        page_bytes=page_bytes,
        mean_page_bytes=costs.moved_page_bytes(model, page_dtype),
        kv_token_bytes=costs.kv_token_bytes(model, cache_dtype),
        state_bytes=state_bytes,
        state_token_bytes=state_token_bytes,
    )


def _kind(tensor: StackedTensor) -> str:
    if tensor.layer < 0:
        return ENDS
    if kind := tensor.parts[0].kind:
        return kind
    family = tensor.name.partition("_")[0]
    return {"dense": DENSE_LAYERS, "shared": SHARED}.get(family, ATTENTION)
