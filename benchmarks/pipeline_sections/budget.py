"""Resident memory under ``--host-memory``: what a run of the command line really takes, beside what it was allowed.

Each budget is a fresh ``moelight generate`` on ragged prompts; its peak is the kernel's own high-water mark
(``VmHWM``), file-backed pages included. The bound is the budget + 5 % + the base: the peak of a process that only
imports torch and the engine. The word ``least`` stands for the least budget that the program names when it refuses.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from runner.limits import measure_base

from moelight.core.units import MiB, parse_bytes
from pipeline_sections.setting import Setting

_WORDS = ("the", "a", "of", "to", "and", "in", "is", "it", "that", "was", "for", "on", "are", "as", "with", "his")


def run(setting: Setting) -> dict[str, Any]:
    """The first resident model under every budget."""
    model, options, base_bytes = setting.models[0], setting.options, measure_base()
    prompts = setting.scratch / "prompts.jsonl"
    write_prompts(prompts, options["budget_prompts"], options["budget_longest"])
    rows = [measure(model, prompts, budget, options["budget_new"], base_bytes) for budget in options["budgets"]]
    print(f"base (torch and the engine imported): {base_bytes / MiB:.0f} MiB")
    print(f"{'budget MiB':>12}{'peak':>9}{'bound':>9}{'of bound':>10}{'passes':>8}{'disk GiB':>10}")
    for row in rows:
        figures = (row["budget_bytes"] / MiB, row["peak_rss_bytes"] / MiB, row["bound_bytes"] / MiB)
        disk = row["disk_bytes"] / 2**30
        print("{:>12.0f}{:>9.0f}{:>9.0f}".format(*figures) + f"{row['share']:>10.0%}{row['passes']:>8}{disk:>10.1f}")
    return {"model": model.name, "base_bytes": base_bytes, "budgets": rows}


def measure(model: Path, prompts: Path, budget: str, max_tokens: int, base_bytes: int) -> dict[str, Any]:
    """One run under ``budget``: peak, bound and the share of it."""
    if budget == "least":
        budget = least_budget(model, prompts, max_tokens)
    stats = prompts.with_suffix(".stats.json")
    done = _generate(model, prompts, budget, max_tokens, "--stats", str(stats))
    if done.returncode:
        raise SystemExit(done.stderr)
    figures = json.loads(stats.read_text())
    budget_bytes = parse_bytes(budget)
    bound_bytes = int(budget_bytes * 1.05) + base_bytes
    return {
        "budget_bytes": budget_bytes,
        "peak_rss_bytes": figures["peak_rss_bytes"],
        "bound_bytes": bound_bytes,
        "share": figures["peak_rss_bytes"] / bound_bytes,
        "passes": figures["passes"],
        "disk_bytes": figures["lanes"]["disk"]["bytes"],
    }


def least_budget(model: Path, prompts: Path, max_tokens: int) -> str:
    """The budget that the program names when it refuses one byte."""
    refused = _generate(model, prompts, "1", max_tokens)
    named = re.search(r"at least (\S+) ", refused.stderr)
    if refused.returncode != 2 or named is None:
        raise SystemExit(f"one byte was not refused as it should be: {refused.stderr}")
    return named.group(1)


def write_prompts(path: Path, count: int, longest: int) -> None:
    """``count`` prompts of 1 to ``longest`` words each, the same ones every time."""
    rng = random.Random(0)
    lengths = [rng.randint(1, longest) for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": " ".join(rng.choices(_WORDS, k=n))}) + "\n" for n in lengths))


def _generate(model: Path, prompts: Path, budget: str, max_tokens: int, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moelight.cli.main", "generate", str(prompts), "--model", str(model)]
    command += ["-o", str(prompts.with_suffix(".out.jsonl")), "--device", "cpu", "--host-memory", budget, "--restart"]
    command += ["--max-tokens", str(max_tokens), *more]
    return subprocess.run(command, check=False, capture_output=True, text=True)
