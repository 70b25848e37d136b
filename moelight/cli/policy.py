"""``moelight policy``: check, format, explain, replay, tune and make expert policies (``.moe`` files)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moelight import __version__
from moelight.cli import planning_options as ask
from moelight.core.errors import ConfigError
from moelight.core.units import format_bytes, parse_bytes
from moelight.observe.number_format import rate_or_count, seconds_text, share_text

if TYPE_CHECKING:
    from rich.table import Table

    from moelight.experts.policy import ExpertPolicy
    from moelight.experts.replay import Outcome, Shape
    from moelight.experts.tune import Tuned, Tuning
    from moelight.lang.diagnostics import CheckedText
    from moelight.lang.explain import ExpertSizes
    from moelight.profiles.hardware import HardwareProfile


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
    bool, typer.Option("--bound", help="Add the most hits that any policy can have in this capacity (Belady).")
]
_ReplayJson = Annotated[bool, typer.Option("--json", help="A JSON list, one object a policy.")]


def replay_command(
    trace: TraceFile,
    policy: _Policies = None,
    model: _Model = None,
    hw: _Hw = None,
    bound: _Bound = False,
    as_json: _ReplayJson = False,
) -> None:
    """Replay a routing trace under policies: hits and bytes, and with a machine the estimated stall and speed.

    A line of the trace is {"l": layer, "e": [ids], "s": [scores]}, one batch of one layer; "s" may be missing.
    """
    from moelight.experts import replay
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
    rows = replay.Trace(trace, profile)
    outcomes = replay.replay_trace(rows, rows.shape, policies, machine)
    if bound:
        rooms = sorted({each.slots for each in outcomes})
        outcomes += [replay.bound(rows, rows.shape, slots, machine, policies=policies) for slots in rooms]
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in outcomes], indent=2, allow_nan=False))
        return
    _print_replays(trace, rows.shape, outcomes, model, hw)


def _print_replays(trace: Path, shape: Shape, outcomes: Sequence[Outcome], model: str | None, hw: str | None) -> None:
    from rich.text import Text

    from moelight.cli.tables import machine_words, open_console, printable

    console = open_console()
    of = "" if model is None else f" of {printable(model)}"
    on = "" if hw is None else f" on {machine_words(hw)}"
    console.print(Text(f"{printable(trace.name)}{of}{on}", style="bold"))
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


_TuneOutput = Annotated[
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
    output: _TuneOutput = None,
    as_json: _Json = False,
) -> None:
    """Search for the policy that takes the least time for a routing trace, for several amounts of memory.

    Policies are ranked by estimated time, not by hit rate. They differ in eviction and its parameters, in one cache or
    a budget for each layer, in prefetch, and in where a missing expert is computed.
    """
    from moelight.batch.output import STANDARD_OUTPUT, check_writable, whole_file
    from moelight.experts import tune
    from moelight.experts.replay import Trace
    from moelight.experts.sizing import RESERVE_BYTES
    from moelight.experts.timing import MachineCosts

    if output is not None:
        if as_json and output == STANDARD_OUTPUT:
            raise ConfigError("--json and --output - contradict each other: both are for standard output")
        check_writable(output, what="output")
    size = None if memory is None else parse_bytes(memory, what="--memory")
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
    found = list(rows)
    if not found:
        raise ConfigError(f"trace {trace} has no rows; record one with generate --routing-trace")
    tuning = tune.tune_policy(found, rows.shape, machine, most_slots=slots)
    if output is not None:
        with whole_file(output, what="output") as write:
            write(_file(tuning.best, trace, model, hw).encode())
    if as_json:
        typer.echo(json.dumps(_as_dict(tuning), indent=2, allow_nan=False))
    elif output != STANDARD_OUTPUT:
        _print(tuning, trace, model, hw)


def _file(best: Tuned, trace: Path, model: str, hw: str) -> str:
    from moelight.cli.tables import machine_words

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
    from moelight.lang.format import format_policy

    rows = []
    for each in tuning.found:
        did = each.outcome
        said = {name: getattr(did, name) for name in ("slots", "memory_bytes", "total_s")}
        rows.append(did.as_dict() | said | {"on_front": each.on_front, "moe": format_policy(each.policy)})
    return {
        "best": rows[tuning.found.index(tuning.best)],
        "front": [row for row in rows if row["on_front"]],
        "candidates": rows,
        "replays": tuning.replays,
        "rows": tuning.rows,
    }


def _print(tuning: Tuning, trace: Path, model: str, hw: str) -> None:
    from rich.text import Text

    from moelight.cli.tables import bar, indented, machine_words, open_console, plain_table, printable

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
    dim = "; dim: no faster than one with less memory" if len(tuning.front) < len(tuning.found) else ""
    console.print(Text(f"bold: the fastest{dim}", style="dim"))


_Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE.moe", help="Where it goes; else stdout.")]
_BatchSize = Annotated[int, typer.Option(min=1, help="Sequences in a pass.")]


def auto(model: ask.Model, hw: ask.Hw = ask.AUTO, output: _Output = None, batch_size: _BatchSize = 1) -> None:
    """Make a policy for a model and a machine without a trace, with the reasons as comments."""
    from moelight.batch.output import check_writable, whole_file
    from moelight.experts.tune import auto_policy

    if output is not None:
        check_writable(output, what="output")
    profile = ask.load_model(model)
    found = auto_policy(profile, ask.load_machine(hw, model), name=model, batch_size=batch_size)
    text = commented(found.policy, (*found.header, f"Made by moelight {__version__}."), found.reasons)
    if output is None:
        typer.echo(text, nl=False)
    else:
        with whole_file(output, what="output") as write:
            write(text.encode())


WIDTH = 100


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
    said = " | ".join(name + parameter.get(name, "") for name in rules.eviction)
    if policy.per_layer is not None:
        said += {"uniform": " per layer", "entropy": " by entropy"}[policy.per_layer.allocation]
    if policy.prefetch.strategy != "none":
        said += f"; {policy.prefetch.strategy} {policy.prefetch.budget}"
    if policy.schedule.mode != "gpu_only":
        said += f"; {policy.schedule.mode}"
    return said


policy = typer.Typer(name="policy", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

ERRORS, REFUSED = 1, 2
_Files = Annotated[list[str], typer.Argument(metavar="FILE.moe", help="Policy files.")]
_File = Annotated[Path, typer.Argument(metavar="FILE.moe", help="A policy file.")]


@policy.callback(invoke_without_command=True)
def describe_policies(context: typer.Context) -> None:
    """Check, format, explain, compare and tune policies of resident experts."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@policy.command()
