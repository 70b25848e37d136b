"""Kernels and copies that a decode pass gives a card, layer by layer, and what the ledger says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.core.schedule import TaskKind
from moelight.engine import loaded_model
from moelight.engine.engine import Engine
from moelight.hrm import schedule_time
from moelight.hrm.cost_model import KERNELS
from moelight.kernels.gpu import serving
from moelight.runtime.graphs import Graphs
from tests.cases import thorough
from tests.graphs import TwinRecorder
from tests.launches import count_launches
from tests.tiny import save_tiny
from tests.weights.quantised import METHODS, quantise

MOST = 20
SIZES = {"batch_size": 1, "ffn_device": "gpu", "weights": Shares(device=1.0)}


def decode(
    model: Path, *, tokens: int = 2, cuda_graphs: bool = True, device: str = "twin", **policy: object
) -> list[list[int]]:
    """The tokens of a prompt: its pass, and passes that decode."""
    with Engine(Policy(model=str(model), **{**SIZES, **policy}), device=device, cuda_graphs=cuda_graphs) as engine:
        result = engine.generate([[65]], SamplingParams(max_tokens=tokens, ignore_eos=True))
    return [list(item.token_ids) for item in result]


def small_model(folder: Path, family: str, **changes: object) -> Path:
    if not serving.interpreting():
        pytest.skip(f"triton does not interpret here: {serving.triton_reason()}")
    width = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    experts = "num_local_experts" if family == "mixtral" else "num_experts"
    sparse = {} if family == "mixtral" else {"decoder_sparse_step": 1, "mlp_only_layers": []}
    small = {"hidden_size": 32, width: 32, experts: 3, "num_experts_per_tok": 2, "head_dim": 16}
    return save_tiny(folder, family, num_hidden_layers=1, **small, **sparse, **changes)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("launches"), request.param)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint; mixtral's has an expert that float16 does not hold."""
    result = small_model(tmp_path_factory.mktemp("narrow"), request.param, dtype="bfloat16")
    if request.param == "mixtral":
        state = load_file(result / "model.safetensors")
        state["model.layers.0.block_sparse_moe.experts.1.w2.weight"][7] = 1e5
        save_file(state, result / "model.safetensors", metadata={"format": "pt"})
    return result


@pytest.mark.parametrize("attention", ["cpu", "gpu"])
def test_launches_of_a_layer(model: Path, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_launches(model, "twin", attention, monkeypatch)


@pytest.mark.parametrize("attention", thorough(["cpu", "gpu"], but=["gpu"]))
def test_mixed_precision_launches_no_more(narrow: Path, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_launches(narrow, "twin:fp16", attention, monkeypatch)


@pytest.mark.parametrize(
    ("method", "device"),
    thorough(
        [("gptq int4 ordered", "twin"), ("fp8 blocks", "twin:fp16"), ("int4 zero points", "twin")],
        but=[("fp8 blocks", "twin:fp16")],
    ),
)
def test_quantised_pages_launch_no_more(
    method: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And give the tokens that torch finds on the twin; an expert's bytes stay as they are stored."""
    dtype = {"dtype": "bfloat16"} if device == "twin:fp16" else {}
    model = small_model(tmp_path / "model", "mixtral", **dtype)
    check_launches(quantise(model, tmp_path, METHODS[method])[0], device, "cpu", monkeypatch)


def check_launches(model: Path, device: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention on the device counts as the ledger's append and kernel."""
    expected = decode(model, device=device, attention_device=attention)
    counted = count_launches(monkeypatch)
    assert decode(model, device=device, attention_device=attention) == expected, "the device's path gives other tokens"
    tasks = counted.passes[-1]
    assert not {key: launches.waits for key, launches in tasks.items() if launches.waits}
    kinds = {kind: launches.kernels for (kind, _, _), launches in tasks.items()}
    head, _ = kinds.pop(TaskKind.SAMPLE), kinds.pop(TaskKind.EMBED)
    totals = {kind: kernels.total() for kind, kernels in kinds.items()}
    if attention == "gpu":
        totals[TaskKind.ATTENTION] = KERNELS["attention"]
    assert sum(totals.values()) <= MOST, kinds
    assert totals[TaskKind.PRE_ATTENTION] == KERNELS["before"], kinds
    assert totals[TaskKind.POST_ATTENTION] == KERNELS["after"] + KERNELS["experts"], kinds
    assert sum(head[name] for name in ("index", "rms_norm", "mm")) + 1 == KERNELS["head"], head  # float32 needs no copy


@pytest.mark.parametrize("model", ["mixtral"], indirect=True)
def test_tokens_from_graphs_are_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay repeats addresses: an input that lies elsewhere in the next pass, and is not declared, gives others.
    Streamed pages change places between two halves of the ring; their numbers change, not the address of the index."""
    check_graphs(model, "twin", monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("narrow", ["mixtral"], indirect=True)
def test_graphs_of_mixed_precision(narrow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_graphs(narrow, "twin:fp16", monkeypatch)


def check_graphs(model: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_time, "ROUTED_ONLY_SHARE", 1.0)  # no on-demand passes
    streamed = {"weights": Shares(device=0.5, host=0.5), "device": device}
    expected, recorder = decode(model, tokens=7, **streamed), TwinRecorder()
    count_launches(monkeypatch)
    monkeypatch.setattr(loaded_model, "graphs_of", lambda _, rows: Graphs(recorder, rows=rows))
    assert decode(model, tokens=7, **streamed) == expected
    # Of six passes that decode, the second records what is before attention and what is after it.
    assert (recorder.recorded, recorder.replays) == (2, 5 + 5)


@pytest.mark.parametrize("model", ["mixtral"], indirect=True)
def test_graphs_are_off_by_one_flag(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(loaded_model, "graphs_of", lambda _, rows: made.append(rows))
    decode(model, cuda_graphs=False)
    assert not made
    decode(model)
    assert len(made) == 1
