"""A GGUF file as a checkpoint of plain matrices under transformers' names (`quantized_checkpoint`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from moelight.core.dtypes import FLOAT32, dtype_named
from moelight.formats.format import ITEM_BYTES
from moelight.profiles.gguf import GGMLTensor
from moelight.profiles.gguf_models import GGUFModel
from moelight.profiles.quantization import expert_module
from moelight.profiles.tensor_list import dense_tensors
from moelight.weights.boxes import AssembledInfo, Tiled
from moelight.weights.gguf_orders import keys_and_values
from moelight.weights.source import Checkpoint
from moelight.weights.stored_matrix import ggml_matrix, gguf_expert_matrix
from moelight.weights.tensor_info import TensorInfo

_EXPERTS = ("gate", "up", "down")
_KEPT = ("router_selection_bias",)  # added to float32 scores, whatever the model's dtype


def gguf_checkpoint(model: GGUFModel, has: Callable[[str], bool] = bool) -> Checkpoint:
    """The tensors of ``model``, put together and taken apart as transformers has them; of several spellings the first
    that the family ``has``."""
    infos = {info.name: info for info in _infos(model, has)}
    path = model.file.path
    return Checkpoint(directory=path, listing=path, tensors=MappingProxyType(infos))


def _infos(model: GGUFModel, has: Callable[[str], bool]) -> Iterator[TensorInfo]:
    names, dtype = model.profile.names, dtype_named(model.profile.dtype).safetensors
    parts = [part for tensor in dense_tensors(model.profile) for part in tensor.parts]
    shapes = {(part.name, part.layer): part.shape for part in parts}  # files leave out dimensions of 1
    for (name, layer), tensor in model.tensors.items():
        if name == "gate_up":
            for half in ("gate", "up"):
                yield from _experts(model, half, layer, dtype)
        elif name.removesuffix("_bias") in _EXPERTS:
            yield from _experts(model, name, layer, dtype)
        elif name == "k_b":
            yield _keys_and_values(model, names.kv_b[0].format(layer=layer), layer, dtype)
        elif name != "v_b":
            matrix = replace(ggml_matrix(tensor), heads=model.heads_of(name))
            spellings = [spelling.format(layer=layer) for spelling in getattr(names, name)]
            tensor_name = next((spelling for spelling in spellings if has(spelling)), spellings[0])
            shape = shapes.get((name, layer), tensor.shape if len(tensor.shape) == 1 else matrix.shape)
            yield matrix.as_values(tensor_name, FLOAT32.safetensors if name in _KEPT else dtype, shape)


def _experts(model: GGUFModel, name: str, layer: int, dtype: str) -> Iterator[TensorInfo]:
    """The matrix or bias ``name`` of all experts of a layer: one by one, or as the stack that a family keeps, in which
    gate and up are one."""
    matrix = name.removesuffix("_bias")
    tensor = model.tensors[name if (name, layer) in model.tensors else "gate_up", layer]
    if model.profile.names.gate:
        for expert in range(tensor.shape[0]):
            module = expert_module(model.profile, layer, matrix, expert)
            expert_matrix = gguf_expert_matrix(model, layer, matrix, expert)
            yield expert_matrix.as_values(f"{module}.weight", dtype, expert_matrix.shape)
    elif matrix != "up":
        stacks = [tensor, model.tensors[name.replace("gate", "up"), layer]] if matrix == "gate" else [tensor]
        count, rows, columns = (*tensor.shape, 1)[:3]
        rows *= len(stacks)
        turned = name == matrix
        module = expert_module(model.profile, layer, "gate_up" if matrix == "gate" else matrix, None)
        matrices = tuple(ggml_matrix(stack, columns=columns) for stack in stacks)
        module, shape = (module, (count, columns, rows)) if turned else (f"{module}_bias", (count, rows))
        yield replace(matrices[0].as_values(module, dtype, shape, turned=turned), matrices=matrices)


def _keys_and_values(model: GGUFModel, name: str, layer: int, dtype: str) -> TensorInfo:
    """kv_b [heads x (width + width of values), rank] of k_b [heads, rank, width] and v_b [heads, width, rank]."""
    parts = []
    for half in ("k_b", "v_b"):
        tensor = model.tensors[half, layer]
        matrix = ggml_matrix(tensor, columns=tensor.shape[-1])
        parts.append(Tiled.of(matrix.as_values(f"{name} of {tensor.name}", dtype, tensor.shape)))
    tiled = keys_and_values(parts)
    return assembled_info(name, model.tensors["k_b", layer].file, tiled, dtype)


def assembled_info(name: str, file: Path, tiled: Tiled, dtype: str) -> AssembledInfo:
    """The tensor ``name`` that ``tiled`` puts together, as numbers of ``dtype``."""
    nbytes = math.prod(tiled.shape) * ITEM_BYTES[dtype]
    return AssembledInfo(name=name, file=file, dtype=dtype, shape=tiled.shape, offset=0, nbytes=nbytes, tiled=tiled)


def matrix_info(
    name: str,
    tensor: GGMLTensor,
    shape: tuple[int, ...],
    dtype: str,
    *,
    heads: int = 0,
    stored_as: str = "",
    rounds: tuple[int, int] = (1, 1),
) -> TensorInfo:
    """All numbers of ``tensor`` as a tensor ``name`` of ``shape``; ``heads``, ``stored_as`` and ``rounds`` as of
    `StoredMatrix`."""
    columns = 1 if heads and len(tensor.shape) == 1 else tensor.shape[-1]
    matrix = replace(ggml_matrix(tensor, columns=columns), heads=heads, stored_as=stored_as, rounds=rounds)
    return matrix.as_values(name, dtype, shape)


def expert_infos(tensor: GGMLTensor, name: str, dtype: str, *, half: int, halves: int) -> Iterator[TensorInfo]:
    """The matrix or bias of each expert in the stack ``tensor``, called ``name`` with its number; of a stack with
    ``halves``, gate rows before up rows, number ``half`` of them."""
    bias = len(tensor.shape) == 2
    for expert in range(tensor.shape[0]):
        matrix = ggml_matrix(tensor).rows_of(expert, expert + 1) if bias else ggml_matrix(tensor, expert=expert)
        if not bias:
            rows = matrix.rows // halves
            matrix = matrix.rows_of(half * rows, (half + 1) * rows)
        yield matrix.as_values(name.format(expert), dtype, (matrix.columns,) if bias else matrix.shape)
