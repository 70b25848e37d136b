"""``moelight policy auto``: an expert policy made without a trace, with reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moelight.cli import planning_options as ask

_Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE.moe", help="Where it goes; else stdout.")]
_BatchSize = Annotated[int, typer.Option(min=1, help="Sequences in a pass.")]


def auto(model: ask.Model, hw: ask.Hw = ask.AUTO, output: _Output = None, batch_size: _BatchSize = 1) -> None:
    """Make a policy for a model and a machine without a trace, with the reasons as comments."""
    from moelight import __version__
    from moelight.batch.output import check_writable, whole_file
    from moelight.cli.policy_text import commented
    from moelight.experts.auto import auto_policy

    if output is not None:
        check_writable(output, what="output")
    profile = ask.load_model(model)
    found = auto_policy(profile, ask.load_machine(hw, model), name=model, batch_size=batch_size)
    text = commented(found.policy, (*found.header, f"Made by moelight {__version__}."), found.reasons)
    if output is None:
        typer.echo(text, nl=False)
        return
    with whole_file(output, what="output") as write:
        write(text.encode())
