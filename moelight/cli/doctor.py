"""``moelight doctor``: what this machine and this installation can do, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="The same facts as one JSON object.")] = False,
) -> None:
    """Say what torch, the processors, the memory and the kernels are on this machine."""
    from moelight.cli.facts import facts, print_facts

    found = facts()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_facts(found)
