"""A GGUF file as a checkpoint of plain matrices under transformers' names (`quantized_checkpoint`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType

from moelight.core.dtypes import dtype_named
from moelight.core.errors import ConfigError
from moelight.profiles.gguf import GGMLTensor
from moelight.profiles.gguf_models import GGUFModel
from moelight.profiles.stored import ITEM_BYTES
from moelight.weights.quantized_checkpoint import QuantizedInfo
from moelight.weights.source import Checkpoint, TensorInfo
from moelight.weights.stored_matrix import StoredMatrix, ggml_matrix

_EXPERTS = ("gate", "up", "down")


def gguf_checkpoint(model: GGUFModel, has: Callable[[str], bool] = bool) -> Checkpoint:
    """The tensors of ``model``, experts apart; of several spellings the first that the family ``has``. Raises
    ConfigError for a family whose matrices transformers puts together otherwise."""
    infos = {info.name: info for info in _infos(model, has)}
    path = model.file.path
    return Checkpoint(directory=path, listing=path, tensors=MappingProxyType(dict[str, TensorInfo](infos)))


def _infos(model: GGUFModel, has: Callable[[str], bool]) -> Iterator[QuantizedInfo]:
    names, dtype = model.profile.names, dtype_named(model.profile.dtype).safetensors
    for (name, layer), tensor in model.tensors.items():
        spellings = [each.format(layer=layer, expert="{expert}") for each in getattr(names, name, ())]
        if not spellings:
            raise ConfigError(
                f"{tensor.file}: tensor {tensor.name!r} is no single tensor of {model.profile.model_type} in "
                "transformers; use the checkpoint in safetensors"
            )
        if name in _EXPERTS:
            for expert in range(tensor.shape[0]):
                matrix = ggml_matrix(tensor, expert=expert)
                yield _info(spellings[0].format(expert=expert), matrix, tensor, dtype)
        else:
            matrix = replace(ggml_matrix(tensor), heads=model.heads_of(name))
            own = next((each for each in spellings if has(each)), spellings[0])
            yield _info(own, matrix, tensor, dtype)


def _info(name: str, matrix: StoredMatrix, tensor: GGMLTensor, dtype: str) -> QuantizedInfo:
    shape = tensor.shape if len(tensor.shape) == 1 else (matrix.rows, matrix.columns)
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    return QuantizedInfo(name=name, file=tensor.file, dtype=dtype, shape=shape, offset=0, nbytes=nbytes, matrix=matrix)
