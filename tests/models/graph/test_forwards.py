"""What versions of transformers call a cache, and forwards that call other functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from moelight.models.graph.forwards import CACHES, cache_argument, calling, undecorated


def step(x: int) -> int:
    return x + 1


def renamed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers keeps the former name of an argument."""

    @functools.wraps(forward)
    def wrapped(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        raise AssertionError("called by its former name")

    return wrapped


def with_cache(hidden: int, cache: Any = None, *, times: int = 2) -> int:
    return step(hidden) * times


def with_cache_params(hidden: int, cache_params: Any = None) -> int:
    return hidden


def with_past_key_values(hidden: int, past_key_values: Any = None) -> int:
    return hidden


def without(hidden: int, cache_offset: int = 0) -> int:
    return hidden


@pytest.mark.parametrize(
    ("forward", "name"),
    [*zip((with_cache, with_cache_params, with_past_key_values), CACHES, strict=True), (without, None)],
)
def test_a_forward_says_what_it_calls_its_cache(forward: Callable[..., Any], name: str | None) -> None:
    assert cache_argument(forward) == cache_argument(renamed(forward)) == name


def test_a_forward_calls_other_functions_and_the_function_itself_does_not() -> None:
    made = calling(undecorated(renamed(with_cache)), {"step": lambda x: x + 10})
    assert made(1) == 22
    assert made(1, times=3) == 33
    assert with_cache(1) == 4
