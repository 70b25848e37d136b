"""The README's figure, docs/throughput.png, from the JSON of a run of ``pipeline.py --sections disk``."""

from __future__ import annotations

import json
from pathlib import Path

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "throughput.png"
LABELS = {
    "moelight": "moelight",
    "accelerate-grouped_mm": "accelerate\n(disk offload)",
    "llamacpp": "llama.cpp\n(mapped file)",
}


def draw(results: Path, to: Path = FIGURE) -> None:
    """Draw each contestant at its fastest batch size; accelerate's memory was not limited (see the results)."""
    from matplotlib.figure import Figure

    stored = json.loads(results.read_text(encoding="utf-8"))
    runs = stored.get("runs", [stored])
    disk = next(run["disk"] for run in runs if run.get("disk", {}).get("peers"))
    speeds = {"moelight": max(run["tokens_per_s"] for run in disk["ours"])}
    for run in disk["peers"]:
        name = run["peer"]
        speeds[name] = max(speeds.get(name, 0.0), run["tokens_per_s"])
    figure = Figure(figsize=(7.2, 2.0), layout="constrained")
    axes = figure.subplots()
    names = [name for name in LABELS if name in speeds][::-1]
    bars = axes.barh(
        [LABELS[name] for name in names],
        [speeds[name] for name in names],
        height=0.62,
        color=["#1f6feb" if name == "moelight" else "#b6bec9" for name in names],
    )
    axes.bar_label(bars, fmt="%.0f", padding=4)
    axes.set_xlabel(
        f"tokens/s, a Mixtral of {disk['bytes'] / 1e9:.1f} GB with {disk['limit_bytes'] / 1e9:.1f} GB of memory"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.savefig(to, dpi=160)
