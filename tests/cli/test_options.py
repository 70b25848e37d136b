"""The command line is an interface: its commands and options change only together with this list."""

from __future__ import annotations

import typer.main

from moelight.cli.main import app
from moelight.core.request import SamplingParams
from moelight.scheduler import SCHEDULES
from tests.cli.program import moelight

OPTIONS = {
    "moelight": {"--version", "--traceback"},
    "generate": {
        "PROMPTS.jsonl",
        "--model",
        "-m",
        "--output",
        "-o",
        "--max-tokens",
        "--temperature",
        "--top-p",
        "--top-k",
        "--seed",
        "--stop",
        "--host-memory",
        "--device-memory",
        "--batch-size",
        "--micro-batch-size",
        "--schedule",
        "--device",
        "--token-ids",
        "--stats",
        "--trace",
        "--show",
        "--no-show",
    },
    "doctor": {"--json"},
}


def options_of(command) -> set[str]:  # type: ignore[no-untyped-def]
    names: set[str] = set()
    for parameter in command.params:
        argument = parameter.param_type_name == "argument"
        names.update([parameter.metavar] if argument else [*parameter.opts, *parameter.secondary_opts])
    return names - {"--help"}


def test_commands_and_options_are_these() -> None:
    program = typer.main.get_command(app)
    found = {
        "moelight": options_of(program),
        **{name: options_of(command) for name, command in program.commands.items()},
    }
    assert found == OPTIONS


def test_defaults_of_generate() -> None:
    command = typer.main.get_command(app).commands["generate"]
    defaults = {parameter.name: parameter.default for parameter in command.params if parameter.name != "help"}
    assert defaults["model"] == "demo"
    assert (defaults["max_tokens"], defaults["seed"], defaults["device"]) == (256, 0, "auto")
    greedy = SamplingParams()
    for name in ("temperature", "top_p", "top_k"):
        assert defaults[name] == getattr(greedy, name), name


def test_help_names_what_there_is() -> None:
    text = " ".join(moelight("generate", "--help").stdout.split())
    for name in [*SCHEDULES, *OPTIONS["generate"], "custom_id", "messages"]:
        assert name in text


def test_help_without_a_command() -> None:
    done = moelight()
    assert done.returncode == 0
    assert "generate" in done.stdout and "doctor" in done.stdout
    assert done.stderr == ""
