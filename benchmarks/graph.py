"""Graph models: transformers' module graphs beside our own decoder, and beside transformers and vLLM.

    python benchmarks/graph.py [--sections native disk peers] [--models DIR ...] [--big DIR] [--graphs DIR ...]
        [--scratch DIR] [--hf-python P] [--vllm-python P]

    native    families that we compute ourselves, once so and once as graphs, resident, batch 1, 16 and 64
    disk      Mixtral's proportions of 6.6 GB in a control group of a third of that: our decoder against the graph
    peers     gpt_oss, deepseek_v2 and qwen3_next of 0.8 to 0.9 GB, resident, batch 16 and 64, beside transformers
              (experts eager and `grouped_mm`) and vLLM, compiled

Contestants of a model are processes of their own that take turns, as in `e2e.py`; ratios are of seconds within a round.
Who cannot run a family is absent, with its own words. Checkpoints that are not given are made in --scratch. The last
line is JSON: of each section its figures, what it misses of its bars, and the seconds that it took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from contestants import OURS, Work, add_places, all_of, figures, places_of, random_work, take_turns
from graph_models import SHAPES, make_graph_shape
from limited import forget
from make_checkpoint import make_shape
from pipeline_sections.direct import direct_rate
from pipeline_sections.setting import Setting, limits_memory, started

from moelight.runtime.measure import processor_name

NATIVE = ("mixtral-0p9b", "qwen3moe-0p9b", "olmoe-0p9b")
BIG = "mixtral-6g"
GRAPH = "moelight-graph"
PEERS = ("transformers-eager", "transformers-grouped_mm", "vllm-compiled")
# Bars: the graph's seconds over those of our decoder at most, by batch size; transformers' best over the graph at least
SLOWER = {64: 1.10}
SLOWER_FROM_DISK = 1.03
FASTER = {"transformers": 1.3}
SLACK = 1.05  # a budget of memory may be exceeded by so much
_BASE = (
    "import greenlet, torch, moelight.engine.engine; from transformers import AutoModelForCausalLM as _;"
    "torch.ones(64, 64) @ torch.ones(64, 64);"
    "from moelight.runtime.measure import peak_rss_bytes; print(peak_rss_bytes())"
)
_PROVE = "import pathlib, sys; from moelight.models.graph.self_test import prove; prove(pathlib.Path(sys.argv[1]))"


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    sections: dict[str, Callable[[Setting], dict[str, Any]]] = {"native": native, "disk": disk, "peers": peers}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.scratch) as made:
        setting = Setting(
            models=args.models or [],
            big=args.big or Path(BIG),
            places=places_of(args),
            scratch=Path(made),
            threads=args.threads,
            rounds=args.rounds,
            options=vars(args),
        )
        for name in args.sections:
            began = time.perf_counter()
            result[name] = sections[name](setting)
            result[name]["seconds"] = time.perf_counter() - began
            print(f"{name}: {result[name]['seconds'] / 60:.1f} minutes", file=sys.stderr)
    print(json.dumps({"benchmark": "graph", "cpu": processor_name(), "threads": args.threads, **result}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sections", nargs="+", choices=("native", "disk", "peers"), default=["native", "disk", "peers"]
    )
    parser.add_argument("--models", type=Path, nargs="+", help="checkpoints of families with a decoder of ours")
    parser.add_argument("--big", type=Path, help="one of them for the disk section")
    parser.add_argument("--graphs", type=Path, nargs="+", help="checkpoints for the section of peers")
    parser.add_argument("--scratch", type=Path, help="a directory on a disk")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--native-batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--native-prompt", type=int, default=16, help="tokens in a prompt of the native section")
    parser.add_argument("--native-new", type=int, default=24, help="new tokens there")
    parser.add_argument("--disk-batch", type=int, default=32)
    parser.add_argument("--disk-prompt", type=int, default=16)
    parser.add_argument("--disk-new", type=int, default=8)
    parser.add_argument("--peer-batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--peer-prompt", type=int, default=128)
    parser.add_argument("--peer-new", type=int, default=32)
    parser.add_argument("--peers", nargs="*", default=PEERS)
    add_places(parser)
    return parser.parse_args()


def native(setting: Setting) -> dict[str, Any]:
    """Each family by our decoder and as a graph, in one run."""
    options = setting.options
    models = setting.models or [make_shape(name, setting.scratch) for name in NATIVE]
    sizes = options["native_prompt"], options["native_new"], options["native_batches"]
    result = [_together(setting, model, (GRAPH,), *sizes) for model in models]
    return {"models": result, "below": [miss for item in result for miss in _slower(item)]}


def peers(setting: Setting) -> dict[str, Any]:
    """Each family as a graph, beside libraries that have it."""
    options = setting.options
    models = options["graphs"] or [make_graph_shape(name, setting.scratch) for name in SHAPES]
    sizes = options["peer_prompt"], options["peer_new"], options["peer_batches"]
    result = [_together(setting, model, options["peers"], *sizes) for model in models]
    return {"models": result, "below": [miss for item in result for miss in _below_peers(item)]}


def _together(
    setting: Setting, model: Path, others: Sequence[str], prompt: int, new: int, batches: Sequence[int]
) -> dict[str, Any]:
    """moelight and ``others`` in turns on one model, all of them in memory."""
    maximum, places = max(batches), setting.places
    work = random_work(model, [prompt] * maximum, [new] * maximum, batches, setting.threads)
    absent = {name: reason for name in others if (reason := places.lacks(name, model)) is not None}
    present = [name for name in others if name not in absent]
    with all_of((OURS, *present), places, work, setting.scratch, absent=absent) as alive:
        take_turns(alive, work, setting.rounds)
        ours = alive[0].samples
        table = [
            {
                "batch": batch,
                "contestants": {one.name: figures(one.samples, ours, batch, work.tokens(batch)) for one in alive},
                "python_share": statistics.median(turn["python_share"] for turn in ours.turns[batch]),
            }
            for batch in batches
        ]
    result = {"model": model.name, "prompt_len": prompt, "new_tokens": new, "batches": table, "absent": absent}
    print_table(result)
    return result


def print_table(result: dict[str, Any]) -> None:
    """One line a contestant and batch size; who is absent."""
    for outcome in result["batches"]:
        heading = f"{result['model']}, batch {outcome['batch']}"
        print(f"{heading:30}{'tok/s':>9}{'its s / ours':>14}{'peak GiB':>10}{'first token':>13}{'all tokens':>12}")
        for name, row in outcome["contestants"].items():
            equal = [f"{row[which]}/{outcome['batch']}" for which in ("first_tokens_equal", "prompts_equal")]
            print(
                f"{name:30}{row['tokens_per_s']:>9.1f}{row['moelight_ratio']:>14.3f}"
                f"{row['peak_rss_bytes'] / 2**30:>10.2f}{equal[0]:>13}{equal[1]:>12}"
            )
    for name, reason in result["absent"].items():
        print(f"{name}: absent: {reason}")


def _slower(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Batch sizes at which the graph takes longer than its bar."""
    rows = [(result["batch"], result["contestants"][GRAPH]["moelight_ratio"]) for result in result["batches"]]
    return [
        {"model": result["model"], "batch": batch, "ratio": ratio, "bar": SLOWER[batch]}
        for batch, ratio in rows
        if ratio > SLOWER.get(batch, ratio)
    ]


