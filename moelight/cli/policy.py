"""``moelight policy``: check, format, explain, replay, tune and make expert policies (``.moe`` files)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moelight import __version__
from moelight.cli import ERRORS, REFUSED
from moelight.cli import planning_options as ask
from moelight.cli.options import argument, check_output, option, with_options, write_output
from moelight.cli.tables import (
    bar,
    indented,
    machine_words,
    open_console,
    plain_table,
    print_json,
    printable,
    section,
    show,
    stacked,
    text,
)
from moelight.core.errors import ConfigError
from moelight.core.units import format_bytes, parse_bytes
from moelight.observe.number_format import rate_or_count, seconds_text, share_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from moelight.experts.policy import ExpertPolicy
    from moelight.experts.replay import Outcome, Shape
    from moelight.experts.tune import Tuned, Tuning
    from moelight.lang.diagnostics import CheckedText
    from moelight.lang.explain import ExpertSizes
    from moelight.profiles.hardware import HardwareProfile

WIDTH = 100
_File = Annotated[Path, typer.Argument(metavar="FILE.moe", help="Expert policy file.")]
_Trace = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE.jsonl", help="Routing trace written by generate --routing-trace, optionally gzipped."
    ),
]

policy = typer.Typer(name="policy", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@policy.callback(invoke_without_command=True)
def describe_policies(context: typer.Context) -> None:
    """Check, format, explain, compare and tune policies of resident experts."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@policy.command()
@with_options()
def check(
    files: list[str] = argument("FILE.moe", "Expert policy files to check."),
    as_json: bool = option("Print a JSON list with one object per file.", "--json", default=False),
) -> None:
    """Report everything that is wrong with policy files.

    The exit code is 0 if nothing is wrong, 1 if there is an error, 2 if a file cannot be read.
    """
    from moelight.lang.files import read_file

    readings: list[tuple[str, CheckedText]] = []
    rows: list[dict[str, Any]] = []
    unread: list[str] = []
    for file in files:
        try:
            reading = read_file(file)
        except ConfigError as failure:
            unread.append(str(failure))
            error = {"code": "unreadable", "line": 1, "column": 1, "message": str(failure)}
            rows.append({"file": file, "ok": False, "errors": [error], "warnings": []})
            continue
        readings.append((file, reading))
        errors, warnings = ([finding.as_dict() for finding in some] for some in (reading.errors, reading.warnings))
        rows.append({"file": file, "ok": not errors, "errors": errors, "warnings": warnings})
    if as_json:
        print_json(rows)
    else:
        _print_findings(readings)
    for words in unread:
        typer.echo(f"moelight: error: {printable(words)}", err=True)
    if unread:
        raise typer.Exit(REFUSED)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(ERRORS)


def _print_findings(readings: Sequence[tuple[str, CheckedText]]) -> None:
    from moelight.lang.diagnostics import diagnostic_lines

    for file, reading in readings:
        for finding in (*reading.errors, *reading.warnings):
            typer.echo(f"{diagnostic_lines(finding, file, reading.lines)}\n")
        if not reading.errors and not reading.warnings:
            names = ", ".join(policy.name for policy in reading.policies)
            typer.echo(f"{printable(file)}: {names}: all is well")
    errors = sum(len(reading.errors) for _, reading in readings)
    warnings = sum(len(reading.warnings) for _, reading in readings)
    if errors or warnings:
        counted = f"{_counted(errors, 'error')} and {_counted(warnings, 'warning')}"
        typer.echo(f"{counted} in {_counted(len(readings), 'file')}")


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _sound(file: Path) -> CheckedText:
    """Return the checked file; print its errors and exit if it has any."""
    from moelight.lang.files import read_file

    reading = read_file(file)
    if reading.errors:
        _print_findings([(str(file), reading)])
        raise typer.Exit(ERRORS)
    return reading


@policy.command("format")
@with_options()
def format_(
    file: _File,
    write: bool = option("Write the result to the file in place.", default=False),
    only_check: bool = option("Only check the layout; exit with 1 if the file would change.", "--check", default=False),
) -> None:
    """Print a policy file in its canonical layout, with its comments."""
    from moelight.lang.format import format_text

    if write and only_check:
        raise ConfigError("--write and --check contradict each other; give one")
    reading = _sound(file)
    formatted = format_text(reading.text)
    if not (write or only_check):
        typer.echo(formatted, nl=False)
    elif formatted != reading.text:
        if only_check:
            typer.echo(f"{printable(str(file))}: not formatted; moelight policy format --write does it")
            raise typer.Exit(ERRORS)
        write_output(file, [formatted])


