"""Experts that are stored one by one, under the names of most families, where transformers' module and its own files
keep a stack: what tools that quantise write for every family. And stacks as mlx-lm keeps them, ``switch_mlp.gate_proj``
[E, rows, columns] with one for each matrix, as experts one by one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from moelight.core.errors import CheckpointError
from moelight.weights.source import Checkpoint
from moelight.weights.tensor_info import TensorInfo

_NAME = re.compile(
    r"(?P<block>(?P<layer>.*?\.\d+)\..*\bexperts)\.(?P<expert>\d+)\.(?P<matrix>\w+)\.(?P<kind>weight|bias)"
)
_STACK = re.compile(r"(?P<block>.+)\.switch_mlp\.(?P<rest>(?:gate|up|down)_proj\.\w+)")
_MAX_EXPERTS = 1 << 12  # of a stack
_LAYER = re.compile(r".*?\.\d+(?=\.)")
MATRICES_BY_SPELLING = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}
LooseExperts = dict[tuple[int, str], TensorInfo]  # by expert and the name of the matrix or bias in a page


def loose_experts(tensors: Iterable[tuple[str, TensorInfo]]) -> dict[str, LooseExperts]:
    """The matrices and biases of single experts among ``tensors`` (name in the module, tensor), by the layer that holds
    them (``model.layers.3``); none of a layer that holds two kinds of experts."""
    by_layer: defaultdict[str, LooseExperts] = defaultdict(dict)
    blocks: defaultdict[str, set[str]] = defaultdict(set)
    for name, info in tensors:
        match = _NAME.fullmatch(name)
        if match is None or match["matrix"] not in MATRICES_BY_SPELLING:
            continue
        matrix = MATRICES_BY_SPELLING[match["matrix"]] + ("_bias" if match["kind"] == "bias" else "")
        by_layer[match["layer"]][int(match["expert"]), matrix] = info
        blocks[match["layer"]].add(match["block"])
    return {layer: experts for layer, experts in by_layer.items() if len(blocks[layer]) == 1}


def layer_of(path: str) -> str:
    """The layer of the parameter ``path``: its name up to the first number."""
    match = _LAYER.match(path)
    return match[0] if match else ""


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
