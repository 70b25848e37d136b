"""The image and its services ask for what the package has; `make images` takes the steps themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cases import thorough
from tests.images import DOCKERFILE, HERE, context_files, read_stages

STAGES = read_stages(DOCKERFILE.read_text(encoding="utf-8"))
try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib


def test_stages_build_on_each_other() -> None:
    assert set(STAGES) == {"base", "build", "cpu-build", "cuda-build", "cpu", "cuda"}
    for stage in STAGES.values():
        assert stage.parent in STAGES or stage.parent.startswith("debian:")
        for word, rest in stage.steps:
            if source := re.match(r"--from=(\S+)", rest):
                assert word == "COPY" and source[1] in STAGES
    assert list(STAGES)[-1] == "cpu", "the one that is built without a target"
    for name in ("cpu", "cuda"):
        steps = dict(STAGES[name].steps)
        assert steps["USER"] == "moelight" and steps["ENTRYPOINT"] == '["moelight"]'


def test_extras_are_those_of_the_package() -> None:
    extras = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = [
        name for stage in STAGES.values() for _, rest in stage.steps for name in re.findall(r"'\.\[(.*?)\]'", rest)
    ]
    assert len(asked) == 2 and {name for names in asked for name in names.split(",")} <= set(extras)


def test_what_the_package_is_built_of_is_copied() -> None:
    copied = {path.name for path in context_files()}
    build = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]
    needed = {*build["wheel"]["packages"], build["cmake"]["source-dir"], *build["wheel"]["force-include"]}
    assert copied == needed | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}


@pytest.mark.parametrize("name", thorough(["serve", "watch"], but=["serve"]))
def test_services_start(name: str, tmp_path: Path) -> None:
    """As their commands say, but for folders and the port: they say what they serve, and end when asked."""
    service = yaml.safe_load((HERE / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"][name]
    assert service["build"]["target"] in STAGES
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    words = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word).replace("/data", str(tmp_path)) for word in service["command"]]
    port = ["--port", "0"] if "ports" in service else []
    command = [sys.executable, "-m", "moelight", *words, *port]
    with subprocess.Popen(command, cwd=HERE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        started = program.stderr.readline()
        program.terminate()
    assert str(tmp_path) in started and "error" not in started
    assert program.returncode in (0, 130, 143, -15)
