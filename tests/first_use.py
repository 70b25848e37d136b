"""What a new user does first, in a root of Debian's packages without a compiler, with times: `make transcript`.

    python -m tests.first_use [--wheels dist] [--gguf FILE] [--compiler] [--out FILE.md] [--share PATH ...]
        [--env NAME=VALUE ...]

Needs what `tests.images` needs, and the wheel of `make wheels`. The root is made anew in build/images. ``--gguf`` is a
file that is run, too, such as those that `make real` fetches; ``--compiler`` installs a compiler at the end, and runs
`make demo` once more without a wheel. The last line is JSON: seconds by step, and the exit code is 1 where a command
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tests.images import BUILD, HERE, PATH, Builder, Setting, debian_root

SUITE, WHEELS, USER, ROWS = "bookworm", "moelight-*-cp311-*.whl", "user", 60_000
PACKAGES = "ca-certificates python3 python3-venv libgomp1 git make"
COMPILER = "g++ python3-dev"
SHOWN_LINES = 24
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\n]*\r(?!\n)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What is wanted, and the commands; ``codes``: the exit codes that they should have."""

    name: str
    commands: tuple[str, ...]
    codes: tuple[int, ...] = (0, 0)


STEPS = (
    Step(
        name="Install the wheel without a compiler",
        commands=("python3 -m venv ~/.venv", "~/.venv/bin/pip install '/srv/wheels/NAME.whl[graph]'"),
    ),
    Step(
        name="Clone, and see the first answers",
        commands=("git clone /srv/moelight.git moelight", "MOELIGHT_WHEELS=/srv/wheels make -C moelight demo"),
    ),
    Step(name="Plan for a GPU by its name", commands=("moelight optimize --hw rtx4090 --model qwen3-30b-a3b",)),
    Step(
        name="Interrupt a job of one's own file, and go on",
        commands=(
            "timeout --signal=INT 30 moelight generate mine.jsonl -o answers.jsonl",
            "moelight generate mine.jsonl -o answers.jsonl",
        ),
        codes=(124, 0),
    ),
    Step(
        name="Which machine should I rent?",
        commands=("moelight optimize --hw rtx3090,rtx4090,l4,a100-80g,cpu-avx2 --model mixtral",),
    ),
)
GGUF_STEP = Step(
    name="Run a GGUF file",
    commands=("moelight generate moelight/examples/prompts.jsonl --model /srv/model.gguf --max-tokens 16 --show",),
)
BUILT_STEP = Step(
    name="The first answers without a wheel, with a compiler",
    commands=("git clone /srv/moelight.git built", "make -C built demo"),
)


def main() -> int:
    args = _arguments()
    wheel = next(iter(sorted(args.wheels.glob(WHEELS))), None)
    if os.geteuid() != 0 or shutil.which("debootstrap") is None or wheel is None:
        print(f"make transcript needs to be root, debootstrap, and {args.wheels / WHEELS}", file=sys.stderr)
        return 1
    env = dict(one.split("=", 1) for one in args.env)
    builder = Builder({}, {}, {"DEBIAN_FRONTEND": "noninteractive", **env}, args.share)
    user = _prepare(builder, wheel)
    steps = STEPS
    if args.gguf is not None:
        shutil.copy(args.gguf, user.root / "srv" / "model.gguf")
        steps = (*STEPS, GGUF_STEP)
    taken = {step.name: _take(builder, user, step, wheel) for step in steps}
    if args.compiler:
        builder.run(replace(user, user="root"), ["/bin/sh", "-c", f"apt-get install --yes -q=2 {COMPILER}"])
        taken[BUILT_STEP.name] = _take(builder, user, BUILT_STEP, wheel)
    if args.out is not None:
        args.out.write_text(_markdown(taken), encoding="utf-8")
    failed = [name for name, commands in taken.items() if not all(one.correct for one in commands)]
    seconds = {name: [round(one.seconds, 1) for one in commands] for name, commands in taken.items()}
    print(json.dumps({"seconds": seconds, "failed": failed}))
    return bool(failed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A command, what it wrote, and how long it took."""

    command: str
    output: str
    seconds: float
    correct: bool


def _prepare(builder: Builder, wheel: Path) -> Setting:
    """A root with Python and git, a user, the repository and the wheel; what the user's commands run in."""
    root = BUILD / "first-use"
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run(["cp", "--archive", "--reflink=auto", debian_root(SUITE), root], check=True)
    administrator = Setting(root=root)
    builder.run(
        administrator,
        ["/bin/sh", "-c", f"apt-get update -q=2 && apt-get install --yes -q=2 --no-install-recommends {PACKAGES}"],
    )
    (root / "srv" / "wheels").mkdir()
    shutil.copy(wheel, root / "srv" / "wheels")
    subprocess.run(["git", "clone", "--quiet", "--bare", HERE, root / "srv" / "moelight.git"], check=True)
    builder.run(administrator, ["/bin/sh", "-c", f"useradd --create-home {USER} && chown -R {USER} /srv"])
    home = f"/home/{USER}"
    draw = random.Random(1)
    rows = [{"custom_id": f"row-{n}", "prompt": f"add {draw.randrange(999)} and {n} ="} for n in range(ROWS)]
    (root / home.lstrip("/") / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    builder.run(administrator, ["chown", USER, f"{home}/mine.jsonl"])
    return replace(
        administrator,
        user=USER,
        directory=home,
        env={"HOME": home, "PATH": f"{home}/.venv/bin:{PATH}", "LANG": "C.UTF-8", "COLUMNS": "100"},
    )


def _take(builder: Builder, user: Setting, step: Step, wheel: Path) -> tuple[Taken, ...]:
    print(f"## {step.name}", flush=True)
    result = []
    commands = [command.replace("NAME.whl", wheel.name) for command in step.commands]
    for command, wanted in zip(commands, step.codes, strict=False):
        began = time.monotonic()
        output = builder.run(user, ["/bin/sh", "-c", f"{{ {command}; }} 2>&1; echo code $?"])
        output, _, code = output.rstrip("\n").rpartition("code ")
        correct = int(code) == wanted
        result.append(Taken(command=command, output=output, seconds=time.monotonic() - began, correct=correct))
    return tuple(result)


def _markdown(taken: dict[str, tuple[Taken, ...]]) -> str:
    lines = ["# The first minutes of a new user", "", f"A root of Debian {SUITE}, no compiler, packages from an index."]
    for name, commands in taken.items():
        lines += ["", f"## {name}", ""]
        for one in commands:
            shown = [line.rstrip() for line in _CONTROL.sub("", one.output).splitlines()]
            if len(shown) > SHOWN_LINES:
                shown = ["…", *shown[-SHOWN_LINES:]]
            lines += ["```", f"$ {one.command}", *shown, "```", "", f"{one.seconds:.1f} s", ""]
    return "\n".join(lines).rstrip() + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, default=HERE / "dist", help="where make wheels left them")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="run this file, too")
    parser.add_argument("--compiler", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the transcript to this file")
    parser.add_argument("--share", type=Path, action="append", default=[], metavar="PATH")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
