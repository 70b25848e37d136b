"""The structure of the package: imports go down only and never in a circle, and a name means one thing."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "moelight"

LAYERS = {
    0: ("core",),
    1: ("profiles", "formats"),
    2: ("hrm",),
    3: ("optimizer", "scheduler", "lang", "experts", "observe"),
    4: ("kernels", "weights"),
    5: ("models", "paging"),
    6: ("runtime",),
    7: ("engine", "batch", "convert"),
    8: ("cli", "integrations", "serve"),
}
LAYER_OF = {package: layer for layer, packages in LAYERS.items() for package in packages}
SIDEWAYS = {
    ("optimizer", "scheduler"),
    ("lang", "experts"),
    ("batch", "engine"),
    ("convert", "engine"),
    ("convert", "batch"),
    ("weights", "kernels"),
    ("profiles", "formats"),
    ("cli", "serve"),
    ("cli", "integrations"),
}
# The longest chain of imports within a package that is kept short, those inside functions apart.
WEIGHTS = {"Matrix", "StoredWeight", "Format"}  # types in which weights are held
MAX_LEVELS = {"kernels": 6}
TORCH_FREE = 3  # the highest layer that imports none of these
TENSOR_LIBRARIES = {"torch", "transformers", "accelerate", "triton", "torchvision", "intel_extension_for_pytorch"}
# Modules without code, and the package's interface, which imports nothing by itself.
NO_PACKAGE = {"__init__.py", "__main__.py"}
MOST_LINES = 60  # of a function with its signature and docstring
# Modules that only one module of their own package imports, and why they are files of their own.
SINGLE_IMPORTER = {
    "batch.columns": "a row format of the registry",
    "batch.openai": "a row format of the registry",
    "batch.status": "status and metrics files, which other programs read",
    "cli.checkpoint_view": "rich output, imported only where something is shown",
    "cli.generate": "a command; serve-batch, whose jobs are such commands, checks their options as it does",
    "cli.job_display": "rich output, imported only where something is shown",
    "convert.gguf_contents": "names, shapes and places, before anything is read",
    "convert.gguf_metadata": "tables: keys of files for fields of configs",
    "convert.gguf_vocabulary": "texts and ids, no tensors",
    "convert.k_quants": "tensor code, no files",
    "convert.rounding": "tensor code, no files",
    "engine.prediction_drafts": "off by a switch",
    "engine.sandbox": "the security boundary of chat templates",
    "experts.adapt": "rules of the language, independent of caches",
    "integrations.paged_modules": "modules that transformers calls",
    "kernels.gpu.attention_triton": "imported only where Triton is installed",
    "kernels.gpu.stored_linear": "a GPU's products, beside those of the CPU",
    "kernels.gpu.unpackers": "imported only where Triton is installed",
    "models.graph.decoder": "the runtime's decoder of module graphs",
    "models.graph.prediction": "one layer of a checkpoint, for drafts alone",
    "optimizer.milp": "the only module that depends on HiGHS",
    "optimizer.published": "the published planner, imported only on request",
    "optimizer.published.formulas": "the published equations, a function each",
    "profiles.families.family": "the one reader of all families, which are data",
    "runtime.calibration.disk": "one kind of measurement",
    "runtime.calibration.forms": "one kind of measurement",
    "runtime.twin": "the emulated device, which a run on a card does without",
    "scheduler.schedules": "the builders of the registry",
    "serve.app": "routes, independent of the server",
    "serve.child_process": "the program of a process of its own",
    "weights.quantized_checkpoint": "what quantised modules are on disk, for a checkpoint of plain matrices",
    "weights.safetensors": "one file format",
}
# Packages with a file for each row of a table, which imports them all.
FILE_A_ROW = ("formats.", "kernels.formats.")
Trees = dict[Path, ast.Module]
_TARGET = re.compile(r"(moelight(?:\.\w+)+):\w+")


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).as_posix() not in NO_PACKAGE)


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A module of the package, for all tests that read its source."""
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def trees() -> Trees:
    return {path: parsed(path) for path in modules()}


