"""Models of 0.9 billion parameters whose experts stream over the link: predicted against measured, lane by lane."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from make_checkpoint import SHAPES, make_checkpoint, make_shape, scaled_config

from gpu_sections.setting import Ended, FailedError, Setting, TimeOverError
from moelight.core.units import MiB, parse_bytes

MODELS = ("mixtral-0p9b", "qwen3moe-0p9b")
ORDERS = ("cgopipe", "module", "flexgen")
# What each run fixes: cgopipe with all experts on the GPU, and with as many on the CPU as is planned.
RUNS = {
    "cgopipe-streamed": ("schedule=cgopipe", "ffn=gpu"),
    "cgopipe-split": ("schedule=cgopipe", "ffn=split"),
    **{order: (f"schedule={order}", "ffn=gpu") for order in ORDERS[1:]},
}
_TRACED = ("cgopipe-streamed", "cgopipe-split")
_BINDS_SHARE = 0.95
RESIDENT_SHARE = 0.4  # of the weights, beside ROOM for everything else
ROOM_BYTES, SMALL_ROOM_BYTES = 512 * MiB, 3 * MiB // 4
_SMALL = {"layers": 3, "hidden": 64, "intermediate": 128, "experts": 8, "heads": 4, "kv_heads": 2, "head_dim": 16}
_LEAST = re.compile(r"--device-memory .* at least (\S+) ")
_LONGEST_TRACE = 48 << 20


def run(setting: Setting) -> None:
    """Every model in every order: first all that is timed, then what CUDA counts."""
    models = [make_model(setting, name) for name in MODELS]
    for model in models:
        for run_name in RUNS:
            setting.add_row(**measured_row(setting, model, run_name))
    rows = setting.figures["rows"]
    for row in rows:
        if setting.twin:
            row["calls"] = {"unable": "needs a card: CUDA counts launches and synchronisations"}
        elif "unable" not in row:
            row["calls"] = _counted(setting, row)
        setting.keep(rows=rows)


def make_model(setting: Setting, name: str) -> Path:
    """The checkpoint ``name``, made unless an earlier part did; a tiny one of its family where sizes are small."""
    if not setting.small:
        return make_shape(name, setting.scratch)
    out = setting.scratch / name
    if not out.exists():
        make_checkpoint(out, scaled_config(SHAPES[name][0], top_k=2, vocab=512, **_SMALL))
    return out


def write_rows(setting: Setting, count: int, words: int) -> Path:
    """``count`` prompts of about ``words`` tokens each."""
    path, draw = setting.scratch / f"rows-{count}-{words}.jsonl", random.Random(0)
    text = "".join(draw.choice("abcdefgh") for _ in range(4096))
    starts = [draw.randrange(len(text) - words) for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": text[at : at + words]}) + "\n" for at in starts), encoding="utf-8")
    return path


def with_enough(setting: Setting, model: Path, start: Callable[[str], Ended]) -> tuple[Ended, int]:
    """How ``start`` ended with device memory for a part of the experts, or for a tenth of the weights more than what a
    refusal names, and that memory in bytes."""
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    memory = int(size * RESIDENT_SHARE) + (SMALL_ROOM_BYTES if setting.small else ROOM_BYTES)
    ended = start(str(memory))
    if (least := least_memory(ended)) is not None:
        memory = parse_bytes(least) + size // 10
        ended = start(str(memory))
    return ended, memory


def generate(setting: Setting, model: Path, order: str, memory: str, count: int, new: int, key: str) -> Ended:
    """``moelight generate`` without changes of the plan while it runs; stats and trace lie under ``key``."""
    position = setting.scratch / key
    files = [
        "-o",
        f"{position}.out.jsonl",
        "--stats",
        f"{position}.stats.json",
        "--trace",
        f"{position}.trace.json",
        "--restart",
    ]
    options = ["-m", model, "--device", setting.device, "--schedule", order, "--device-memory", memory, "--no-adapt"]
    rows = write_rows(setting, count, _words(setting))
    return setting.moelight(
        "generate", rows, *files, *options, "--batch-size", count, "--max-tokens", new, "--ignore-eos"
    )


def least_memory(ended: Ended) -> str | None:
    """What a refusal names as the least device memory; None if it was another end."""
    named = _LEAST.search(" ".join(ended.err.split()))
    return named[1] if ended.code == 2 and named else None


def measured_row(setting: Setting, model: Path, name: str) -> dict[str, Any]:
    """One run of `RUNS`: planned, carried out, and compared with its plan."""
    count, new = (4, 4) if setting.small else (256, 48)
    position = setting.scratch / f"{model.name}-{name}"
    row: dict[str, Any] = {"model": model.name, "run": name, "batch_size": count}
    try:
        ended, row["device_memory_bytes"] = with_enough(
            setting, model, lambda memory: _plan(setting, model, name, memory, count, new)
        )
        ended.check()
        words = _words(setting)
        files = [
            "-o",
            f"{position}.out.jsonl",
            "--stats",
            f"{position}.stats.json",
            "--trace",
            f"{position}.trace.json",
        ]
        options = ["--policy", f"{position}.yaml", "--device", setting.device, "--max-tokens", new, "--ignore-eos"]
        setting.moelight("generate", write_rows(setting, count, words), *files, *options, "--restart").check()
        report = json.loads(setting.moelight("report", f"{position}.trace.json", "--json").check().out)
    except TimeOverError:
        raise
    except FailedError as error:
        return row | {"unable": str(error)}
    trace = Path(f"{position}.trace.json")
    if name in _TRACED and trace.stat().st_size < _LONGEST_TRACE:
        setting.keep_trace(trace, position.name)
    stats = json.loads(Path(f"{position}.stats.json").read_text())
    figures = ("load_s", "wall_s", "tokens_per_s", "device_peak_bytes", "peak_rss_bytes", "counts")
    policy = json.loads(trace.read_text())["otherData"]["policy"]
    return row | {"policy": policy, "report": report, **{figure: stats[figure] for figure in figures}}


def _plan(setting: Setting, model: Path, name: str, memory: str, count: int, new: int) -> Ended:
    """``moelight optimize`` with what the run fixes; a twin is planned as a T4."""
    words = _words(setting)
    work = ["--prompt-len", words, "--max-prompt-len", words, "--gen-len", new, "--num-requests", count]
    fixed = [part for key in (f"batch_size={count}", *RUNS[name]) for part in ("--fix", key)]
    where = ["--hw", "t4" if setting.twin else "auto", "--device-memory", memory, "-o"]
    return setting.moelight(
        "optimize", "-m", model, *work, *fixed, *where, setting.scratch / f"{model.name}-{name}.yaml"
    )


def _words(setting: Setting) -> int:
    return 24 if setting.small else 64


def _counted(setting: Setting, row: dict[str, Any]) -> dict[str, Any]:
    policy = setting.scratch / f"{row['model']}-{row['run']}.yaml"
    ended = setting.python("gpu_sections.launches", policy, "--device", setting.device, limit_s=60)
    if ended.code != 0:
        return {"unable": ended.why}
    result: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return result if result["calls"] else {"unable": "the profiler saw no call of CUDA"}


def link_binds(row: dict[str, Any]) -> bool:
    """Whether the plan expects the link to be busy throughout: only then it should be."""
    predicted = row["report"]["lanes"].get("h2d", {}).get("predicted_s") or 0.0
    return bool(predicted >= _BINDS_SHARE * (row["report"]["predicted_pass_s"] or 1e9))


def link(row: dict[str, Any]) -> dict[str, float]:
    """Busy share and rate of the link, and the rate as a share of pinned copies: those measured beside this run, else
    the profile's."""
    lane = row["report"]["lanes"].get("h2d", {})
    roof = row.get("calls", {}).get("pinned_h2d_bytes_per_s") or lane.get("roof_bytes_per_s") or 0.0
    rate = lane.get("bytes_per_s") or 0.0
    return {
        "busy_share": lane.get("busy_share", 0.0),
        "bytes_per_s": rate,
        "share_of_pinned": rate / roof if roof else 0.0,
    }


