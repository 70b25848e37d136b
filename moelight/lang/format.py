"""Format objects as canonical text, which `check.read` turns into equal objects; format texts, keeping comments.

Canonical text has blocks and keys in the order of `keys.KEYS`, one key a line, and only keys that differ from their
defaults; formatting a text also keeps the keys that are written in it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import fields
from decimal import Decimal
from itertools import count, groupby
from operator import itemgetter
from typing import Any

from moelight.core.errors import ConfigError
from moelight.core.units import GB, KB, MB, TB, GiB, KiB, MiB, TiB
from moelight.experts.policy import AdaptRule, Capacity, ExpertPolicy
from moelight.lang.check import read
from moelight.lang.keys import KEYS, SWAPS, Place
from moelight.lang.parse import parse
from moelight.lang.syntax import Assignment, PolicyText

INDENT = "    "
COOLDOWN = 50  # accesses; the language has no other
_UNITS = (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB), ("TB", TB), ("GB", GB), ("MB", MB), ("KB", KB))
# Strategies that the reference lacks are written under the key ``predictor``.
OWN_STRATEGIES = ("previous", "frequency", "next_router")
# Blocks whose mere presence has a meaning are never left out; this key is always written in them.
_STANDS_FOR_BLOCK = {"monitor": "metrics", "per_layer": "allocation"}
OWN_KEYS = {"predictor": "strategy"}  # keys that stand for another
_COMMENT = re.compile(r'"(?:\\["\\]|[^"\\\n])*"|#[^\n]*')

# policy, block, key (or number of the rule); empty for the line of a whole block or policy; None: never commented
Anchor = tuple[int, str, str]
Line = tuple[Anchor | None, str]


def format_policy(policy: ExpertPolicy, *, written: Collection[Place] = ()) -> str:
    """Return the canonical text of ``policy``, with the keys in ``written`` even if their values are defaults. Raises
    ConfigError for what the language cannot express: a cooldown other than `COOLDOWN`, second values out of order."""
    return "".join(f"{line}\n" for _, line in _lines(policy, 0, written))


def format_text(text: str) -> str:
    """Return ``text`` in canonical layout, with its own keys and comments; raises ConfigError if it has errors."""
    reading = read(text)
    if reading.errors:
        first = reading.errors[0]
        raise ConfigError(f"line {first.line}, column {first.column}: {first.message} [{first.code}]")
    tree, _ = parse(text)
    places = dict(_anchors(tree))
    lines: list[Line] = []
    if tree.version is not None:
        lines.append(((-1, "", ""), f"version {number_literal(tree.version.value)}"))
    for number, policy in enumerate(reading.policies):
        if lines:
            lines.append((None, ""))
        written = {(block, key) for index, block, key in places.values() if index == number}
        lines.extend(_lines(policy, number, written))
    return _with_comments(text, lines, places)


def entries(policy: ExpertPolicy, *, written: Collection[Place] = ()) -> Iterator[tuple[str, str, str]]:
    """Yield (block, key, text of the value) of every entry of the canonical text, second values included."""
    seconds = {rule.action.name: rule for rule in policy.adapt if rule.conditional}
    for block, keys in KEYS.items():
        section = getattr(policy, block)
        for item in fields(section) if section is not None else ():
            name, key, value = item.name, keys[item.name], getattr(section, item.name)
            second = seconds.get(key.swap)
            needed = value != item.default or _STANDS_FOR_BLOCK.get(block) == name or second is not None
            if needed or ((block, name) in written and value is not None):
                words = value_text(value, quoted=key.kind == "text", listed=key.kind in ("ids", "names"))
                if second is not None:
                    words += f" : {value_text(second.action.value)} when {condition_text(second)}"
                yield block, "predictor" if name == "strategy" and value in OWN_STRATEGIES else name, words


def rule_text(rule: AdaptRule) -> str:
    """Return the text of an explicit rule of the block ``adapt``."""
    held = "" if rule.accesses == 1 else f" for {rule.accesses} accesses"
    action = rule.action
    setting = f"{action.name} = {value_text(action.value)}" if action.kind == "set" else f"{action.kind} {action.name}"
    return f"when {condition_text(rule)}{held} {{ {setting} }}"


def condition_text(rule: AdaptRule) -> str:
    """Return the text of the rule's condition, such as ``hit_rate < 0.4``."""
    return f"{rule.metric} {rule.op} {number_literal(rule.threshold)}"


