"""Commands whose options are the fields of dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def with_options(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command so that every field of its dataclass parameters is an option, except those of ``without``.

    Fields are annotated as Typer's options are. The command gets the dataclass; fields of ``without`` have their
    defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
        options: list[Parameter] = []
        for name, parameter in signature(command).parameters.items():
            if name not in groups:
                options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
                continue
            kinds = get_type_hints(groups[name], include_extras=True)
            options += [
                Parameter(each.name, Parameter.KEYWORD_ONLY, default=_default(each), annotation=kinds[each.name])
                for each in fields(groups[name])
                if each.name not in without
            ]

        def run(**given: Any) -> None:
            for name, group in groups.items():
                known = [each.name for each in fields(group) if each.name not in without]
                given[name] = group(**{each: given.pop(each) for each in known})
            command(**given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {each.name: each.annotation for each in options}
        run.__signature__ = Signature(options)  # type: ignore[attr-defined]
        return run

    return decorate


def _default(option: Field[Any]) -> Any:
    return Parameter.empty if option.default is MISSING else option.default


def flag(field: str) -> str:
    """Return the name of the option of ``field``, such as ``--prompt-len``."""
    return "--" + field.replace("_", "-")