@policy.command()
@with_options()
def explain(
    file: _File,
    model: str | None = option("Model to show the policy's memory use for.", "--model", "-m", metavar="NAME|DIR"),
    hw: str | None = option("Hardware profile to show the distribution over its memories.", metavar="NAME|FILE|auto"),
) -> None:
    """Describe in words what a policy does.

    With --model also the memory that its experts take; with --hw also their tiers on that machine.
    """
    from moelight.lang.diagnostics import diagnostic_lines

    if hw is not None and model is None:
        raise ConfigError("--hw says how much of a machine's memory a model's experts take; give --model, too")
    reading = _sound(file)
    experts = None if model is None else _experts(model)
    machine = None if hw is None or model is None else ask.load_machine(hw, model)
    for number, expert_policy in enumerate(reading.policies):
        if number:
            typer.echo()
        show(open_console(), *_explanation(expert_policy, experts, model or "", machine))
    for warning in reading.warnings:
        typer.echo(f"\n{diagnostic_lines(warning, str(file), reading.lines)}")


def _experts(model: str) -> ExpertSizes:
    from moelight.hrm.inventory import inventory
    from moelight.lang.explain import ExpertSizes

    profile = ask.load_model(model)
    layers, per_layer = profile.num_moe_layers, profile.experts.num_experts
    return ExpertSizes(layers=layers, per_layer=per_layer, page_bytes=inventory(profile).mean_page_bytes)


def _explanation(
    policy: ExpertPolicy, experts: ExpertSizes | None, model: str, machine: HardwareProfile | None
) -> Iterator[RenderableType]:
    from moelight.lang.explain import meanings, memory_words, pressure_words

    table = plain_table("", "", "", rows=((m.block, text(m.line), text((m.words, "dim"))) for m in meanings(policy)))
    block, line, words = table.columns
    table.show_header, block.style, line.max_width, line.no_wrap, words.no_wrap = False, "dim", 48, False, False
    yield section(f"policy {policy.name}", table)
    if experts is not None:
        lines = (memory_words(policy, experts, model), pressure_words(policy, experts))
        yield stacked(*(text(words) for words in lines if words))
        if machine is not None:
            rows = _tiers(policy, experts, machine)
            yield indented(plain_table("", ">experts", ">bytes", ">there is", "", "", rows=rows))


def _tiers(policy: ExpertPolicy, experts: ExpertSizes, machine: HardwareProfile) -> Iterator[Sequence[RenderableType]]:
    from moelight.lang.explain import spread

    capacities = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    for tier, count in spread(policy, experts, capacities).items():
        size, capacity = count * experts.page_bytes, capacities[tier]
        drawn, words = bar(size / capacity if capacity else 0.0, 20), "" if size <= capacity else "does not fit"
        yield tier, f"{count:,}", format_bytes(size), format_bytes(capacity), drawn, words


@policy.command("replay")
@with_options()
def replay_command(
    trace: _Trace,
    policy: list[Path] | None = option("Expert policy file to replay; may be repeated.", metavar="FILE.moe"),
    model: str | None = option("Model of the trace; adds bytes to the results.", "--model", "-m", metavar="NAME|DIR"),
    hw: str | None = option(
        "Hardware profile; adds estimated times to the results; requires --model.", metavar="NAME|FILE|auto"
    ),
    bound: bool = option("Add the upper bound on hits for each capacity (Belady's algorithm).", default=False),
    as_json: bool = option("Print a JSON list with one object per policy.", "--json", default=False),
) -> None:
    """Replay a routing trace under policies: hits and bytes, and with a machine the estimated stall and speed.

    A line of the trace is {"l": layer, "e": [ids], "s": [scores]}, one batch of one layer; "s" may be missing.
    """
    from moelight.experts import replay
    from moelight.experts.timing import MachineCosts
    from moelight.lang.files import load_expert_policies

    if not policy:
        raise ConfigError("which policy? give --policy FILE.moe, once or more (policy auto makes one)")
    if hw is not None and model is None:
        raise ConfigError("--hw says how fast a model's experts come and are computed; give --model, too")
    policies = [expert_policy for file in policy for expert_policy in load_expert_policies(file)]
    profile = None if model is None else ask.load_model(model)
    machine = None
    if hw is not None and profile is not None:
        machine = MachineCosts(profile, ask.load_machine(hw, model or ""))
    rows = replay.Trace(trace, profile)
    outcomes = replay.replay_trace(rows, rows.shape, policies, machine)
    if bound:
        rooms = sorted({outcome.slots for outcome in outcomes})
        outcomes += [replay.bound(rows, rows.shape, slots, machine, policies=policies) for slots in rooms]
    if as_json:
        print_json([outcome.as_dict() for outcome in outcomes])
    else:
        _print_replays(trace, rows.shape, outcomes, model, hw)


