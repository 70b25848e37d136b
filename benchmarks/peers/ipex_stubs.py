"""Stand-ins for NVIDIA's libraries, so that a CUDA build of torch loads where there is no GPU and none of them.

    ENV/bin/python benchmarks/peers/ipex_stubs.py

IPEX 2.8 wants torch 2.8, whose wheel on PyPI is the CUDA one. This writes ENV/stubs: for every library that torch's own
need and the environment lacks, one that defines the functions they look for in it, each of which says "no device"
(error 100). With LD_LIBRARY_PATH=ENV/stubs torch then finds no CUDA device, and its CPU half works. Needs gcc and
binutils.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

LIBRARIES = Path(sysconfig.get_paths()["purelib"]) / "torch" / "lib"
THEIRS = re.compile(r"lib(cu|nv|nccl).*")
FUNCTION = re.compile(r"(_*cuda|cu|nvml|nccl|nvtx|nvrtc|nvJit).*")
TEXT = re.compile(r".*(Error|Status)(String|Name)|.*get_error_string|.*GetVersionString")
FINE = re.compile(r"cuda(Get|PeekAt)LastError|__cudaRegister.*")


def main() -> None:
    stubs = Path(sys.prefix) / "stubs"
    stubs.mkdir(exist_ok=True)
    needed, wanted = _needed_and_wanted()
    for library in sorted(needed):
        # Functions are looked for under their library's name as version; those without one may be in any library.
        names = sorted(wanted.get(library, wanted.get("", set())))
        source, versions = stubs / "stub.c", stubs / "stub.map"
        source.write_text("".join(map(_function, names)))
        versions.write_text(f"{library} {{ global: *; }};\n")
        options = [f"-Wl,--version-script={versions}"] if library in wanted else []
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", source, f"-Wl,-soname,{library}", *options]
        subprocess.run([*command, "-o", stubs / library], check=True)
        source.unlink()
        versions.unlink()
        print(f"{library}: {len(names)} functions")


def _needed_and_wanted() -> tuple[set[str], dict[str, set[str]]]:
    """Libraries that torch's own need, and the functions they want, by version."""
    needed, wanted, defined = set[str](), dict[str, set[str]](), set[str]()
    for library in LIBRARIES.glob("*.so*"):
        names = re.findall(r"NEEDED.*\[(.*)\]", _said("readelf", "-d", library))
        needed |= {name for name in names if THEIRS.match(name)}
        for line in _said("nm", "-D", library).splitlines():
            kind, name = line.split()[-2:]
            name, _, version = name.partition("@")
            if kind not in "Uwv":
                defined.add(name)
            elif FUNCTION.fullmatch(name):
                wanted.setdefault(version.lstrip("@"), set()).add(name)
    return needed, {version: names - defined for version, names in wanted.items()}


def _function(name: str) -> str:
    if TEXT.fullmatch(name):
        return f'const char* {name}() {{ return "no CUDA here"; }}\n'
    return f"long {name}() {{ return {0 if FINE.fullmatch(name) else 100}; }}\n"


def _said(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
