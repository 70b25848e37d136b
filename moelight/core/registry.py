"""Lazy tables of named components, used for look-ups, help texts and error messages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar, cast

from moelight.core.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping of names to ``"module:attribute"`` targets, imported on first use."""

    def __init__(self, kind: str, targets: Mapping[str, str]) -> None:
        self.kind, self._targets = kind, dict(targets)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def names(self) -> tuple[str, ...]:
        return tuple(self._targets)

    def get(self, name: str) -> T:
        """The component called ``name``; raises ConfigError with the known names and the closest one."""
        if name not in self._targets:
            names = ", ".join(self._targets)
            raise ConfigError(f"unknown {self.kind} {name!r}{did_you_mean(name, self._targets)}; known: {names}")
        module, attribute = self._targets[name].split(":")
        return cast("T", getattr(importlib.import_module(module), attribute))
