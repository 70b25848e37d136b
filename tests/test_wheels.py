"""An installation from a clone takes its extension from a wheel of the same sources, and from no other."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
BYTES = b"an extension"

pytestmark = pytest.mark.skipif(CMAKE is None, reason="no cmake")


def configure(build: Path, wheels: Path, **options: str) -> str:
    """What cmake says, which would install or compile next."""
    assert CMAKE is not None
    command = [
        CMAKE,
        "-S",
        str(ROOT / "csrc"),
        "-B",
        str(build),
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DSKBUILD=2",
    ]
    command += [f"-DMOELIGHT_WHEELS={wheels}", *(f"-D{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout + done.stderr


def installed(build: Path) -> dict[str, bytes]:
    assert CMAKE is not None
    to = build / "installed"
    subprocess.run([CMAKE, "--install", str(build), "--prefix", str(to)], check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in to.rglob("*") if path.is_file()}


def wheel(directory: Path, sources: bytes, *, python: str = f"{TAG}-{TAG}", machine: str | None = None) -> None:
    machine = machine or platform.machine()
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"moelight-0.1.0-{python}-manylinux_2_34_{machine}.whl", "w") as file:
        file.writestr("moelight/kernels/_native.test.so", BYTES)
        file.writestr("moelight/kernels/_native.sources", sources)
        file.writestr("moelight/__init__.py", "")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The hash of the sources, as an installation states it."""
    build = tmp_path_factory.mktemp("sources")
    configure(build, build)
    return (build / "_native.sources").read_bytes()


def test_a_wheel_of_the_same_sources_saves_the_compiler(tmp_path: Path, sources: bytes) -> None:
    wheel(tmp_path / "dist", sources)
    # nothing that compiles is looked for
    output = configure(tmp_path / "build", tmp_path / "dist", CMAKE_CXX_COMPILER="/nowhere/c++")
    assert f"moelight-0.1.0-{TAG}-{TAG}" in output and "built of the same sources" in output
    assert installed(tmp_path / "build") == {"_native.test.so": BYTES, "_native.sources": sources}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": b"0" * 64 + b"\n"}, "was built of other sources"),
        ({"python": "cp39-cp39"}, None),
        ({"machine": "s390x"}, None),
    ],
)
def test_another_wheel_is_left_alone(
    tmp_path: Path, sources: bytes, changes: dict[str, str | bytes], message: str | None
) -> None:
    wheel(tmp_path / "dist", **{"sources": sources, **changes})
    output = configure(tmp_path / "build", tmp_path / "dist", CMAKE_CXX_COMPILER="/nowhere/c++")
    assert "built of the same sources" not in output and "/nowhere/c++" in output
    assert message is None or message in output


def test_the_hash_is_of_every_source(tmp_path: Path, sources: bytes) -> None:
    copy = tmp_path / "clone"
    shutil.copytree(ROOT / "csrc", copy / "csrc")
    shutil.copytree(ROOT / "moelight" / "formats" / "codebooks", copy / "moelight" / "formats" / "codebooks")
    changed = [copy / "csrc" / "peaks" / "unit.inl", *sorted((copy / "moelight").rglob("*.inc"))[:1]]
    hashes = {sources}
    for number, path in enumerate(changed):
        path.write_bytes(path.read_bytes() + b"\n")
        build = tmp_path / str(number)
        command = [str(CMAKE), "-S", str(copy / "csrc"), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}"]
        subprocess.run([*command, "-DCMAKE_CXX_COMPILER=/nowhere/c++"], check=False, capture_output=True)
        hashes.add((build / "_native.sources").read_bytes())
    assert len(hashes) == 3
