"""Forms of native kernels that differ in time alone: what there is, what is in force, and what a machine prefers.

All forms of a kernel give the same results, bit for bit, so that a measurement may choose between them. Forms that
round differently are no variants: instruction sets choose those (`native.bf16_products`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moelight.kernels import native
from moelight.profiles.hardware import KERNELS

# By name in a hardware profile: the number of tokens that meet a stream of bfloat16 weights.
_TOKENS = dict(zip(KERNELS, (1, 2, 4), strict=True))


def forms() -> tuple[str, ...]:
    """The forms of every kernel in `KERNELS`; none without the extension."""
    extension = native.extension()
    return () if extension is None else tuple(map(str, extension.stream_forms()))


def chosen() -> dict[str, str]:
    """The form in force of every kernel in `KERNELS`; empty without the extension."""
    extension: Any = native.extension()
    return {} if extension is None else {name: str(extension.stream(tokens)) for name, tokens in _TOKENS.items()}


def choose(chosen_forms: Mapping[str, str]) -> None:
    """Use the forms ``chosen_forms`` by kernel from now on, in this process. A kernel that is not named, and a form
    that this build does not have, changes nothing."""
    extension: Any = native.extension()
    for name, form in chosen_forms.items():
        if name in _TOKENS and form in forms():
            extension.set_stream(_TOKENS[name], form)


def tokens_of(kernel: str) -> int:
    """The number of tokens for which ``kernel`` of `KERNELS` is measured."""
    return _TOKENS[kernel]
