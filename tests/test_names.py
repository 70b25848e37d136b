"""Names state a type or a role: ``each``, ``found`` and their like name no variable, parameter or attribute.

The programs of Triton are apart: their text is what `tests/kernels/compiled.json` records. Names of the C++ sources are
read without a parser: their words outside of comments and strings, and classes that begin a line.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import moelight
from tests.test_layers import parsed

PACKAGE = Path(moelight.__file__).parent
ROOT = Path(__file__).parents[1]
WORDS = frozenset(
    {
        "each",
        "found",
        "given",
        "kept",
        "known",
        "mine",
        "most",
        "numbers",
        "own",
        "place",
        "said",
        "there",
        "what",
        "whole",
        "why",
    }
)
# Attributes that are keys of JSON objects, or public, or stand in for such; their number may only fall.
ATTRIBUTES = {
    PACKAGE: {"found": 2, "given": 1, "kept": 1, "place": 1, "why": 3},
    ROOT / "tests": {"why": 2},
    ROOT / "benchmarks": {"why": 1},
}


def assigned(tree: ast.AST) -> tuple[Counter[str], Counter[str]]:
    """The words among the names of variables and parameters of ``tree``, and among those of fields and functions."""
    names, attributes, fields = Counter[str](), Counter[str](), set[int]()
    for node in ast.walk(tree):  # a class before what is in it
        if isinstance(node, ast.ClassDef):
            fields.update(id(statement.target) for statement in node.body if isinstance(statement, ast.AnnAssign))
        elif isinstance(node, ast.Name):
            if node.id in WORDS and isinstance(node.ctx, ast.Store):
                (attributes if id(node) in fields else names)[node.id] += 1
        elif isinstance(node, ast.arg):
            if node.arg in WORDS:
                names[node.arg] += 1
        elif isinstance(node, ast.Attribute):
            if node.attr in WORDS and isinstance(node.ctx, ast.Store):
                attributes[node.attr] += 1
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in WORDS:
            attributes[node.name] += 1
    return names, attributes


@pytest.mark.parametrize("root", ATTRIBUTES, ids=lambda root: root.name)
def test_variables_and_attributes_have_names_of_the_field(root: Path) -> None:
    variables: dict[str, list[str]] = {}
    attributes = Counter[str]()
    for path in sorted(root.rglob("*.py")):
        if path.name.endswith("_triton.py"):
            continue
        of_variables, of_attributes = assigned(
            parsed(path) if root == PACKAGE else ast.parse(path.read_text(encoding="utf-8"))
        )
        attributes += of_attributes
        if of_variables:
            variables[str(path.relative_to(root))] = sorted(of_variables)
    assert variables == {}, "name the type or the role: expert, tensor, result, max_bytes, offset, values, reason"
    assert attributes == ATTRIBUTES[root]


@pytest.mark.parametrize(
    ("source", "variables", "attributes"),
    [
        ("for each in rows: pass", ["each"], []),
        ("def f(given, *, most=1): pass", ["given", "most"], []),
        ("rows = [place for place in places]", ["place"], []),
        ("if (found := f()): pass", ["found"], []),
        ("class A:\n    kept: int\n    def why(self): self.whole = 1", [], ["kept", "whole", "why"]),
        ("import numbers\nf(most=1, each=found.kept)", [], []),
    ],
)
def test_what_counts(source: str, variables: list[str], attributes: list[str]) -> None:
    of_variables, of_attributes = assigned(ast.parse(source))
    assert sorted(of_variables) == variables
    assert sorted(of_attributes) == attributes


CXX_WORDS = WORDS | {"both", "crowds", "enter", "room", "takes", "tame"}
_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
_CLASS = re.compile(
    r"^(?:struct|class|union|enum class)\s+(?:alignas\(\d+\)\s+)?(\w+)(?:\s+final)?\s*(?::[^;{]*)?\{", re.MULTILINE
)


def cxx_sources() -> dict[Path, str]:
    """The code of every C++ file, without comments and strings."""
    files = [path for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in {".cpp", ".h", ".inl", ".cu"}]
    return {path.relative_to(ROOT / "csrc"): _NO_CODE.sub("", path.read_text(encoding="utf-8")) for path in files}


def cxx_words(code: str) -> set[str]:
    """The words among the identifiers of ``code``; a member's underscore does not hide one."""
    return {name for name in re.findall(r"[A-Za-z_]\w*", code) if name.rstrip("_") in CXX_WORDS}


def test_names_in_cxx() -> None:
    sources = {str(path): cxx_words(code) for path, code in cxx_sources().items()}
    assert len(sources) > 100
    assert {path: words for path, words in sources.items() if words} == {}


def test_a_class_name_in_cxx_belongs_to_one_directory() -> None:
    """Within a directory, files of several instruction sets may each define their form of one class."""
    directories = defaultdict(set)
    for path, code in cxx_sources().items():
        for name in _CLASS.findall(code):
            directories[name].add(path.parent)
    assert len(directories) > 150
    assert {name: places for name, places in directories.items() if len(places) > 1} == {}


def test_what_counts_in_cxx() -> None:
    code = _NO_CODE.sub(
        "", 'int found_ = 0;  // each\nauto f = [](int each) { return "room"; };\nstruct Side : Base {\n'
    )
    assert cxx_words(code) == {"found_", "each"} and _CLASS.findall(code) == ["Side"]
