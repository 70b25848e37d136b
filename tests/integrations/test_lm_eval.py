"""The harness gets the same scores and texts as from its own class for transformers models, and from its command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moelight.core.errors import ConfigError, InputError
from moelight.core.request import SamplingParams
from tests.cli.program import DEMO, ROOT, moelight_inside
from tests.tiny import EOS, save_tiny

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (pip install 'moelight[lm-eval]')")

from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from moelight.cli.lm_eval import completed
from moelight.cli.main import main
from moelight.engine.engine import Engine
from moelight.integrations.lm_eval import MoELightLM
from moelight.kernels import native

TASKS = "tests/integrations/lm_eval_tasks"
CLOSE = 1e-3
SHORT = 40  # a max_length that texts reach
LONG = "reverse desert = tresed, sort window = dinoww, " * 3
Pair = tuple[MoELightLM, HFLM]


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is fetched, what the harness keeps it keeps here, and what takes it seconds is left out: to read its own
    tasks, and to describe the machine."""
    with pytest.MonkeyPatch.context() as patch:
        import datasets.config
        import lm_eval.evaluator
        import lm_eval.tasks

        patch.setattr(lm_eval.evaluator, "add_env_info", lambda _: None)
        patch.setattr(lm_eval.tasks, "TaskManager", partial(TaskManager, include_defaults=False))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two of float32, where sums of another order hardly differ; the context of one is short."""
    demo = tmp_path_factory.mktemp("demo")
    for path in DEMO.glob("*.json"):
        values = json.loads(path.read_text(encoding="utf-8"))
        changed = {"dtype": "float32"} if path.name == "config.json" else {}
        (demo / path.name).write_text(json.dumps(values | changed))
    weights = {name: tensor.float() for name, tensor in load_file(DEMO / "model.safetensors").items()}
    save_file(weights, demo / "model.safetensors", metadata={"format": "pt"})
    mixtral = save_tiny(tmp_path_factory.mktemp("mixtral"), "mixtral", seed=3, max_position_embeddings=SHORT)
    return {"demo": demo, "mixtral": mixtral}


def both(path: Path, **options: Any) -> Pair:
    theirs = HFLM(pretrained=str(path), device="cpu", dtype="float32", batch_size=1, **options)
    return MoELightLM(str(path), host_memory="1GiB", **options), theirs


@pytest.fixture(scope="module", params=["demo", "mixtral"])
def pair(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[Pair]:
    ours, theirs = both(checkpoints[request.param], **({"max_length": SHORT} if request.param == "demo" else {}))
    yield ours, theirs
    ours.close()


@pytest.fixture(scope="module")
def mixtral(checkpoints: dict[str, Path]) -> Iterator[MoELightLM]:
    ours = MoELightLM(str(checkpoints["mixtral"]), host_memory="1GiB")
    yield ours
    ours.close()


def asked(*args: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=arg, task_name="t") for arg in args]


def assert_scores_equal(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=CLOSE)


def test_scores_are_those_of_the_harness(pair: Pair) -> None:
    ours, theirs = pair
    questions = asked(
        ("add 1 and 2 =", " 3"),
        ("add 1 and 2 =", " 4"),
        ("add 1 and 2 =", " 3"),
        ("add 1 and 2 =", " 34"),
        ("upper lemon =", " LEMON"),
        ("ends in spaces   ", "then goes on"),
        ("", "no context at all"),
        ("", "x"),
        (LONG, "cut from the left"),
        ("sort", LONG[:SHORT]),
        ("<|bos|>once", " more"),
    )
    expected = theirs.loglikelihood(questions)
    assert_scores_equal(ours.loglikelihood(questions), expected)
    assert len({greedy for _, greedy in expected}) == 2 or ours.profile.max_positions == SHORT


def test_rolling_scores_are_those_of_the_harness(pair: Pair) -> None:
    ours, theirs = pair
    questions = asked((LONG,), ("short",), (LONG[:SHORT],), (LONG[: SHORT + 1],))
    assert ours.loglikelihood_rolling(questions) == pytest.approx(theirs.loglikelihood_rolling(questions), abs=CLOSE)
    assert ours.loglikelihood_rolling(asked(("",))) == [0.0]


def test_texts_are_those_of_the_harness(pair: Pair) -> None:
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
    assert len(set(expected)) > 3


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_bos_is_put_in_front_as_by_the_harness(checkpoints: dict[str, Path], add_bos_token: bool) -> None:
    ours, theirs = both(checkpoints["mixtral"], add_bos_token=add_bos_token)
    for text in ("plain", "<|bos|>has one", ""):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text, add_special_tokens=False) == theirs.tok_encode(text, add_special_tokens=False)
    assert (ours.prefix_token_id, ours.eot_token_id) == (theirs.prefix_token_id, theirs.eot_token_id)
    assert ours.max_length == theirs.max_length == SHORT


def test_conversations_are_written_as_by_the_harness(pair: Pair) -> None:
    ours, theirs = pair
    talk = [{"role": "user", "content": "add 1 and 2 ="}]
    assert ours.apply_chat_template(talk) == theirs.apply_chat_template(talk)
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.chat_template(False) is None
    if "assistant" in theirs.apply_chat_template(talk):  # the other's template writes no assistant
        begun = [*talk, {"role": "assistant", "content": "The answer is"}]
        assert ours.apply_chat_template(begun, False) == theirs.apply_chat_template(begun, False)


def test_what_is_no_question(mixtral: MoELightLM) -> None:
    with pytest.raises(InputError, match="continuation must have 1 to 40 tokens"):
        mixtral.loglikelihood(asked(("", "<|bos|>")))
    with pytest.raises(InputError, match="below max_length 40"):
        mixtral.generate_until(asked(("a", {"max_gen_toks": SHORT})))
    with pytest.raises(InputError, match="beam search"):
        mixtral.generate_until(asked(("a", {"max_gen_toks": 4, "num_beams": 3})))
    with pytest.raises(InputError, match=r"top_q.*did you mean"):
        mixtral.generate_until(asked(("a", {"max_gen_toks": 4, "do_sample": True, "top_q": 3})))
    assert mixtral.engine is None, "refused before anything is loaded"


@pytest.mark.thorough
def test_thoughts_are_left_out(checkpoints: dict[str, Path], mixtral: MoELightLM) -> None:
    questions = asked(("upper lemon =", {"max_gen_toks": 12}))
    (full,) = mixtral.generate_until(questions)
    end = full[3]
    with Engine.from_pretrained(checkpoints["mixtral"], host_memory="1GiB") as engine:
        byte = mixtral.tok_encode(end)[0]
        for think_end in (end, byte, str(byte)) if end.isascii() else (byte,):
            lent = MoELightLM(engine, enable_thinking=True, think_end_token=think_end)
            assert lent.generate_until(questions) == [full.split(end)[-1].lstrip()]
            with pytest.raises(ConfigError, match="one of these scores"):
                lent.loglikelihood(asked(("a", "b")))
            lent.close()
        assert engine.generate("a", SamplingParams(max_tokens=1)), "a lent engine stays open"
    with pytest.raises(ConfigError, match="think_end_token"):
        MoELightLM(str(checkpoints["mixtral"]), enable_thinking=True)


def test_sampled_texts_follow_the_seed_of_the_harness(mixtral: MoELightLM) -> None:
    import torch

    questions = asked(*[("once", {"max_gen_toks": 8, "do_sample": True, "temperature": 1.5, "until": []})] * 3)
    result = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        result.append(mixtral.generate_until(questions))
    assert result[0] == result[1] != result[2]
    assert len(set(result[0])) > 1, "repeats of one question differ"


@pytest.mark.thorough
def test_each_answer_is_kept_as_it_comes(mixtral: MoELightLM) -> None:
    retained: list[tuple[str, Any, Any]] = []
    mixtral.set_cache_hook(SimpleNamespace(add_partial=lambda *item: retained.append(item)))
    scores = mixtral.loglikelihood(asked(("a", "b"), ("c", "de")))
    rolling = mixtral.loglikelihood_rolling(asked((LONG,)))
    how = {"max_gen_toks": 4, "until": ["q"]}
    (text,) = mixtral.generate_until(asked(("a", how)))
    assert {args: answer for kind, args, answer in retained if kind == "loglikelihood"} == {
        ("a", "b"): scores[0],
        ("c", "de"): scores[1],
    }
    assert retained[-2:] == [("loglikelihood_rolling", (LONG,), rolling[0]), ("generate_until", ("a", how), text)]
    assert how == {"max_gen_toks": 4, "until": ["q"]}


@pytest.mark.thorough
def test_a_plan_serves_as_long_as_it_has_room(checkpoints: dict[str, Path]) -> None:
    ours = MoELightLM(str(checkpoints["demo"]), host_memory="1GiB")
    short, long = asked(("add 1 and 2 =", " 3")), asked((LONG * 3, " 3"))
    ours.loglikelihood(short)
    first = ours.engine
    ours.loglikelihood(short)
    assert ours.engine is first
    ours.loglikelihood(long)
    second = ours.engine
    assert second is not first
    ours.loglikelihood(short)
    assert ours.engine is second
    ours.close()


@pytest.mark.thorough
@pytest.mark.skipif(not native.available(), reason="the extension is not built")
def test_activations_are_rounded_where_asked(tmp_path: Path) -> None:
    """Scores near the exact ones and not equal, and the harness's record of the run says why."""
    rounded, scores = str(tmp_path / "rounded"), {}
    assert main(["convert", "demo", rounded, "--experts", "int8", "--group-size", "32"]) == 0
    for activations in ("auto", "int8"):
        ours = MoELightLM(rounded, host_memory="1GiB", activations=activations)
        ((scores[activations], _),) = ours.loglikelihood(asked(("add 1 and 2 =", " once")))
        assert ours.get_model_info()["moelight_policy"]["activations"] == activations
        ours.close()
    assert scores["int8"] != scores["auto"] == pytest.approx(scores["int8"], rel=0.05)