def check(
    files: _Files,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list, one object a file.")] = False,
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
        errors, warnings = ([each.as_dict() for each in some] for some in (reading.errors, reading.warnings))
        rows.append({"file": file, "ok": not errors, "errors": errors, "warnings": warnings})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_findings(readings)
    for words in unread:
        typer.echo(f"moelight: error: {_printable(words)}", err=True)
    if unread:
        raise typer.Exit(REFUSED)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(ERRORS)


def _print_findings(readings: Sequence[tuple[str, CheckedText]]) -> None:
    from moelight.lang.diagnostics import diagnostic_lines

    errors = warnings = 0
    for file, reading in readings:
        errors, warnings = errors + len(reading.errors), warnings + len(reading.warnings)
        lines = reading.lines
        for finding in (*reading.errors, *reading.warnings):
            typer.echo(f"{diagnostic_lines(finding, file, lines)}\n")
        if not reading.errors and not reading.warnings:
            names = ", ".join(each.name for each in reading.policies)
            typer.echo(f"{_printable(file)}: {names}: all is well")
    if errors or warnings:
        counted = f"{_counted(errors, 'error')} and {_counted(warnings, 'warning')}"
        typer.echo(f"{counted} in {_counted(len(readings), 'file')}")


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in text)


@policy.command("format")
def format_(
    file: _File,
    write: Annotated[bool, typer.Option("--write", help="Put the result in the file's place.")] = False,
    only_check: Annotated[
        bool, typer.Option("--check", help="Only say whether the file is formatted; 1 if not.")
    ] = False,
) -> None:
    """Print a policy file in its canonical layout, with its comments."""
    from moelight.lang.format import format_text

    if write and only_check:
        raise ConfigError("--write and --check contradict each other; give one")
    reading = _sound(file)
    found = format_text(reading.text)
    if not (write or only_check):
        typer.echo(found, nl=False)
    elif found != reading.text:
        if only_check:
            typer.echo(f"{_printable(str(file))}: not formatted; moelight policy format --write does it")
            raise typer.Exit(ERRORS)
        _write(file, found)


