"""What is declared is imported by the package, what it imports is declared, and all of it has a tested version."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.test_layers import parsed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
# Distributions whose module is called otherwise, and those that another one loads by itself.
MODULES = {"pyyaml": "yaml", "python-multipart": "python_multipart"}
# What a Python on a machine with a card has where there is no network (CONTRIBUTING.md, "On a card").
AT_HAND = ("torch", "triton", "transformers", "accelerate", "pytest", "hypothesis", "cmake", "ninja")
LOADED_BY = {"accelerate": "transformers", "sentencepiece": "transformers", "protobuf": "transformers"}


def declared() -> dict[str, list[str]]:
    """Names of distributions, of the package itself (``""``) and of each extra."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [re.split(r"[^\w.-]", name)[0].lower() for name in names] for extra, names in asked.items()}


@functools.cache
def imported() -> frozenset[str]:
    """Modules of others that the package imports, anywhere."""
    return frozenset(_imported())


def _imported() -> Iterator[str]:
    for path in (ROOT / "moelight").rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                yield from (name.name.split(".")[0] for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.split(".")[0]


OURS = {extra: names for extra, names in declared().items() if extra != "dev"}


@pytest.mark.parametrize("name", sorted({name for names in OURS.values() for name in names}))
def test_what_is_declared_is_used(name: str) -> None:
    used = LOADED_BY.get(name, name)
    assert MODULES.get(used, used.replace("-", "_")) in imported()


def test_what_is_imported_is_declared() -> None:
    known_names = {MODULES.get(name, name.replace("-", "_")) for names in OURS.values() for name in names}
    others = imported() - set(sys.stdlib_module_names) - {"moelight"}
    assert others - known_names <= {"datasets", "tqdm"}  # which the harness brings


def test_the_developers_environment_has_every_extra_and_a_version_for_all() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    everything = declared()
    for extra, names in everything.items():
        assert {name.replace("_", "-") for name in names} <= pinned, extra
        assert extra in ("", "dev") or set(names) <= set(everything["dev"]), extra


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_their_needs(names: Iterable[str]) -> set[str]:
    """Distributions, and all that they need without extras, as far as they are installed."""
    result, left = set[str](), [normalised(name) for name in names]
    while left:
        if (name := left.pop()) in result:
            continue
        result.add(name)
        try:
            needs = [Requirement(line) for line in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        left += [normalised(need.name) for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return result


def test_wheels_for_a_machine_without_a_network_are_all_that_its_python_seldom_has() -> None:
    """`make gpu-wheels` fetches what the package, its graphs and its build need beyond what such a Python has."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    variables = dict(re.findall(r"^(\w+) := ([^\n]*)$", text, re.MULTILINE))
    seldom = {normalised(name) for name in variables["SELDOM"].split()}
    tools = [re.split(r"[^\w.-]", name.strip("'"))[0] for name in variables["BUILD_TOOLS"].split()]
    needed = with_their_needs([*OURS[""], *OURS["graph"], *tools, "compressed-tensors"])
    missing = needed - with_their_needs(AT_HAND) - seldom
    assert not missing, f"SELDOM of the Makefile lacks {sorted(missing)}"
