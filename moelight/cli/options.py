"""Commands whose options are the fields of dataclasses, and what several commands do with their options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from moelight.core.errors import ConfigError
from moelight.core.units import format_bytes, parse_bytes

SIZE = "SIZE"  # metavar of a number of bytes


def option(text: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """Return an option with the help ``text``, as a field of a dataclass or as the default of a command's parameter.

    ``names`` and ``settings`` are those of `typer.Option`. Without ``names`` the option is called as the field, and a
    boolean one has no negation.
    """
    return field(default=default, metadata={"make": typer.Option, "names": names, "help": text, **settings})


def argument(metavar: str, text: str, default: Any = MISSING) -> Any:
    """Return a positional argument, likewise; without ``default`` it must be given."""
    return field(default=default, metadata={"make": typer.Argument, "names": (), "help": text, "metavar": metavar})


def with_options(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: its parameters, and the fields of those that are dataclasses, are Typer's parameters.

    Each is an `option`, an `argument`, annotated as Typer's are, or has the ``help`` text and settings of an option in
    its metadata. The command gets the dataclasses; other fields, and those ``without``, have their defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, list[str]] = {}
        parameters: list[Parameter] = []
        for name, parameter in signature(command).parameters.items():
            group = hints[name]
            if not is_dataclass(group):
                parameters.append(_parameter(name, group, parameter.default))
                continue
            kinds = get_type_hints(group, include_extras=True)
            group_fields = {
                group_field.name: group_field
                for group_field in fields(group)
                if group_field.name not in without
                and (group_field.metadata or get_origin(kinds[group_field.name]) is Annotated)
            }
            groups[name] = list(group_fields)
            parameters += [_parameter(key, kinds[key], field) for key, field in group_fields.items()]

        def run(**values: Any) -> None:
            values = {parameter.name: parameter.default for parameter in parameters} | values
            for name, group_fields in groups.items():
                values[name] = hints[name](**{key: values.pop(key) for key in group_fields})
            command(**values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(name: str, kind: Any, default: Any) -> Parameter:
    if isinstance(default, Field):
        settings, default = dict(default.metadata), default.default
        if settings:
            make, names = settings.pop("make", typer.Option), settings.pop("names", ())
            if kind is bool and not names:
                names = [f"{flag(name)}/--no-{flag(name)[2:]}" if default else flag(name)]
            if kind == int | None and settings.get("metavar") == SIZE:
                settings["parser"] = partial(parse_bytes, label=flag(name))
            kind = Annotated[kind, make(*names, **settings)]
        default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def flag(field: str) -> str:
    """Return the name of the option of ``field``, such as ``--prompt-len``."""
    return "--" + field.replace("_", "-")


def refuse_beside(option: str, arguments: object, names: Iterable[str], reason: str) -> None:
    """Raise ConfigError if one of the options ``names`` of ``arguments`` is set, since ``option`` is, too."""
    sizes = {field.name for field in fields(arguments) if field.metadata.get("metavar") == SIZE}  # type: ignore[arg-type]
    for name in names:
        value = getattr(arguments, name)
        if name in sizes and isinstance(value, int):
            value = format_bytes(value)
        if value not in (None, False, "auto"):
            values = value if isinstance(value, list) else [] if value is True else [value]
            words = " ".join(map(str, (flag(name), *values)))
            raise ConfigError(f"{option} and {words} contradict each other: {reason}")


def check_output(path: Path | None, *, as_json: bool = False) -> None:
    """Refuse a path of ``--output`` that cannot be written, and standard output beside ``--json``."""
    from moelight.batch.output import STANDARD_OUTPUT, check_writable

    if path is not None:
        if as_json and path == STANDARD_OUTPUT:
            raise ConfigError("--json and --output - contradict each other: both are for standard output")
        check_writable(path, label="output")


def write_output(path: Path, texts: Iterable[str]) -> None:
    """Write ``texts`` to ``path``, which holds all of them or is unchanged; ``-`` is standard output."""
    from moelight.batch.output import whole_file

    with whole_file(path, label="output") as write:
        for text in texts:
            write(text.encode())
