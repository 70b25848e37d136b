"""What policies are worth in the engine: real routing, real bytes, the disk binding.

The experts of a trained model are padded with zeros to megabytes (`padded`), a quarter of them has room, and prompts of
held-out problems are answered by one to four sequences at a time. Every contestant gives the same tokens. Contestants:

    whole layers   every expert of every layer is read in every pass, as where nothing is known of routing
    no cache       what is routed to is read, and forgotten
    plain lru      one least-recently-used cache, every batch through it, prompts too, nothing else
    lru            the same order of leaving in this engine: whole layers past it, the ring remembered
    ...            other orders, shared or with equal room for every layer
    default        `DEFAULT_POLICY`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from runner.run import in_rounds

from experts_sections.padded import pad_experts
from moelight import Engine, SamplingParams
from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane
from moelight.core.units import MiB
from moelight.experts.options import ExpertOptions
from moelight.experts.policy import (
    DEFAULT_POLICY,
    CacheRules,
    Capacity,
    ExpertPolicy,
    PerLayerRules,
    PrefetchRules,
)

ROOT = Path(__file__).resolve().parents[2]
MODELS = {
    "demo": (ROOT / "moelight" / "demo", 3 * MiB),
    "many": (ROOT / "benchmarks" / "models" / "many", 3 * MiB // 2),
}
ROOM = 0.25
NEW = 12
_EQUAL = PerLayerRules(allocation="uniform", min_capacity=1, max_capacity=4096)
NO_ROOM = Shares(disk=1.0)
QUARTER = Shares(host=ROOM, disk=1.0 - ROOM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """One way to run."""

    experts: ExpertOptions
    weights: Shares = QUARTER
    schedule: str = "cgopipe"


def _policy(eviction: str, *, per_layer: bool = False, predictor: str = "none") -> ExpertPolicy:
    return ExpertPolicy(
        name=eviction,
        cache=CacheRules(capacity=Capacity(value=100 * ROOM, unit="percent"), eviction=(eviction,)),
        prefetch=PrefetchRules(strategy=predictor),
        per_layer=_EQUAL if per_layer else None,
    )


def contestants() -> dict[str, Contestant]:
    """By name."""
    static = ExpertOptions(learn=False)
    result = {
        "whole layers": Contestant(experts=static, weights=NO_ROOM, schedule="flexgen"),
        "no cache": Contestant(experts=replace(static, plain=True), weights=NO_ROOM),
        "plain lru": Contestant(experts=ExpertOptions(policy=_policy("lru"), plain=True)),
        "static": Contestant(experts=static),
    }
    for eviction in ("lru", "lfu", "slru", "score", "frequency_threshold", "reuse"):
        result[eviction] = Contestant(experts=ExpertOptions(policy=_policy(eviction)))
    result["lru, each layer"] = Contestant(experts=ExpertOptions(policy=_policy("lru", per_layer=True)))
    result["reuse, each layer"] = Contestant(experts=ExpertOptions(policy=_policy("reuse", per_layer=True)))
    previous = _policy("reuse", per_layer=True, predictor="previous")
    result["reuse, each layer, previous"] = Contestant(experts=ExpertOptions(policy=previous))
    result["default"] = Contestant(experts=ExpertOptions(policy=DEFAULT_POLICY))
    return result


def workloads(prompts: int) -> dict[str, list[str]]:
    """Held-out problems: all six tasks in turn, and one of them."""
    lines = (ROOT / "tests" / "demo" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    tasks: dict[str, list[str]] = {}
    for line in map(json.loads, lines):
        tasks.setdefault(line["custom_id"].split("-")[0], []).append(line["prompt"])
    mixed = [prompt for together in zip(*tasks.values(), strict=True) for prompt in together]
    return {"mixed": mixed[:prompts], "add": tasks["add"][:prompts]}


def model_of(name: str, scratch: Path) -> Path:
    """The padded model ``name``, made if it is not there."""
    source, page_bytes = MODELS[name]
    pad_experts(source, scratch / name, page_bytes)
    return scratch / name


def run_once(
    model: Path, prompts: Sequence[str], batch: int, contestant: Contestant
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Figures of one run, and what it answered."""
    policy = Policy(
        model=str(model),
        batch_size=batch,
        micro_batch_size=batch,
        kv_tokens=4096,
        weights=contestant.weights,
        schedule=contestant.schedule,
    )
    with Engine(policy, experts=contestant.experts) as engine:
        answers = engine.generate(list(prompts), SamplingParams(max_tokens=NEW))
        stats, experts = engine.stats, engine.expert_stats or {}
    disk = stats.lanes[Lane.DISK]
    figures = {
        "tokens_per_s": stats.tokens_per_s,
        "hit_rate": experts.get("overall", {}).get("hit_rate", 0.0),
        "read_mb": disk.bytes / 1e6,
        "disk_busy": disk.busy_s / stats.wall_s,
        "guesses": experts.get("stalls", {}).get("ahead_pages", 0),
        "guesses_useful": experts.get("stalls", {}).get("ahead_useful", 0),
        "found_in_ring": experts.get("stalls", {}).get("found", 0),
    }
    return figures, tuple(answer.text for answer in answers)


