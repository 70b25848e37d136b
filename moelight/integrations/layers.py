"""Finds the expert layers of a transformers model by structure, and lays out an expert's tensors in its page.

Two forms: `fused`, one tensor over all experts of a layer (transformers 5), and `listed`, a `ModuleList` beside a
router (transformers 4, and code of checkpoints). Shapes: E experts of a layer, H hidden, I expert width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moelight.core.errors import ConfigError
from moelight.core.units import align_up

ATTACHMENT = "_moelight_attachment"  # attribute of an attached model
# Of a page in memory and in a file: required by direct reads.
PAGE_ALIGNMENT = 4096
# Of a tensor in a page: enough for the vector units of every processor.
_TENSOR_ALIGNMENT = 64
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FLOATING_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATING)


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
class ExpertParameter:
    """Parameter ``key`` of the module ``owner``.

    Attributes:
        expert: None for a parameter of all experts along the first axis.
        values: returns the values, which may be read from a disk.
        stored: the tensor whose memory holds the values: the parameter, that of accelerate's map of offloaded weights,
            or None where they are on a disk.
    """

    owner: nn.Module
    key: str
    parameter: nn.Parameter
    piece: TensorSlice
    expert: int | None
    values: Callable[[], Tensor]
    stored: Tensor | None

    def parts(self, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        """``(expert, its tensor)`` of ``tensor``, a tensor shaped like the parameter."""
        yield from enumerate(tensor) if self.expert is None else ((self.expert, tensor),)


@dataclass(eq=False, kw_only=True, slots=True)
class MoeLayer:
    """The experts of one layer of the model.

    Attributes:
        name: path of the experts' module in the model.
        experts: the experts' module, of the `fused` or the `listed` form.
        block: the parent module of ``experts``.
        router: the sibling module with one row of weights per expert, if there is one.
        top_k: experts per token; None if neither the modules nor the model's configuration define it.
        pieces: an expert's tensors, in page order.
        device: where the experts compute.
    """

    name: str
    experts: nn.Module
    fused: bool
    block: nn.Module
    router: nn.Module | None
    num_experts: int
    top_k: int | None
    pieces: tuple[TensorSlice, ...]
    parameters: list[ExpertParameter]
    device: torch.device

    @property
    def page_bytes(self) -> int:
        """Bytes of an expert, its tensors aligned."""
        return self.pieces[-1].offset + self.pieces[-1].nbytes

    def tensors(self) -> Iterator[tuple[int, int, Tensor]]:
        """``(expert, first byte in its page, tensor)`` of all experts."""
        for held in self.parameters:
            for expert, tensor in held.parts(held.values()):
                yield expert, held.piece.offset, tensor

    def chosen(self, output: Any) -> tuple[np.ndarray, np.ndarray] | None:
        """``(ids int64 [T, k], scores float32 [T, k])`` from a router's ``output``: its ids, else the ``top_k`` largest
        of its logits; None if it contains neither."""
        tensors = [value for value in (output if isinstance(output, tuple) else (output,)) if isinstance(value, Tensor)]
        for ids in tensors:
            if not ids.is_floating_point() and ids.dim() >= 1:
                scores = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.shape == ids.shape]
                flat = (-1, ids.shape[-1])
                weights = scores[0] if scores else torch.ones(ids.shape)
                return as_array(ids.reshape(flat), np.int64), as_array(weights.reshape(flat), np.float32)
        for logits in tensors:
            if logits.shape[-1] == self.num_experts and self.top_k is not None:
                weights, ids = logits.reshape(-1, self.num_experts).float().softmax(-1).topk(self.top_k, dim=-1)
                return as_array(ids, np.int64), as_array(weights, np.float32)
        return None

    def predicted(self, states: Tensor) -> tuple[np.ndarray, np.ndarray] | None:
        """The choice of the layer's router for ``states`` [T, H], without its hooks; None if there is none, or its
        parameters are offloaded."""
        if self.router is None or any(parameter.is_meta for parameter in self.router.parameters()):
            return None
        return self.chosen(type(self.router).forward(self.router, states))

    @property
    def resident(self) -> bool:
        """True if the experts take memory of ``device``."""
        return any(
            held.stored is not None and held.stored.numel() > 0 and held.stored.device == self.device
            for held in self.parameters
        )


def as_array(tensor: Tensor, dtype: Any) -> np.ndarray:
    """``tensor`` in host memory; numpy has no bfloat16."""
    wide = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
    return wide.cpu().numpy().astype(dtype, copy=False)


def moe_layers(model: nn.Module) -> list[MoeLayer]:
    """The layers of ``model`` with experts, in module order; raises ConfigError if it is no model or is attached, if
    there are none, or some cannot be moved: quantised, without values, shared between modules, on several devices."""
    layers = find_moe_layers(model)
    _refuse(model, layers)
    return layers


def find_moe_layers(model: nn.Module) -> list[MoeLayer]:
    """`moe_layers` of a model whose parameters may be without values."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attach needs a model, not {type(model).__name__}")
    if getattr(model, ATTACHMENT, None) is not None:
        raise ConfigError(f"{type(model).__name__} is attached already; detach() it first")
    config = getattr(model, "config", None)
    every = [
        _layer(f"{name}.{key}".lstrip("."), block, child, config)
        for name, block in model.named_modules()
        for key, child in block.named_children()
    ]
    layers = [layer for layer in every if layer is not None]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no experts that moelight knows: neither transformers' fused experts nor a "
            "ModuleList of them beside a router"
        )
    return layers


