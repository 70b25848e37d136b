"""The inner loops of the kernels for AMX by a model of its ports: what can be said of them without a processor that has
tiles.

    python benchmarks/amx_loops.py [--llvm-mca llvm-mca-19] [--ghz 2.0] [--gb-per-s 5.5]

Each file is compiled to assembly with its own flags. A loop is what lies between a label and a jump back to it, with at
least one product of tiles inside and no smaller such loop. llvm-mca's model of Sapphire Rapids knows the ports of all
instructions but those of tiles. A product every 16 cycles is Intel's 1024 products of bf16 a cycle; 52 cycles until its
sum can be added to, and 16 lines of a load by two ports, are assumed. A loop takes as long as the slowest of

    unit   of products: 16 cycles each
    chain  52 cycles for each product into the same tile
    ports  of loads: two lines a cycle, those of tiles, prefetches and all others
    rest   what llvm-mca says of everything else

`share` is that of the unit. `tokens` is how many make the products take as long as reading the weights from memory
does, at --gb-per-s of one core (a socket's 307 GB/s over 56 cores). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Bytes of weights in memory that become a tile: bf16 or codes of 8 bits; none of attention over a prompt.
FILES = {"ffn/amx.cpp": 1024, "ffn/integers_amx.cpp": 1024, "prefill/amx.cpp": 0}
TILE_TOKENS = 16
# What is printed of a loop: its key in the results, and the format.
COLUMNS = {
    "products": ("products", ""),
    "loads": ("tile_loads", ""),
    "stores": ("tile_stores", ""),
    "spills": ("spills", ""),
    "unit": ("products_cycles", ""),
    "chain": ("chain_cycles", ""),
    "ports": ("loads_cycles", ".0f"),
    "rest": ("rest_cycles", ".1f"),
    "share": ("share", ".0%"),
    "tokens": ("tokens", ".0f"),
}
PRODUCT_CYCLES, CHAIN_CYCLES, TILE_LINES, LINES_PER_CYCLE = 16, 52, 16, 2


@dataclass(frozen=True)
class Loop:
    """Instructions of one iteration."""

    function: str
    lines: list[str]

    def count(self, pattern: str) -> int:
        return sum(bool(re.match(pattern, line)) for line in self.lines)


def main() -> None:
    args = _arguments()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        commands = _commands(Path(scratch))
        for file, weight_bytes in FILES.items():
            result = loops(_assembly(commands[file], Path(scratch)))
            rows += [{"file": file, **_figures(loop, weight_bytes, args)} for loop in result]
    print(f"{'loop':<60}" + "".join(f"{name:>10}" for name in COLUMNS))
    for row in rows:
        name = f"{row['file']} {row['function']}"[:60]
        print(f"{name:<60}" + "".join(f"{row[key]:>10{form}}" for key, form in COLUMNS.values()))
    print(json.dumps({"benchmark": "amx_loops", "ghz": args.ghz, "gb_per_s": args.gb_per_s, "loops": rows}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llvm-mca", default="llvm-mca-19")
    parser.add_argument("--ghz", type=float, default=2.0, help="clock under tile products [2.0]")
    parser.add_argument("--gb-per-s", type=float, default=5.5, help="of memory, for one core [5.5]")
    return parser.parse_args()


def _commands(scratch: Path) -> dict[str, list[str]]:
    """How CMake compiles each file, by its path in csrc."""
    configure = ["cmake", "-S", ROOT / "csrc", "-B", scratch, "-DCMAKE_BUILD_TYPE=Release"]
    result = (f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
    subprocess.run([*configure, *result], check=True, stdout=subprocess.DEVNULL)
    entries = json.loads((scratch / "compile_commands.json").read_text(encoding="utf-8"))
    return {entry["file"].removeprefix(f"{ROOT}/csrc/"): shlex.split(entry["command"]) for entry in entries}


def _assembly(command: list[str], scratch: Path) -> list[str]:
    out = scratch / "loops.s"
    position = command.index("-o")
    compiled = [*command[:position], *command[position + 2 :]]
    compiled[compiled.index("-c")] = "-S"
    subprocess.run([*compiled, "-o", out], check=True, cwd=scratch)
    return out.read_text(encoding="utf-8").splitlines()


def loops(assembly: list[str]) -> list[Loop]:
    """The innermost ones with products of tiles. An inner loop without any is repeated as often as its counter says."""
    labels = {line[:-1]: at for at, line in enumerate(assembly) if re.fullmatch(r"\.L\d+:", line)}
    ends = {}  # a loop with several jumps back ends at the last
    for at, line in enumerate(assembly):
        jump = re.match(r"\tj\w+\t(\.L\d+)$", line)
        if jump and labels.get(jump[1], at) < at:
            ends[labels[jump[1]]] = at
    spans = list(ends.items())
    with_products = [span for span in spans if any("\ttdp" in line for line in assembly[span[0] : span[1]])]
    inside = [a for a in with_products if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in with_products)]
    inside = [(begin, end) for begin, end in inside if _whole(assembly[begin : end + 1])]
    counted = [span for span in spans if span not in with_products]
    return [Loop(_function(assembly, begin), _instructions(assembly, begin, end, counted)) for begin, end in inside]


def _whole(lines: list[str]) -> bool:
    """True if nothing else lies between: no jump leads out for good, and no sums begin or end."""
    leaves = any(f"{jump[1]}:" not in lines for line in lines if (jump := re.match(r"\tjmp\t(\S+)$", line)))
    return not leaves and not any(re.match(r"\ttile(zero|store)", line) for line in lines)


def _function(assembly: list[str], at: int) -> str:
    symbol = next(line[:-1] for line in reversed(assembly[:at]) if line.startswith("_Z"))
    name = subprocess.run(["c++filt", symbol], check=True, text=True, capture_output=True).stdout
    return re.sub(r"\(anonymous namespace\)::|moelight::|void ", "", name).split("(")[0]


def _instructions(assembly: list[str], begin: int, end: int, counted: list[tuple[int, int]]) -> list[str]:
    result: list[str] = []
    at = begin
    while at <= end:
        inner = next((span for span in counted if span[0] == at and span[1] <= end), None)
        if inner is not None:
            times = max(
                (int(count[1]) for line in result[-4:] if (count := re.match(r"movl\t\$(\d+)", line))), default=1
            )
            result += _plain(assembly[inner[0] : inner[1] + 1]) * times
            at = inner[1] + 1
            continue
        result += _plain(assembly[at : at + 1])
        at += 1
    return result


def _plain(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if re.match(r"\t[a-z]", line) and "#" not in line]


def _figures(loop: Loop, weight_bytes: int, args: argparse.Namespace) -> dict[str, Any]:
    sums = Counter(line.split("%")[-1] for line in loop.lines if line.startswith("tdp"))
    products, tile_loads = sum(sums.values()), loop.count("tileload")
    lines = TILE_LINES * tile_loads + loop.count(r"prefetch|(?!tile|lea|test|j)\w+\t[^,]*\([^)]*\),|cmp\w*\t.*\(")
    cycles = {
        "products_cycles": PRODUCT_CYCLES * products,
        "chain_cycles": CHAIN_CYCLES * max(sums.values()),
        "loads_cycles": lines / LINES_PER_CYCLE,
        "rest_cycles": _rest_cycles(loop, args.llvm_mca),
    }
    per_product = max(cycles.values()) / products
    reads = weight_bytes * args.ghz / args.gb_per_s
    return {
        "function": loop.function,
        "products": products,
        "tile_loads": tile_loads,
        "tile_stores": loop.count("tilestore"),
        "spills": loop.count(r"v?mov\w*\t%\wmm\d+, -?\d*\(%r[sb]p\)"),
        **cycles,
        "share": PRODUCT_CYCLES * products / max(cycles.values()),
        "tokens": TILE_TOKENS * reads / per_product,
    }


def _rest_cycles(loop: Loop, llvm_mca: str) -> float:
    """Of everything that is neither a tile's nor a jump."""
    text = "\n".join(line for line in loop.lines if not re.match(r"tile|tdp|j", line)) + "\n"
    command = [llvm_mca, "-mcpu=sapphirerapids", "-instruction-info=0", "-resource-pressure=0"]
    message = subprocess.run(command, input=text, check=True, text=True, capture_output=True).stdout
    return float(re.findall(r"Block RThroughput:\s+([\d.]+)", message)[0])


if __name__ == "__main__":
    main()
