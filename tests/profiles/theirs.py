"""What transformers makes of the same config: its model on the meta device, and our tensors matched with its own."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moelight.profiles.model import ModelProfile, StoredTensor
from moelight.profiles.model_files import model_config
from moelight.profiles.tensor_list import dense_tensors, page_shapes, pages

Shapes = dict[str, tuple[int, ...]]


def their_config(name: str) -> dict[str, Any]:
    """The config of a shipped model as transformers 5 takes it."""
    config = model_config(name)
    if name == "dbrx":  # transformers insists on a float where the released file has 1
        config["ffn_config"]["moe_normalize_expert_weights"] = 1.0
    if name == "phi-3.5-moe":  # the factors of its positions, which have no parameters, are not in the profile
        del config["rope_scaling"]
    if name == "deepseek-moe-16b":  # not in transformers; a Qwen2-MoE of its sizes has one kind of tensor more
        config |= {
            "model_type": "qwen2_moe",
            "qkv_bias": False,
            "num_experts": config["n_routed_experts"],
            "shared_expert_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
            "mlp_only_layers": list(range(config["first_k_dense_replace"])),
        }
    return config


def on_meta(config: dict[str, Any]) -> tuple[Shapes, Shapes]:
    """Shapes of the parameters and of the persistent buffers of transformers' model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    parameters = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    stored = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    return parameters, {key: shape for key, shape in stored.items() if key not in parameters}


def elements(shapes: Shapes) -> int:
    """Numbers in all of them."""
    return sum(map(math.prod, shapes.values()))


def parts(model: ModelProfile) -> list[StoredTensor]:
    """Every tensor on disk outside the experts."""
    return [part for stored in dense_tensors(model) for part in stored.parts]


def in_pages(model: ModelProfile) -> int:
    """Numbers in all experts."""
    return len(pages(model)) * elements(page_shapes(model))


def assert_same_tensors(model: ModelProfile, shapes: Shapes) -> None:
    """Each of our dense tensors is one of ``shapes``; what is left there are experts, as many numbers as our pages."""
    left = dict(shapes)
    for part in parts(model):
        spellings = [spelling.format(layer=part.layer) for spelling in getattr(model.names, part.name)]
        result = [key for key in spellings if key in left]
        assert len(result) == 1, (part, spellings)
        assert left.pop(result[0]) == part.shape, part
    assert all(".experts." in key for key in left), list(left)
    assert elements(left) == in_pages(model)