def _layer(name: str, block: nn.Module, child: nn.Module, config: Any) -> MoeLayer | None:
    # Attributes that transformers' decorator of experts classes sets on every instance.
    fused = hasattr(child, "has_gate") and hasattr(child, "is_transposed") and hasattr(child, "num_experts")
    if not fused and (not isinstance(child, nn.ModuleList) or len(child) < 2):
        return None
    count = int(child.num_experts) if fused else len(child)  # type: ignore[arg-type]
    router = _router(block, child, count)
    if not fused and router is None:
        return None
    parameters = _fused(child, count) if fused else _listed(list(child.children()))
    if parameters is None:
        return None
    return MoeLayer(
        name=name,
        experts=child,
        fused=fused,
        block=block,
        router=router,
        num_experts=count,
        top_k=_top_k((router, block, config), count),
        pieces=tuple(dict.fromkeys(held.piece for held in parameters)),
        parameters=parameters,
        device=_device(parameters),
    )


def _fused(child: nn.Module, count: int) -> list[ExpertParameter]:
    parameters = {key: value for key, value in child.named_parameters(recurse=False) if value.shape[:1] == (count,)}
    pieces = _lay_out({key: value[0] for key, value in parameters.items()})
    return [_expert_parameter(child, piece.name, piece, None) for piece in pieces]


def _listed(experts: list[nn.Module]) -> list[ExpertParameter] | None:
    shapes = [[(key, value.shape, value.dtype) for key, value in module.named_parameters()] for module in experts]
    if not shapes[0] or any(other != shapes[0] for other in shapes):
        return None
    pieces, parameters = _lay_out(dict(experts[0].named_parameters())), []
    for expert, module in enumerate(experts):
        for piece in pieces:
            path, _, last = piece.name.rpartition(".")
            parameters.append(_expert_parameter(module.get_submodule(path), last, piece, expert))
    return parameters


def _expert_parameter(owner: nn.Module, key: str, piece: TensorSlice, expert: int | None) -> ExpertParameter:
    parameter = owner.get_parameter(key)
    offloaded = _offloaded(owner, key) if parameter.is_meta else None
    values, stored = (parameter.detach, parameter) if offloaded is None else offloaded
    return ExpertParameter(
        owner=owner, key=key, parameter=parameter, piece=piece, expert=expert, values=values, stored=stored
    )


