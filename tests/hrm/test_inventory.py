"""What a model consists of, against published figures and against the list of its tensors."""

from __future__ import annotations

import pytest

from moelight.core.dtypes import INT4, dtype_named
from moelight.core.units import GiB
from moelight.hrm import costs
from moelight.hrm.inventory import DENSE_LAYERS, EXPERTS, SHARED, inventory
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.tensor_list import dense_tensors
from tests.shapes import small_model


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141, 39),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("dbrx", 132, 36),
        ("deepseek-v2", 236, 21),
        ("olmoe-1b-7b", 6.9, 1.3),
    ],
)
def test_published_figures(name: str, billions: float, active: float) -> None:
    result = inventory(load_model_profile(name))
    assert result.total_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert result.active / 1e9 == pytest.approx(active, rel=0.03)


def test_mixtral_by_hand() -> None:
    result = inventory(load_model_profile("mixtral"))
    assert result.dtype == "bfloat16"
    assert result.page_bytes == 3 * 4096 * 14336 * 2 and result.pages == 256
    assert result.bytes[EXPERTS] == 84 * GiB
    assert result.kv_token_bytes == 32 * 2 * 8 * 128 * 2
    assert result.parameters[SHARED] == result.parameters[DENSE_LAYERS] == 0


def test_kinds_add_up() -> None:
    model = load_model_profile("deepseek-v2-lite")
    result = inventory(model)
    assert result.parameters[SHARED] > 0 and result.parameters[DENSE_LAYERS] > 0
    dense = result.total_bytes - result.bytes[EXPERTS]
    announced = costs.dense_bytes(model, dtype_named(model.dtype))
    assert announced - 64 * len(list(dense_tensors(model))) <= dense <= announced


def test_experts_may_be_smaller_than_the_rest() -> None:
    model = small_model((True, False), experts=3)
    plain, packed = inventory(model), inventory(model, weight_dtype=INT4)
    assert packed.page_bytes == costs.page_bytes(model, INT4) < plain.page_bytes
    assert packed.parameters == plain.parameters and packed.dtype == "int4"
    assert packed.total_bytes - packed.bytes[EXPERTS] == plain.total_bytes - plain.bytes[EXPERTS]
