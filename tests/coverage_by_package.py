"""The share of executed lines of each package, by layer, from the data file of ``make coverage``."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from coverage import Coverage

from tests.test_layers import LAYER_OF, PACKAGE


def main() -> None:
    measured = Coverage()
    measured.load()
    lines, missing = defaultdict[str, int](int), defaultdict[str, int](int)
    for name in measured.get_data().measured_files():
        package = Path(name).relative_to(PACKAGE).parts[0]
        if package in LAYER_OF:
            _, statements, _, unexecuted, _ = measured.analysis2(name)
            lines[package] += len(statements)
            missing[package] += len(unexecuted)
    print("| layer | package | statements | executed |\n|--:|---|--:|--:|")
    for package in sorted(lines, key=lambda item: (-LAYER_OF[item], item)):
        share = 1 - missing[package] / lines[package]
        print(f"| {LAYER_OF[package]} | `{package}/` | {lines[package]:,} | {share:.0%} |")
    print(f"| | all | {sum(lines.values()):,} | {1 - sum(missing.values()) / sum(lines.values()):.0%} |")


if __name__ == "__main__":
    main()
