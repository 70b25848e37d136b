"""The policy language: milliseconds to parse and check each policy of the corpus, and seconds of the command line.

The command's seconds stand beside those of Python's own start and of a command's help in the same turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from moelight.lang.check import read
from moelight.lang.files import read_file

ROOT = Path(__file__).resolve().parents[2]
CORPUS, EXAMPLES = ROOT / "tests" / "lang" / "corpus", ROOT / "examples" / "policies"
REPEATS, ROUNDS, STARTS = 20, 5, 7


def run() -> dict[str, Any]:
    """``corpus``, ``examples``: ms by file, best of the rounds; ``cli``: s, best of the starts."""
    return {
        "corpus": {kind: _of_files(sorted((CORPUS / kind).glob("*.moe"))) for kind in ("good", "bad")},
        "examples": _of_files(sorted(EXAMPLES.glob("*.moe"))),
        "cli": _command_line(),
    }


def _of_files(files: list[Path]) -> dict[str, Any]:
    spent = {path.stem: _milliseconds(read_file(path).text) for path in files}
    slowest = max(spent, key=lambda name: spent[name])
    return {
        "files": len(spent),
        "median_ms": statistics.median(spent.values()),
        "slowest_ms": spent[slowest],
        "slowest": slowest,
        "under_1_ms": sum(item <= 1.0 for item in spent.values()),
    }


def _milliseconds(text: str) -> float:
    """Of one reading. The first, which builds the parser's tables, was made when the file was opened."""
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(REPEATS):
            read(text)
        best = min(best, (time.perf_counter() - begun) / REPEATS)
    return best * 1e3


def _command_line() -> dict[str, Any]:
    files = [str(path) for path in sorted(EXAMPLES.glob("*.moe"))]
    program = ["-m", "moelight.cli.main"]
    commands = {
        "python_s": ["-c", "pass"],
        "help_s": [*program, "--help"],
        "command_help_s": [*program, "policy", "check", "--help"],
        "check_one_s": [*program, "policy", "check", files[0]],
        "check_all_examples_s": [*program, "policy", "check", *files],
        "explain_s": [*program, "policy", "explain", files[0]],
    }
    best = dict.fromkeys(commands, float("inf"))
    for _ in range(STARTS):
        for name, arguments in commands.items():
            begun = time.perf_counter()
            subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            best[name] = min(best[name], time.perf_counter() - begun)
    return best


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
