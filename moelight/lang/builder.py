"""The Python builder of policies: the same policies as in the language, built by calls, under the same rules.

::

    @expert_policy
    def small(p):
        p.cache(capacity="25%", eviction="lfu | lru")
        p.prefetch(predictor="next_router", budget="4 : 2 when hit_rate > 0.9")
        p.when("hit_rate < 0.4", accesses=100, eviction="slru")

Values are Python objects, or texts in the syntax of the language.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable
from functools import partialmethod
from typing import Any

from moelight.core.errors import ConfigError
from moelight.experts.policy import Capacity, ExpertPolicy
from moelight.lang.check import read
from moelight.lang.format import format_policy, value_text
from moelight.lang.keys import KEYS

# A value ends where a key, a brace or a comment begins; `<=`, `>=` and `!=` belong to conditions.
_MORE_THAN_A_VALUE = re.compile(r"[{}#;\n]|(?<![<>!])=")


class PolicyBuilder:
    """Collects blocks and rules; each method returns the builder. Arguments of a block are its keys in the language."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._blocks: list[str] = []
        self._rules: list[str] = []

    def _block(self, block: str, /, **keys: Any) -> PolicyBuilder:
        lines = []
        for name, value in keys.items():
            key = KEYS[block].get(name)
            quoted = key is not None and key.kind == "text" and isinstance(value, str)
            lines.append(f"{name} = {value_text(value, quoted=True) if quoted else _text(value)}")
        self._blocks.append("\n".join((f"{block} {{", *lines, "}")))
        return self

    cache = partialmethod(_block, "cache")
    prefetch = partialmethod(_block, "prefetch")
    schedule = partialmethod(_block, "schedule")
    monitor = partialmethod(_block, "monitor")
    per_layer = partialmethod(_block, "per_layer")

    def when(self, condition: str, *, accesses: int = 1, **action: Any) -> PolicyBuilder:
        """Add a rule of the block ``adapt``: once ``condition`` has held over ``accesses`` consecutive accesses, apply
        ``action``, one of ``KEY=VALUE``, ``trigger="memory_pressure"`` and ``rebalance="per_layer"``."""
        verbs = ("trigger", "rebalance")
        assignments = " ".join(
            f"{name} {'' if name in verbs else '= '}{_text(value)}" for name, value in action.items()
        )
        self._rules.append(f"when {_text(condition)} for {_text(accesses)} accesses {{ {assignments} }}")
        return self

    def build(self) -> ExpertPolicy:
        """Return the checked policy; raises ConfigError with the codes of all broken rules of the language."""
        adapt = ["adapt {", *self._rules, "}"] if self._rules else []
        return _read(self._name, "\n".join((f"policy {self._name} {{", *self._blocks, *adapt, "}")))[0]


def expert_policy(define: Callable[[PolicyBuilder], object]) -> ExpertPolicy:
    """Decorator that turns a function into the policy that it builds, under the function's name."""
    builder = PolicyBuilder(define.__name__)
    define(builder)
    return builder.build()


def check_expert_policy(policy: ExpertPolicy) -> None:
    """Raise ConfigError if ``policy`` breaks a rule of the language, or the language cannot express it."""
    if _read(policy.name, format_policy(policy)) != (policy,):
        raise ConfigError(f"policy {policy.name}: a value is not of the type that the language gives it")


def _read(name: str, text: str) -> tuple[ExpertPolicy, ...]:
    reading = read(text)
    if reading.errors:
        message = "; ".join(f"{error.message} [{error.code}]" for error in reading.errors)
        raise ConfigError(f"policy {name}: {message}")
    return reading.policies


def _text(value: Any) -> str:
    if isinstance(value, str):
        if _MORE_THAN_A_VALUE.search(value):
            raise ConfigError(f"{value!r} is more than one value")
        return value
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(part) for part in value)}]"
    if isinstance(value, bool | Capacity):
        return value_text(value)
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    raise ConfigError(f"{value!r} is no value of the policy language")
