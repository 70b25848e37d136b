"""Moves experts from a model's parameters to an offload store, and back.

An offloaded parameter keeps its identity but has no bytes. Its module holds a placeholder of the same shape on the meta
device, so code that uses or saves it fails instead of computing with nothing.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from moelight.integrations.layers import MoeLayer
from moelight.integrations.links import PageLink
from moelight.integrations.page_stores import OffloadStore


def offload_layer(home: OffloadStore, number: int, layer: MoeLayer) -> None:
    """Copy the experts of layer ``number`` to ``home`` and free their memory."""
    home.keep(number, layer)
    for held in layer.parameters:
        parameter = held.parameter
        held.owner._parameters[held.key] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        parameter.data = parameter.data.new_empty(0)


def trim() -> None:
    """Return freed memory to the system: glibc keeps allocations of less than 32 MiB."""
    give = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries lack malloc_trim and do not need it
    if give is not None:
        give(0)


def restore_layer(home: OffloadStore, link: PageLink, number: int, layer: MoeLayer) -> None:
    """Restore the bytes of the parameters of layer ``number`` and put them back into the model.

    Raises:
        CheckpointError: the offload store cannot be read; the layer remains offloaded.
    """
    coming, wholes = [], []
    for held in layer.parameters:
        shape = held.piece.shape if held.expert is not None else (layer.num_experts, *held.piece.shape)
        whole = held.parameter.data.new_empty(shape)
        wholes.append(whole)
        for expert, tensor in held.parts(whole):
            coming.append(link.start(home, number, expert, [(held.piece.offset, _cells(tensor))]))
    for in_flight in coming:
        in_flight.wait()
    for held, whole in zip(layer.parameters, wholes, strict=True):
        held.parameter.data = whole
        held.owner._parameters[held.key] = held.parameter


def _cells(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
