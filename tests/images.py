"""Takes the steps of docker/Dockerfile in a root of Debian's packages, without a daemon, and answers prompts there:
`make images`.

    python -m tests.images [--target cpu] [--share PATH ...] [--arg NAME=VALUE ...] [--env NAME=VALUE ...]

Needs to be root, debootstrap and a network. A stage is a directory in build/images; its commands run in it with their
user, directory and variables alone. ``--share`` mounts a file or directory of this machine there, such as a mirror of
packages and the configuration of pip that names it; ``--arg`` is a build argument; ``--env`` a variable that all
commands have, such as the certificates of a proxy.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).parents[1]
DOCKERFILE, IGNORED = HERE / "docker" / "Dockerfile", HERE / ".dockerignore"
BUILD = HERE / "build" / "images"
DEBIAN = re.compile(r"debian:(\w+)-slim")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROMPTS = ({"prompt": "add 17 and 25 ="}, {"prompt": "sort window ="})


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A ``FROM`` and the steps behind it, each a word and its arguments."""

    name: str
    parent: str
    steps: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the steps of a stage leave to the next ones."""

    root: Path
    env: Mapping[str, str] = field(default_factory=dict)
    args: Mapping[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: str = "root"
    entrypoint: tuple[str, ...] = ()


def read_stages(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name."""
    result: dict[str, Stage] = {}
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            parent, _, name = rest.partition(" AS ")
            result[name] = Stage(name=name, parent=parent, steps=())
        elif word:
            last = next(reversed(result.values()))
            result[last.name] = replace(last, steps=(*last.steps, (word, rest.strip())))
    return result


def context_files() -> list[Path]:
    """What ``COPY . .`` copies: top-level files and directories that the ignore file excepts."""
    patterns = [line[1:] for line in IGNORED.read_text(encoding="utf-8").splitlines() if line.startswith("!")]
    return [path for path in sorted(HERE.iterdir()) if any(fnmatch(path.name, pattern) for pattern in patterns)]


class Builder:
    """Builds stages, each once."""

    def __init__(
        self, stages: Mapping[str, Stage], args: Mapping[str, str], env: Mapping[str, str], shared: Sequence[Path]
    ) -> None:
        self._stages, self._args, self._env, self._shared = stages, args, env, shared
        self._built: dict[str, Setting] = {}

    def build(self, name: str) -> Setting:
        if name in self._built:
            return self._built[name]
        if (debian := DEBIAN.fullmatch(name)) is not None:
            return Setting(root=debian_root(debian[1]))
        stage = self._stages[name]
        parent = self.build(stage.parent)
        for source in _sources(stage):
            self.build(source)
        root = BUILD / name
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(["cp", "--archive", "--reflink=auto", parent.root, root], check=True)
        setting = replace(parent, root=root)
        for word, rest in stage.steps:
            print(f"{name}: {word} {rest}", flush=True)
            setting = self._take(setting, word, rest)
        self._built[name] = setting
        return setting

    def _take(self, setting: Setting, word: str, rest: str) -> Setting:
        if word == "ENV":
            return replace(setting, env={**setting.env, **_pairs(rest)})
        if word == "ARG":
            defaults = _pairs(rest)
            return replace(
                setting, args={**setting.args, **defaults, **{k: v for k, v in self._args.items() if k in defaults}}
            )
        if word == "WORKDIR":
            (setting.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            return replace(setting, directory=rest)
        if word == "USER":
            return replace(setting, user=rest)
        if word == "ENTRYPOINT":
            return replace(setting, entrypoint=tuple(json.loads(rest)))
        if word == "COPY":
            self._copy(setting, rest)
        elif word == "RUN":
            self.run(setting, ["/bin/sh", "-c", rest])
        return setting

    def _copy(self, setting: Setting, rest: str) -> None:
        source, target = rest.split()[-2:]
        to = setting.root / str(Path(setting.directory) / target).lstrip("/")
        if rest.startswith("--from="):
            of = self.build(rest.split(maxsplit=1)[0].removeprefix("--from=")).root
            subprocess.run(["cp", "--archive", of / source.lstrip("/"), to], check=True)
            return
        for path in context_files():
            subprocess.run(["cp", "--recursive", path, to / path.name], check=True)

    def run(self, setting: Setting, command: Sequence[str], text: str | None = None) -> str:
        """Run ``command`` in a stage; returns what it wrote, which is shown too. Raises CalledProcessError."""
        mounts = ["mount -t proc proc proc", "mount --rbind /dev dev"]
        for path in (Path("/etc/resolv.conf"), *self._shared):
            inside = str(path).lstrip("/")
            made = f"mkdir -p {inside}" if path.is_dir() else f"mkdir -p {Path(inside).parent} && touch {inside}"
            mounts.append(f"{made} && mount --bind {path} {inside}")
        env = {"PATH": PATH, **self._env, **setting.args, **setting.env}
        entered = ["chroot", f"--userspec={setting.user}", ".", "/usr/bin/env", "--ignore-environment"]
        entered += [
            *(f"{name}={value}" for name, value in env.items()),
            "/bin/sh",
            "-c",
            f'cd {setting.directory} && "$@"',
            "sh",
        ]
        script = " && ".join([*mounts, shlex.join([*entered, *command])])
        done = subprocess.run(
            ["unshare", "--mount", "/bin/sh", "-c", script],
            cwd=setting.root,
            input=text,
            text=True,
            stdout=subprocess.PIPE,
            check=False,
        )
        print(done.stdout, end="", flush=True)
        done.check_returncode()
        return done.stdout


def debian_root(suite: str) -> Path:
    """A root of ``suite`` with its least packages, made once."""
    root = BUILD / f"debian-{suite}"
    if not (root / ".complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["debootstrap", "--variant=minbase", suite, root], check=True, stdout=subprocess.DEVNULL)
        (root / ".complete").touch()
    return root


def _pairs(rest: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(rest))


def _sources(stage: Stage) -> Iterator[str]:
    for word, rest in stage.steps:
        if word == "COPY" and rest.startswith("--from="):
            yield rest.split(maxsplit=1)[0].removeprefix("--from=")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu", help="the stage that is built and tried")
    parser.add_argument("--share", type=Path, action="append", default=[], metavar="PATH")
    for name in ("--arg", "--env"):
        parser.add_argument(name, action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        print("make images needs to be root, and debootstrap (apt-get install debootstrap)", file=sys.stderr)
        return 1
    build_args, env = (dict(one.split("=", 1) for one in options) for options in (args.arg, args.env))
    builder = Builder(read_stages(DOCKERFILE.read_text(encoding="utf-8")), build_args, env, args.share)
    began = time.monotonic()
    setting = builder.build(args.target)
    built_s = time.monotonic() - began
    builder.run(setting, [*setting.entrypoint, "doctor"])
    prompts = "".join(json.dumps(prompt) + "\n" for prompt in PROMPTS)
    began = time.monotonic()
    answers = builder.run(setting, [*setting.entrypoint, "generate", "-"], prompts).splitlines()
    size = int(
        subprocess.run(["du", "-sm", setting.root], check=True, capture_output=True, text=True).stdout.split()[0]
    )
    answered_s = time.monotonic() - began
    print(
        json.dumps({"target": args.target, "built_s": round(built_s), "answered_s": round(answered_s, 1), "mib": size})
    )
    return 0 if [json.loads(line)["text"].strip() for line in answers] == ["42", "dinoww"] else 1


if __name__ == "__main__":
    sys.exit(main())
