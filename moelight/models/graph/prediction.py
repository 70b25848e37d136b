"""The layer of multi-token prediction that DeepSeek-V3, GLM-4.5 and later models have behind their last one, as a model
of one layer.

It sees a token with the final hidden state of the position before: both are normed and projected to the input of the
layer, which has a cache of its own. Head and embedding are those of the layer where it stores them, else the model's.

Legend: T rows of the micro-batch, H hidden.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moelight.core.errors import ConfigError
from moelight.models.graph.model import decoder_of
from moelight.weights.source import Checkpoint

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PROJECTION = "eh_proj"
_RENAMED = (
    ("shared_head.norm.", "model.norm."),
    ("shared_head.head.", "lm_head."),
    ("embed_tokens.", "model.embed_tokens.embedding."),
    ("enorm.", "model.embed_tokens.enorm."),
    ("hnorm.", "model.embed_tokens.hnorm."),
    ("eh_proj.", "model.embed_tokens.eh_proj."),
    ("", "model.layers.0."),
)
_OF_MODEL = {
    "model.embed_tokens.weight": "model.embed_tokens.embedding.weight",
    "lm_head.weight": "lm_head.weight",
    "model.norm.weight": "model.norm.weight",
}


class PredictionInput(nn.Module):
    """What takes the place of the embedding: tokens int64 [..., T] and ``hidden`` [T, H], the final hidden states of
    the positions before, to [..., T, H]."""

    def __init__(self, embedding: nn.Module, norm: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.embedding: Any = embedding
        self.enorm, self.hnorm = deepcopy(norm), deepcopy(norm)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False, device="meta")
        self.hidden: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.embedding.weight
        return weight

    def forward(self, token_ids: Tensor) -> Tensor:
        embedded = self.embedding(token_ids)
        before = torch.zeros_like(embedded) if self.hidden is None else self.hidden.to(embedded.dtype).view_as(embedded)
        projected: Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(before)), dim=-1))
        return projected


def prediction_config(config: PretrainedConfig) -> PretrainedConfig:
    """``config`` of a model of one layer, which has experts."""
    one: Any = deepcopy(config)
    one.num_hidden_layers, one.num_nextn_predict_layers = 1, 0
    if hasattr(one, "first_k_dense_replace"):
        one.first_k_dense_replace = 0
    for name, kind in (("mlp_layer_types", "sparse"), ("layer_types", None)):
        if getattr(one, name, None):
            setattr(one, name, [kind or getattr(one, name)[-1]])
    result: PretrainedConfig = one
    return result


def as_prediction(module: Any) -> PredictionInput:
    """Give the causal language model ``module`` of one layer the input of a prediction layer."""
    decoder = decoder_of(module)
    made = PredictionInput(decoder.embed_tokens, decoder.norm, decoder.config.hidden_size)
    made.to(dtype=module.dtype)
    decoder.embed_tokens = made
    return made


def prediction_tensors(checkpoint: Checkpoint, layer: int) -> Checkpoint:
    """The tensors of the prediction layer ``layer`` of ``checkpoint`` by the names of a model of one layer, with those
    of the model that it shares. Raises ConfigError if there is no such layer."""
    prefix = re.compile(rf"model\.layers\.{layer}\.(.*)")
    within = {match[1]: info for name, info in checkpoint.tensors.items() if (match := prefix.fullmatch(name))}
    if not any(name.startswith(_PROJECTION) for name in within):
        raise ConfigError(
            f"{checkpoint.listing}: no tensor model.layers.{layer}.{_PROJECTION}, so there is no multi-token "
            "prediction that is served; use --speculate ngram, or a --draft-model"
        )
    tensors: dict[str, Any] = {}
    for name, target in _OF_MODEL.items():
        if name in checkpoint.tensors:
            tensors[target] = checkpoint.tensors[name]
    for name, info in within.items():
        begin, target = next((old, new) for old, new in _RENAMED if name.startswith(old))
        tensors[target + name[len(begin) :]] = info
    named: Mapping[str, Any] = {name: replace(info, name=name) for name, info in tensors.items()}
    return replace(checkpoint, tensors=MappingProxyType(dict(named)), ignored=())
