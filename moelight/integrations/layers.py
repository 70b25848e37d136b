"""Finds the expert layers of a transformers model by structure, and lays out an expert's tensors in its page.

Two forms: `fused`, one tensor over all experts of a layer (transformers 5), and `listed`, a `ModuleList` beside a
router (transformers 4, and code of checkpoints). Shapes: E experts of a layer, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moelight.core.errors import ConfigError
from moelight.core.units import align_up

# Of a page in memory and in a file: required by direct reads.
PAGE_ALIGNMENT = 4096
# Of a tensor in a page: enough for the vector units of every processor.
_TENSOR_ALIGNMENT = 64
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlice:
    """One tensor of an expert: ``shape`` of ``dtype`` at byte ``offset`` of its page."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def of(self, page: Tensor) -> Tensor:
        """View of ``page``, uint8 [at least a page]."""
        return page[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)

    def over(self, slots: Tensor) -> Tensor:
        """View of ``slots``, uint8 [slots, slot bytes], as ``[slots, *shape]``."""
        flat, item = slots.view(-1).view(self.dtype), self.dtype.itemsize
        inner = torch.empty(self.shape, device="meta").stride()
        begin = flat.storage_offset() + self.offset // item
        return flat.as_strided((slots.shape[0], *self.shape), (slots.shape[1] // item, *inner), begin)


@dataclass(eq=False, kw_only=True, slots=True)
class MoeLayer:
    """The experts of one layer of the model.

    Attributes:
        name: path of the experts' module in the model.
        experts: the experts' module, of the `fused` or the `listed` form.
        block: the parent module of ``experts``.
        router: the sibling module with one row of weights per expert, if there is one.
        pieces: an expert's tensors, in page order.
    """

    name: str
    experts: nn.Module
    fused: bool
    block: nn.Module
    router: nn.Module | None
    num_experts: int
    pieces: tuple[TensorSlice, ...]
    parameters: list[ExpertParameter]

    @property
    def page_bytes(self) -> int:
        """Bytes of an expert, its tensors aligned."""
        return self.pieces[-1].offset + self.pieces[-1].nbytes

    def tensors(self) -> Iterator[tuple[int, int, Tensor]]:
        """``(expert, first byte in its page, tensor)`` of all experts."""
        for held in self.parameters:
            for expert, tensor in held.parts(held.parameter.detach()):
                yield expert, held.piece.offset, tensor

    @property
    def device(self) -> torch.device:
        return self.parameters[0].parameter.device


@dataclass(eq=False, kw_only=True, slots=True)
class ExpertParameter:
    """Parameter ``key`` of the module ``owner``; ``expert`` None: of all experts along the first axis."""

    owner: nn.Module
    key: str
    parameter: nn.Parameter
    piece: TensorSlice
    expert: int | None

    def parts(self, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        """``(expert, its tensor)`` of ``whole``, a tensor shaped like the parameter."""
        yield from enumerate(whole) if self.expert is None else ((self.expert, whole),)


def moe_layers(model: nn.Module) -> list[MoeLayer]:
    """The layers of ``model`` with experts, in module order; raises ConfigError if there are none, or some cannot be
    moved: quantised, offloaded, shared between modules, on several devices."""
    every = [
        _layer(name, key, block, child)
        for name, block in model.named_modules()
        for key, child in block.named_children()
    ]
    found = [layer for layer in every if layer is not None]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no experts that moelight knows: neither transformers' fused experts nor a "
            "ModuleList of them beside a router"
        )
    _refuse(model, found)
    return found


Found = tuple[tuple[TensorSlice, ...], "list[ExpertParameter]"]


def _layer(name: str, key: str, block: nn.Module, child: nn.Module) -> MoeLayer | None:
    # Attributes that transformers' decorator of experts classes sets on every instance.
    fused = hasattr(child, "has_gate") and hasattr(child, "is_transposed") and hasattr(child, "num_experts")
    if not fused and (not isinstance(child, nn.ModuleList) or len(child) < 2):
        return None
    count = int(child.num_experts) if fused else len(child)  # type: ignore[arg-type]
    router = _router(block, child, count)
    found = _fused(child, count) if fused else None if router is None else _listed(list(child.children()))
    if found is None:
        return None
    return MoeLayer(
        name=f"{name}.{key}".lstrip("."),
        experts=child,
        fused=fused,
        block=block,
        router=router,
        num_experts=count,
        pieces=found[0],
        parameters=found[1],
    )


def _fused(child: nn.Module, count: int) -> Found:
    own = {key: value for key, value in child.named_parameters(recurse=False) if value.shape[:1] == (count,)}
    pieces = _lay_out({key: value[0] for key, value in own.items()})
    return pieces, [
        ExpertParameter(owner=child, key=piece.name, parameter=own[piece.name], piece=piece, expert=None)
        for piece in pieces
    ]


def _listed(experts: list[nn.Module]) -> Found | None:
    shapes = [[(key, value.shape, value.dtype) for key, value in each.named_parameters()] for each in experts]
    if not shapes[0] or any(other != shapes[0] for other in shapes):
        return None
    pieces, parameters = _lay_out(dict(experts[0].named_parameters())), []
    for expert, module in enumerate(experts):
        for piece in pieces:
            path, _, last = piece.name.rpartition(".")
            owner = module.get_submodule(path)
            parameter = owner._parameters[last]
            assert parameter is not None  # named_parameters() has just returned it
            parameters.append(ExpertParameter(owner=owner, key=last, parameter=parameter, piece=piece, expert=expert))
    return pieces, parameters


def _router(block: nn.Module, experts: nn.Module, count: int) -> nn.Module | None:
    for child in block.children():
        weight = child._parameters.get("weight")
        if child is not experts and weight is not None and weight.dim() == 2 and weight.shape[0] == count:
            return child
    return None


def _lay_out(tensors: dict[str, Tensor]) -> tuple[TensorSlice, ...]:
    pieces, offset = [], 0
    for name, tensor in tensors.items():
        piece = TensorSlice(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, offset=offset)
        pieces.append(piece)
        offset = align_up(offset + piece.nbytes, _TENSOR_ALIGNMENT)
    return tuple(pieces)


def _refuse(model: nn.Module, layers: list[MoeLayer]) -> None:
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise ConfigError(f"{type(model).__name__} is quantised; attach wants experts in {_names(_FLOATING)}")
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        for key, value in module._parameters.items():
            if value is None:
                continue
            place = f"{name}.{key}".lstrip(".")
            cell = value.untyped_storage().data_ptr() or id(value)
            if cell in owners and any(value is held.parameter for layer in layers for held in layer.parameters):
                raise ConfigError(f"{place} shares its memory with {owners[cell]}; attach moves experts of their own")
            owners.setdefault(cell, place)
    for layer in layers:
        _refuse_layer(layer)
    devices = sorted({str(layer.device) for layer in layers})
    if len(devices) > 1:
        raise ConfigError(f"the experts are on {', '.join(devices)}; attach wants them on one device")


def _refuse_layer(layer: MoeLayer) -> None:
    if not layer.pieces:
        raise ConfigError(f"{layer.name} holds no tensor over its {layer.num_experts} experts; attach cannot move it")
    if any(hasattr(module, "_hf_hook") for module in (layer.block, *layer.experts.modules())):
        raise ConfigError(f"{layer.name} is dispatched by accelerate; load the model without device_map")
    if getattr(layer.experts, "_is_expert_parallel", False):
        raise ConfigError(f"{layer.name} is spread over processes; attach serves models of one process")
    for held in layer.parameters:
        if held.parameter.is_meta:
            raise ConfigError(f"{layer.name}: {held.piece.name} has no values (offloaded, or attached already)")
        if held.parameter.dtype not in _FLOATING or type(held.parameter) is not nn.Parameter:
            raise ConfigError(
                f"{layer.name}: {held.piece.name} is {held.parameter.dtype} ({type(held.parameter).__name__}); "
                f"attach wants plain parameters in {_names(_FLOATING)}"
            )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


# Attribute names for the number of experts per token.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_topk", "moe_k")


def top_k(layer: MoeLayer, config: Any) -> int | None:
    """Experts per token; None if neither the layer's modules nor ``config`` define it."""
    for place, names in ((layer.router, _TOP_K), (layer.block, _TOP_K), (config, _TOP_K)):
        for name in names:
            found = getattr(place, name, None)
            if isinstance(found, int) and 0 < found <= layer.num_experts:
                return found
    return None


def chosen(output: Any, num_experts: int, k: int | None) -> tuple[np.ndarray, np.ndarray] | None:
    """``(ids int64 [T, k], scores float32 [T, k])`` from a router's ``output``: its ids, else the ``k`` largest of its
    logits; None if it contains neither."""
    given = [each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)]
    for ids in given:
        if not ids.is_floating_point() and ids.dim() >= 1:
            scores = next((each for each in given if each.is_floating_point() and each.shape == ids.shape), None)
            shape = (-1, ids.shape[-1])
            scores = torch.ones(ids.shape) if scores is None else scores
            return ids.reshape(shape).cpu().numpy().astype(np.int64), _floats(scores.reshape(shape))
    for logits in given:
        if logits.shape[-1] == num_experts and k is not None:
            scores, ids = logits.reshape(-1, num_experts).float().softmax(-1).topk(k, dim=-1)
            return ids.cpu().numpy(), _floats(scores)
    return None


def ask(router: nn.Module, states: Tensor, num_experts: int, k: int | None) -> tuple[np.ndarray, np.ndarray] | None:
    """The choice of ``router`` for ``states`` [T, H], without its hooks."""
    return chosen(type(router).forward(router, states), num_experts, k)


def _floats(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
