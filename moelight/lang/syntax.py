"""Nodes of the syntax tree of a ``.moe`` text, before any check. A span is (start, end) in characters of the text."""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Value:
    """One value as written. ``kind`` is ``int``, ``number`` (with a point or exponent), ``size`` (value: bytes),
    ``percent``, ``name``, ``text``, ``list`` or ``layers`` (value: tuple of `Value`), ``signed`` or ``huge`` (value: as
    written)."""

    kind: str
    value: int | float | str | tuple[Value, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Name:
    """A word: a name, key, metric or operator."""

    text: str
    span: Span

    @property
    def as_value(self) -> Value:
        return Value("name", self.text, self.span)


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
    """The action of a rule: ``verb = what`` (a value) or ``verb what`` (two words)."""

    verb: Name
    what: Value | Name


@dataclass(frozen=True, slots=True)
class Rule:
    """``when condition for count unit { commands }``."""

    condition: Condition
    duration: tuple[Value, Name] | None
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """``name { items }``; the items of a block of the reference that is not supported are dropped."""

    name: Name
    items: tuple[Assignment | Rule, ...]


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
