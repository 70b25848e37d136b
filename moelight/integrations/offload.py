"""Experts leave their model's parameters for a home, and come back.

A parameter that is away keeps its identity but has no bytes; in its module a stand-in on the meta device says its
shape, so that whatever would use or save it fails instead of computing with nothing.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from moelight.integrations.layers import MoeLayer
from moelight.integrations.links import PageLink
from moelight.integrations.page_stores import OffloadStore


def put_away(home: OffloadStore, number: int, layer: MoeLayer) -> None:
    """Copy the experts of layer ``number`` to ``home`` and free their memory."""
    home.keep(number, layer)
    for held in layer.parameters:
        parameter = held.parameter
        held.owner._parameters[held.key] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        parameter.data = parameter.data.new_empty(0)


def trim() -> None:
    """Have the C library give freed memory back to the system: glibc keeps what came in pieces of less than 32 MiB."""
    give = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries have none, and need none
    if give is not None:
        give(0)


def bring_back(home: OffloadStore, link: PageLink, number: int, layer: MoeLayer) -> None:
    """Give the parameters of layer ``number`` their bytes and their places in the model again.

    Raises:
        CheckpointError: the home cannot be read; the layer stays away.
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
