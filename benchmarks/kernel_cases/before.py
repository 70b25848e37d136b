"""The same cases in another checkout of moelight, in turns with this one, each in a process of its own.

Both measure with their own benchmark. Contenders of one name are compared by the least of their milliseconds over
rounds: processes differ by more than kernels do in where their memory lies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.run import in_rounds

HERE = Path(__file__).resolve().parents[2]
SLOWER = 0.98  # less than this is called slower


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A checkout and the interpreter of its environment; milliseconds by case and contender, a list for each."""

    path: Path
    python: str
    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def measure(self, case: str, options: list[str]) -> None:
        """One run of ``case`` with its own benchmark."""
        command = [self.python, "benchmarks/kernels.py", *options, "--only", f"{case} "]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(command, cwd=self.path, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{self.path}: {case}: {done.stderr.strip()[-600:]}")
        for row in json.loads(done.stdout.splitlines()[-1])["rows"]:
            if "ms" in row:
                self.samples.setdefault((row["case"], row["who"]), []).append(row["ms"])


def compare(cases: list[str], before: Path, rounds: int, options: list[str]) -> list[dict[str, Any]]:
    """A row for each contender of ``cases`` that is measured on both sides, printed as its case ends.

    Args:
        before: the other checkout, with its `.venv`.
        options: of the benchmark, for both.
    """
    now = Checkout(path=HERE, python=sys.executable)
    other = Checkout(path=before, python=str(before / ".venv" / "bin" / "python"))
    rows = []
    for case in cases:
        for _, order in in_rounds([now, other], rounds):
            for checkout in order:
                checkout.measure(case, options)
        for (name, who), present in now.samples.items():
            earlier = other.samples.get((name, who), [])
            if name == case and earlier:
                rows.append(_row(case, who, present, earlier))
                print(_line(rows[-1]), flush=True)
    return rows


def _row(case: str, who: str, present: list[float], earlier: list[float]) -> dict[str, Any]:
    ratio = min(earlier) / min(present)
    return {
        "case": case,
        "who": who,
        "ms": present,
        "before_ms": earlier,
        "ratio": ratio,
        "below": [f"ratio < {SLOWER}"] if ratio < SLOWER else [],
    }


def _line(row: dict[str, Any]) -> str:
    start = (
        f"{row['case']:<30}{row['who']:<40}{min(row['before_ms']):>10.3f}{min(row['ms']):>10.3f}{row['ratio']:>8.2f}"
    )
    return start + ("  BELOW: " + ", ".join(row["below"]) if row["below"] else "")


HEADING = f"{'case':<30}{'who':<40}{'before':>10}{'ms':>10}{'ratio':>8}"
