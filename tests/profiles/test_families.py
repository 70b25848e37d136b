"""A ``config.json`` of either transformers generation gives the same profile; what is unknown is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from moelight.core.errors import CheckpointError, ConfigError
from moelight.profiles.families import FAMILIES, profile_from_config, profile_from_dir
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile
from moelight.profiles.rope import RopeScaling
from moelight.profiles.tensor_list import dense_tensors, pages
from tests.tiny import FAMILIES as FAMILY_NAMES
from tests.tiny import tiny_config


def read(values: dict[str, Any]) -> ModelProfile:
    return profile_from_config(HFConfig(values, where="config.json"), name="tiny")


def as_transformers_4(values: dict[str, Any]) -> dict[str, Any]:
    """The same model as transformers 4 wrote it."""
    old = dict(values)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    old["torch_dtype"] = old.pop("dtype", None)
    return old


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}])
def test_both_generations_of_config_mean_the_same(family: str, rope: dict[str, Any]) -> None:
    new = tiny_config(family, dtype="bfloat16", rope_parameters={"rope_theta": 5e5, **rope})
    profile = read(new)
    assert profile == read(as_transformers_4(new))
    assert profile.attention.rope_theta == 5e5
    scaling = RopeScaling(kind="linear", factor=rope["factor"]) if "factor" in rope else None
    assert profile.attention.rope_scaling == scaling
    assert profile.dtype == "bfloat16"


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_is_found_under_both_names(family: str, key: str) -> None:
    values = tiny_config(family)
    count = values.pop("num_experts", None) or values.pop("num_local_experts")
    assert read({**values, key: count}).experts.num_experts == count


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_what_transformers_saves_is_what_was_meant(family: str, tmp_path: Path) -> None:
    AutoConfig.for_model(**tiny_config(family, dtype="float32")).save_pretrained(tmp_path)
    saved = profile_from_dir(tmp_path)
    meant = read(tiny_config(family, dtype="float32"))
    assert saved.attention == meant.attention
    assert (saved.router, saved.experts, saved.moe_layers) == (meant.router, meant.experts, meant.moe_layers)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_absent_keys_mean_what_they_mean_to_transformers(family: str) -> None:
    known_names = AutoConfig.for_model(family)
    width = FAMILIES[family].expert_width_key
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", width)
    profile = read({"model_type": family, **{key: getattr(known_names, key) for key in needed}})
    assert profile.experts.num_experts == known_names.num_local_experts
    assert profile.router.top_k == known_names.num_experts_per_tok
    assert profile.router.normalize == getattr(known_names, "norm_topk_prob", True)
    assert profile.max_positions == known_names.max_position_embeddings
    assert profile.norm_eps == known_names.rms_norm_eps
    assert profile.tie_embeddings == known_names.tie_word_embeddings
    assert profile.attention.rope_theta == known_names.rope_parameters["rope_theta"]


@pytest.mark.parametrize("head_dim", [{"head_dim": None}, {}])
def test_a_head_size_that_is_null_or_absent_is_hidden_over_heads(head_dim: dict[str, None]) -> None:
    values = {key: value for key, value in tiny_config("mixtral").items() if key != "head_dim"}
    assert read({**values, **head_dim}).attention.head_dim == 8


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, [0, 1, 2, 3, 4, 5]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": None}, [1, 3, 5]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1, 5]),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 4]}, [1, 2, 3, 5]),
    ],
)
def test_dense_layers_lie_where_both_keys_put_them(changes: dict[str, Any], sparse: list[int]) -> None:
    profile = read(tiny_config("qwen3_moe", **changes))
    assert [layer for layer, moe in enumerate(profile.moe_layers) if moe] == sparse
    assert {page.layer for page in pages(profile)} == set(sparse)
    dense = {part.layer for part in dense_tensors(profile) if part.name == "dense_down"}
    assert dense == set(range(6)) - set(sparse)


def test_each_family_has_its_own_norms_clips_and_windows() -> None:
    olmoe = read(tiny_config("olmoe", sliding_window=64)).attention
    assert (olmoe.qk_norm, olmoe.clip_qkv, olmoe.window) == ("projection", 1.25, None)
    assert read(tiny_config("olmoe", clip_qkv=None)).attention.clip_qkv is None
    mixtral = read(tiny_config("mixtral", sliding_window=64, clip_qkv=3.0)).attention
    assert (mixtral.qk_norm, mixtral.clip_qkv, mixtral.window) == ("none", None, 64)
    assert read(tiny_config("qwen3_moe", sliding_window=64)).attention.window is None
    assert read(tiny_config("qwen3_moe", sliding_window=64, use_sliding_window=True)).attention.window == 64
    assert read(tiny_config("qwen3_moe")).attention.qk_norm == "head"


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mixtrall", "", None, 7, ["mixtral"]])
def test_dense_and_unknown_models_are_refused_with_where_known_ones_are_listed(model_type: object) -> None:
    with pytest.raises(ConfigError, match=r"is not a family that moelight knows.*; `moelight models` lists those"):
        read({**tiny_config("mixtral"), "model_type": model_type})


def test_a_dense_model_is_not_taken_for_a_misspelt_mixture_of_experts() -> None:
    with pytest.raises(ConfigError) as caught:
        read({**tiny_config("mixtral"), "model_type": "qwen2"})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("mixtral", {"hidden_size": None}, "hidden_size"),
        ("mixtral", {"hidden_size": "48"}, "hidden_size"),
        ("mixtral", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("mixtral", {"num_hidden_layers": True}, "num_hidden_layers"),
        ("mixtral", {"num_key_value_heads": 4}, "num_key_value_heads"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("mixtral", {"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ("mixtral", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
        ("mixtral", {"head_dim": 41}, "head_dim"),
        ("mixtral", {"rope_parameters": [1]}, "rope_parameters"),
        ("mixtral", {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ("mixtral", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 4.0}}, "yarn"),
        ("mixtral", {"rope_parameters": {"rope_type": "axial"}}, "axial"),
        ("qwen3_moe", {"mlp_only_layers": "3"}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, "dense"),
        ("olmoe", {"clip_qkv": 0}, "clip_qkv"),
    ],
)
def test_impossible_values_are_refused_by_file_and_key(family: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tiny_config(family, **changes))
    assert "config.json" in str(caught.value)
    assert key in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe{}", b"[" * 100_000, json.dumps("x").encode()])
def test_a_directory_without_a_readable_config_is_no_model(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        profile_from_dir(tmp_path)