def imports(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """``(line, dotted name)`` of everything a module imports, inside functions and by registry targets too."""
    package = ("moelight", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            full = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{full}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := _TARGET.fullmatch(node.value))
        ):
            yield node.lineno, match.group(1)


def typing_only(tree: ast.Module) -> set[int]:
    """Lines under ``if TYPE_CHECKING:``: they bind nothing at run time."""
    guarded = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    return {
        inner.lineno for node in guarded for step in node.body for inner in ast.walk(step) if hasattr(inner, "lineno")
    }


def dotted(path: Path) -> str:
    """The name by which a module of the package is imported."""
    return "moelight." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def modules_of(wanted: Iterable[str]) -> set[str]:
    """Every module that the imports ``wanted`` may name: a name itself, or what it is taken from."""
    return {name for item in wanted for name in (item, item.rpartition(".")[0])}


def offences(path: Path, tree: ast.Module) -> Iterator[str]:
    package = path.relative_to(PACKAGE).parts[0]
    if package not in LAYER_OF:
        yield f"{path}: {package} is no package of the table"
        return
    layer, free = LAYER_OF[package], typing_only(tree)
    for line, name in imports(path, tree):
        where = f"{path.relative_to(PACKAGE.parent)}:{line}: {package} (layer {layer}) imports {name}"
        top, _, rest = name.partition(".")
        if top == "moelight":
            other = rest.partition(".")[0]
            if other in LAYER_OF and other != package and (package, other) not in SIDEWAYS and LAYER_OF[other] >= layer:
                yield f"{where} (layer {LAYER_OF[other]})"
            elif other not in LAYER_OF and not other.startswith("__"):
                yield f"{where}: the package's interface is for users, import the module"
        elif line in free:
            continue
        elif layer <= TORCH_FREE and top in TENSOR_LIBRARIES:
            yield f"{where}: layers 0 to {TORCH_FREE} do not import it"
        elif layer == 0 and top not in sys.stdlib_module_names:
            yield f"{where}: layer 0 depends on the standard library alone"


def test_imports_go_down_only(trees: Trees) -> None:
    result = [offence for path, tree in trees.items() for offence in offences(path, tree)]
    assert not result, "\n" + "\n".join(result)


def test_no_modules_import_each_other(trees: Trees) -> None:
    names = {dotted(path): path for path in trees}
    graph = {}
    for name, path in names.items():
        free = typing_only(trees[path])
        wanted = (imported for line, imported in imports(path, trees[path]) if line not in free)
        graph[name] = modules_of(wanted) & names.keys() - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("package", MAX_LEVELS)
def test_a_package_has_few_levels_of_imports(package: str, trees: Trees) -> None:
    paths = {dotted(path): path for path in trees if path.relative_to(PACKAGE).parts[0] == package}
    graph = {}
    for name, path in paths.items():
        top = ast.Module(body=[node for node in trees[path].body if isinstance(node, ast.Import | ast.ImportFrom)])
        graph[name] = modules_of(imported for _, imported in imports(path, top)) & paths.keys() - {name}
    levels: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        levels[name] = 1 + max((levels[other] for other in graph[name]), default=0)
    assert max(levels.values()) == MAX_LEVELS[package], sorted(levels.items(), key=lambda item: item[1])


def importers(trees: Trees) -> dict[str, set[str]]:
    """For each module, below the package's root, the modules that import it, types included."""
    names = {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for path in trees}
    result: dict[str, set[str]] = {name: set() for name in names}
    for path, tree in trees.items():
        original = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for _, imported in imports(path, tree):
            name = imported.removeprefix("moelight.")
            name = name if name in names else name.rpartition(".")[0]
            if imported.startswith("moelight.") and name in names and name != original:
                result[name].add(original)
    return result


