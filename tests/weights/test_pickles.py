"""No pickle is ever opened, and no code of a checkpoint run: both could do anything."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from pathlib import Path

import pytest

from moelight.batch.job import run_job
from moelight.batch.options import JobOptions
from moelight.core.errors import CheckpointError
from moelight.weights.source import resolve_model
from tests.test_layers import PACKAGE, parsed

_UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, sprung: Path) -> None:
        self._sprung = sprung

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._sprung), "w")


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """The bundled model among pickles and code, each of which would leave a file ``sprung``."""
    model, sprung = tmp_path / "model", tmp_path / "sprung"
    shutil.copytree(PACKAGE / "demo", model)
    trap = pickle.dumps(Trap(sprung))
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "tokenizer.pkl", "training_args.bin",
                 "optimizer.pt", "rng_state.pth", "tokenizer.model", "merges.pkl"):  # fmt: skip
        (model / name).write_bytes(trap)
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    code = f"open({str(sprung)!r}, 'w')\n"
    for name in ("modeling_moe.py", "configuration_moe.py", "tokenization_moe.py", "conftest.py"):
        (model / name).write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        config = json.loads((model / name).read_text())
        config["auto_map"] = {
            "AutoConfig": "configuration_moe.Config",
            "AutoModelForCausalLM": "modeling_moe.Model",
            "AutoTokenizer": ["tokenization_moe.Slow", "tokenization_moe.Fast"],
        }
        (model / name).write_text(json.dumps(config))
    return model


def test_the_trap_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung"))).close()
    assert (tmp_path / "sprung").exists()


def test_a_job_opens_none_of_them(trapped: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "add 17 and 25 ="}]}\n')
    assert run_job(JobOptions(prompts=prompts, model=str(trapped), output=out)).completed == 1
    assert json.loads(out.read_text())["text"].strip() == "42"
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("listed", [False, True])
def test_where_pickles_are_all_there_is_it_is_said(listed: bool, trapped: Path, tmp_path: Path) -> None:
    from moelight.models.checkpoints import open_model

    (trapped / "model.safetensors").unlink()
    if listed:
        index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}}
        (trapped / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"\.bin" if listed else "a pickle, which is never opened"):
        open_model(str(resolve_model(str(trapped))))
    assert not (tmp_path / "sprung").exists()


def test_a_sentence_piece_file_that_is_a_pickle_is_not_opened(trapped: Path, tmp_path: Path) -> None:
    from moelight.engine.tokenizer import Tokenizer

    (trapped / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
        Tokenizer.from_dir(trapped)
    assert not (tmp_path / "sprung").exists()


def test_the_package_knows_no_unsafe_reader() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [name.name.split(".")[0] for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            assert not _UNSAFE & set(names), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func) if node.func.attr == "load" else ""
                assert called not in ("torch.load", "np.load", "numpy.load", "torch.hub.load"), path
                for keyword in node.keywords:
                    trusting = keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"
                    assert not trusting, path
