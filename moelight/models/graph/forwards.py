"""Forwards of transformers' modules as Python functions: what they call their cache, in which versions of transformers
differ, and with other functions in place of those that they call. Does not depend on what a module computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

CACHES = ("cache", "cache_params", "past_key_values")  # the names of an argument that is transformers' cache


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name of the cache argument of ``forward``; None if it takes none."""
    taken = inspect.signature(forward).parameters
    return next((name for name in CACHES if name in taken), None)


def undecorated(forward: Callable[..., Any]) -> Any:
    """``forward`` without transformers' decorators, which rename arguments of old callers or switch gradients off."""
    return inspect.unwrap(forward)


def calling(function: FunctionType, functions: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """``function`` with ``functions`` in place of those that it calls by these names."""
    made = FunctionType(
        function.__code__,
        {**function.__globals__, **functions},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
