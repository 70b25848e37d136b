"""Options of an engine by keyword: names, sizes of memory, and what is refused."""

from __future__ import annotations

import pytest

from moelight.core.errors import ConfigError
from moelight.engine.engine import Engine
from moelight.engine.options import PLANNING, EngineOptions, RunOptions
from moelight.experts.options import ExpertOptions


def test_keywords_change_options() -> None:
    before = EngineOptions(batch_size=3, device="cpu")
    after = before.changed({"host_memory": "3GiB", "device_memory": 7, "experts": None, "adapt": False})
    assert after == EngineOptions(batch_size=3, device="cpu", host_memory=3 << 30, device_memory=7, adapt=False)
    assert after.experts == ExpertOptions()


def test_what_a_plan_decides_is_no_option_of_an_engine_that_has_a_policy() -> None:
    for name in PLANNING:
        with pytest.raises(ConfigError, match=f"'{name}' is no option here"):
            RunOptions().changed({name: None})


def test_wrong_keywords_are_refused_before_a_model_is_opened() -> None:
    with pytest.raises(ConfigError, match=r"'batchsize' is no option here \(did you mean 'batch_size'\?\)"):
        Engine.from_pretrained("no/such/model", batchsize=3)
    with pytest.raises(ConfigError, match="host_memory: 'lots' is not a size"):
        Engine.from_pretrained("no/such/model", host_memory="lots")