def test_tasks_give_the_same_results(checkpoints: dict[str, Path]) -> None:
    names = ["moelight_choice", "moelight_text", "moelight_answer"]
    manager = TaskManager(include_path=str(ROOT / TASKS), include_defaults=False)
    inputs = f"pretrained={checkpoints['demo']}"
    ours, theirs = (
        simple_evaluate(model, model_args=f"{inputs},{more}", tasks=names, task_manager=manager, bootstrap_iters=0)
        for model, more in (("moelight", "host_memory=1GiB,batch_size=8"), ("hf", "dtype=float32,device=cpu"))
    )
    for name in names:
        for selected, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            assert_answers_equal(selected["resps"], other["resps"])
        for metric, value in theirs["results"][name].items():
            expected = pytest.approx(value, rel=CLOSE) if isinstance(value, float) else value
            assert ours["results"][name][metric] == expected, (name, metric)
    assert ours["results"]["moelight_choice"]["acc,none"] > 0.8, "the model knows its sums"
    assert ours["config"]["moelight_policy"]["batch_size"] == 8


def assert_answers_equal(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, (list, tuple)):
        for selected, other in zip(ours, theirs, strict=True):
            assert_answers_equal(selected, other)
    else:
        assert ours == (pytest.approx(theirs, abs=CLOSE) if isinstance(theirs, float) else theirs)