def _below_peers(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Libraries of whose best form the graph is not faster by its bar."""
    misses = []
    for outcome in result["batches"]:
        for library, bar in FASTER.items():
            rows = [row for name, row in outcome["contestants"].items() if name.startswith(library)]
            ratio = min((row["moelight_ratio"] for row in rows), default=bar)
            if ratio < bar:
                misses.append({"model": result["model"], "batch": outcome["batch"], "ratio": ratio, "bar": bar})
    return misses


def disk(setting: Setting) -> dict[str, Any]:
    """Our decoder and the graph of one model that is three times its memory, alone in turns."""
    model = setting.big if setting.options["big"] else make_shape(BIG, setting.scratch)
    files = sorted(model.glob("*.safetensors"))
    limit = sum(path.stat().st_size for path in files) // 3
    base = int(subprocess.run([sys.executable, "-c", _BASE], check=True, stdout=subprocess.PIPE, text=True).stdout)
    memory, batch = int((limit - base) / SLACK), setting.options["disk_batch"]
    lengths, new = [setting.options["disk_prompt"]] * batch, [setting.options["disk_new"]] * batch
    work = random_work(model, lengths, new, [batch], setting.threads)
    subprocess.run([sys.executable, "-c", _PROVE, model], check=True)  # once, not within the limit
    rows: dict[str, list[dict[str, Any]]] = {OURS: [], GRAPH: []}
    for number in range(setting.rounds):
        for name in (OURS, GRAPH) if number % 2 == 0 else (GRAPH, OURS):
            rows[name].append(_streamed(setting, work, name, files, limit, memory))
    forget(model)
    ratios = [theirs["decode_s"] / ours["decode_s"] for ours, theirs in zip(rows[OURS], rows[GRAPH], strict=True)]
    ratio = statistics.median(ratios)
    print(f"{model.name} from disk: the graph's seconds over our decoder's {ratio:.3f} ({ratios})")
    return {
        "model": model.name,
        "limit_bytes": limit,
        "limited": limits_memory(),
        "host_memory": memory,
        "base_bytes": base,
        "rows": rows,
        "ratio": ratio,
        "ratios": ratios,
        "below": [] if ratio <= SLOWER_FROM_DISK else [{"ratio": ratio, "bar": SLOWER_FROM_DISK}],
    }


def _streamed(setting: Setting, work: Work, name: str, files: list[Path], limit: int, memory: int) -> dict[str, Any]:
    batch = work.batches[0]
    options = {"host_memory": memory, "batch_size": batch, "watch": True}
    before = direct_rate(files)
    with started(name, setting, work, limit=limit, **options) as one:
        if isinstance(one, str):
            raise SystemExit(f"{name}: {one}")
        result = one.generate(batch)
        peak = one.samples.peak_rss_bytes
    lane = result["decode_lanes"].get("disk", {})
    row = {
        "tokens_per_s": work.tokens(batch) / result["seconds"],
        "decode_s": result["decode_s"] / max(1, result["decode_passes"]),
        "decode_passes": result["decode_passes"],
        "disk_busy_share": lane.get("busy_share", 0.0),
        "disk_bytes_per_s": lane.get("bytes_per_s", 0.0),
        "roof_bytes_per_s": statistics.mean((before, direct_rate(files))),
        "peak_rss_bytes": peak,
        "policy": result["policy"],
    }
    print(
        f"{name}: {row['decode_s']:.2f} s a decode pass, disk busy {row['disk_busy_share']:.0%}, "
        f"{row['disk_bytes_per_s'] / 1e9:.2f} of {row['roof_bytes_per_s'] / 1e9:.2f} GB/s, "
        f"peak {peak / 2**30:.2f} of {limit / 2**30:.2f} GiB"
    )
    return row


if __name__ == "__main__":
    main()
