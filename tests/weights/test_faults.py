"""The line that refuses a checkpoint names the cause: a name that is not read, a config of another model, a format that
the config does not state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from moelight.core.errors import CheckpointError
from moelight.profiles.hf_config import HFConfig
from moelight.weights.faults import Faults
from moelight.weights.ignored import ignore_rules, set_aside
from moelight.weights.source import Checkpoint, TensorInfo

FILE = Path("model.safetensors")
LAYER = "model.layers.1.mlp"


def checkpoint(tensors: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    infos = {
        name: TensorInfo(name=name, file=FILE, dtype="F32", shape=shape, offset=0, nbytes=0)
        for name, shape in tensors.items()
    }
    return Checkpoint(directory=FILE.parent, listing=FILE, tensors=MappingProxyType(infos))


def told(present: Mapping[str, tuple[int, ...]], missing: Mapping[str, tuple[int, ...]], left: str = "") -> str:
    """The refusal of a model of 2 layers and 4 experts."""
    opened = checkpoint(present)
    faults = Faults(opened, "mixtral, num_hidden_layers 2", layers=2, experts=4)
    for name, shape in missing.items():
        faults.missing(name, shape)
    if left:
        faults.left_over(opened.tensors[left])
    with pytest.raises(CheckpointError) as caught:
        faults.raise_first()
    return str(caught.value)


@pytest.mark.parametrize(
    ("present", "missing", "left", "says"),
    [
        (f"{LAYER}.experts.0.gate.weight", f"{LAYER}.experts.0.w1.weight", True, "has a name that is not read"),
        (f"{LAYER}.experts.0.w1.qweight", f"{LAYER}.experts.0.w1.weight", True, "config.json does not say how"),
        ("model.layers.0.norm.weight", "model.layers.1.norm.weight", False, "hold layers 0 to 0: correct num_hidden"),
        (f"{LAYER}.experts.2.w1.weight", f"{LAYER}.experts.3.w1.weight", False, "hold experts 0 to 2: correct the"),
        ("model.norm.weight", "lm_head.weight", False, "the files that are listed are complete: correct config.json"),
        ("model.layers.2.norm.weight", "", True, "layers there are 0 to 1: correct num_hidden_layers"),
        (f"{LAYER}.experts.4.w1.weight", "", True, "experts there are 0 to 3: correct the number of experts"),
        (f"{LAYER}.experts.0.w1.weight_packed", "", True, "belongs to a quantised matrix that config.json does not"),
    ],
)
def test_a_refusal_names_the_cause(present: str, missing: str, left: bool, says: str) -> None:
    line = told({present: (4, 8)}, {missing: (4, 8)} if missing else {}, present if left else "")
    assert says in line
    assert "fetch" not in line
    assert (present if left else missing) in line


def test_layers_of_prediction_are_those_behind_the_last_one() -> None:
    names = ["model.layers.1.a.weight", "model.layers.2.a.weight", "model.layers.9.eh_proj.weight", "mtp.fc.weight"]
    names += ["model.layers.1.k_scale", "model.layers.9.b.weight", "model.layers.3.a.weight"]
    opened = checkpoint(dict.fromkeys(names, (4,)))
    config = HFConfig({"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, where="config.json")
    result = set_aside(opened, ignore_rules(config, names), lambda name: name == "model.layers.9.b.weight")
    assert {item.info.name for item in result.ignored} == {names[1], names[2], names[3]}
    assert set(result.tensors) == {names[0], *names[4:]}
