"""Files of one run, named after its machine: what is printed as Markdown, and the result as JSON."""

from __future__ import annotations

import datetime as dt
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from moelight.kernels import native
from moelight.runtime.measure import PROC, entry, processor_name

# By family and model of cpuinfo; AMD's cores of one family differ by what they can do.
_INTEL = {
    85: "cascade-lake",
    106: "ice-lake",
    108: "ice-lake",
    143: "sapphire-rapids",
    173: "granite-rapids",
    174: "granite-rapids",
    207: "emerald-rapids",
}
_ARM = {"0xd0c": "neoverse-n1", "0xd40": "neoverse-v1", "0xd49": "neoverse-n2", "0xd4f": "neoverse-v2"}
# The first that the processor has.
_UNITS = {
    "amx_bf16": "amx",
    "avx512_bf16": "avx512bf16",
    "avx512_vnni": "avx512vnni",
    "avx512f": "avx512",
    "avx2": "avx2",
    "bf16": "neonbf16",
    "dotprod": "neondots",
    "neon": "neon",
}


class Printed(io.StringIO):
    """Keeps what is printed, and prints it."""

    def __init__(self) -> None:
        super().__init__()
        self._terminal = sys.stdout

    def write(self, text: str) -> int:
        self._terminal.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._terminal.flush()


def machine_name(threads: int, *, proc: Path = PROC) -> str:
    """Core, the best unit that it has, and threads: `zen4-avx512bf16-2threads`."""
    features = native.cpu_features()
    units = next((name for feature, name in _UNITS.items() if features.get(feature)), "scalar")
    return f"{_core(features, proc / 'cpuinfo')}-{units}-{threads}threads"


def _core(features: dict[str, bool], cpuinfo: Path) -> str:
    family, model = entry(cpuinfo, "cpu family"), entry(cpuinfo, "model")
    match entry(cpuinfo, "vendor_id"), family:
        case "AuthenticAMD", "23":
            return "zen2" if int(model) >= 0x30 else "zen"
        case "AuthenticAMD", "25":
            return "zen4" if features["avx512f"] else "zen3"
        case "AuthenticAMD", "26":
            return "zen5"
        case "GenuineIntel", "6":
            return _INTEL.get(int(model), "intel")
    return _ARM.get(entry(cpuinfo, "CPU part"), re.sub(r"[^a-z0-9]+", "-", processor_name().lower()).strip("-"))


def write(directory: Path, benchmark: str, command: str, printed: str, result: dict[str, Any]) -> None:
    """``BENCHMARK_MACHINE_DATE.json`` and ``.md``."""
    today, threads = dt.date.today().isoformat(), result.get("threads", os.cpu_count())
    name = f"{benchmark}_{machine_name(threads)}_{today}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    title = f"# {benchmark} on {processor_name()}, {threads} threads, {today}"
    lines = [title, "", f"## {command}", "", "```", printed.strip(), "```", ""]
    (directory / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")
    print(f"written to {directory / name}.json and .md", file=sys.stderr)
