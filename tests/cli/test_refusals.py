"""Every mistake of a user's is one clear line on stderr, nothing on stdout, exit code 2."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from moelight.cli import main as program
from moelight.core.errors import InputError
from moelight.experts.profile import ActivationProfile, facts_of_model, save_profile
from tests.cli.program import DEMO, Program, moelight, moelight_inside, write_prompts


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of prompts and models, most of them wrong; every test must leave it as it is."""
    directory = tmp_path_factory.mktemp("refusals")
    write_prompts(directory / "good.jsonl", {"prompt": "add 1 and 2 ="})
    (directory / "empty.jsonl").write_text("\n  \n")
    (directory / "dense").mkdir()
    (directory / "dense" / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    (directory / "unknown").mkdir()
    (directory / "unknown" / "config.json").write_text('{"model_type": "nobody_knows"}')
    (directory / "hollow").mkdir()
    (directory / "file").write_text("x")
    (directory / "several").mkdir()
    for name in ("model-Q4_K_M.gguf", "model-Q8_0.gguf", "mmproj-F16.gguf"):
        (directory / "several" / name).touch()
    (directory / "policy.yaml").write_text("model: demo\nbatchsize: 4\n")
    (directory / "gpu.yaml").write_text("model: demo\nffn_device: gpu\n")
    (directory / "wrong.moe").write_text("policy p {\n    cache { capacty = 4 }\n}\n")
    (directory / "few.moe").write_text("policy p { cache { capacity = 4 } }\n")
    other = facts_of_model(model_type="qwen3_moe", moe_layers=3, num_experts=8, top_k=2, expert_numbers=3 * 128 * 128)
    save_profile(ActivationProfile(model=other, num_layers=3, num_experts=8), directory / "other.json")
    for name in ("torn", "wordless"):
        shutil.copytree(DEMO, directory / name)
    weights = (directory / "torn" / "model.safetensors").read_bytes()
    (directory / "torn" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (directory / "wordless" / "tokenizer.json").unlink()
    (directory / "schema.json").write_text('{"maximun": 3}')
    return directory


# What is wrong: the arguments after `generate`, where @ is that directory, and words the line must hold.
REFUSED = {
    "no such prompts": ("@/none.jsonl", ["@/none.jsonl", "No such file"]),
    "prompts are a directory": ("@", ["@", "directory"]),
    "empty prompts": ("@/empty.jsonl", ["@/empty.jsonl", "no prompts"]),
    "no such model": ("@/good.jsonl --model @/none", ["@/none"]),
    "no such model on the hub": ("@/good.jsonl --model nobody/nothing", ["nobody/nothing"]),
    "a file for a model": ("@/good.jsonl --model @/file", ["@/file", "directory"]),
    "a directory without a model": ("@/good.jsonl --model @/hollow", ["@/hollow", "config.json"]),
    "several GGUF files": ("@/good.jsonl --model @/several", ["holds 2 GGUF models", "@/several:Q", "Q4_K_M, Q8_0"]),
    "no GGUF file of that tag": ("@/good.jsonl --model @/several:Q6_K", ["'Q6_K'", "Q4_K_M, Q8_0"]),
    "an impossible config": ("@/good.jsonl --model @/dense", ["@/dense/config.json", "hidden size"]),
    "an unknown family": ("@/good.jsonl --model @/unknown", ["@/unknown/config.json", "nobody_knows"]),
    "a torn checkpoint": ("@/good.jsonl --model @/torn", ["model.safetensors"]),
    "no tokenizer": ("@/good.jsonl --model @/wordless", ["tokenizer.json"]),
    "output is a directory": ("@/good.jsonl -o @", ["output", "@", "directory"]),
    "output in no directory": ("@/good.jsonl -o @/none/out.jsonl", ["output", "@/none"]),
    "output below a file": ("@/good.jsonl -o @/file/out.jsonl", ["output", "@/file", "not a directory"]),
    "output over the prompts": ("@/good.jsonl -o @/good.jsonl", ["same file"]),
    "stats in no directory": ("@/good.jsonl --stats @/none/s.json", ["stats", "@/none"]),
    "trace is a directory": ("@/good.jsonl --trace @", ["trace", "@"]),
    "unknown option": ("@/good.jsonl --max-token 5", ["--max-token", "--max-tokens"]),
    "unknown schedule": ("@/good.jsonl --schedule cgopip", ["cgopip", "cgopipe", "serial"]),
    "unknown device": ("@/good.jsonl --device tpu", ["tpu", "cpu", "cuda"]),
    "a device that is not here": ("@/good.jsonl --device xpu", ["xpu"]),
    "not a size": ("@/good.jsonl --host-memory lots", ["--host-memory", "lots"]),
    "a size of nothing": ("@/good.jsonl --host-memory 0", ["--host-memory"]),
    "a budget too small": ("@/good.jsonl --host-memory 64KiB", ["64.0KiB", "at least"]),
    "tokens below 1": ("@/good.jsonl --max-tokens -4", ["--max-tokens"]),
    "temperature below 0": ("@/good.jsonl --temperature -1", ["--temperature"]),
    "temperature is no number": ("@/good.jsonl --temperature nan", ["temperature"]),
    "seed too large": ("@/good.jsonl --seed 18446744073709551616", ["seed"]),
    "an empty stop": ("@/good.jsonl --stop=", ["stop"]),
    "no such policy": ("@/good.jsonl --policy @/none.yaml", ["@/none.yaml"]),
    "a policy with a wrong key": (
        "@/good.jsonl --policy @/policy.yaml",
        ["@/policy.yaml:2", "batchsize", "batch_size"],
    ),
    "a policy and a batch size": (
        "@/good.jsonl --policy @/policy.yaml --batch-size 4",
        ["--policy @/policy.yaml", "--batch-size 4", "contradict"],
    ),
    "a policy and a budget": (
        "@/good.jsonl --policy @/policy.yaml --host-memory 1GiB",
        ["--policy @/policy.yaml", "--host-memory 1.0GiB", "contradict"],
    ),
    "a policy of experts with an error": (
        "@/good.jsonl --expert-policy @/wrong.moe",
        ["@/wrong.moe:2:13", "capacty", "capacity"],
    ),
    "no such policy of experts": ("@/good.jsonl --expert-policy @/none.moe", ["@/none.moe"]),
    "no policy of experts": ("@/good.jsonl --expert-policy defualt", ["defualt"]),
    "a profile where nobody learns": (
        "@/good.jsonl --expert-policy static --expert-profile @/other.json",
        ["--expert-policy static", "--expert-profile @/other.json", "contradict"],
    ),
    "a profile of another model": (
        "@/good.jsonl --expert-policy @/few.moe --expert-profile @/other.json",
        ["@/other.json", "moe_layers"],
    ),
    "expert stats in no directory": ("@/good.jsonl --expert-stats @/none/e.json", ["expert stats", "@/none"]),
    "a routing trace over the prompts": ("@/good.jsonl --routing-trace @/good.jsonl", ["same file"]),
    "a policy for a GPU": ("@/good.jsonl --policy @/gpu.yaml --device cpu", ["gpu"]),
    "unknown machine": ("@/good.jsonl --hw l44", ["l44", "'l4'"]),
    "no prompts named": ("", ["PROMPTS"]),
    "one argument too many": ("@/good.jsonl @/empty.jsonl", ["argument"]),
    "an option without its value": ("@/good.jsonl --model", ["--model"]),
    "a misspelt keyword of a schema": (
        "@/good.jsonl --json-schema @/schema.json",
        ["--json-schema @/schema.json", "'maximun'", "'maximum'"],
    ),
}


# One of each way to be refused, by a process of its own: by the options, before torch is there, by the hub (which is
# told to be offline as it is imported), by a checkpoint, by the planner. What the others say is said the same way.
BY_A_PROCESS = (
    "no prompts named",
    "no such prompts",
    "a policy and a budget",
    "no such model on the hub",
    "a torn checkpoint",
    "a budget too small",
    "a profile of another model",
)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_one_clear_line(kind: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    before = sorted(files.rglob("*"))
    arguments, words = REFUSED[kind]
    run = moelight if kind in BY_A_PROCESS else moelight_inside
    done = run("generate", *arguments.replace("@", str(files)).split())
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    # On a slow machine the plan is said before.
    message = done.stderr[done.stderr.index("moelight: error: ") :]
    assert 1 <= message.count("\n") <= 3
    assert "Traceback" not in done.stderr
    for word in words:
        assert word.replace("@", str(files)) in done.stderr
    assert sorted(files.rglob("*")) == before


def test_unknown_command() -> None:
    done = moelight("generat")
    assert (done.returncode, done.stdout) == (2, "")
    assert "generat" in done.stderr and done.stderr.count("\n") == 1


def test_a_full_disk_is_one_line(files: Path) -> None:
    done = moelight("generate", files / "good.jsonl", "-o", "/dev/full")
    assert (done.returncode, done.stdout) == (74, "")
    assert "no space left" in done.stderr.splitlines()[-1] and done.stderr.count("moelight: error: ") == 1


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The program with a command that raises what it is told to."""

    def fail(error: BaseException) -> None:
        def invoke(context: object) -> None:
            raise error

        class Context(SimpleNamespace):
            def __enter__(self) -> Context:
                return self

            def __exit__(self, *error: object) -> None:
                return None

        command = SimpleNamespace(make_context=lambda name, inputs: Context(), invoke=invoke)
        monkeypatch.setattr(program.typer.main, "get_command", lambda app: command)

    return fail


def test_a_fault_of_ours_says_so(failing, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    failing(ZeroDivisionError("division\nby zero"))
    assert program.main([]) == 70
    message = capsys.readouterr()
    assert message.out == ""
    assert message.err.startswith("moelight: internal error: ZeroDivisionError: division by zero (")
    assert "--traceback" in message.err and message.err.count("\n") == 1
    assert program.main(["--traceback"]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [BaseException("a panic"), GeneratorExit(), SystemExit(1), SystemExit("no")], ids=repr
)
def test_what_is_no_exception_is_a_fault_too(  # type: ignore[no-untyped-def]
    error: BaseException, failing, capsys: pytest.CaptureFixture[str]
) -> None:
    """1, with which Python ends by itself, is the exit code of jobs that have error rows."""
    failing(error)
    assert program.main([]) == 70
    assert capsys.readouterr().err.startswith(f"moelight: internal error: {type(error).__name__}: ")


def test_the_parser_of_a_library_may_leave(failing) -> None:  # type: ignore[no-untyped-def]
    for code in (0, 2):
        failing(SystemExit(code))
        assert program.main([]) == code


def test_what_an_error_quotes_cannot_steer_the_terminal(failing, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    failing(InputError("evil \x1b[2J\x07 name\u202e"))
    assert program.main([]) == 2
    message = capsys.readouterr().err
    assert message == "moelight: error: evil \\x1b[2J\\x07 name\\u202e\n"


def test_interrupted(failing, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    failing(KeyboardInterrupt())
    assert program.main([]) == 130
    assert capsys.readouterr().out == ""


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", *({"prompt": "add 1 and 2 ="} for _ in range(12)))
    (gone, written), (heard, complained) = os.pipe(), os.pipe()
    os.close(gone)
    child = Program("moelight.cli.main", "generate", path, "--max-tokens", "2", streams=(0, written, complained))
    os.close(written)
    os.close(complained)
    with open(heard, encoding="utf-8") as stream:
        message = stream.read()
    assert child.wait() == 141
    assert "error" not in message and "Traceback" not in message


def test_a_reader_that_leaves_a_table_is_no_error() -> None:
    (gone, written), (heard, complained) = os.pipe(), os.pipe()
    os.close(gone)
    child = Program("moelight.cli.main", "models", streams=(0, written, complained))
    os.close(written)
    os.close(complained)
    with open(heard, encoding="utf-8") as stream:
        text = stream.read()
    assert (child.wait(), text) == (141, "")


def test_error_rows_are_exit_code_1(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", "{", {"custom_id": "x", "prompt": 3})
    done = moelight("generate", path)
    assert done.returncode == 1
    assert [json.loads(line)["error"]["code"] for line in done.stdout.splitlines()] == [
        "invalid_json",
        "invalid_request",
    ]
    assert "2 of 2 lines" in done.stderr and done.stderr.count("\n") == 1
