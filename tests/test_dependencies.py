"""What is declared is imported by the package, what it imports is declared, and all of it has a tested version."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
# Distributions whose module is called otherwise, and those that another one loads by itself.
MODULES = {"pyyaml": "yaml", "python-multipart": "python_multipart"}
LOADED_BY = {"accelerate": "transformers", "sentencepiece": "transformers", "protobuf": "transformers"}


def declared() -> dict[str, list[str]]:
    """Names of distributions, of the package itself (``""``) and of each extra."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [re.split(r"[^\w.-]", name)[0].lower() for name in names] for extra, names in asked.items()}


def _imported() -> Iterator[str]:
    """Modules of others that the package imports, anywhere."""
    for path in (ROOT / "moelight").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (name.name.split(".")[0] for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.split(".")[0]


IMPORTED = frozenset(_imported())
OURS = {extra: names for extra, names in declared().items() if extra != "dev"}


@pytest.mark.parametrize("name", sorted({name for names in OURS.values() for name in names}))
def test_what_is_declared_is_used(name: str) -> None:
    used = LOADED_BY.get(name, name)
    assert MODULES.get(used, used.replace("-", "_")) in IMPORTED


def test_what_is_imported_is_declared() -> None:
    known_names = {MODULES.get(name, name.replace("-", "_")) for names in OURS.values() for name in names}
    others = IMPORTED - set(sys.stdlib_module_names) - {"moelight"}
    assert others - known_names <= {"datasets", "tqdm"}  # which the harness brings


def test_the_developers_environment_has_every_extra_and_a_version_for_all() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    everything = declared()
    for extra, names in everything.items():
        assert {name.replace("_", "-") for name in names} <= pinned, extra
        assert extra in ("", "dev") or set(names) <= set(everything["dev"]), extra
