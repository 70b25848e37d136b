"""Imports transformers without what no module graph uses: without triton and scipy it keeps 137 MiB beside torch, not
241 (docs/log.md)."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from moelight.core.errors import ConfigError


@cache
def transformers_of_graphs() -> Any:
    """The module transformers; raises ConfigError if it, or greenlet, is missing."""
    try:
        importlib.import_module("greenlet")
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"this family needs transformers and greenlet: pip install 'moelight[graph]' ({error})"
        ) from None
    _import_without_triton("torch._dynamo", "torch.utils.flop_counter")
    with _imported_when_called("scipy.optimize"):  # its losses of object detection
        importlib.import_module("transformers.modeling_utils")
    return transformers


def _import_without_triton(*names: str) -> None:
    """Import modules of torch that import triton (70 MiB) where it is installed, unless something here may run it: who
    imports it or compiles later finds it."""
    import torch

    if torch.accelerator.is_available() or "triton" in sys.modules:
        return
    from torch.utils._triton import has_triton_package

    sys.modules["triton"] = None  # type: ignore[assignment]
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # that flops of triton's kernels are not counted: there are none
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        logging.disable(disabled)
        del sys.modules["triton"]
        has_triton_package.cache_clear()


class _ImportedWhenCalled(ModuleType):
    """A module of functions, each of which imports the module when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)

        return call


@contextmanager
def _imported_when_called(name: str) -> Iterator[None]:
    """Meanwhile ``from name import …`` gives functions that import the module when they are called."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = _ImportedWhenCalled(name)
    try:
        yield
    finally:
        del sys.modules[name]