def test_a_module_for_a_single_importer_has_a_reason(trees: Trees) -> None:
    """Modules that only one module of their own package imports are these, or rows of a table; another one joins its
    importer."""
    single = {
        name
        for name, others in importers(trees).items()
        if len(others) == 1 and name.count(".") and name.split(".")[0] == next(iter(others)).split(".")[0]
        if not name.startswith(FILE_A_ROW)
    }
    assert single == SINGLE_IMPORTER.keys()
    assert len(SINGLE_IMPORTER) <= 32


def test_every_package_and_module_has_a_docstring(trees: Trees) -> None:
    packages = [path for path in sorted(PACKAGE.iterdir()) if path.is_dir() and any(path.glob("*.py"))]
    for package in packages:
        assert (package / "__init__.py").is_file(), f"{package.name} has no __init__.py"
    for path, tree in trees.items():
        assert ast.get_docstring(tree), f"{path}: no docstring"


def test_a_class_name_means_one_thing(trees: Trees) -> None:
    defined = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                defined[node.name.lstrip("_")].append(path.relative_to(PACKAGE).as_posix())
    assert not {name: places for name, places in defined.items() if len(places) > 1}


def test_a_public_function_name_means_one_thing(trees: Trees) -> None:
    """Only a kernel and its implementations on other devices share a name."""
    defined = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                defined[node.name].append(path.relative_to(PACKAGE).as_posix())
    shared = {name: places for name, places in defined.items() if len(places) > 1}
    assert not {name: places for name, places in shared.items() if any(not p.startswith("kernels/") for p in places)}


def test_no_function_body_is_longer_than_a_page(trees: Trees) -> None:
    """Signature and docstring apart: an option or an argument is a line of its own."""
    result = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES:
                    result[f"{path.relative_to(PACKAGE)}: {node.name}"] = lines
    assert not result


def test_few_places_ask_how_a_weight_is_held(trees: Trees) -> None:
    """All others take a matrix and ask its format."""
    asked = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        if any(isinstance(part, ast.Name) and part.id in WEIGHTS for part in ast.walk(node.args[1]))
    ]
    assert len(asked) <= 10, asked


def test_few_places_ask_whether_a_matrix_is_quantised(trees: Trees) -> None:
    """A format answers what it is asked, floats too."""
    asked = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "is_quantised"
    ]
    assert len(asked) <= 6, asked


def test_few_places_ask_what_computes_a_model(trees: Trees) -> None:
    """A `DecoderSource` answers what it is asked, of moelight's own decoder and of a module graph."""
    asked = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, tree in trees.items()
        if "graph" not in path.relative_to(PACKAGE).parts
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        if any(isinstance(part, ast.Constant) and part.value in ("native", "graph") for part in ast.walk(node))
    ]
    assert len(asked) <= 4, asked


def test_benchmarks_of_one_kind_are_sections_of_a_script() -> None:
    """What they share is in `benchmarks/runner/`."""
    assert len(list((PACKAGE.parent / "benchmarks").glob("*.py"))) <= 15


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
        ("core/a.py", "X = {'a': 'moelight.scheduler.schedules:build_serial'}", True),
        ("hrm/a.py", "def f():\n    import torch.nn", True),
        ("hrm/a.py", "if TYPE_CHECKING:\n    import torch", False),
        ("hrm/a.py", "if TYPE_CHECKING:\n    from moelight.models import decoder", True),
        ("observe/a.py", "from moelight.scheduler import schedules", True),
        ("optimizer/a.py", "from moelight.scheduler import schedules", False),
        ("scheduler/a.py", "from moelight.optimizer import plan", True),
        ("lang/a.py", "from moelight import experts", False),
        ("experts/a.py", "from moelight import lang", True),
        ("kernels/a.py", "import torch", False),
        ("kernels/a.py", "from moelight.paging import arena", True),
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
    assert bool(list(offences(PACKAGE / module, ast.parse(source)))) == offends
