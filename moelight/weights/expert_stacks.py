"""Stacks of experts as mlx-lm keeps them, ``switch_mlp.gate_proj`` [E, rows, columns] with one for each matrix, as
experts that are stored one by one."""

from __future__ import annotations

import re
from dataclasses import replace
from types import MappingProxyType

from moelight.core.errors import CheckpointError
from moelight.weights.source import Checkpoint, TensorInfo

_STACK = re.compile(r"(?P<block>.+)\.switch_mlp\.(?P<rest>(?:gate|up|down)_proj\.\w+)")
_MAX_EXPERTS = 1 << 12


def experts_one_by_one(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with a tensor for each expert of such a stack; what is no stack stays as it is. Raises
    CheckpointError for an expert that is stored twice."""
    tensors: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        match = _STACK.fullmatch(name)
        if match is None or len(info.shape) < 2 or not 1 <= info.shape[0] <= _MAX_EXPERTS:
            tensors[name] = info
            continue
        count = info.shape[0]
        for expert in range(count):
            single = f"{match['block']}.experts.{expert}.{match['rest']}"
            if single in checkpoint.tensors:
                raise CheckpointError(
                    f"{info.file}: tensor {name!r} holds {single!r}, which is stored by itself, too; "
                    "save the model again, with one of them"
                )
            tensors[single] = replace(info.part(expert, count), name=single, shape=info.shape[1:])
    return replace(checkpoint, tensors=MappingProxyType(tensors))
