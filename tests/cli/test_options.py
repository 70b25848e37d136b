"""The command line is an interface: its commands and options change only together with this list."""

from __future__ import annotations

import pytest
import typer.main

from moelight.cli.main import app
from moelight.core.request import SamplingParams
from moelight.scheduler import SCHEDULES
from tests.cli.program import ROOT, moelight, moelight_inside

QUESTION = {
    "--hw",
    "--model",
    "-m",
    "--workload",
    "--prompt-len",
    "--max-prompt-len",
    "--gen-len",
    "--num-requests",
}
LIMITS = {"--device-memory", "--host-memory", "--disk"}
CHOICES = {"--fix", "--no-cache"}
SAMPLING = {
    "--n",
    "--max-tokens",
    "--min-tokens",
    "--temperature",
    "--top-p",
    "--top-k",
    "--min-p",
    "--seed",
    "--stop",
    "--stop-token-id",
    "--ignore-eos",
    "--presence-penalty",
    "--frequency-penalty",
    "--repetition-penalty",
    "--logprobs",
    "--prompt-logprobs",
    "--return-routed-experts",
    "--json-schema",
    "--regex",
    "--choice",
    "--thinking-token-budget",
    "--strict",
    "--no-strict",
    "--resamplings",
}
OPTIONS = {
    "moelight": {"--version", "--traceback"},
    "generate": {
        "PROMPTS",
        "--model",
        "-m",
        "--output",
        "-o",
        "--dry-run",
        "--json",
        "--error-file",
        "--task",
        "--pooling",
        "--per-request-metrics",
        "--normalize",
        "--no-normalize",
        "--dimensions",
        "--format",
        "--prompt-column",
        "--id-column",
        "--ignore-model",
        "--chat-template",
        "--reasoning",
        "--order",
        "--restart",
        "--allow-changed",
        "--atomic",
        "--sync-interval",
        "--ray",
        "--ray-engines",
        "--ray-num-cpus",
        "--ray-num-gpus",
        "--ray-resource",
        "--ray-label",
        "--status",
        "--metrics",
        *SAMPLING,
        "--host-memory",
        "--device-memory",
        "--batch-size",
        "--micro-batch-size",
        "--schedule",
        "--dtype",
        "--kv-dtype",
        "--activations",
        "--policy",
        "--hw",
        "--device",
        "--token-ids",
        "--stats",
        "--trace",
        "--show",
        "--no-show",
        "--adapt",
        "--no-adapt",
        "--cuda-graphs",
        "--no-cuda-graphs",
        "--speculate",
        "--draft-model",
        "--num-speculative-tokens",
        "--tp",
        "--expert-policy",
        "--expert-profile",
        "--save-expert-profile",
        "--routing-trace",
        "--expert-stats",
    },
    "serve-batch": {
        "--model",
        "-m",
        "--host",
        "--port",
        "--data",
        "--token-file",
        "--allow-remote",
        "--max-file-size",
        "--expire",
        "--watch",
        "--max-tokens",
        "--reasoning",
        "--ignore-model",
        "--strict",
        "--resamplings",
        "--host-memory",
        "--device-memory",
        "--dtype",
        "--kv-dtype",
        "--activations",
        "--policy",
        "--hw",
        "--speculate",
        "--draft-model",
        "--num-speculative-tokens",
        "--tp",
        "--device",
        "--expert-policy",
    },
    "optimize": {
        *QUESTION,
        *LIMITS,
        *CHOICES,
        "--estimator",
        "--weight-dtype",
        "--kv-dtype",
        "--allow",
        "--prices",
        "--nodes",
        "--plot",
        "--acceptance",
        "--tp",
        "--output",
        "-o",
        "--json",
    },
    "simulate": {
        *QUESTION,
        *LIMITS,
        *CHOICES,
        "--nodes",
        "--rows",
        "--failures",
        "--slow",
        "--load",
        "--policy",
        "--schedule",
        "--passes",
        "--acceptance",
        "--trace",
        "--plot",
        "--json",
    },
    "roofline": {*QUESTION, *CHOICES, "--policy", "--plot", "--json"},
    "report": {"TRACE", "--output", "-o", "--json"},
    "inspect": {"MODEL", "--check", *(QUESTION - {"--model", "-m"}), *LIMITS, "--no-cache", "--json"},
    "models": {"[MODEL]", "--json"},
    "convert": {
        "MODEL",
        "OUT",
        "--to",
        "--type",
        "--experts",
        "--group-size",
        "--dense",
        "--keep",
        "--expert-profile",
        "--calibrate",
        "--host-memory",
        "--shard-size",
    },
    "compare": {
        "MODEL",
        "PROMPTS",
        "--against",
        "--format",
        "--host-memory",
        "--device-memory",
        "--device",
        "--kv-dtype",
        "--activations",
        "--space",
        "--output",
        "-o",
        "--json",
    },
    "profile": {"--device", "--output", "-o", "--quick", "--disk-dir"},
    "doctor": {"--model", "-m", "--json"},
    "lm-eval": {"ARGUMENTS"},  # the harness's own
    "policy": set(),
    "policy check": {"FILE.moe", "--json"},
    "policy format": {"FILE.moe", "--write", "--check"},
    "policy explain": {"FILE.moe", "--model", "-m", "--hw"},
    "policy replay": {"TRACE.jsonl", "--policy", "--model", "-m", "--hw", "--bound", "--json"},
    "policy tune": {"TRACE.jsonl", "--model", "-m", "--hw", "--memory", "--output", "-o", "--json"},
    "policy auto": {"--model", "-m", "--hw", "--output", "-o", "--batch-size"},
}
# Every command that plans can be asked for its help.
PLANNING = ("optimize", "simulate", "roofline", "inspect")


