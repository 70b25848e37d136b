"""Triton's interpreter at the pace of tests, which spend minutes in it: it patches `triton.language` once a launch, and
looks at integers for overflow where a test asks for it (the fixture ``checks_overflow``)."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FunctionType
from typing import Any

_MODULE = "triton.runtime.interpreter"


def hasten() -> None:
    """Once a process, if it interprets at all: no patches at every call of a function within a launch (a fifth of the
    time), and no checks for overflow in every operation (two fifths)."""
    interpreter = sys.modules.get(_MODULE)
    if interpreter is None or getattr(interpreter._patch_lang, "once", False):
        return
    check_overflow(False)
    patch_lang, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    languages = (interpreter.tl, interpreter.tl.core)
    patched: set[tuple[bool, ...]] = set()

    def patch_once(function: FunctionType) -> Any:
        names = tuple(any(value is item for value in function.__globals__.values()) for item in languages)
        if names in patched:
            return interpreter._LangPatchScope()
        scope = patch_lang(function)
        patched.add(names)
        return scope

    def restore_all(scope: Any) -> None:
        if scope._changes:
            patched.clear()
        restore(scope)

    patch_once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once  # type: ignore[attr-defined]
    interpreter._LangPatchScope.restore = restore_all


def check_overflow(on: bool) -> None:
    """Whether sums, differences and products of integers that do not fit are errors, which is Triton's default."""
    if (interpreter := sys.modules.get(_MODULE)) is not None:
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=on)
