"""Models in memory: the comparison of `e2e.py`, all peers, every batch size; and which bars are missed."""

from __future__ import annotations

from typing import Any

import e2e
from runner.contestants import random_work

from pipeline_sections.setting import Setting

# The least that moelight's rate is to be over a peer's, by batch size; a name stands for all its modes.
BARS = {
    64: {"vllm": 1.3, "openvino": 2.0, "transformers": 2.0, "llamacpp": 2.0},
    16: {"vllm": 1.15},
    1: {"vllm": 1.0},
}


def run(setting: Setting) -> dict[str, Any]:
    """Every model, one after the other."""
    batches = sorted(BARS)
    outcome = []
    for model in setting.models:
        work = random_work(model, [128] * batches[-1], [32] * batches[-1], batches, setting.threads)
        result = e2e.compare(work, e2e.GROUPS, setting.places, setting.rounds, setting.scratch)
        e2e.print_table(result)
        result["below"] = below(result["batches"])
        for miss in result["below"]:
            print(f"  BELOW: batch {miss['batch']}: {miss['ratio']:.2f} x {miss['peer']}, wanted {miss['bar']:.2f}")
        outcome.append(result)
    return {"models": outcome}


def below(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars that are missed."""
    return [
        {"batch": result["batch"], "peer": name, "ratio": row["moelight_ratio"], "bar": bar}
        for result in table
        for name, row in result["contestants"].items()
        if (bar := BARS.get(result["batch"], {}).get(name.partition("-")[0])) is not None
        and row["moelight_ratio"] < bar
    ]