def _print_replays(trace: Path, shape: Shape, outcomes: Sequence[Outcome], model: str | None, hw: str | None) -> None:
    head = trace.name + ("" if model is None else f" of {model}") + ("" if hw is None else f" on {machine_words(hw)}")
    size = f"{outcomes[0].accesses:,} accesses, {len(shape.layers)} layers of {shape.num_experts} experts"
    best = max(outcome.tokens_per_s or 0.0 for outcome in outcomes)
    rows = [_cells(outcome, best) for outcome in outcomes]
    columns = (head if head in ("policy", "") else f">{head}" for head in rows[0])
    notes = (text((f"{outcome.policy}: {note}", "dim")) for outcome in outcomes for note in outcome.notes)
    show(
        open_console(),
        stacked(text((head, "bold")), text((size, "dim"))),
        stacked(plain_table(*columns, rows=(row.values() for row in rows)), *notes),
    )


def _cells(did: Outcome, best: float) -> dict[str, RenderableType]:
    """Return a row of the table, which must fit 80 columns: bytes replace misses, and seconds replace the bar."""
    cells: dict[str, RenderableType] = {
        "policy": printable(did.policy),
        "room": f"{did.slots:,}",
        "hits": share_text(did.hit_rate),
    }
    if did.stall_s is None:
        cells[""] = bar(did.hit_rate, 12)
    if did.bytes is None:
        cells["misses"] = f"{did.misses:,}"
    cells["evictions"] = f"{did.evictions:,}"
    if did.bytes is not None:
        cells |= {"memory": format_bytes(did.memory_bytes or 0), "moved": format_bytes(did.bytes)}
    if did.stall_s is not None:
        speed = did.tokens_per_s or 0.0
        cells["stall"] = seconds_text(did.stall_s)
        cells["tokens/s"] = text((rate_or_count(speed), "bold" if speed == best else ""))
    return cells


@policy.command("tune")
@with_options()
def tune_command(
    trace: _Trace,
    model: ask.Model,
    hw: ask.Hw = ask.AUTO,
    memory: str | None = option("Maximum memory for experts, e.g. 4GiB; defaults to the free memory.", metavar="SIZE"),
    output: Path | None = option(
        "File to write the fastest policy to; - writes to stdout.", "--output", "-o", metavar="FILE.moe"
    ),
    as_json: ask.Json = False,
) -> None:
    """Search for the policy that takes the least time for a routing trace, for several amounts of memory.

    Policies are ranked by estimated time, not by hit rate. They differ in eviction and its parameters, in one cache or
    a budget for each layer, in prefetch, and in where a missing expert is computed.
    """
    from moelight.batch.output import STANDARD_OUTPUT
    from moelight.experts import tune
    from moelight.experts.replay import Trace
    from moelight.experts.sizing import RESERVE_BYTES
    from moelight.experts.timing import MachineCosts

    check_output(output, as_json=as_json)
    size = None if memory is None else parse_bytes(memory, label="--memory")
    profile = ask.load_model(model)
    hardware = ask.load_machine(hw, model)
    machine, rows = MachineCosts(profile, hardware), Trace(trace, profile)
    if size is None:
        size = max(0, tune.room_for_experts(profile, hardware).free_bytes - RESERVE_BYTES)
    slots = size // machine.page_bytes
    layers = len(rows.shape.layers)
    if slots < layers:
        least = format_bytes(layers * machine.page_bytes, round_up=True)
        where = f"--memory {memory}" if memory is not None else f"{format_bytes(size)}, what {hardware.name} has free,"
        raise ConfigError(f"{where} is too little: one expert for each of {layers} layers takes {least}")
    trace_rows = list(rows)
    if not trace_rows:
        raise ConfigError(f"trace {trace} has no rows; record one with generate --routing-trace")
    tuning = tune.tune_policy(trace_rows, rows.shape, machine, most_slots=slots)
    if output is not None:
        write_output(output, [_file(tuning.best, trace, model, hw)])
    if as_json:
        print_json(_tuning_as_dict(tuning))
    elif output != STANDARD_OUTPUT:
        _print_tuning(tuning, trace, model, hw)


def _file(best: Tuned, trace: Path, model: str, hw: str) -> str:
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


