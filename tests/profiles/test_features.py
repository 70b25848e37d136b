"""What the native decoder does not compute is listed, every feature by its name; what it computes is not."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from moelight.profiles.files import profile_names
from moelight.profiles.model import (
    NOT_COMPUTED,
    AttentionSpec,
    ExpertSpec,
    LatentSpec,
    ModelProfile,
    RouterSpec,
    not_computed,
)
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.rope import RopeScaling
from tests.shapes import small_model

LATENT = LatentSpec(q_lora_rank=None, kv_lora_rank=8, nope_head_dim=8, rope_head_dim=4, value_head_dim=8)
# What a field has to say for the feature to be asked for; an empty part is the profile itself.
ASKED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "latent attention": [("attention", {"latent": LATENT})],
    "values of another width than keys": [("attention", {"value_head_dim": 4})],
    "attention sinks": [("attention", {"sinks": True})],
    "a window in some layers only": [("attention", {"window": 4, "window_layers": (True, False)})],
    "positions stretched by the length of each sequence": [
        ("attention", {"rope_type": kind}) for kind in ("longrope", "dynamic")
    ],
    "heads of a width that is no multiple of 8": [("attention", {"head_dim": 12})],
    "positions in a part of each head": [("attention", {"rotary_share": 0.5})],
    "router scores other than softmax": [
        ("router", {"scoring": kind}) for kind in ("sigmoid", "softmax_of_top", "sparsemixer")
    ],
    "groups of experts": [("router", {"groups": 2}), ("router", {"groups": 2, "top_groups": 2})],
    "scaled router weights": [("router", {"scale": 2.5})],
    "a router bias": [("router", {"bias": True}), ("router", {"selection_bias": True})],
    "shared experts": [
        ("experts", {"shared_intermediate_size": 8}),
        ("experts", {"shared_intermediate_size": 8, "shared_gate": True}),
    ],
    "expert biases": [("experts", {"bias": True})],
    "experts without a gate": [("experts", {"gated": False})],
    "experts of another width than the hidden states": [("experts", {"input_size": 4})],
    "transposed or interleaved experts": [("experts", {"transposed": True}), ("experts", {"interleaved": True})],
    "clamped experts": [("experts", {"clamp": 7.0})],
    "experts that torch computes": [("experts", {"by_torch": True})],
    "LayerNorm": [("", {"norm": "layer"})],
    "norm biases": [("", {"norm_bias": True})],
    "a bias of the output matrix": [("", {"head_bias": True})],
}
# What the decoder computes whatever it says (a field that is not here must be in the table).
COMPUTED = {
    AttentionSpec: (
        "num_heads num_kv_heads head_dim qk_norm clip_qkv qkv_bias output_bias window rope_theta rope_scaling "
        "scale softcap chunk"
    ),
    RouterSpec: "top_k normalize weights_in_model_dtype",
    ExpertSpec: "num_experts intermediate_size activation",
    ModelProfile: (
        "name model_type num_layers hidden_size vocab_size max_positions norm_eps tie_embeddings dtype attention "
        "router experts moe_layers dense_intermediate_size names layers tensors "
        "page_tensors stored by_length ranks head_ranks"
    ),
}


def changed(part: str, values: dict[str, Any]) -> ModelProfile:
    model = small_model()
    return replace(model, **{part: replace(getattr(model, part), **values)} if part else values)


@pytest.mark.parametrize(
    ("feature", "part", "values"), [(feature, *case) for feature, cases in ASKED.items() for case in cases]
)
def test_each_feature_is_named_alone(feature: str, part: str, values: dict[str, Any]) -> None:
    assert not_computed(changed(part, values)) == (feature,)


def test_every_field_of_a_profile_is_computed_or_in_the_table() -> None:
    assert set(ASKED) == set(NOT_COMPUTED)
    parts = {"attention": AttentionSpec, "router": RouterSpec, "experts": ExpertSpec, "": ModelProfile}
    asked = {(parts[part], name) for cases in ASKED.values() for part, values in cases for name in values}
    for spec, computed in COMPUTED.items():
        known_names = set(computed.split()) | {name for owner, name in asked if owner is spec}
        assert {field.name for field in fields(spec)} == known_names


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"window": 4},
        {"window": 4, "window_layers": (True, True)},
        {"rope_type": "linear", "rope_scaling": RopeScaling(kind="linear", factor=4.0)},
        {"qkv_bias": True},
        {"qkv_bias": True, "output_bias": True},
        {"qk_norm": "head"},
        {"clip_qkv": 8.0},
    ],
)
def test_what_is_computed_is_not_refused(values: dict[str, Any]) -> None:
    assert not not_computed(changed("attention", values))


@pytest.mark.parametrize("name", profile_names("model"))
def test_three_families_can_be_run(name: str) -> None:
    model = load_model_profile(name)
    assert (not not_computed(model)) == (model.model_type in ("mixtral", "qwen3_moe", "olmoe"))
