"""The part of a checkpoint that one rank of several holds: whole experts, and attention heads where a family allows it.

Experts stay whole, so pages in every format move as they are stored and are read once over all ranks. Projections of
queries, keys and values are divided by heads, that of the output by its rows: columns would be strided in the file, and
within blocks. The router, norms, embeddings and layers without experts are on every rank. Nothing is read.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from moelight.core.errors import CheckpointError
from moelight.core.schedule import Page
from moelight.profiles.model import ModelProfile, StoredTensor
from moelight.profiles.stored import StoredWeights
from moelight.profiles.tensor_list import dense_tensors
from moelight.weights.expert_pages import ExpertPages
from moelight.weights.tensor_info import TensorInfo
from moelight.weights.tensor_map import OpenCheckpoint

Parts = dict[StoredTensor, TensorInfo]


def shard(opened: OpenCheckpoint, rank: int, count: int) -> OpenCheckpoint:
    """``opened`` as rank ``rank`` of ``count`` has it. Raises ConfigError if its experts cannot be divided so."""
    profile, parts = opened.profile.on_ranks(count), Parts(opened.weight_map.parts)
    width = profile.experts.num_experts
    experts = _experts(opened.weight_map.experts, range(rank * width, (rank + 1) * width))
    if profile.head_ranks > 1:
        undivided = replace(profile, attention=opened.profile.attention, head_ranks=1)
        profile, parts = _heads(undivided, profile, parts, rank)
    if profile.stored is not None:
        profile = replace(profile, stored=_stored(profile.stored, experts, profile, parts))
    weight_map = replace(opened.weight_map, parts=MappingProxyType(parts), experts=experts)
    return replace(opened, profile=profile, weight_map=weight_map, source=opened.source.sharded(weight_map))


def _experts(pages: ExpertPages, selected: range) -> ExpertPages:
    """The pages of the experts ``selected``, numbered from 0."""
    renumbered = {
        page: Page(layer=page.layer, expert=page.expert - selected.start)
        for page in pages.layout_ids
        if page.expert in selected
    }
    return replace(
        pages,
        pieces=MappingProxyType({number: pages.pieces[page] for page, number in renumbered.items()}),
        layout_ids=MappingProxyType({number: pages.layout_ids[page] for page, number in renumbered.items()}),
    )


def _heads(profile: ModelProfile, divided: ModelProfile, parts: Parts, rank: int) -> tuple[ModelProfile, Parts]:
    """``divided`` and its parts of the ``parts`` of ``profile``, whose heads it divides; ``profile`` and ``parts``, all
    heads on each rank, where a format does not divide the rows."""
    result = Parts()
    for before, after in zip(dense_tensors(profile), dense_tensors(divided), strict=True):
        for part, smaller in zip(before.parts, after.parts, strict=True):
            if (info := parts.get(part)) is None:
                continue
            result[smaller] = info if part.shape == smaller.shape else info.part(rank, divided.head_ranks)
            try:
                if info.matrices:
                    result[smaller].stored()
            except CheckpointError:
                return profile, parts
    return divided, result


def _stored(stored: StoredWeights, experts: ExpertPages, profile: ModelProfile, parts: Parts) -> StoredWeights:
    """``stored`` with the bytes of the ``experts`` and ``parts`` of a rank."""
    infos = {(part.name, part.layer): info for part, info in parts.items() if info.matrices}
    shares = {key: info.shape[0] / info.matrices[0].rows for key, info in infos.items()}
    pages = experts.page_bytes(profile.num_layers)
    total, count = sum(map(sum, pages)), sum(map(len, pages))
    return replace(
        stored,
        pages=tuple(max(sizes, default=0) for sizes in pages),
        total_bytes=total,
        mean_page_bytes=-(-total // max(count, 1)),
        dense=tuple((name, layer, round(size * shares.get((name, layer), 1.0))) for name, layer, size in stored.dense),
        dense_stored=tuple(
            (name, layer, infos[name, layer].stored().kept_bytes if (name, layer) in infos else size)
            for name, layer, size in stored.dense_stored
        ),
    )
