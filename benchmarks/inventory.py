"""List what a user can reach: options, Python names, keys of the .moe language, keys and files that commands write.

python benchmarks/inventory.py > after.txt; diff before.txt after.txt

One line each, sorted, so that two versions are compared by ``diff``. Everything is found from outside (help texts,
signatures, real runs of the bundled model), so the script runs on any version of the package that is installed beside
the interpreter, whatever its modules are called. The last line is one JSON object with the counts.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
# Runs whose files and output are listed; each in one directory, so that later ones read what earlier ones wrote.
RUNS = {
    "dry-run": "generate prompts.jsonl --dry-run --json",
    "generate": "generate prompts.jsonl -o rows.jsonl --token-ids --logprobs 2 --stats stats.json --trace trace.json "
    "--status status.json --metrics metrics.prom --host-memory 90MiB --batch-size 4",
    "generate openai": "generate batch.jsonl -o batch.rows.jsonl --error-file errors.jsonl",
    "generate experts": "generate prompts.jsonl -o small.jsonl --host-memory 90MiB --batch-size 2 "
    "--routing-trace routing.jsonl --expert-stats experts.json --save-expert-profile profile.json",
    "generate twin": "generate prompts.jsonl -o twin.jsonl --device twin --device-memory 250MiB "
    "--stats twin_stats.json",
    "optimize": "optimize --hw t4 --model mixtral --json -o policy.yaml --no-cache",
    "optimize cpu": "optimize --hw laptop-nvme --model qwen3-30b-a3b --json --no-cache",
    "optimize paper": "optimize --hw t4 --model mixtral --estimator paper --json --no-cache",
    "simulate": "simulate --hw t4 --model mixtral --schedule all --json --trace simulated.json",
    "roofline": "roofline --hw t4 --model mixtral --json",
    "inspect": "inspect mixtral --hw t4 --json",
    "report": "report trace.json --json",
    "doctor": "doctor --json --model demo",
    "policy check": "policy check policy.moe --json",
    "policy explain": "policy explain policy.moe",
    "policy replay": "policy replay routing.jsonl --policy policy.moe --json --bound --model demo --hw t4",
    "policy auto": "policy auto --model demo --hw t4 -o auto.moe",
}
# Parts of keys that count or name things of this run, of this machine or of this model.
MADE_UP = re.compile(r"^(\d+|/.*|custom-.*|L\d+|e\d+|.*[ :/].*)$")
REFERENCE = ("policy-language.md", "files.md", "errors.md", "hardware_profiles.md")


def main() -> None:
    result = sorted({*options(), *names(), *reference(), *written(), *shipped()})
    print("\n".join(result))
    print(json.dumps(Counter(line.split()[0] for line in result)))


def options() -> Iterator[str]:
    """Every command and option, and its default."""
    from moelight.cli.main import app

    def walk(command: Any, path: str) -> Iterator[str]:
        yield f"command {path}"
        for parameter in command.params:
            yield f"option {path} {'/'.join([*parameter.opts, *parameter.secondary_opts])} = {parameter.default!r}"
        for name, below in getattr(command, "commands", {}).items():
            yield from walk(below, f"{path} {name}")

    yield from walk(typer.main.get_command(app), "moelight")


def names() -> Iterator[str]:
    """The public Python names, their parameters, fields and methods."""
    import moelight

    for name in moelight.__all__:
        thing = getattr(moelight, name)
        yield f"python {name}"
        if dataclasses.is_dataclass(thing):
            yield from (f"python {name}.{field.name}" for field in dataclasses.fields(thing))
        members = inspect.getmembers(thing, callable) if inspect.isclass(thing) else [("", thing)]
        for member, function in members:
            if member.startswith("_") and member != "__init__":
                continue
            try:
                parameters = inspect.signature(function).parameters
            except (TypeError, ValueError):
                continue
            yield from (f"python {name}.{member}({parameter})" for parameter in parameters)


def reference() -> Iterator[str]:
    """What the reference pages name as code: keys, words, error codes (tests hold the pages to the program)."""
    for page in REFERENCE:
        for word in re.findall(r"`([A-Za-z_][\w.\-]*)`", (ROOT / "docs" / "reference" / page).read_text()):
            yield f"reference {page} {word}"


def shipped() -> Iterator[str]:
    """Profiles and example policies, and the keys of the profiles."""
    for folder in ("hardware_profiles", "model_profiles", "workload_profiles", "examples"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            yield f"shipped {path.relative_to(ROOT)}"


def written() -> Iterator[str]:
    """The keys of everything that the runs write."""
    with tempfile.TemporaryDirectory() as made:
        present = Path(made)
        (present / "prompts.jsonl").write_text((EXAMPLES / "prompts.jsonl").read_text())
        (present / "policy.moe").write_text((EXAMPLES / "policies" / "default.moe").read_text())
        body = {"model": "demo", "messages": [{"role": "user", "content": "add 17 and 25 ="}], "max_tokens": 8}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        (present / "batch.jsonl").write_text(json.dumps(line) + "\n" + '{"custom_id": "b"}\n')
        before = {path.name for path in present.iterdir()}
        for run, words in RUNS.items():
            environment = {**os.environ, "MOELIGHT_CACHE": made + "/cache", "COLUMNS": "100"}
            command = [str(Path(sys.executable).with_name("moelight")), *words.split()]
            done = subprocess.run(command, cwd=present, env=environment, capture_output=True, text=True, check=False)
            yield f"exit {run} {done.returncode}"
            yield from (f"stdout {run} {key}" for key in keys_of(done.stdout))
            for path in sorted(present.iterdir()):
                if path.is_file() and path.name not in before:
                    before.add(path.name)
                    yield f"file {run} {path.name}"
                    yield from (
                        f"key {run} {path.name} {key}" for key in keys_of(path.read_bytes().decode(errors="replace"))
                    )


def keys_of(text: str) -> set[str]:
    """Paths of keys in JSON, JSON lines, YAML or Prometheus's format; none for other text."""
    try:
        return set(paths_of(json.loads(text)))
    except ValueError:
        pass
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return {path for line in lines for path in paths_of(json.loads(line))}
    except ValueError:
        pass
    if any(line.startswith("# TYPE") for line in lines):
        return {re.split(r"[\s{]", line)[0] for line in lines if not line.startswith("#")}
    return {match.group(1) for line in lines if (match := re.match(r"\s*([a-z_]+)(:| =| \{)", line))}


def paths_of(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from paths_of(below, f"{path}.{'*' if MADE_UP.match(key) else key}")
    elif isinstance(value, list):
        for below in value:
            yield from paths_of(below, f"{path}[]")
    else:
        yield path or "."


if __name__ == "__main__":
    main()
