"""Nodes of the syntax tree of a ``.moe`` text, before any check.

A span is (start, end) in characters of the text; it is None for nodes built in Python.
"""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Value:
    """One value as written.

    ``kind`` is ``int``, ``number`` (with a point or exponent), ``size`` (value: bytes), ``percent``, ``name``,
    ``text``, ``list`` or ``layers`` (value: tuple of `Value`), ``signed`` or ``huge`` (value: as written).
    """

    kind: str
    value: int | float | str | tuple[Value, ...]
    span: Span = None


@dataclass(frozen=True, slots=True)
class Name:
    """A word: a name, key, metric or operator."""

    text: str
    span: Span = None


@dataclass(frozen=True, slots=True)
class Condition:
    """``metric operator threshold``."""

    metric: Name
    operator: Name
    threshold: Value


@dataclass(frozen=True, slots=True)
class Conditional:
    """``first : second when condition``."""

    first: Value
    second: Value
    condition: Condition


@dataclass(frozen=True, slots=True)
class Assignment:
    """``key = value``."""

    key: Name
    value: Value | Conditional


@dataclass(frozen=True, slots=True)
class Command:
    """The action of a rule: ``verb = value`` (written like an assignment) or ``verb what`` (two words)."""

    verb: Name
    value: Value | None = None
    what: Name | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """``when condition for count unit { commands }``."""

    condition: Condition
    count: Value | None
    unit: Name | None
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """``name { items }``. ``foreign``: a block of the reference that is not supported; its contents are dropped."""

    name: Name
    items: tuple[Assignment | Rule, ...]
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class PolicyNode:
    """``policy name { blocks }``."""

    name: Name
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class PolicyText:
    """A whole text."""

    version: Value | None
    policies: tuple[PolicyNode, ...]
