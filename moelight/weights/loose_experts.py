"""Experts that are stored one by one, under the names of most families, where transformers' module and its own files
keep a stack: what tools that quantise write for every family."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from moelight.weights.source import TensorInfo

_NAME = re.compile(
    r"(?P<block>(?P<layer>.*?\.\d+)\..*\bexperts)\.(?P<expert>\d+)\.(?P<matrix>\w+)\.(?P<kind>weight|bias)"
)
_LAYER = re.compile(r".*?\.\d+(?=\.)")
_MATRICES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
LooseExperts = dict[tuple[int, str], TensorInfo]  # by expert and the name of the matrix or bias in a page


def loose_experts(tensors: Iterable[tuple[str, TensorInfo]]) -> dict[str, LooseExperts]:
    """The matrices and biases of single experts among ``tensors`` (name in the module, tensor), by the layer that holds
    them (``model.layers.3``); none of a layer that holds two kinds of experts."""
    by_layer: defaultdict[str, LooseExperts] = defaultdict(dict)
    blocks: defaultdict[str, set[str]] = defaultdict(set)
    for name, info in tensors:
        match = _NAME.fullmatch(name)
        if match is None or match["matrix"] not in _MATRICES:
            continue
        matrix = _MATRICES[match["matrix"]] + ("_bias" if match["kind"] == "bias" else "")
        by_layer[match["layer"]][int(match["expert"]), matrix] = info
        blocks[match["layer"]].add(match["block"])
    return {layer: experts for layer, experts in by_layer.items() if len(blocks[layer]) == 1}


def layer_of(path: str) -> str:
    """The layer of the parameter ``path``: its name up to the first number."""
    match = _LAYER.match(path)
    return match[0] if match else ""
