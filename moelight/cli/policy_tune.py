"""``moelight policy tune``: the expert policy with the least estimated time for a routing trace, by memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moelight.cli import planning_options as ask
from moelight.cli.policy_replay import TraceFile
from moelight.core.errors import ConfigError

if TYPE_CHECKING:
    from moelight.experts.tune import Tuned, Tuning

_Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE.moe", help="Write the fastest policy here; - is stdout.")
]
_Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="The most memory for experts, e.g. 4GiB; what is free if not given.")
]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


def tune_command(
    trace: TraceFile,
    model: ask.Model,
    hw: ask.Hw = ask.AUTO,
    memory: _Memory = None,
    output: _Output = None,
    as_json: _Json = False,
) -> None:
    """Search the policy that takes least time for a routing trace, for several amounts of memory.

    What counts is estimated time, not the rate of hits. The policies tried differ in eviction and its parameters, one
    cache or a budget for each layer, what is fetched ahead, and where a missing expert is computed.
    """
    from moelight.batch.output import STANDARD_OUTPUT, check_writable, whole_file
    from moelight.core.units import parse_bytes
    from moelight.experts.replay import Trace
    from moelight.experts.timing import MachineCosts
    from moelight.experts.tune import tune_policy as search

    if output is not None:
        if as_json and output == STANDARD_OUTPUT:
            raise ConfigError("--json and --output - contradict each other: both are for standard output")
        check_writable(output, what="output")
    size = None if memory is None else parse_bytes(memory, what="--memory")
    profile = ask.load_model(model)
    hardware = ask.load_machine(hw, model)
    machine, rows = MachineCosts(profile, hardware), Trace(trace, profile)
    if size is None:
        from moelight.experts.auto import room_for_experts
        from moelight.experts.sizing import RESERVE_BYTES

        size = max(0, room_for_experts(profile, hardware).free_bytes - RESERVE_BYTES)
    slots = size // machine.page_bytes
    layers = len(rows.shape.layers)
    if slots < layers:
        from moelight.core.units import format_bytes

        least = format_bytes(layers * machine.page_bytes, round_up=True)
        where = f"--memory {memory}" if memory is not None else f"{format_bytes(size)}, what {hardware.name} has free,"
        raise ConfigError(f"{where} is too little: one expert for each of {layers} layers takes {least}")
    found = list(rows)
    if not found:
        raise ConfigError(f"trace {trace} has no rows; record one with generate --routing-trace")
    tuning = search(found, rows.shape, machine, most_slots=slots)
    if output is not None:
        with whole_file(output, what="output") as write:
            write(_file(tuning.best, trace, model, hw).encode())
    if as_json:
        typer.echo(json.dumps(_as_dict(tuning), indent=2, allow_nan=False))
    elif output != STANDARD_OUTPUT:
        _print(tuning, trace, model, hw)


def _file(best: Tuned, trace: Path, model: str, hw: str) -> str:
    from moelight import __version__
    from moelight.cli.policy_text import commented
    from moelight.cli.tables import machine_words
    from moelight.core.units import format_bytes
    from moelight.observe.number_format import rate_or_count, seconds_text, share_text

    did = best.outcome
    return commented(
        best.policy,
        (
            f"{model} on {machine_words(hw)}, tuned to {trace.name} by moelight {__version__}.",
            f"Estimate: {rate_or_count(did.tokens_per_s or 0.0)} tokens/s, {seconds_text(did.stall_s or 0.0)} of "
            f"{seconds_text(did.total_s or 0.0)} stalled; {share_text(did.hit_rate)} of {did.accesses:,} accesses hit. "
            f"Room for {did.slots:,} experts takes {format_bytes(did.memory_bytes or 0)}.",
            "Run it: moelight generate PROMPTS.jsonl --expert-policy THIS_FILE",
        ),
    )


def _as_dict(tuning: Tuning) -> dict[str, Any]:
    rows = [_row(each) for each in tuning.found]
    return {
        "best": rows[tuning.found.index(tuning.best)],
        "front": [row for row, each in zip(rows, tuning.found, strict=True) if each.on_front],
        "candidates": rows,
        "replays": tuning.replays,
        "rows": tuning.rows,
    }


def _row(each: Tuned) -> dict[str, Any]:
    from moelight.lang.format import format_policy

    did = each.outcome
    extra = {"slots": did.slots, "memory_bytes": did.memory_bytes, "total_s": did.total_s, "on_front": each.on_front}
    return did.as_dict() | extra | {"moe": format_policy(each.policy)}


def _print(tuning: Tuning, trace: Path, model: str, hw: str) -> None:
    from rich.text import Text

    from moelight.cli.policy_text import in_words
    from moelight.cli.tables import bar, indented, machine_words, open_console, plain_table, printable
    from moelight.core.units import format_bytes
    from moelight.observe.number_format import rate_or_count, seconds_text, share_text

    console = open_console()
    console.print(Text(f"{printable(model)} on {machine_words(hw)}, {printable(trace.name)}", style="bold"))
    console.print(Text(f"{tuning.replays} replays of {tuning.rows:,} batches or a part of them", style="dim"))
    console.print()
    numbers = ("memory", "room", "hits", "stall", "tokens/s")
    table = plain_table(*numbers, "", "policy", numbers=numbers)
    table.columns[-1].no_wrap = False
    most = tuning.best.outcome.tokens_per_s or 1.0
    for each in tuning.found:
        did, best = each.outcome, each is tuning.best
        speed = did.tokens_per_s or 0.0
        table.add_row(
            format_bytes(did.memory_bytes or 0),
            f"{did.slots:,}",
            share_text(did.hit_rate),
            seconds_text(did.stall_s or 0.0),
            rate_or_count(speed),
            bar(speed / most, 12),
            Text(in_words(each.policy), style="bold" if best else "" if each.on_front else "dim"),
            style="" if each.on_front else "dim",
        )
    console.print(indented(table))
    console.print()
    words = "bold: the fastest"
    if len(tuning.front) < len(tuning.found):
        words += "; dim: no faster than one with less memory"
    console.print(Text(words, style="dim"))