def accelerate_hooks(module: nn.Module) -> list[Any]:
    """The hooks by which accelerate moves the inputs and parameters of ``module``."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def _offloaded(owner: nn.Module, key: str) -> tuple[Callable[[], Tensor], Tensor | None] | None:
    """`ExpertParameter.values` and ``stored`` of a parameter that accelerate offloaded; None if it did not."""
    for hook in accelerate_hooks(owner):
        weights = getattr(hook, "weights_map", None)
        if weights is None or not hook.offload:
            continue
        name, source = getattr(weights, "prefix", "") + key, getattr(weights, "dataset", weights)
        in_memory = getattr(source, "state_dict", source)
        if name in in_memory:
            return functools.partial(weights.__getitem__, key), in_memory[name]
        if name in getattr(source, "index", ()):
            return functools.partial(weights.__getitem__, key), None
    return None


def _device(parameters: list[ExpertParameter]) -> torch.device:
    """Where accelerate computes offloaded parameters, else where they are."""
    for held in parameters:
        if not held.parameter.is_meta:
            return held.parameter.device
        for hook in accelerate_hooks(held.owner):
            if getattr(hook, "execution_device", None) is not None:
                return torch.device(hook.execution_device)
    return torch.device("meta")


def _router(block: nn.Module, experts: nn.Module, count: int) -> nn.Module | None:
    for child in block.children():
        weight = child._parameters.get("weight")
        if child is not experts and weight is not None and weight.dim() == 2 and weight.shape[0] == count:
            return child
    return None


# Attribute names for the number of experts per token.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_topk", "moe_k")


def _top_k(places: tuple[Any, ...], num_experts: int) -> int | None:
    for owner in places:
        for name in _TOP_K:
            value = getattr(owner, name, None)
            if isinstance(value, int) and 0 < value <= num_experts:
                return value
    return None


def _lay_out(tensors: dict[str, Tensor]) -> list[TensorSlice]:
    pieces, offset = [], 0
    for name, tensor in tensors.items():
        pieces.append(TensorSlice(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, offset=offset))
        offset = align_up(offset + pieces[-1].nbytes, _TENSOR_ALIGNMENT)
    return pieces


def _refuse(model: nn.Module, layers: list[MoeLayer]) -> None:
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise ConfigError(f"{type(model).__name__} is quantised; attach needs experts in {_FLOATING_NAMES}")
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        for key, value in module._parameters.items():
            if value is None:
                continue
            path = f"{name}.{key}".lstrip(".")
            cell = value.untyped_storage().data_ptr() or id(value)
            if cell in owners and any(value is held.parameter for layer in layers for held in layer.parameters):
                raise ConfigError(f"{path} shares its memory with {owners[cell]}; attach moves experts of their own")
            owners.setdefault(cell, path)
    for layer in layers:
        _refuse_layer(layer)
    devices = sorted({str(layer.device) for layer in layers})
    if len(devices) > 1:
        raise ConfigError(f"the experts are on {', '.join(devices)}; attach needs them on one device")


def _refuse_layer(layer: MoeLayer) -> None:
    if not layer.pieces:
        raise ConfigError(f"{layer.name} holds no tensor over its {layer.num_experts} experts; attach cannot move it")
    for module in (layer.block, *layer.experts.modules()):
        if any(getattr(hook, "offload", False) and hook.place_submodules for hook in accelerate_hooks(module)):
            raise ConfigError(
                f"{layer.name}: accelerate loads {type(module).__name__} as one (preload_module_classes); dispatch the "
                "model without that"
            )
    if getattr(layer.experts, "_is_expert_parallel", False):
        raise ConfigError(f"{layer.name} is spread over processes; attach serves models of one process")
    moved = {id(held.parameter) for held in layer.parameters}
    if any(parameter.is_meta and id(parameter) not in moved for parameter in layer.experts.parameters()):
        raise ConfigError(f"{layer.name} has offloaded parameters that are not of one expert; keep them in memory")
    for held in layer.parameters:
        if held.parameter.is_meta and held.stored is held.parameter:
            raise ConfigError(
                f"{layer.name}: {held.piece.name} has no values (on the meta device, or attached already)"
            )
        if held.parameter.dtype not in _FLOATING or type(held.parameter) is not nn.Parameter:
            raise ConfigError(
                f"{layer.name}: {held.piece.name} is {held.parameter.dtype} ({type(held.parameter).__name__}); "
                f"attach needs plain parameters in {_FLOATING_NAMES}"
            )
