"""The work a chat template may do, what its operations cost, and what is a value to them.

A unit is about one byte touched or made, so a budget bounds time and memory alike. Costs are charged before the work
is done, and where a value is charged for it is looked at: a method or function may be called, and is no value; what
has no text but its address in memory is not written. Knows values, filters and methods. Refuses to know templates.
"""

from __future__ import annotations

import contextvars
import functools
import re
import sys
import types
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import jinja2.runtime
import jinja2.utils
from jinja2.exceptions import SecurityError

STEP = 16  # one call, iteration or filter: about 0.5 µs, in which as many characters are copied many times over
PIECE = 8  # a reference in a list
DEEPEST = 100  # of nested values: Python hashes tuples without an eye on its stack
MOST_BITS = 4096  # of an integer
WIDEST = 10_000  # of a padded field
_PRINTF = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


METHODS: dict[type, frozenset[str]] = {
    str: _words(
        """capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit islower
        isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix
        replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
        zfill"""
    ),
    dict: _words("copy get items keys values"),
    list: _words("copy count index"),
    tuple: _words("count index"),
    range: _words("count index"),
    int: _words("bit_length"),
    float: _words("is_integer"),
}
# Filters whose work depends on how many values they are given, not on what is in them.
_SHALLOW = _words(
    "attr batch count d default first items last length list map reject rejectattr reverse select selectattr slice"
)
_SORTING = _words("dictsort groupby sort unique")


class Helper:
    """What a template may call, and nothing else."""


