"""Every tensor of every shipped model: the same names, shapes and numbers as transformers' model of the same config."""

from __future__ import annotations

from collections import Counter

import pytest

from moelight.profiles.files import profile_names
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.tensor_list import dense_tensors
from tests.profiles.theirs import assert_same_tensors, elements, in_pages, on_meta, parts, their_config

# Where transformers keeps as a buffer, not as a parameter, what checkpoints store and we list.
BUFFERS = {"deepseek-v3": "e_score_correction_bias", "glm-4.5-air": "e_score_correction_bias"}
# The one kind of tensor that the stand-in for this model has too many: the gate on its shared experts' output.
SPARE = {"deepseek-moe-16b": ".mlp.shared_expert_gate.weight"}


@pytest.mark.peer
@pytest.mark.parametrize("name", profile_names("model"))
def test_every_tensor_is_one_of_transformers_and_the_rest_of_theirs_are_experts(name: str) -> None:
    model = load_model_profile(name)
    parameters, buffers = on_meta(their_config(name))
    shapes = {**parameters, **buffers}
    if name in SPARE:
        spare = [key for key in shapes if key.endswith(SPARE[name])]
        assert [shapes.pop(key) for key in spare] == [(1, model.hidden_size)] * model.num_moe_layers
    assert_same_tensors(model, shapes)


@pytest.mark.peer
@pytest.mark.parametrize("name", profile_names("model"))
def test_the_number_of_parameters_is_transformers_own_but_for_what_is_named(name: str) -> None:
    model = load_model_profile(name)
    parameters, buffers = on_meta(their_config(name))
    ours = sum(part.elements for part in parts(model)) + in_pages(model)
    assert {key.rpartition(".")[2] for key in buffers} == ({BUFFERS[name]} if name in BUFFERS else set())
    only_ours = model.num_moe_layers * model.experts.num_experts if name in BUFFERS else 0
    only_theirs = model.num_moe_layers * model.hidden_size if name in SPARE else 0
    assert ours - elements(parameters) == only_ours - only_theirs


def test_no_tensor_is_listed_twice() -> None:
    for name in profile_names("model"):
        model = load_model_profile(name)
        assert max(Counter((part.name, part.layer) for part in parts(model)).values()) == 1
        assert max(Counter((stored.name, stored.layer) for stored in dense_tensors(model)).values()) == 1
