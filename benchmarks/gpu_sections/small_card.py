"""`gpu_small_card.py` at several caps on device memory, accelerate beside it; published workloads; real files."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from typing import Any

from gpu_sections.setting import Setting, TimeOverError

_LEAST_S = 45.0  # an engine of this size is not started with less
_CAPS = ("16GiB", "24GiB")
Run = tuple[str, list[str]]


def run(setting: Setting) -> None:
    """First each cap in cgopipe with accelerate, then the workload of MoE-Gen, real files, other orders."""
    memory = ["--host-memory", setting.host_memory] if setting.host_memory else []
    for name, options in _runs(setting):
        if setting.left_s < (2 if setting.small else _LEAST_S):
            raise TimeOverError(f"no time was left for {name}")
        results = setting.scratch / f"small-card-{name}"
        minutes = f"{max(0.1, (setting.left_s - 10) / 60):.2f}"
        common = ["--device", setting.device, "--minutes", minutes, "--results", str(results), *memory]
        ended = setting.python("gpu_small_card", *common, *options)
        path = results / "gpu_small_card.json"
        report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        row = {"run": name, "options": options, **report}
        if ended.code:
            row["unable"] = ended.why
        setting.add_row(**row)
        for trace in sorted(results.glob("cgopipe-*.trace.json")):
            setting.keep_trace(trace, f"{name}-{trace.name.removesuffix('.trace.json')}")
    if importlib.util.find_spec("accelerate") is None:
        setting.keep(note="accelerate is not installed: nothing to compare with")


def _runs(setting: Setting) -> Iterator[Run]:
    peer = (
        ["--accelerate-python", sys.executable] if importlib.util.find_spec("accelerate") and not setting.twin else []
    )
    if setting.small:
        yield "tiny", ["--tiny"]
        yield "tiny-files", ["--tiny", "--real", "mixtral-6g", "--contestants", "cgopipe"]
        return
    model = ["--model", str(setting.scratch / "mixtral-8x7b-hollow")]
    for cap in _CAPS:
        options = ["--caps", cap, "--contestants", "cgopipe", "--new", "32", "--rounds", "1", "--job-seconds", "45"]
        yield cap, [*model, *options, *peer]
    moe_gen = ["--caps", "24GiB", "--prompt-len", "512", "--new", "256", "--rounds", "0", "--contestants", "cgopipe"]
    yield "moe-gen", [*model, *moe_gen]
    files = ["--real", "mixtral-6g", "--caps", "2GiB", "--host-memory", "4GiB", "--new", "32", "--rounds", "1"]
    yield "files", [*files, "--contestants", "cgopipe"]
    for cap in _CAPS:
        yield (
            f"{cap}-orders",
            [*model, "--caps", cap, "--contestants", "flexgen", "static", "--new", "64", "--rounds", "1"],
        )
    yield "long-answers", [*model, "--caps", *_CAPS, "--contestants", "cgopipe", "--new", "64", "128", "256"]


def contestants(figures: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name of the run, its report, and every row of it."""
    for report in figures.get("rows", []):
        for row in report.get("rows", []):
            yield report["run"], report, row


def lines(figures: dict[str, Any]) -> list[str]:
    """For the summary."""
    told = [figures["note"]] if "note" in figures else []
    rows = figures.get("rows", [])
    told += [f"{report['run']}: {report['unable']}" for report in rows if "unable" in report]
    for name, report, row in contestants(figures):
        head = f"{name}, {row['contestant']}: "
        if "steady" not in row:
            told.append(head + str(row.get("unable") or f"{row['tokens_per_s']:.1f} tok/s"))
            continue
        steady, predicted = row["steady"], row.get("predicted_pass_s")
        off = f" (predicted {predicted:.3f}, {steady['pass_s'] / predicted - 1:+.0%})" if predicted else ""
        jobs = ", ".join(
            f"{job['new_tokens']} new: {job['tokens_per_s']:.1f} tok/s{' cut' if job['cut'] else ''} (whole "
            f"{job['whole_tokens_per_s']:.1f})"
            for job in row["jobs"]
        )
        told += [
            f"{head}{report['layers']} layers, N {steady['sequences']}, µ {row['policy']['micro_batch_size']}; pass "
            f"{steady['pass_s']:.3f} s{off}; link busy {steady['lanes'].get('h2d', 0.0):.0%} at "
            f"{steady['h2d_bytes_per_s'] / 1e9:.1f} GB/s, {steady['h2d_share_of_roof']:.0%} of pinned copies",
            f"   filled in {steady['fill_s']:.1f} s, loaded in {row['load_s']:.0f} s; {row['device_used_share']:.0%} "
            f"of the cap; {jobs or 'no jobs'}",
        ]
    return told
