"""Nodes of the syntax tree of a ``.moe`` text, before any check. A span is (start, end) in characters of the text."""

from __future__ import annotations

from typing import Any, NamedTuple

Span = tuple[int, int]


class Value(NamedTuple):
    """One value or word as written.

    ``kind`` is ``int``, ``number`` (with a point or exponent), ``size`` (value: bytes), ``percent``, ``name``,
    ``text``, ``list`` or ``layers`` (value: tuple of `Value`), ``signed`` or ``huge`` (value: as written).
    """

    kind: str
    value: Any
    span: Span

    @property
    def text(self) -> str:
        return str(self.value)


class Condition(NamedTuple):
    """``metric operator threshold``."""

    metric: Value
    operator: Value
    threshold: Value


class Conditional(NamedTuple):
    """``first : second when condition``."""

    first: Value
    second: Value
    condition: Condition


class Assignment(NamedTuple):
    """``key = value``."""

    key: Value
    value: Value | Conditional


class Command(NamedTuple):
    """The action of a rule: ``verb what``, or ``verb = what`` if it ``assigns``."""

    verb: Value
    target: Value
    assigns: bool = False


class Rule(NamedTuple):
    """``when condition for number unit { actions }``; ``number`` and ``unit`` may both be missing."""

    condition: Condition
    number: Value | None
    unit: Value | None
    actions: tuple[Command, ...]


class Block(NamedTuple):
    """``name { items }``; the items of a block of the reference that is not supported are dropped."""

    name: Value
    items: tuple[Assignment | Rule, ...]


class PolicyNode(NamedTuple):
    """``policy name { blocks }``."""

    name: Value
    blocks: tuple[Block, ...]


class PolicyText(NamedTuple):
    """A whole text."""

    version: Value | None
    policies: tuple[PolicyNode, ...]