def lines(figures: dict[str, Any]) -> list[str]:
    """For the summary."""
    told = []
    for row in figures.get("rows", []):
        head = f"{row['model']}, {row['run']}: "
        if "unable" in row:
            told.append(head + row["unable"])
            continue
        report, calls, crossing = row["report"], row.get("calls", {}), link(row)
        predicted = report["predicted_pass_s"]
        off = "" if not predicted else f" (predicted {predicted * 1e3:.1f}, {report['pass_s'] / predicted - 1:+.0%})"
        counted = f"; {calls['unable']}" if "unable" in calls else ""
        if "launches" in calls:
            counted = (
                f"; {calls['launches_per_layer_and_micro_batch']:.1f} launches a layer and micro-batch, "
                f"{calls['waits']:.0f} waits, {calls['allocations']:.0f} allocations a pass"
            )
        told.append(
            f"{head}pass {report['pass_s'] * 1e3:.1f} ms{off}; link busy {crossing['busy_share']:.0%} at "
            f"{crossing['bytes_per_s'] / 1e9:.1f} GB/s, {crossing['share_of_pinned']:.0%} of pinned copies; "
            f"{report['binding']} binds; {row['tokens_per_s']:.0f} tok/s{counted}"
        )
        lanes = {
            name: lane["pass_s"] / lane["predicted_s"] - 1
            for name, lane in report["lanes"].items()
            if lane["predicted_s"]
        }
        told.append("   lanes off by " + ", ".join(f"{name} {error:+.0%}" for name, error in lanes.items()))
    return told