def compare(
    model: Path, prompts: Sequence[str], batch: int, names: Mapping[str, Contestant], rounds: int
) -> dict[str, dict[str, float]]:
    """Medians over ``rounds``, contestants in turn; every one must give the tokens of the first."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    wanted: tuple[str, ...] | None = None
    for _, order in in_rounds(names, rounds):
        for name in order:
            figures, answers = run_once(model, prompts, batch, names[name])
            wanted = wanted or answers
            if answers != wanted:
                raise SystemExit(f"{name} gives other tokens than {next(iter(names))}")
            seen[name].append(figures)
    return {name: {key: median(run[key] for run in runs) for key in runs[0]} for name, runs in seen.items()}


def run(args: Any) -> dict[str, Any]:
    """The table, and the two ratios that matter for each cell."""
    result: dict[str, Any] = {}
    names = contestants()
    if args.contestants:
        names = {name: names[name] for name in args.contestants}
    for model in args.models:
        folder = model_of(model, args.scratch)
        for work, prompts in workloads(args.prompts).items():
            for batch in args.batches:
                cell = compare(folder, prompts, batch, names, args.rounds)
                result[f"{model} {work} {batch}"] = cell
                _print(f"{model}, {work}, batch {batch}", cell)
    return {"cells": result, "ratios": _ratios(result)}


def _ratios(cells: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for other in ("plain lru", "lru", "no cache", "whole layers"):
        item = {
            name: cell["default"]["tokens_per_s"] / cell[other]["tokens_per_s"]
            for name, cell in cells.items()
            if other in cell and "default" in cell
        }
        if item:
            result[f"default over {other}"] = {**item, "geometric mean": geometric_mean(item.values())}
    return result


def _print(title: str, cell: Mapping[str, Mapping[str, float]]) -> None:
    print(
        f"\n{title}\n{'':30}{'tok/s':>8}{'plain':>7}{'hits':>6}{'MB':>8}{'disk':>6}{'guesses':>12}{'ring':>6}",
        flush=True,
    )
    plain = cell.get("plain lru", next(iter(cell.values())))["tokens_per_s"]
    for name, item in cell.items():
        guesses = f"{item['guesses_useful']:.0f}/{item['guesses']:.0f}"
        print(
            f"{name:30}{item['tokens_per_s']:8.1f}{item['tokens_per_s'] / plain:7.2f}{item['hit_rate']:6.2f}"
            f"{item['read_mb']:8.0f}{item['disk_busy']:6.2f}{guesses:>12}{item['found_in_ring']:6.0f}",
            flush=True,
        )
