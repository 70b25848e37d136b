"""Kernels and copies that a decode pass gives a card, layer by layer, and what the ledger says of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.core.schedule import TaskKind
from moelight.engine.engine import Engine
from moelight.hrm.cost_model import KERNELS
from moelight.kernels.gpu import serving
from tests.launches import Counted, count_launches
from tests.tiny import save_tiny

MOST = 20
AROUND = {TaskKind.EMBED, TaskKind.SAMPLE}  # once a pass, not once a layer


def decode(model: Path, **policy: object) -> list[list[int]]:
    """The tokens of five prompts in micro-batches of three and two."""
    sizes = {"batch_size": 5, "micro_batch_size": 3, "ffn_device": "gpu", "weights": Shares(device=0.5, host=0.5)}
    prompts = [[65 + n, 66, 67 + n] for n in range(5)]
    with Engine(Policy(model=str(model), **sizes, **policy), device="twin") as engine:
        return [
            list(each.token_ids) for each in engine.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
        ]


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not serving.interpreting():
        pytest.skip(f"triton does not interpret here: {serving.triton_reason()}")
    sparse = {} if request.param == "mixtral" else {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return save_tiny(tmp_path_factory.mktemp("launches"), request.param, num_hidden_layers=2, head_dim=16, **sparse)


def last_decode(counted: Counted) -> dict[tuple[int, int], Counter[str]]:
    return counted.by_micro_batch(counted.passes[-1])


@pytest.mark.parametrize("attention", ["cpu", "gpu"])
def test_launches_of_a_layer(model: Path, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decode(model, attention_device=attention)
    counted = count_launches(monkeypatch)
    assert decode(model, attention_device=attention) == expected, "the device's path gives other tokens"
    tasks = counted.passes[-1]
    waits = {key: launches.waits for key, launches in tasks.items() if launches.waits}
    assert not waits
    seen = 0
    for (layer, micro_batch), kinds in counted.by_micro_batch(tasks).items():
        around = {kind for kind in kinds if kind in AROUND}
        mine = Counter({kind: count for kind, count in kinds.items() if kind not in around})
        if TaskKind.ATTENTION in mine:
            mine[TaskKind.ATTENTION] = KERNELS["attention"]
        print(layer, micro_batch, dict(mine), mine.total())
        assert mine.total() <= MOST
        assert mine[TaskKind.PRE_ATTENTION] == KERNELS["before"]
        assert mine[TaskKind.POST_ATTENTION] == KERNELS["after"] + KERNELS["experts"]
        seen += 1
    assert seen == 2 * 2
