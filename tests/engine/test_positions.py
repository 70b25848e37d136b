"""Where ``config.json`` says twice how positions turn, log-probabilities are transformers'; what is not computed is
refused before a weight is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moelight.core.errors import ConfigError
from moelight.models.checkpoints import open_model
from tests.cases import thorough
from tests.engine.test_parity import reference, texts
from tests.engines import Tiny, forced, in_turn
from tests.tiny import FAMILIES, hf_model

pytestmark = pytest.mark.peer

BASE = {"rope_type": "default", "rope_theta": 5e3}
WRITTEN: dict[str, dict[str, Any]] = {
    "linear beside parameters": {"rope_parameters": BASE, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "its old spelling": {"rope_parameters": BASE, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "with a base beside both": {
        "rope_parameters": BASE,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_theta": 7e4,
    },
    "default beside linear": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3},
        "rope_scaling": {"rope_type": "default", "rope_theta": 3e4},
    },
    "empty beside linear": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3},
        "rope_scaling": {},
    },
    "a base beside parameters": {"rope_parameters": BASE, "rope_theta": 7e4},
}


def rewritten(source: Path, target: Path, changes: dict[str, Any]) -> Path:
    """A copy whose ``config.json`` holds ``changes`` as they stand: nobody puts them in order first."""
    shutil.copytree(source, target)
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return target


BY_NAME = in_turn([(item,) for item in WRITTEN], FAMILIES)


@pytest.mark.parametrize(("name", "family"), thorough(BY_NAME, but=BY_NAME[::2]))
def test_log_probabilities_follow_the_keys_that_transformers_follows(
    name: str, family: str, tiny: Tiny, tmp_path: Path
) -> None:
    directory = rewritten(tiny(family), tmp_path / "model", WRITTEN[name])
    sequences, prompt_lens = texts([60, 41]), [48, 30]
    with forced(directory, batch_size=8, kv_tokens=4096) as engine:
        ours = engine.logits(sequences, prompt_lens)
    for selected, known_names, first in zip(ours, reference(hf_model(directory), sequences), prompt_lens, strict=True):
        apart = (selected.double().log_softmax(-1) - known_names[first - 1 :].double().log_softmax(-1)).abs().max()
        assert float(apart) < 2e-3
    with forced(tiny(family), batch_size=8, kv_tokens=4096) as engine:
        plain = engine.logits(sequences, prompt_lens)
    assert not any(torch.allclose(selected, other, atol=1.0) for selected, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_unknown_positions_are_refused_by_their_key(spelling: str, family: str, tiny: Tiny, tmp_path: Path) -> None:
    unknown = {spelling: "spiral", "factor": 4.0}
    directory = rewritten(tiny(family), tmp_path / "model", {"rope_parameters": BASE, "rope_scaling": unknown})
    with pytest.raises(ConfigError) as caught:
        open_model(str(directory))
    assert str(caught.value) == (
        f"{directory}/config.json: rope_scaling: rope_type 'spiral' is not supported; known: default, linear, dynamic, "
        "yarn, longrope, llama3"
    )
