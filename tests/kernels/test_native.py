"""The extension: loaded once and lazily, honest about what runs, and its absence explained."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from moelight.kernels import native
from moelight.kernels.native import INT8_ACTIVATIONS, NATIVE_OPERATIONS, serving


@pytest.fixture
def forgetful():
    native._load.cache_clear()
    yield
    native._load.cache_clear()


def test_an_extension_that_was_built_loads():
    """Else every test of native kernels would be left out, and nobody would know."""
    assert not native.reason().startswith("the extension does not load")


def test_a_build_for_one_processor_has_what_it_leaves_out():
    """Every function of an instruction set that a header declares has a stand-in, but those that serve several sets or
    that only kernels of the same set call."""
    csrc = Path(__file__).parents[2] / "csrc"
    declares = re.compile(r"^(?:const )?[A-Z]\w+&? (\w+_(?:avx|amx|emulated)\w*)\(.*\);", re.MULTILINE)
    headers = (path.read_text(encoding="utf-8") for path in csrc.glob("*/*.h"))
    declared = {name for text in headers for name in declares.findall(text)}
    absent = (csrc / "absent.cpp").read_text(encoding="utf-8")
    assert len(declared) > 30
    assert declared - set(re.findall(r"(\w+)\(", absent)) == {"turn_lines_avx2"}


def test_asking_does_not_import_torch():
    code = (
        "import sys; from moelight.kernels import native;"
        "native.cpu_features(); native.serving(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_extension_torch_serves_and_the_reason_is_told(forgetful, monkeypatch):
    monkeypatch.setitem(sys.modules, "moelight.kernels._native", None)
    assert not native.available()
    assert native.isa() is None
    assert native.cpu_features() == {}
    assert native.reason() == "the extension was not built"
    assert {row.implementation for row in serving()} == {"torch"}


@pytest.mark.parametrize(
    ("installed", "compiler", "words"),
    [
        (True, None, "install a C++20 compiler (g++ 11 or clang 14 will do), then install moelight again"),
        (True, "/usr/bin/g++", "install moelight again (pip install --force-reinstall"),
        (False, "/usr/bin/g++", "run the installation again"),
    ],
)
def test_the_reason_and_the_remedy_are_those_of_this_installation(
    installed: bool, compiler: str | None, words: str, forgetful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation that was broken off has no metadata; one whose build failed has, with a compiler or without."""

    def version(name: str) -> str:
        if not installed:
            raise PackageNotFoundError(name)
        return "0.1.0"

    monkeypatch.setitem(sys.modules, "moelight.kernels._native", None)
    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("shutil.which", lambda name: compiler if name == "g++" else None)
    assert native.reason() == (
        "the extension was not built" if installed else "the installation of moelight is not complete"
    )
    assert native.remedy().startswith(words)


def test_serving_names_every_operation_once():
    operations = [row.operation for row in serving()]
    assert len(set(operations)) == len(operations)
    assert {*NATIVE_OPERATIONS, INT8_ACTIVATIONS} == set(operations)
    assert native.reason() and not any(native.reason() in row.reason for row in serving())


def test_forcing_an_instruction_set(isa):
    assert native.isa() == isa
    assert f"native {isa}" in {row.implementation for row in serving()}


def test_unknown_instruction_set_is_refused(isa):
    with pytest.raises(ValueError, match="must be auto, scalar"):
        native.extension().set_isa("sse9")
    assert native.isa() == isa


def test_features_cover_every_kernel_to_come():
    if not native.available():
        pytest.skip("the extension is not built")
    wanted = {"avx2", "f16c", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}
    assert wanted <= native.cpu_features().keys()
