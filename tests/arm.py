"""Cross-compiles the extension for 64-bit Arm, and runs the kernels' tests with it under qemu-user: `make arm`.

    python -m tests.arm [--cpu max|neoverse-n1|cortex-a72 ...] [arguments of pytest]

The processors are models of qemu: `max` has dotprod, i8mm and bf16, neoverse-n1 dotprod, cortex-a72 none. All tests run
on the first; on the others those whose code depends on these units. Everything is kept in build/arm: a root of Debian
packages with Python, packages of PyPI for Arm, the extension. Nothing of the machine is changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parents[1]
BUILD = HERE / "build" / "arm"
ROOT, SITE, WHEELS = BUILD / "root", BUILD / "site", BUILD / "wheels"
COMPLETE = ".complete"
TOOLS = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
    "apt-get": "Debian",
    "dpkg": "Debian",
}
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SUITE, PYTHON = "bookworm", "3.11"
# A build that wants no CUDA, unlike later ones for Arm.
TORCH = "torch==2.9.1"
PACKAGES = (
    *("numpy", "msgspec", "pyyaml", "psutil", "safetensors", "gguf", "tqdm"),
    *("sympy", "mpmath", "typing-extensions", "filelock", "jinja2", "markupsafe", "networkx", "fsspec"),
    *("pytest", "iniconfig", "pluggy", "packaging", "pygments", "hypothesis", "sortedcontainers"),
)
LIBRARY_VERSIONS = ("_2_34", "_2_31", "_2_28", "_2_27", "_2_26", "_2_17", "2014")  # pip takes each by its name alone
PRODUCTS = ("linear", "ffn", "quantized_ffn", "integers", "native")
OTHERS = ("attention", "prefill_cpu", "mla", "delta", "norm", "routing", "quantized", "repack", "layer", "peaks")
CPUS = {"max": PRODUCTS + OTHERS, "neoverse-n1": PRODUCTS, "cortex-a72": PRODUCTS}
# This torch lends no float8 to an extension, nor scales of NVFP4, and its ldexp is infinite where the power alone is.
CHOSEN = "not scalar and not torch and not fp8 and not nvfp4 and not (test_dequantize and mxfp4)"
# Nor is there an interpreter that this processor starts by itself.
LEFT_OUT = (
    "tests/kernels/test_integers.py::test_refusals",
    "tests/kernels/test_native.py::test_asking_does_not_import_torch",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="append", choices=CPUS, help="one of qemu's models; all three if not given")
    args, asked = parser.parse_known_args()
    missing = [f"{tool} ({package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    missing += [] if KEYS.exists() else [f"{KEYS} (debian-archive-keyring)"]
    if missing:
        print(f"make arm needs {', '.join(missing)}", file=sys.stderr)
        return 1
    make_root()
    fetch_packages()
    extension = build()
    return max(run(cpu, extension, asked) for cpu in args.cpu or CPUS)


def make_root() -> None:
    """Unpacks Debian's Python for Arm, with what it needs; no package is installed."""
    if (ROOT / COMPLETE).exists():
        return
    apt = BUILD / "apt"
    for position in ("lists/partial", "archives/partial"):
        (apt / position).mkdir(parents=True, exist_ok=True)
    sources = apt / "sources.list"
    sources.write_text(f"deb [signed-by={KEYS}] http://deb.debian.org/debian {SUITE} main\n", encoding="utf-8")
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": apt,
        "Dir::State::status": "/dev/null",
        "Dir::Cache": apt,
    }
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*command, "update"], check=True)
    names = [f"python{PYTHON}-minimal", f"libpython{PYTHON}-dev", "libstdc++6"]
    subprocess.run([*command, "install", "--download-only", "--yes", "--no-install-recommends", *names], check=True)
    for package in sorted((apt / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, ROOT], check=True)
    (ROOT / COMPLETE).touch()


def fetch_packages() -> None:
    if (SITE / COMPLETE).exists():
        return
    platforms = [f"--platform=manylinux{version}_aarch64" for version in LIBRARY_VERSIONS]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", WHEELS]
    pip += ["--implementation=cp", f"--python-version={PYTHON}", *platforms]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "--constraint", _constraints(), *PACKAGES], check=True)
    for wheel in sorted(WHEELS.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(SITE)
    (SITE / COMPLETE).touch()


def _constraints() -> Path:
    """Those of this project for everything but torch."""
    lines = (HERE / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    result = BUILD / "constraints.txt"
    result.write_text("".join(line for line in lines if not line.startswith("torch==")), encoding="utf-8")
    return result


def build() -> Path:
    """The extension, by CMake and the compiler of this machine and the headers of the root."""
    position = BUILD / "native"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
        "CMAKE_CXX_FLAGS": f"-idirafter {ROOT}/usr/include",
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": ROOT / "usr" / "include" / f"python{PYTHON}",
    }
    values = [f"-D{name}={value}" for name, value in variables.items()]
    present = os.environ | {"PATH": path}
    subprocess.run(["cmake", "-S", HERE / "csrc", "-B", position, "-G", "Ninja", *values], check=True, env=present)
    subprocess.run(["cmake", "--build", position], check=True, env=present)
    return next(position.glob("_native*.so"))


def run(cpu: str, extension: Path, asked: Sequence[str]) -> int:
    """The tests that are asked for, or those of the processor, by what is best on it; the result of pytest."""
    tests = [f"tests/kernels/test_{name}.py" for name in CPUS[cpu]]
    arguments = list(asked) or ["-k", CHOSEN, *(f"--deselect={test}" for test in LEFT_OUT), *tests]
    print(f"qemu-user, -cpu {cpu}", flush=True)
    emulator = ["qemu-aarch64-static", "-cpu", cpu, "-L", ROOT, "-E", f"PYTHONPATH={SITE}:{HERE}"]
    python = [ROOT / "usr" / "bin" / f"python{PYTHON}", HERE / "tests" / "with_extension.py", extension]
    command = [*emulator, *python, "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, check=False, cwd=HERE).returncode


if __name__ == "__main__":
    sys.exit(main())