def test_the_command_evaluates(tmp_path: Path) -> None:
    done = moelight_inside(
        *("lm-eval", "--tasks", "moelight_answer", "--include_path", TASKS, "--limit", "3"),
        *("--model_args", "pretrained=demo,host_memory=1GiB", "--output_path", tmp_path / "out.json"),
    )
    assert done.returncode == 0, done.stderr
    assert "moelight (" in done.stdout and "exact_match" in done.stdout
    (results,) = tmp_path.glob("*.json")
    assert json.loads(results.read_text())["results"]["moelight_answer"]["exact_match,stripped"] > 0.6
    assert get_model("hf") is HFLM, "the harness's own models are still there"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tasks", "no_such_task"], "lm-eval: Tasks not found: no_such_task"),
        (["--tasks", f"{TASKS}/moelight_text.yaml"], "--model_args pretrained=PATH"),
        (
            ["--tasks", f"{TASKS}/moelight_text.yaml", "--model_args", "pretrained=demo,host_memry=1GiB"],
            "unknown model argument 'host_memry' (did you mean 'host_memory'?)",
        ),
        (
            ["--tasks", f"{TASKS}/moelight_text.yaml", "--model_args", "pretrained=demo,activations=int9"],
            "activations 'int9' is not one of auto, int8 (did you mean 'int8'?)",
        ),
        (["--config", "none.yaml"], "--config none.yaml: cannot be read"),
    ],
)
def test_the_command_refuses_with_one_line(arguments: list[str], complaint: str) -> None:
    done = moelight_inside("lm-eval", *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("moelight: error: ")
    assert complaint in done.stderr


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = moelight_inside("lm-eval", "--tasks", "anything")
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'moelight[lm-eval]'" in done.stderr


def test_the_command_fills_in_what_nobody_said(tmp_path: Path) -> None:
    filled = ["run", "--model", "moelight", "--batch_size", "auto", "--device", "auto"]
    assert completed(["--tasks", "x"]) == completed(["run", "--tasks", "x"]) == [*filled, "--tasks", "x"]
    assert completed(["-M", "moelight", "-b", "4"]) == [*filled, "-M", "moelight", "-b", "4"]
    assert completed(["--model", "hf", "--tasks", "x"]) == ["run", "--model", "hf", "--tasks", "x"]
    for others in ([], ["run"], ["run", "--help"], ["ls", "tasks"], ["validate", "--tasks", "x"]):
        assert completed(others) == others
    config = tmp_path / "run.yaml"
    config.write_text("batch_size: 4\n")
    assert completed(["--config", str(config)]) == [
        *("run", "--model", "moelight", "--device", "auto", "--config", str(config)),
    ]
    config.write_text("model: hf\n")
    assert completed([f"--config={config}"]) == ["run", f"--config={config}"]


def test_eos_ends_a_text_whatever_the_configuration_calls_it(mixtral: MoELightLM) -> None:
    assert mixtral.eot_token_id == EOS
    assert mixtral.tok_decode([EOS], skip_special_tokens=False) == "<|eos|>"
    assert mixtral.tok_decode([EOS]) == ""
