"""``moelight policy replay``: hits, transfers and speed of expert policies on a recorded routing trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moelight.cli import planning_options as ask
from moelight.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from moelight.experts.replay import Outcome, Shape

TraceFile = Annotated[
    Path, typer.Argument(metavar="TRACE.jsonl", help="What generate --routing-trace wrote; gzipped or not.")
]
_Policies = Annotated[
    list[Path] | None, typer.Option("--policy", metavar="FILE.moe", help="Policies to replay; may be repeated.")
]
_Model = Annotated[
    str | None, typer.Option("--model", "-m", metavar="NAME|DIR", help="The model of the trace, for bytes.")
]
_Hw = Annotated[
    str | None, typer.Option("--hw", metavar="NAME|FILE|auto", help="The machine, for seconds; needs --model.")
]
_Bound = Annotated[
    bool, typer.Option("--bound", help="Add the most hits that there can be with so much room (Belady).")
]
_Json = Annotated[bool, typer.Option("--json", help="A JSON list, one object a policy.")]


def replay_command(
    trace: TraceFile,
    policy: _Policies = None,
    model: _Model = None,
    hw: _Hw = None,
    bound: _Bound = False,
    as_json: _Json = False,
) -> None:
    """Replay a routing trace under policies: hits and bytes, and with a machine the estimated stall and speed.

    A line of the trace is {"l": layer, "e": [ids], "s": [scores]}, one batch of one layer; "s" may be missing.
    """
    from moelight.experts.replay import Trace
    from moelight.experts.replay import bound as bound_of
    from moelight.experts.replay import replay_trace as replay_all
    from moelight.lang.files import load_expert_policies

    if not policy:
        raise ConfigError("which policy? give --policy FILE.moe, once or more (policy auto makes one)")
    if hw is not None and model is None:
        raise ConfigError("--hw says how fast a model's experts come and are computed; give --model, too")
    policies = [each for file in policy for each in load_expert_policies(file)]
    profile = None if model is None else ask.load_model(model)
    machine = None
    if hw is not None and profile is not None:
        from moelight.experts.timing import MachineCosts

        machine = MachineCosts(profile, ask.load_machine(hw, model or ""))
    rows = Trace(trace, profile)
    outcomes = replay_all(rows, rows.shape, policies, machine)
    if bound:
        rooms = sorted({each.slots for each in outcomes})
        outcomes += [bound_of(rows, rows.shape, slots, machine, policies=policies) for slots in rooms]
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in outcomes], indent=2, allow_nan=False))
        return
    _print(trace, rows.shape, outcomes, model, hw)


def _print(trace: Path, shape: Shape, outcomes: Sequence[Outcome], model: str | None, hw: str | None) -> None:
    from rich.text import Text

    from moelight.cli.tables import machine_words, open_console, printable

    console = open_console()
    parts = [printable(trace.name)]
    if model is not None:
        parts.append(f"of {printable(model)}")
    if hw is not None:
        parts.append(f"on {machine_words(hw)}")
    console.print(Text(" ".join(parts), style="bold"))
    size = f"{outcomes[0].accesses:,} accesses, {len(shape.layers)} layers of {shape.num_experts} experts"
    console.print(Text(size, style="dim"))
    console.print()
    console.print(_table(outcomes))
    for each in outcomes:
        for note in each.notes:
            console.print(Text(f"{printable(each.policy)}: {printable(note)}", style="dim"))


def _table(outcomes: Sequence[Outcome]) -> Table:
    from rich.text import Text

    from moelight.cli.tables import bar, plain_table, printable
    from moelight.core.units import format_bytes
    from moelight.observe.number_format import rate_or_count, seconds_text, share_text

    known, timed = outcomes[0].bytes is not None, outcomes[0].stall_s is not None
    # The table must fit 80 columns, so bytes replace misses and seconds replace the bar.
    numbers = ["room", "hits", *([] if known else ["misses"]), "evictions"]
    numbers += ["memory", "moved"] if known else []
    numbers += ["stall", "tokens/s"] if timed else []
    drawn = [] if timed else [""]
    table = plain_table("policy", *numbers[:2], *drawn, *numbers[2:], numbers=tuple(numbers))
    best = max((each.tokens_per_s or 0.0 for each in outcomes), default=0.0)
    for each in outcomes:
        cells: list[Text | str] = [printable(each.policy), f"{each.slots:,}", share_text(each.hit_rate)]
        cells += [bar(each.hit_rate, 12)] * len(drawn)
        cells += [f"{each.misses:,}"] * (not known) + [f"{each.evictions:,}"]
        if each.bytes is not None:
            cells += [format_bytes(each.memory_bytes or 0), format_bytes(each.bytes)]
        if each.stall_s is not None:
            speed = each.tokens_per_s or 0.0
            cells += [seconds_text(each.stall_s), Text(rate_or_count(speed), style="bold" if speed == best else "")]
        table.add_row(*cells)
    return table
