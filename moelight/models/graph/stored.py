"""The bytes of a quantised module graph, by what was found of its weights: those of pages, and of the tensors outside
them as they are stored and as a CPU keeps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from moelight.formats.format import Format
from moelight.models.graph.weights import GraphWeightMap
from moelight.profiles.model import ModelProfile
from moelight.profiles.quantization import cpu_integers_of, kept_matrices
from moelight.profiles.stored import StoredWeights
from moelight.profiles.tensor_list import page_shapes
from moelight.weights.page_layout import parameter_of


def with_stored_weights(profile: ModelProfile, weights: GraphWeightMap, kind: str) -> ModelProfile:
    """``profile`` with the bytes of the stored ``weights``, as it is where pages are floats. ``kind``: of the files, as
    people call it."""
    pages = weights.experts
    if pages.dtype is not None:
        return profile
    counted = Counter[Format]()
    layers = {tensor.name: tensor.layer for tensor in (*profile.tensors, *profile.page_tensors)}
    in_pages = Counter[str]()
    for layout_id in pages.layout_ids.values():
        for name, matrix in pages.layouts[layout_id].parts.items():
            size = sum(tensor.nbytes for tensor in matrix.tensors.values())
            in_pages[parameter_of(name)] += size
            if matrix.stored.is_quantised or not name.endswith("_bias"):
                counted[matrix.stored] += size
    label = f"{kind} " + " and ".join(stored.name for stored, _ in counted.most_common(2))
    elements = sum(rows * columns for rows, columns in page_shapes(profile).values())
    sizes = (*_outside(weights), *(in_pages.items() if profile.dense else ()))
    stored = StoredWeights.of(
        label,
        label,
        pages.page_bytes(profile.num_layers),
        elements,
        [(name, layers[name], size) for name, size in sizes if name in layers],
        kept_matrices(profile, lambda part: weights.kept_as(part.name)),
        {stored.name: stored.int8_reason for stored in counted},
    )
    experts = () if profile.dense else pages.layouts
    pairs = [(layout.parts["gate_up"], layout.parts["up"]) for layout in experts if "up" in layout.parts]
    apart = any(gate.stored != up.stored for gate, up in pairs)
    alone = cpu_integers_of(counted)
    stored = replace(stored, mixed=stored.mixed or apart, repacked_bytes=pages.turned_bytes, cpu_integers=alone)
    return replace(profile, stored=stored)


def _outside(weights: GraphWeightMap) -> Iterator[tuple[str, int]]:
    """The tensors outside pages that are stored as matrices, and their stored bytes."""
    for tensor in weights.dense:
        matrices = {id(matrix): matrix for box in tensor.boxes for matrix in box.info.matrices}
        if matrices and len(matrices) == len({id(box.info) for box in tensor.boxes}):
            infos = (info for matrix in matrices.values() for info in matrix.tensors.values())
            yield tensor.names[0], sum(info.nbytes for info in infos)
