"""Runs the scripts of the benchmarks in this process: one of their own would spend most of its time importing torch."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.process import affinities

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def ran(script: str, *arguments: object, changes: Mapping[str, Any] | None = None) -> Any:
    """The last line that ``script`` prints, which is JSON; ``changes`` are values by the names that have them then."""
    with pytest.MonkeyPatch.context() as patch, _unbound(), contextlib.redirect_stdout(io.StringIO()) as message:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setenv("GOMP_SPINCOUNT", "10000")  # without it a script may start itself again
        patch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
        for name, value in {"make_checkpoint._TRAINING_FILES": 3, **(changes or {})}.items():
            patch.setattr(name, value)
        importlib.import_module(script).main()
    return json.loads(message.getvalue().splitlines()[-1])


@contextlib.contextmanager
def _unbound() -> Iterator[None]:
    """Afterwards every thread may run where it might before: benchmarks bind them to cores."""
    before = affinities()
    try:
        yield
    finally:
        for task in affinities():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(task, before.get(task, before[os.getpid()]))
