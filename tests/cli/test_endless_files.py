"""Wherever a file is asked for, what is none or never ends is one line and exit code 2, in little memory."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from tests.cli.program import DEMO, moelight_inside, write_prompts
from tests.hostile.endless import ENDLESS, guarded, put

GENERATE = "generate @/good.jsonl"
OF_MODEL = f"{GENERATE} --model @/model"
WAITS = ("fifo", "device")  # the two that could do harm; that others are refused is the one reader's own test

# The arguments where @ is the directory, and the file below it that is put in the place of a good one.
OPTIONS = {
    "machine": ("optimize --model mixtral --hw @/it.yaml", "it.yaml"),
    "model file": ("optimize --hw t4 --model @/it.yaml", "it.yaml"),
    "workload": ("optimize --hw t4 --model mixtral --workload @/it.yaml", "it.yaml"),
    "policy": (f"{GENERATE} --policy @/it.yaml", "it.yaml"),
    "machine of a job": (f"{GENERATE} --hw @/it.yaml", "it.yaml"),
    "chat template": (f"{GENERATE} --chat-template @/it.jinja", "it.jinja"),
    "schema": (f"{GENERATE} --json-schema @/it.json", "it.json"),
    "expert policy": (f"{GENERATE} --expert-policy @/it.moe", "it.moe"),
    "policy to check": ("policy check @/it.moe", "it.moe"),
    "trace": ("report @/it.json", "it.json"),
    "config of the harness": ("lm-eval run --config @/it.yaml", "it.yaml"),
    "token": ("serve-batch --model demo --data @/data --token-file @/it.token", "it.token"),
    "inspected config": ("inspect @/model", "model/config.json"),
    **{
        f"checkpoint's {name}": (OF_MODEL, f"model/{name}")
        for name in (
            *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
            *("special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
            *("model.safetensors", "added_tokens.json"),
        )
    },
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_prompts(tmp_path / "good.jsonl", {"prompt": "add 1 and 2 ="})
    shutil.copytree(DEMO, tmp_path / "model")
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    return tmp_path


# All of them read through the one reader: each meets one of the two in turn.
@pytest.mark.parametrize(("option", "kind"), list(zip(OPTIONS, itertools.cycle(WAITS))))
def test_a_file_that_never_ends_is_one_line(option: str, kind: str, directory: Path) -> None:
    arguments, name = OPTIONS[option]
    put(kind, directory / name)
    with guarded():
        done = moelight_inside(*arguments.replace("@", str(directory)).split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert Path(name).name in done.stderr and ENDLESS[kind][1].lower() in done.stderr.lower()


@pytest.mark.parametrize("kind", WAITS)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "shard.safetensors"])
def test_a_shard_or_index_that_never_ends_is_one_line(name: str, kind: str, directory: Path) -> None:
    model = directory / "model"
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"x": "shard.safetensors"}}')
    put(kind, model / name)
    with guarded():
        done = moelight_inside("generate", directory / "good.jsonl", "--model", model)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert name in done.stderr and ENDLESS[kind][1] in done.stderr
