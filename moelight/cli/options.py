"""Commands whose options are the fields of dataclasses, and what several commands do with their options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, Field, field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from moelight.core.errors import ConfigError


def option(text: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """Return the field of an option with the help ``text``; ``names`` and ``settings`` are those of `typer.Option`.

    Without ``names`` the option has the name of the field, and a boolean one no negation.
    """
    return field(default=default, metadata={"names": names, "help": text, **settings})


def with_options(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command so that every field of its dataclass parameter is an option, except those of ``without``.

    Fields are `option`s or annotated as Typer's parameters are. The command gets the dataclass; fields of ``without``
    have their defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        (whole,) = (name for name, hint in hints.items() if is_dataclass(hint))
        group: Any = hints[whole]
        kinds = get_type_hints(group, include_extras=True)
        known = [each for each in fields(group) if each.name not in without]
        parameters: list[Parameter] = []
        for name, parameter in signature(command).parameters.items():
            if name == whole:
                parameters += [_parameter(each, kinds[each.name]) for each in known]
            else:
                parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

        def run(**given: Any) -> None:
            command(**{whole: group(**{each.name: given.pop(each.name) for each in known})}, **given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(each: Field[Any], kind: Any) -> Parameter:
    settings = dict(each.metadata)
    if settings:
        names = settings.pop("names") or ([flag(each.name)] if kind is bool else [])
        kind = Annotated[kind, typer.Option(*names, **settings)]
    default = Parameter.empty if each.default is MISSING else each.default
    return Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def flag(field: str) -> str:
    """Return the name of the option of ``field``, such as ``--prompt-len``."""
    return "--" + field.replace("_", "-")


def refuse_beside(option: str, given: object, names: Iterable[str], why: str) -> None:
    """Raise ConfigError if one of the options ``names`` of ``given`` is set, since ``option`` is, too."""
    for name in names:
        value = getattr(given, name)
        if value not in (None, False, "auto"):
            values = value if isinstance(value, list) else [] if value is True else [value]
            words = " ".join(map(str, (flag(name), *values)))
            raise ConfigError(f"{option} and {words} contradict each other: {why}")


def check_output(path: Path | None, *, as_json: bool = False) -> None:
    """Refuse a path of ``--output`` that cannot be written, and standard output beside ``--json``."""
    from moelight.batch.output import STANDARD_OUTPUT, check_writable

    if path is not None:
        if as_json and path == STANDARD_OUTPUT:
            raise ConfigError("--json and --output - contradict each other: both are for standard output")
        check_writable(path, what="output")


def write_output(path: Path, texts: Iterable[str]) -> None:
    """Write ``texts`` to ``path``, which holds all of them or is unchanged; ``-`` is standard output."""
    from moelight.batch.output import whole_file

    with whole_file(path, what="output") as write:
        for text in texts:
            write(text.encode())
