"""Table of the commands. A command is imported when it is invoked; the help text imports none."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import typer
import typer.core
import typer.main


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEntry:
    """A command: ``attribute`` of ``moelight.cli.<module>``; ``summary`` is the first sentence of its help."""

    module: str
    attribute: str
    summary: str
    settings: dict[str, Any] = field(default_factory=dict)


COMMANDS = {
    "generate": CommandEntry(module="generate", attribute="generate", summary="Answer every row of PROMPTS."),
    "serve-batch": CommandEntry(
        module="serve_batch",
        attribute="serve_batch",
        summary="Serve OpenAI's Files and Batches on this machine, or watch a folder.",
    ),
    "optimize": CommandEntry(
        module="optimize",
        attribute="optimize_command",
        summary="Find the fastest policy that fits the memory, and say why.",
    ),
    "simulate": CommandEntry(
        module="simulate", attribute="simulate_command", summary="Run a policy's passes on a virtual clock."
    ),
    "roofline": CommandEntry(
        module="roofline", attribute="roofline", summary="Show roofs, turning points, and what binds a policy."
    ),
    "report": CommandEntry(
        module="report",
        attribute="report",
        summary="Hold a trace against its prediction, lane by lane, and say what the busiest one waited for.",
    ),
    "inspect": CommandEntry(
        module="inspect", attribute="inspect", summary="Count a model's parameters and bytes, from its config alone."
    ),
    "profile": CommandEntry(
        module="profile",
        attribute="profile",
        summary="Measure this machine in about a minute: memory, processor, disk, and a GPU and its link.",
    ),
    "doctor": CommandEntry(
        module="doctor",
        attribute="doctor",
        summary="Say what torch, the processors, the memory and the kernels are on this machine.",
    ),
    "lm-eval": CommandEntry(
        module="lm_eval",
        attribute="lm_eval",
        summary="Evaluate a model with lm-evaluation-harness, whose own options follow.",
        # Unknown options, and everything after the first word, belong to the harness.
        settings={
            "context_settings": {
                "ignore_unknown_options": True,
                "allow_extra_args": True,
                "allow_interspersed_args": False,
            }
        },
    ),
    "policy": CommandEntry(
        module="policy", attribute="policy", summary="Check, format and explain policies of which experts stay."
    ),
}


class _Imported(MutableMapping[str, Any]):
    """Commands by name, each imported at its first look-up."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _command(name, COMMANDS[name])
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _command(name: str, entry: CommandEntry) -> Any:
    found = getattr(importlib.import_module(f"moelight.cli.{entry.module}"), entry.attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name=name, **entry.settings)(found)
    return typer.main.get_command(alone)


class Commands(typer.core.TyperGroup):
    """Command group whose help lists every command and imports none."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Imported()

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (typer's signature)
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 (typer's signature)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 (typer's signature)
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])