def options_of(command) -> set[str]:  # type: ignore[no-untyped-def]
    names: set[str] = set()
    for parameter in command.params:
        argument = parameter.param_type_name == "argument"
        names.update([parameter.metavar] if argument else [*parameter.opts, *parameter.secondary_opts])
    return names - {"--help"}


def test_commands_and_options_are_these() -> None:
    program = typer.main.get_group(app)
    result = {"moelight": options_of(program)}
    for name, command in program.commands.items():
        result[name] = options_of(command)
        within = getattr(command, "commands", {})
        result.update({f"{name} {inner}": options_of(item) for inner, item in within.items()})
    assert result == OPTIONS


def test_defaults_of_generate() -> None:
    command = typer.main.get_group(app).commands["generate"]
    defaults = {parameter.name: parameter.default for parameter in command.params if parameter.name != "help"}
    assert defaults["model"] is None  # demo, or the policy's
    assert (defaults["max_tokens"], defaults["seed"], defaults["device"]) == (None, 0, "auto")
    assert (defaults["hw"], defaults["policy"]) == ("auto", None)
    greedy = SamplingParams()
    for name in ("temperature", "top_p", "top_k"):
        assert defaults[name] == getattr(greedy, name), name


def test_help_names_what_there_is() -> None:
    text = " ".join(moelight_inside("generate", "--help").stdout.split())
    for name in [*SCHEDULES, *OPTIONS["generate"], "custom_id", "messages"]:
        assert name in text


@pytest.mark.parametrize("command", PLANNING)
def test_planning_starts_from_the_machine_at_hand_and_mtbench(command: str) -> None:
    result = typer.main.get_group(app).commands[command]
    defaults = {parameter.name: parameter.default for parameter in result.params if parameter.name != "help"}
    assert defaults["hw"] == (None if command == "inspect" else "auto")
    assert defaults["workload"] is None and defaults["prompt_len"] is None
    text = " ".join(moelight_inside(command, "--help").stdout.split())
    for name in OPTIONS[command]:
        assert name in text
    assert "mtbench" in text


@pytest.mark.parametrize("command", [(), ("generate",), ("policy", "check")])
def test_help_has_a_short_form(command: tuple[str, ...]) -> None:
    assert moelight_inside(*command, "-h").stdout == moelight_inside(*command, "--help").stdout != ""


def test_help_without_a_command() -> None:
    done = moelight()
    assert done.returncode == 0
    for command in OPTIONS:
        assert command.split()[0] in done.stdout
    assert done.stderr == ""


def test_the_reference_names_every_command_and_option() -> None:
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    for command, options in OPTIONS.items():
        assert command in reference
        for option in options:
            assert option in reference, f"{command} {option}"
