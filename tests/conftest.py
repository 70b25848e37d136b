"""What every test shares: markers with teeth, and a closing line about the tests that could not run here."""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import interpreter

# Tensors are tiny here. Two threads a product would wait for each other far longer than they work (50 times slower
# where the cores are busy). Set before torch is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a card Triton's kernels are interpreted, which it decides when it is imported: transformers does that too.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _same_state_every_time() -> None:
    """A test that draws numbers draws the same ones in every run, and torch has the threads that the run began with:
    two that an earlier test left would wait for each other. Tests of packages without torch set nothing."""
    random.seed(0)
    if "torch" in sys.modules:
        _generators().manual_seed(0)
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))


@functools.cache
def _generators() -> Any:
    """What seeds those of all devices. torch itself formats a stack for each device that is not here, a millisecond."""
    return sys.modules["torch"] if _has_gpu() else sys.modules["torch"].default_generator


@pytest.fixture(autouse=True)
def _interpreter_keeps_pace() -> None:
    interpreter.hasten()


@pytest.fixture
def checks_overflow(_interpreter_keeps_pace: None) -> Iterator[None]:
    """Triton's interpreter refuses integers that overflow."""
    interpreter.check_overflow(True)
    yield
    interpreter.check_overflow(False)


@pytest.fixture
def without_extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process computes as an install without the compiled extension does."""
    from moelight.kernels import native

    features = (native.has_tiles, native.has_fast_bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(native, "_load", lambda: (None, "a test hides the extension"))
        for feature in features:
            feature.cache_clear()
        yield
    for feature in features:
        feature.cache_clear()


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without a proof, which takes as long as the search: nobody asks how near the bound comes, nor what a better
    machine would gain."""
    from moelight.optimizer import bound, optimize

    monkeypatch.setattr(bound, "MOST_BOXES", dict.fromkeys(bound.MOST_BOXES, 0))
    monkeypatch.setattr(optimize, "what_if", lambda *_: ())


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu") is not None]
    if gpu_tests and not _has_gpu():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no device"))


def pytest_collection_finish() -> None:
    """What is imported and collected by now is kept for the whole session: the garbage collector need not walk it, nor
    come at every 700 objects. A quarter of the time of tests that make many."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts reports: the process that collects is another where tests run in several."""
    missed = sum("gpu" in report.keywords for report in terminalreporter.stats.get("skipped", ()))
    reason = "no device" if missed else "none was left out"
    terminalreporter.write_line(f"gpu tests not run: {missed} ({reason})")
