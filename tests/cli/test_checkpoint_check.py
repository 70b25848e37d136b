"""``moelight inspect --check``: what a checkpoint is, what does not fit, and the line with which a job ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moelight.cli.checkpoint_view import broken
from moelight.engine.checkpoint_report import check_checkpoint
from moelight.engine.model import LazyModel
from tests.cli.program import moelight_inside as run
from tests.hostile.checkpoints import HOSTILE, SINGLE, Hostile
from tests.tiny import save_tiny
from tests.weights.gguf_files import write_gguf
from tests.weights.quantised import METHODS, quantise


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    position = tmp_path_factory.mktemp("quantised")
    source = save_tiny(position / "source", "mixtral", hidden_size=64, intermediate_size=64)
    return quantise(source, position, METHODS["fp8 blocks"])[0]


def checked(model: Path, code: int = 0) -> dict[str, Any]:
    done = run("inspect", model, "--check", "--json")
    assert (done.returncode, done.stderr) == (code, "")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def family(report: dict[str, Any], leaf: str) -> dict[str, Any]:
    (one,) = (item for item in report["tensors"] if leaf in item["leaves"])
    return one


def test_each_part_has_its_format_count_and_bytes(quantised: Path) -> None:
    report = checked(quantised)
    assert report["runs"] and report["refusals"] == [] and report["road"] == "native"
    assert (report["model_type"], report["files"], report["context"]) == ("mixtral", 1, 512)
    stored = load_file(quantised / SINGLE)
    assert sum(item["nbytes"] for item in report["tensors"]) == sum(tensor.nbytes for tensor in stored.values())
    experts = family(report, "w1")
    assert experts["name"] == "model.layers.*.block_sparse_moe.experts.*" and set(experts["leaves"]) == {
        "w1",
        "w2",
        "w3",
    }
    assert experts["format"] == "FP8 in blocks of 32x32"
    assert experts["count"] == sum(".experts." in name and name.endswith(".weight") for name in stored)
    assert family(report, "input_layernorm")["format"] == "F32"
    text = report["text"]
    assert text["ends"] == [[257, "<|eos|>"]] and text["tokens"] == 259 and text["templates"] == ["default"]


def test_what_is_not_read_and_what_does_not_fit(
    quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in quantised.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(7)
    tensors["odd.weight"] = torch.ones(7)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / SINGLE)
    report = checked(tmp_path, code=2)
    assert not report["runs"] and report["road"] is None
    assert "key-value cache" in family(report, "k_scale")["reason"]
    for words in ("input_layernorm.weight' has shape [7]", "'model.norm.weight' [64] is missing", "'odd.weight' [7]"):
        assert any(words in line for line in report["refusals"]), words
    monkeypatch.setenv("COLUMNS", "80")
    page = run("inspect", tmp_path, "--check")
    first, _, rest = page.stdout.partition("\n")
    assert page.returncode == 2 and first == f"moelight: error: {report['refusals'][0]}"
    assert max(map(len, rest.splitlines())) <= 80
    for words in ("not read", "more that does not fit", "answers end at     <|eos|> (257)"):
        assert words in rest


def test_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3moe", vocab=True)
    report = checked(tmp_path / "m.gguf")
    experts = family(report, "ffn_gate_exps")
    assert report["runs"] and experts["name"] == "blk.*" and experts["format"] == "Q4_0"
    assert report["text"]["ends"] == [[318, "<|end|>"]] and not report["text"]["templates"]
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:200])
    assert len(checked(tmp_path / "m.gguf", code=2)["refusals"][0].splitlines()) == 1


def test_no_end_of_answers_is_said(quantised: Path, tmp_path: Path) -> None:
    for name in ("config.json", SINGLE, "tokenizer.json"):
        (tmp_path / name).write_bytes((quantised / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "eos_token_id"}))
    page = run("inspect", tmp_path, "--check")
    assert page.returncode == 0
    words = " ".join(page.stdout.split())
    assert "max_tokens alone" in words and "chat template none: rows with messages are refused" in words


@pytest.mark.parametrize("hostile", HOSTILE[::12], ids=lambda hostile: hostile.name)
def test_the_first_line_is_that_of_a_job(hostile: Hostile, tmp_path: Path) -> None:
    directory = hostile.build(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    job = run("generate", prompts, "--model", directory, "-o", tmp_path / "out.jsonl")
    page = run("inspect", directory, "--check")
    assert (job.returncode, page.returncode) == (2, 2)
    assert page.stdout.splitlines()[0] == job.stderr.rstrip("\n")


# Which values are stored is known to no header: a job finds these when it loads them.
BY_VALUES = ("tied, but stored twice and different",)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "hostile", [hostile for hostile in HOSTILE if hostile.name not in BY_VALUES], ids=lambda hostile: hostile.name
)
def test_every_hostile_checkpoint_is_refused_in_one_line(
    hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = check_checkpoint(LazyModel(str(hostile.build(tmp_path / "model"))))
    assert report.refusals and all("\n" not in line for line in report.refusals)


def test_a_machine_is_another_question() -> None:
    done = run("inspect", "demo", "--check", "--hw", "t4")
    assert done.returncode == 2 and "--check looks at the files" in done.stderr


def test_names_are_cut_between_their_parts() -> None:
    name = "model.layers.*.self_attn.{k,o,q,v}_proj"
    lines = list(broken(name, 20))
    assert max(map(len, lines)) <= 20 and "".join(line.strip() for line in lines) == name
    assert all(line[-1] in ".,_" for line in lines[:-1])
    assert next(broken("x" * 50, 20)) == "x" * 20
