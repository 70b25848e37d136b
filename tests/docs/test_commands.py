"""README names two commands, and CI runs the second."""

from __future__ import annotations

import re

from tests.cli.program import ROOT


def test_ci_runs_the_test_command_that_readme_names() -> None:
    first = re.search(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert first is not None
    named = re.findall(r"\bmake [a-z]+", first[1])
    assert named == ["make demo", "make test"]
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert named[1] in re.sub(r"#.*", "", run)
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in named:
        assert re.search(rf"^{command.split()[1]}:", targets, re.MULTILINE)
