"""The public face is closed, every name on it loads, and importing it does nothing."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import subprocess
import sys

import pytest

import moelight
import moelight.core

NAMES = [
    "Completion",
    "Engine",
    "Plan",
    "Policy",
    "PoolingParams",
    "SamplingParams",
    "Workload",
    "attach",
    "auto_attach",
    "load_policy",
    "optimize",
    "simulate",
]


def test_the_face_is_closed() -> None:
    assert moelight.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_loads(name: str) -> None:
    assert getattr(moelight, name).__name__ == name
    assert name in dir(moelight)


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Enigne"):
        moelight.Enigne  # noqa: B018


def test_importing_does_nothing() -> None:
    code = (
        "import sys, threading; before = set(sys.modules); import moelight; dir(moelight); "
        "print(sorted(m for m in set(sys.modules) - before if m.startswith(('torch', 'numpy', 'moelight.'))), "
        "threading.active_count())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (out.stdout, out.stderr) == ("[] 1\n", "")


def test_the_nouns_are_frozen_keyword_only_and_slotted() -> None:
    seen = 0
    for module in pkgutil.iter_modules(moelight.core.__path__, "moelight.core."):
        for noun in vars(importlib.import_module(module.name)).values():
            if isinstance(noun, type) and dataclasses.is_dataclass(noun) and noun.__module__ == module.name:
                seen += 1
                assert noun.__dataclass_params__.frozen, noun  # type: ignore[attr-defined]
                assert "__slots__" in vars(noun), noun
                assert all(field.kw_only for field in dataclasses.fields(noun)), noun
    assert seen >= 10