_FUNCTIONS = (
    *(Helper, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
)
_CONTAINERS = (list, tuple, dict, set, frozenset, types.MappingProxyType, KeysView, ValuesView, ItemsView)
# Their text shows an object of the interpreter, or a function that they hold.
_UNWRITTEN = (
    *(Iterator, jinja2.runtime.Macro, jinja2.runtime.LoopContext, jinja2.runtime.BlockReference),
    *(jinja2.runtime.TemplateReference, jinja2.runtime.Context, jinja2.utils.Namespace),
)


class Meter:
    """The work one rendering may still do. ``with meter:`` makes it the one that is charged.

    ``measuring``: values are measured before any is used, so that nothing is said of functions among them.
    """

    def __init__(self, work: int, *, measuring: bool = False) -> None:
        self._left = work
        self._measuring = measuring

    def charge(self, work: int) -> None:
        """Raises:
        SecurityError: no such amount is left.
        """
        self._left -= work
        if self._left < 0:
            raise SecurityError("it takes too many steps or makes too much text")

    def __enter__(self) -> None:
        self._token = _METER.set(self)

    def __exit__(self, *_: object) -> None:
        _METER.reset(self._token)

    def size(self, value: object, depth: int = 0, *, written: bool = False) -> int:
        """Charges the size of ``value`` with all it holds, about its bytes as text, and returns it.

        Raises:
            SecurityError: no such amount is left, it nests too deep, or a function is among it; where it is to be
                ``written`` also for what is no text.
        """
        if isinstance(value, str):
            size = len(value) + 1
        elif isinstance(value, _CONTAINERS):
            if depth > DEEPEST:
                raise SecurityError(f"its values nest deeper than {DEEPEST}")
            self.charge(PIECE * len(value))
            held = (
                self._held(value.keys(), depth, written=written) + self._held(value.values(), depth, written=written)
                if isinstance(value, Mapping)
                else self._held(value, depth, written=written)
            )
            return PIECE * len(value) + 2 + held
        else:
            if not self._measuring:
                check_value(value, written=written)
            size = PIECE * len(value) if hasattr(value, "__len__") else PIECE
        self.charge(size)
        return size

    def _held(self, parts: Iterable[object], depth: int, *, written: bool) -> int:
        """Charges the sizes of ``parts`` that a container holds, and returns their sum. Most are texts, and every
        rendering looks at all that it is given: these are summed without a call for each."""
        texts = inner = 0
        for part in parts:
            if type(part) is str:
                texts += len(part) + 1
            elif part is None or part is True or part is False:
                texts += PIECE
            else:
                inner += self.size(part, depth + 1, written=written)
        self.charge(texts)
        return texts + inner


_METER: contextvars.ContextVar[Meter] = contextvars.ContextVar("meter")


def meter() -> Meter:
    """The one that is charged."""
    return _METER.get()


def tree_size(value: object) -> int:
    """The size of ``value`` with all it holds, by `Meter.size`'s measure.

    Raises:
        SecurityError: it nests too deep.
    """
    return Meter(sys.maxsize, measuring=True).size(value)


def check_value(value: object, *, written: bool = False) -> None:
    """Refuses what is no value: a function, and where it is to be ``written``, an object without a text of its own."""
    if isinstance(value, _FUNCTIONS):
        raise SecurityError("a method or function is no value; it can only be called")
    if written and (isinstance(value, _UNWRITTEN) or type(value).__repr__ is object.__repr__):
        raise SecurityError(f"a value of type {type(value).__name__} has no text")


def extent(value: object) -> int:
    """The bytes of ``value`` itself, without what a container holds: what it takes to copy it."""
    if isinstance(value, str):
        return len(value)
    return PIECE * len(value) if hasattr(value, "__len__") else 0


def counted(items: Iterable[Any]) -> Iterator[Any]:
    """``items``, each charged as it comes."""
    now = meter()
    for item in items:
        now.charge(STEP + extent(item))
        yield item


def check_replace(text: str, old: str = "", new: str = "") -> None:
    """Charges for every ``old`` in ``text`` made ``new``."""
    meter().charge(2 * len(text) + text.count(old) * len(new))


def check_printf(text: str, values: object) -> None:
    """Charges for ``text % values``."""
    fields = _PRINTF.findall(text)
    if any("*" in field for field in fields):
        raise SecurityError("a width of * is not for chat templates")
    widths = [number for field in fields for number in field if number]
    check_width(*widths)
    now = meter()
    now.charge(len(text) + (1 + len(fields)) * now.size(values, written=True) + sum(int(width) for width in widths))


def check_width(*widths: float | str) -> None:
    """Refuses to pad a field beyond reason."""
    if any(float(width) > WIDEST for width in widths):
        raise SecurityError(f"a width is more than {WIDEST}")


def check_bits(operator: str, left: int, right: int) -> None:
    """Refuses integers so long that to compute with them takes time."""
    bits = left.bit_length()
    if operator == "**":
        bits *= max(right, 1)
    elif operator == "*":
        bits += right.bit_length()
    if bits > MOST_BITS:
        raise SecurityError(f"an integer of more than {MOST_BITS} bits")


def metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its work charged first. A lazy result is worked out at once: nested thousands deep, generators
    would overrun Python's stack when they are freed."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
    shallow = name in _SHALLOW

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        now = meter()
        now.charge(STEP)
        given = list(args)
        value = given[skipped] if len(given) > skipped else None
        rest = [*given[skipped + 1 :], *kwargs.values()]
        if shallow:
            now.charge(0 if isinstance(value, str) else extent(value))
            if rest and name not in {"default", "d"}:
                now.size(rest)
        else:
            if isinstance(value, Iterator):
                value = given[skipped] = list(counted(value))
            _check_filter(name, value, rest)
        if rest:
            _check_numbers(name, rest)
        result = function(*given, **kwargs)
        if isinstance(result, Iterator):
            return iter(list(counted(result)))
        if isinstance(result, list):
            now.charge(PIECE * len(result))
        return result

    return metered


def _check_filter(name: str, value: Any, rest: list[Any]) -> None:
    now = meter()
    size, given = now.size(value, written=True), now.size(rest, written=True)
    if name in _SORTING:
        now.charge(20 * size)
    elif name == "replace":
        check_replace(str(value), *(str(text) for text in rest[:2]))
    elif name == "format":
        check_printf(str(value), rest)
    elif name == "join":
        now.charge(given * len(value) if hasattr(value, "__len__") else 0)
    elif name == "indent":
        now.charge(str(value).count("\n") * (given + max((n for n in rest if isinstance(n, int)), default=4)))
    elif name == "sum" and isinstance(value, list):
        now.charge(PIECE * len(value) * sum(len(item) for item in value if hasattr(item, "__len__")))


def _check_numbers(name: str, rest: list[Any]) -> None:
    if name in ("batch", "center", "indent", "round", "slice"):
        check_width(*(number for number in rest if isinstance(number, (int, float))))
    if name == "round":
        check_width(*(100 * abs(number) for number in rest if isinstance(number, int)))


def metered_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its work charged first."""

    @functools.wraps(function)
    def metered(*args: Any) -> Any:
        meter().charge(STEP)
        meter().size(args)
        return function(*args)

    return metered


def check_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments with which ``method`` of a string, list, dict or number may be called, its work charged."""
    now = meter()
    owner, name = method.__self__, method.__name__
    kind = next((kind for kind in type(owner).__mro__ if kind in METHODS), None)
    if kind is None or name not in METHODS[kind]:
        raise SecurityError(f"{type(owner).__name__}.{name} is not for chat templates")
    if name == "join":
        args = tuple(list(counted(items)) if isinstance(items, Iterator) else items for items in args)
    given = now.size(args) + now.size(kwargs)
    if not isinstance(owner, str):
        if name in ("count", "index"):
            now.size(list(owner))
        elif name == "copy":
            now.charge(PIECE * len(owner))
        return args
    now.charge(len(owner))
    if name in ("center", "ljust", "rjust", "zfill"):
        check_width(*(number for number in args if isinstance(number, int)))
    elif name in ("split", "rsplit", "splitlines"):
        now.charge(4 * PIECE * len(owner))
    elif name == "join":
        now.charge(len(owner) * given // PIECE)
    elif name == "replace":
        check_replace(owner, *(text for text in args[:2] if isinstance(text, str)))
    return args
