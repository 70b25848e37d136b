"""``moelight policy``: check, format and explain expert policies (``.moe`` files)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moelight.cli import planning_options as ask
from moelight.cli.policy_auto import auto
from moelight.cli.policy_replay import replay_command
from moelight.cli.policy_tune import tune_command
from moelight.core.errors import ConfigError

if TYPE_CHECKING:
    from moelight.experts.policy import ExpertPolicy
    from moelight.lang.check import CheckedText
    from moelight.lang.explain import ExpertSizes
    from moelight.profiles.hardware import HardwareProfile

policy = typer.Typer(name="policy", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

ERRORS, REFUSED = 1, 2
_Files = Annotated[list[str], typer.Argument(metavar="FILE.moe", help="Policy files.")]
_File = Annotated[Path, typer.Argument(metavar="FILE.moe", help="A policy file.")]


@policy.callback(invoke_without_command=True)
def describe_policies(context: typer.Context) -> None:
    """Check, format and explain policies of which experts stay."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@policy.command()
def check(
    files: _Files,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list, one object a file.")] = False,
) -> None:
    """Say everything that is wrong with policy files.

    The exit code is 0 if nothing is, 1 if there is an error, 2 if a file cannot be read.
    """
    from moelight.lang.files import read_file

    readings: list[tuple[str, CheckedText | str]] = []
    for file in files:
        try:
            readings.append((file, read_file(file)))
        except ConfigError as error:
            readings.append((file, str(error)))
    if as_json:
        typer.echo(json.dumps([_row(file, reading) for file, reading in readings], indent=2))
    else:
        _print_findings(readings)
    unread = [reading for _, reading in readings if isinstance(reading, str)]
    for words in unread:
        typer.echo(f"moelight: error: {_printable(words)}", err=True)
    if unread:
        raise typer.Exit(REFUSED)
    if any(reading.errors for _, reading in readings if not isinstance(reading, str)):
        raise typer.Exit(ERRORS)


def _row(file: str, reading: CheckedText | str) -> dict[str, Any]:
    if isinstance(reading, str):
        error = {"code": "unreadable", "line": 1, "column": 1, "message": reading}
        return {"file": file, "ok": False, "errors": [error], "warnings": []}
    return {
        "file": file,
        "ok": not reading.errors,
        "errors": [error.as_dict() for error in reading.errors],
        "warnings": [warning.as_dict() for warning in reading.warnings],
    }


def _print_findings(readings: list[tuple[str, CheckedText | str]]) -> None:
    from moelight.lang.diagnostics import diagnostic_lines

    errors = warnings = 0
    for file, reading in readings:
        if isinstance(reading, str):
            continue
        errors, warnings = errors + len(reading.errors), warnings + len(reading.warnings)
        lines = reading.lines
        for finding in (*reading.errors, *reading.warnings):
            typer.echo(f"{diagnostic_lines(finding, file, lines)}\n")
        if not reading.errors and not reading.warnings:
            names = ", ".join(each.name for each in reading.policies)
            typer.echo(f"{_printable(file)}: {names}: all is well")
    if errors or warnings:
        files = sum(not isinstance(reading, str) for _, reading in readings)
        typer.echo(f"{_counted(errors, 'error')} and {_counted(warnings, 'warning')} in {_counted(files, 'file')}")


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
    """Print a policy file in its canonical layout, comments kept."""
    from moelight.lang.format import format_text

    if write and only_check:
        raise ConfigError("--write and --check contradict each other; give one")
    reading = _sound(file)
    found = format_text(reading.text)
    if only_check:
        if found != reading.text:
            typer.echo(f"{_printable(str(file))}: not formatted; moelight policy format --write does it")
            raise typer.Exit(ERRORS)
    elif write:
        if found != reading.text:
            _write(file, found)
    else:
        typer.echo(found, nl=False)


def _write(file: Path, text: str) -> None:
    """Replace the content of ``file`` atomically; symbolic links and the file mode are preserved.

    Raises:
        ConfigError: the file cannot be written.
    """
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
        str | None, typer.Option("--model", "-m", metavar="NAME|DIR", help="Say what memory it takes on this model.")
    ] = None,
    hw: Annotated[
        str | None, typer.Option("--hw", metavar="NAME|FILE|auto", help="And how much of this machine's that is.")
    ] = None,
) -> None:
    """Say in words what a policy does.

    With --model also the memory that it takes; with --hw, too, where on that machine the experts lie.
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
    """Return the checked file; print its errors and exit if it has any.

    Raises:
        ConfigError: the file cannot be read.
        typer.Exit: the file has errors.
    """
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
    """Return a table of experts by tier: the cache slots in the first tier, the other experts in the tiers below."""
    from moelight.cli.tables import bar, plain_table
    from moelight.core.units import format_bytes
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


for _more in (replay_command, tune_command, auto):
    policy.command()(_more)
