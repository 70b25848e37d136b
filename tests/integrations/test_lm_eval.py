"""The harness gets the same scores and texts as from its own class for transformers models, and from its command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.program import DEMO, ROOT
from tests.tiny import save_tiny

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (pip install 'moelight[lm-eval]')")

from lm_eval.models.huggingface import HFLM

from moelight.integrations.lm_eval import MoELightLM

TASKS = ROOT / "tests" / "integrations" / "lm_eval_tasks"
CLOSE = 1e-3
SHORT = 40  # a max_length that texts reach
LONG = "reverse desert = tresed, sort window = dinoww, " * 3


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is fetched, and what the harness keeps it keeps here."""
    with pytest.MonkeyPatch.context() as patch:
        import datasets.config

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two of float32, where sums of another order hardly differ."""
    demo = tmp_path_factory.mktemp("demo")
    for path in DEMO.glob("*.json"):
        values = json.loads(path.read_text(encoding="utf-8"))
        changed = {"dtype": "float32"} if path.name == "config.json" else {}
        (demo / path.name).write_text(json.dumps(values | changed))
    weights = {name: tensor.float() for name, tensor in load_file(DEMO / "model.safetensors").items()}
    save_file(weights, demo / "model.safetensors", metadata={"format": "pt"})
    mixtral = save_tiny(tmp_path_factory.mktemp("mixtral"), "mixtral", seed=3, max_position_embeddings=SHORT)
    return {"demo": demo, "mixtral": mixtral}


def both(path: Path, **options: Any) -> tuple[MoELightLM, HFLM]:
    theirs = HFLM(pretrained=str(path), device="cpu", dtype="float32", batch_size=1, **options)
    return MoELightLM(str(path), host_memory="1GiB", **options), theirs


@pytest.fixture(scope="module", params=["demo", "mixtral"])
def pair(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[tuple[MoELightLM, HFLM]]:
    limit = {"max_length": SHORT} if request.param == "demo" else {}  # the other's context is as short
    ours, theirs = both(checkpoints[request.param], **limit)
    yield ours, theirs
    ours.close()


def asked(*args: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each, task_name="t") for each in args]


def assert_scores_equal(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=CLOSE)


def test_scores_are_those_of_the_harness(pair: tuple[MoELightLM, HFLM]) -> None:
    ours, theirs = pair
    questions = asked(
        ("add 1 and 2 =", " 3"),
        ("add 1 and 2 =", " 4"),
        ("add 1 and 2 =", " 3"),
        ("add 1 and 2 =", " 34"),
        ("max 7 and 5 =", " 7"),
        ("ends in spaces   ", "then goes on"),
        ("", "no context at all"),
        ("", "x"),
        (LONG, "cut from the left"),
        ("sort", LONG[:SHORT]),
        ("count o in cookie =", " 2"),
    )
    assert_scores_equal(ours.loglikelihood(questions), theirs.loglikelihood(questions))


def test_rolling_scores_are_those_of_the_harness(pair: tuple[MoELightLM, HFLM]) -> None:
    ours, theirs = pair
    questions = asked((LONG,), ("short",), (LONG[:SHORT],), (LONG[: SHORT + 1],))
    assert ours.loglikelihood_rolling(questions) == pytest.approx(theirs.loglikelihood_rolling(questions), abs=CLOSE)
    assert ours.loglikelihood_rolling(asked(("",))) == [0.0]


def test_texts_are_those_of_the_harness(pair: tuple[MoELightLM, HFLM]) -> None:
    ours, theirs = pair
    questions = asked(
        ("add 128 and 64 =", {"until": ["\n"], "max_gen_toks": 12}),
        ("add 128 and 64 =", {"until": "2", "max_gen_toks": 12, "do_sample": False, "temperature": 1.0}),
        ("sort window =", {"max_gen_toks": 6, "do_sample": False}),
        ("upper lemon =", {"until": ["zzz", "EM", "E"], "max_new_tokens": 20}),
        (LONG, {"until": [], "max_gen_toks": 15}),
        ("reverse desert =", {"until": ["<eos>"], "max_gen_toks": 25}),
    )
    expected = theirs.generate_until(questions)
    assert ours.generate_until(questions) == expected
    assert any(expected)
