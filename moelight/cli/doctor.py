"""``moelight doctor``: capabilities of this machine and installation, with reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moelight.core.errors import InputError


def doctor(
    model: Annotated[
        str | None, typer.Option("-m", "--model", metavar="DIR", help="A model whose files would be read.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same facts as one JSON object.")] = False,
) -> None:
    """Say what torch, the processors, the memory and the kernels are on this machine."""
    from moelight.cli.facts import facts, print_facts

    found = facts(None if model is None else _directory(model))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_facts(found)


def _directory(model: str) -> Path:
    """Return the directory with the files of ``model``. Unlike other commands, ``doctor`` does not query the hub.

    Raises:
        InputError: the directory does not exist.
    """
    from moelight.weights.source import DEMO, resolve_model

    directory = Path(model).expanduser()
    if model != DEMO and not directory.is_dir():
        raise InputError(f"--model {model}: no such directory")
    return resolve_model(model)