def _tuning_as_dict(tuning: Tuning) -> dict[str, Any]:
    from moelight.lang.format import format_policy

    rows = []
    for candidate in tuning.candidates:
        did = candidate.outcome
        figures = {name: getattr(did, name) for name in ("slots", "memory_bytes", "total_s")}
        rows.append(did.as_dict() | figures | {"on_front": candidate.on_front, "moe": format_policy(candidate.policy)})
    return {
        "best": rows[tuning.candidates.index(tuning.best)],
        "front": [row for row in rows if row["on_front"]],
        "candidates": rows,
        "replays": tuning.replays,
        "rows": tuning.rows,
    }


def _print_tuning(tuning: Tuning, trace: Path, model: str, hw: str) -> None:
    table = plain_table(">memory", ">room", ">hits", ">stall", ">tokens/s", "", "policy")
    table.columns[-1].no_wrap = False
    fastest = tuning.best.outcome.tokens_per_s or 1.0
    for candidate in tuning.candidates:
        did, style = candidate.outcome, "" if candidate.on_front else "dim"
        speed = did.tokens_per_s or 0.0
        table.add_row(
            format_bytes(did.memory_bytes or 0),
            f"{did.slots:,}",
            share_text(did.hit_rate),
            seconds_text(did.stall_s or 0.0),
            rate_or_count(speed),
            bar(speed / fastest, 12),
            text((in_words(candidate.policy), "bold" if candidate is tuning.best else style)),
            style=style,
        )
    dim = "; dim: no faster than one with less memory" if len(tuning.front) < len(tuning.candidates) else ""
    show(
        open_console(),
        stacked(
            text((f"{model} on {machine_words(hw)}, {trace.name}", "bold")),
            text((f"{tuning.replays} replays of {tuning.rows:,} batches or a part of them", "dim")),
        ),
        indented(table),
        text((f"bold: the fastest{dim}", "dim")),
    )


@policy.command()
@with_options()
def auto(
    model: ask.Model,
    hw: ask.Hw = ask.AUTO,
    output: Path | None = option(
        "File to write the policy to; defaults to stdout.", "--output", "-o", metavar="FILE.moe"
    ),
    batch_size: int = option("Number of sequences per pass.", min=1, default=1),
) -> None:
    """Make a policy for a model and a machine without a trace, with the reasons as comments."""
    from moelight.experts.tune import auto_policy

    check_output(output)
    profile = ask.load_model(model)
    derived = auto_policy(profile, ask.load_machine(hw, model), name=model, batch_size=batch_size)
    made = commented(derived.policy, (*derived.header, f"Made by moelight {__version__}."), derived.reasons)
    if output is None:
        typer.echo(made, nl=False)
    else:
        write_output(output, [made])


def commented(policy: ExpertPolicy, header: Iterable[str], reasons: Mapping[tuple[str, str], str] | None = None) -> str:
    """Return the text of a policy file with ``header`` above it and each reason above its (block, key)."""
    from moelight.lang.format import INDENT, format_policy

    reasons = reasons or {}
    out = [line for words in header for line in _comment(words, "")]
    block = ""
    for line in format_policy(policy, written=reasons.keys()).splitlines():
        words = line.split()
        if line.startswith(INDENT) and not line.startswith(2 * INDENT) and words[-1] == "{":
            block = words[0]
        elif line.startswith(2 * INDENT) and (block, words[0]) in reasons:
            out += _comment(reasons[block, words[0]], 2 * INDENT)
        out.append(line)
    return "".join(f"{line}\n" for line in out)


def _comment(words: str, indent: str) -> list[str]:
    # Names of models and machines may be anything; a line break in one would end the comment.
    flat = "".join(c if c.isprintable() else " " for c in words)
    return textwrap.wrap(flat, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def in_words(policy: ExpertPolicy) -> str:
    """Return a short form such as ``lru per layer; previous 4; hybrid``."""
    rules = policy.cache
    parameter = {
        "lfu": f" {rules.frequency_decay:g}",
        "score": f" {rules.score_ema_alpha:g}",
        "frequency_threshold": f" {rules.freq_threshold:.2g} of {rules.freq_window}",
    }
    words = " | ".join(name + parameter.get(name, "") for name in rules.eviction)
    if policy.per_layer is not None:
        words += {"uniform": " per layer", "entropy": " by entropy"}[policy.per_layer.allocation]
    if policy.prefetch.strategy != "none":
        words += f"; {policy.prefetch.strategy} {policy.prefetch.budget}"
    if policy.schedule.mode != "gpu_only":
        words += f"; {policy.schedule.mode}"
    return words
