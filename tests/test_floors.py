"""Imports go down only: the table of floors, and every module of the package held against it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "moelight"

FLOORS = {
    0: ("core",),
    1: ("profiles",),
    2: ("hrm",),
    3: ("optimizer", "scheduler", "lang", "experts", "observe"),
    4: ("kernels", "memory", "weights"),
    5: ("models",),
    6: ("runtime",),
    7: ("engine", "batch"),
    8: ("cli", "integrations", "serve"),
}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
NEIGHBOURS = {
    ("optimizer", "scheduler"),
    ("lang", "experts"),
    ("batch", "engine"),
    ("cli", "serve"),
    ("cli", "integrations"),
}
WATERLINE = 3
ABOVE_WATER = {"torch", "transformers", "accelerate", "triton", "torchvision", "intel_extension_for_pytorch"}
# Rooms without code, and the face of the package, which imports nothing by itself.
NO_ROOM = {"__init__.py", "__main__.py"}
_TARGET = re.compile(r"(moelight(?:\.\w+)+):\w+")


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).as_posix() not in NO_ROOM)


def imports(path: Path, source: str | None = None) -> Iterator[tuple[int, str]]:
    """``(line, dotted name)`` of everything a module imports, inside functions and by registry targets too."""
    tree = ast.parse(path.read_text(encoding="utf-8") if source is None else source)
    package = ("moelight", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            whole = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{whole}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and (found := _TARGET.fullmatch(node.value))
        ):
            yield node.lineno, found.group(1)


def typing_only(path: Path, source: str | None = None) -> set[int]:
    """Lines under ``if TYPE_CHECKING:``: they bind nothing at run time."""
    tree = ast.parse(path.read_text(encoding="utf-8") if source is None else source)
    guarded = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    return {
        inner.lineno for node in guarded for step in node.body for inner in ast.walk(step) if hasattr(inner, "lineno")
    }


def offences(path: Path, source: str | None = None) -> Iterator[str]:
    room = path.relative_to(PACKAGE).parts[0]
    if room not in FLOOR_OF:
        yield f"{path}: {room} is no room of the table"
        return
    floor, free = FLOOR_OF[room], typing_only(path, source)
    for line, name in imports(path, source):
        where = f"{path.relative_to(PACKAGE.parent)}:{line}: {room} (floor {floor}) imports {name}"
        top, _, rest = name.partition(".")
        if top == "moelight":
            other = rest.partition(".")[0]
            if other in FLOOR_OF and other != room and (room, other) not in NEIGHBOURS and FLOOR_OF[other] >= floor:
                yield f"{where} (floor {FLOOR_OF[other]})"
            elif other not in FLOOR_OF and not other.startswith("__"):
                yield f"{where}: the package's face is for users, import the room"
        elif line in free:
            continue
        elif floor <= WATERLINE and top in ABOVE_WATER:
            yield f"{where}: below the waterline"
        elif floor == 0 and top not in sys.stdlib_module_names:
            yield f"{where}: the ground stands on the standard library alone"


def test_imports_go_down_only() -> None:
    found = [offence for path in modules() for offence in offences(path)]
    assert not found, "\n" + "\n".join(found)


def test_every_room_says_what_it_knows() -> None:
    rooms = [path for path in sorted(PACKAGE.iterdir()) if path.is_dir() and any(path.glob("*.py"))]
    for room in rooms:
        assert (room / "__init__.py").is_file(), f"{room.name} has no __init__.py"
    for path in modules():
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path}: no docstring"


@pytest.mark.parametrize(
    ("module", "source", "offends"),
    [
        ("core/a.py", "import torch", True),
        ("core/a.py", "import numpy", True),
        ("core/a.py", "import json", False),
        ("core/a.py", "from moelight.profiles import model", True),
        ("core/a.py", "def f():\n    import moelight.engine.engine", True),
        ("core/a.py", "from ..hrm import costs", True),
        ("core/a.py", "from . import units", False),
        ("core/a.py", "X = {'a': 'moelight.scheduler.serial:build_serial'}", True),
        ("hrm/a.py", "def f():\n    import torch.nn", True),
        ("hrm/a.py", "if TYPE_CHECKING:\n    import torch", False),
        ("hrm/a.py", "if TYPE_CHECKING:\n    from moelight.models import decoder", True),
        ("observe/a.py", "from moelight.scheduler import serial", True),
        ("optimizer/a.py", "from moelight.scheduler import serial", False),
        ("scheduler/a.py", "from moelight.optimizer import plan", True),
        ("lang/a.py", "from moelight import experts", False),
        ("experts/a.py", "from moelight import lang", True),
        ("kernels/a.py", "import torch", False),
        ("kernels/a.py", "from moelight.memory import arena", True),
        ("batch/a.py", "from moelight.engine.engine import Engine", False),
        ("engine/a.py", "from moelight.batch import job", True),
        ("cli/a.py", "from moelight.serve import watch", False),
        ("serve/a.py", "from moelight.cli import main", True),
        ("engine/a.py", "from moelight import Engine", True),
        ("cli/a.py", "from moelight import __version__", False),
        ("runtime/a.py", "from moelight import __version__", False),
        ("attic/a.py", "", True),
    ],
)
def test_the_test_sees(module: str, source: str, offends: bool) -> None:
    assert bool(list(offences(PACKAGE / module, source))) == offends