def _write(file: Path, text: str) -> None:
    """Replace the content of ``file`` atomically; symbolic links and the file mode are preserved."""
    target = file.resolve()
    beside = target.with_name(f".{target.name}.new")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.chmod(target.stat().st_mode & 0o7777)
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"{file}: cannot be written: {error.strerror or error}") from None


@policy.command()
def explain(
    file: _File,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME|DIR", help="Show the memory it takes on this model.")
    ] = None,
    hw: Annotated[
        str | None, typer.Option("--hw", metavar="NAME|FILE|auto", help="And how much of this machine's that is.")
    ] = None,
) -> None:
    """Describe in words what a policy does.

    With --model also the memory that its experts take; with --hw also their tiers on that machine.
    """
    if hw is not None and model is None:
        raise ConfigError("--hw says how much of a machine's memory a model's experts take; give --model, too")
    reading = _sound(file)
    experts = None if model is None else _experts(model)
    machine = None if hw is None or model is None else ask.load_machine(hw, model)
    for number, each in enumerate(reading.policies):
        if number:
            typer.echo()
        _explain(each, experts, model or "", machine)
    if reading.warnings:
        from moelight.lang.diagnostics import diagnostic_lines

        lines = reading.lines
        for warning in reading.warnings:
            typer.echo(f"\n{diagnostic_lines(warning, str(file), lines)}")


def _sound(file: Path) -> CheckedText:
    """Return the checked file; print its errors and exit if it has any."""
    from moelight.lang.files import read_file

    reading = read_file(file)
    if reading.errors:
        _print_findings([(str(file), reading)])
        raise typer.Exit(ERRORS)
    return reading


def _experts(model: str) -> ExpertSizes:
    from moelight.hrm.inventory import inventory
    from moelight.lang.explain import ExpertSizes

    profile = ask.load_model(model)
    layers, per_layer = profile.num_moe_layers, profile.experts.num_experts
    return ExpertSizes(layers=layers, per_layer=per_layer, page_bytes=inventory(profile).page_bytes)


def _explain(each: ExpertPolicy, experts: ExpertSizes | None, model: str, machine: HardwareProfile | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from moelight.cli.tables import heading, indented, open_console, printable
    from moelight.lang.explain import meanings, memory_words, pressure_words

    console = open_console()
    console.print(heading(f"policy {each.name}"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(max_width=48)
    table.add_column()
    for meaning in meanings(each):
        table.add_row(meaning.block, Text(printable(meaning.line)), Text(meaning.words, style="dim"))
    console.print(indented(table))
    if experts is None:
        return
    console.print()
    console.print(Text(memory_words(each, experts, printable(model))))
    pressure = pressure_words(each, experts)
    if pressure:
        console.print(Text(pressure))
    if machine is not None:
        console.print()
        console.print(indented(_memory(each, experts, machine)))


def _memory(each: ExpertPolicy, experts: ExpertSizes, machine: HardwareProfile) -> Any:
    """Return a table of the experts in each tier."""
    from moelight.cli.tables import bar, plain_table
    from moelight.lang.explain import spread

    table = plain_table("", "experts", "bytes", "there is", "", "", numbers=("experts", "bytes", "there is"))
    capacities = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    for tier, count in spread(each, experts, capacities).items():
        size, there = count * experts.page_bytes, capacities[tier]
        words = "" if size <= there else "does not fit"
        table.add_row(
            tier, f"{count:,}", format_bytes(size), format_bytes(there), bar(size / there if there else 0.0, 20), words
        )
    return table


policy.command("replay")(replay_command)
policy.command("tune")(tune_command)
policy.command()(auto)