def value_text(value: Any, *, quoted: bool = False, listed: bool = False) -> str:
    """Return the text of a value in the language. ``quoted``: in quotes; ``listed``: names or ids in brackets."""
    if isinstance(value, Capacity):
        return _capacity_text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number_literal(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]" if listed else " | ".join(map(str, value))
    if quoted:
        escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)


def number_literal(value: Any) -> str:
    """Return the exact number, without a decimal point if it is whole."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _capacity_text(capacity: Capacity) -> str:
    if capacity.unit == "percent":
        return f"{Decimal(number_literal(capacity.value)):f}%"
    if capacity.unit != "bytes":
        return number_literal(capacity.value)
    size = int(capacity.value)
    for unit, factor in _UNITS:
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def _lines(policy: ExpertPolicy, number: int, written: Collection[Place]) -> Iterator[Line]:
    _check_sayable(policy)
    yield (number, "", ""), f"policy {policy.name} {{"
    for block, group in groupby(entries(policy, written=written), key=itemgetter(0)):
        yield (number, block, ""), f"{INDENT}{block} {{"
        for _, key, words in group:
            yield (number, block, OWN_KEYS.get(key, key)), f"{INDENT * 2}{key} = {words}"
        yield None, f"{INDENT}}}"
    rules = [rule for rule in policy.adapt if not rule.conditional]
    if rules:
        yield (number, "adapt", ""), f"{INDENT}adapt {{"
        yield from (((number, "adapt", str(at)), f"{INDENT * 2}{rule_text(rule)}") for at, rule in enumerate(rules))
        yield None, f"{INDENT}}}"
    yield None, "}"


def _check_sayable(policy: ExpertPolicy) -> None:
    if any(rule.cooldown != COOLDOWN for rule in policy.adapt):
        raise ConfigError(f"policy {policy.name}: the language has no other cooldown than {COOLDOWN} accesses")
    implied = [rule for rule in policy.adapt if rule.conditional]
    names = [rule.action.name for rule in implied]
    first = list(policy.adapt[: len(implied)]) == implied and names == [name for name in SWAPS if name in names]
    if not first or any(rule.accesses != 1 or rule.action.kind != "set" for rule in implied):
        message = "conditional rules set one key each, at once, and come first in the keys' order"
        raise ConfigError(f"policy {policy.name}: {message}")


def _anchors(tree: PolicyText) -> Iterator[tuple[int, Anchor]]:
    """Yield the start of each statement in the text, in order, and the anchor of its canonical line."""
    if tree.version is not None:
        yield tree.version.span[0], (-1, "", "")
    for number, policy in enumerate(tree.policies):
        yield policy.name.span[0], (number, "", "")
        for block in policy.blocks:
            yield block.name.span[0], (number, block.name.text, "")
            rules = count()
            for item in block.items:
                if isinstance(item, Assignment):
                    start, key = item.key.span[0], OWN_KEYS.get(item.key.text, item.key.text)
                else:
                    start, key = item.condition.metric.span[0], str(next(rules))
                yield start, (number, block.name.text, key)


def _with_comments(text: str, lines: list[Line], places: dict[int, Anchor]) -> str:
    """The lines with the comments of ``text``; one behind a statement remains there, others precede the next."""
    anchors = {anchor for anchor, _ in lines} - {None}
    starts = sorted(places)
    before: defaultdict[Anchor | None, list[str]] = defaultdict(list)
    behind: defaultdict[Anchor | None, list[str]] = defaultdict(list)
    for match in _COMMENT.finditer(text):
        if not match.group().startswith("#"):
            continue
        at = match.start()
        index = bisect_right(starts, at)
        statement = places[starts[index - 1]] if index else None
        if statement in anchors and text[text.rfind("\n", 0, at) + 1 : at].strip(" \t\r;}"):
            behind[statement].append(match.group().rstrip())
        else:
            following = next((places[start] for start in starts[index:] if places[start] in anchors), None)
            before[following].append(match.group().rstrip())
    rest = before.pop(None, [])
    out: list[str] = []
    for anchor, line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        out.extend(f"{indent}{comment}" for comment in before[anchor])
        out.append("  ".join((line, " ".join(behind[anchor]))) if behind[anchor] else line)
    return "".join(f"{line}\n" for line in (*out, *rest))
