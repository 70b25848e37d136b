"""Reads the chosen experts of each token from the output of any router module.

Shapes: T tokens, k experts of a token, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moelight.integrations.layers import MoeLayer

# Attribute names for the number of experts per token.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_topk", "moe_k")


def top_k(layer: MoeLayer, config: Any) -> int | None:
    """Experts per token in ``layer``; None if neither its modules nor the model's ``config`` define it."""
    for place, names in ((layer.router, _TOP_K), (layer.block, _TOP_K), (config, _TOP_K)):
        for name in names:
            found = getattr(place, name, None)
            if isinstance(found, int) and 0 < found <= layer.num_experts:
                return found
    return None


def chosen(output: Any, num_experts: int, k: int | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Return ``(ids int64 [T, k], scores float32 [T, k])`` from a router's ``output``: its ids if it contains any, else
    the ``k`` largest of its logits; None if it contains neither."""
    given = [each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)]
    for ids in given:
        if not ids.is_floating_point() and ids.dim() >= 1:
            scores = next((each for each in given if each.is_floating_point() and each.shape == ids.shape), None)
            shape = (-1, ids.shape[-1])
            scores = torch.ones(ids.shape) if scores is None else scores
            return ids.reshape(shape).cpu().numpy().astype(np.int64), _floats(scores.reshape(shape))
    for logits in given:
        if logits.shape[-1] == num_experts and k is not None:
            scores, ids = logits.reshape(-1, num_experts).float().softmax(-1).topk(k, dim=-1)
            return ids.cpu().numpy(), _floats(scores)
    return None


def ask(router: nn.Module, states: Tensor, num_experts: int, k: int | None) -> tuple[np.ndarray, np.ndarray] | None:
    """The choice of ``router`` for ``states`` [T, H], without running its hooks."""
    return chosen(type(router).forward(router, states), num_experts, k)


def _floats(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
