"""Continuous refill with riding prompts, against static batches with a prefill of their own, on the same policy.

Lengths are ragged: that is what a static batch waits for. Where weights stream (``--refill-share``, the budget over the
weights), every pass that it waits brings them once more. Both are loaded together and take turns. The roof is the
least time: prompts at the product rate, and as few full decode passes as the new tokens need.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
from e2e import ROOF_GIB, bound_s
from runner.contestants import random_work, take_turns
from runner.roofs import Roofs

from pipeline_sections.setting import Setting, started

PROMPTS, NEW = (32, 512), (8, 128)
ADMISSIONS = ("refill", "static")


def run(setting: Setting) -> dict[str, Any]:
    """Every resident model."""
    count, batch, share = (setting.options[f"refill_{name}"] for name in ("requests", "batch", "share"))
    draw = np.random.default_rng(0)
    lengths, new = (draw.integers(low, high + 1, count).tolist() for low, high in (PROMPTS, NEW))
    rows = []
    roofs = Roofs(ROOF_GIB, setting.threads)
    for model in setting.models:
        work = random_work(model, lengths, new, [count], setting.threads)
        roofs.measure()
        options: dict[str, Any] = {"batch_size": batch, "watch": True}
        if share is not None:
            options["host_memory"] = int(share * sum(path.stat().st_size for path in model.glob("*.safetensors")))
        with (
            started("moelight-refill", setting, work, admission="refill", **options) as refill,
            started("moelight-static", setting, work, admission="static", **options) as static,
        ):
            alive = [one for one in (refill, static) if not isinstance(one, str)]
            take_turns(alive, work, setting.rounds)
            roofs.measure()
        turns = {one.name.partition("-")[2]: one.samples.turns[count] for one in alive}
        roof = roofs.figures()
        rows.append(
            _row(model.name, turns, work.tokens(count), bound_s(work, count, roof, alive=batch)) | {"roof": roof}
        )
    result = {
        "requests": count,
        "batch_size": batch,
        "share": share,
        "prompts": PROMPTS,
        "new_tokens": NEW,
        "rows": rows,
    }
    print_table(result)
    return result


def _row(model: str, turns: dict[str, list[dict[str, Any]]], tokens: int, bound: float) -> dict[str, Any]:
    seconds = {name: statistics.median(turn["seconds"] for turn in turn) for name, turn in turns.items()}
    row: dict[str, Any] = {
        "model": model,
        "tokens_per_s": {name: tokens / value for name, value in seconds.items()},
        "passes": {name: turn[-1]["passes"] for name, turn in turns.items()},
        "policy": {name: turn[-1]["policy"] for name, turn in turns.items()},
        "roof_share": {name: bound / value for name, value in seconds.items()},
    }
    if len(turns) == len(ADMISSIONS):
        pairs = list(zip(turns["refill"], turns["static"], strict=True))
        row["ratio"] = statistics.median(static["seconds"] / refill["seconds"] for refill, static in pairs)
        row["identical_tokens"] = all(refill["ids"] == static["ids"] for refill, static in pairs)
    return row


def print_table(result: dict[str, Any]) -> None:
    """One line for each model and admission."""
    print(
        f"refill: {result['requests']} requests, N {result['batch_size']}, prompts of {PROMPTS[0]} to {PROMPTS[1]} "
        f"tokens, {NEW[0]} to {NEW[1]} new ones"
    )
    for row in result["rows"]:
        for name, rate in row["tokens_per_s"].items():
            share, passes = row["roof_share"][name], row["passes"][name]
            print(f"{row['model'] + ', ' + name:32}{rate:>8.1f} tok/s{passes:>7} passes, {share:.0%} of the roof")
        if "ratio" in row:
            print(f"  refill is {row['ratio']:.2f} x static; identical tokens: {row['identical_tokens']}")
