"""A long run through a constrained plan: the resident set beside what was announced, and whether it grows.

The roof is the plan: the budget it was made for and 5 %, and what a process has that only imports torch and the engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from runner.contestants import random_work
from runner.limits import measure_base

from moelight.core.units import MiB
from pipeline_sections.setting import Setting, started

PROMPTS, NEW = (16, 64), (4, 16)
SETTLED = 200  # completions


def run(setting: Setting) -> dict[str, Any]:
    """The first resident model, with a part of its bytes."""
    model, count = setting.models[0], setting.options["long_requests"]
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    budget = int(size * setting.options["long_share"])
    draw = np.random.default_rng(0)
    lengths, new = (draw.integers(low, high + 1, count).tolist() for low, high in (PROMPTS, NEW))
    work = random_work(model, lengths, new, [count], setting.threads)
    base = measure_base()
    with started("moelight", setting, work, host_memory=budget, resident_after=SETTLED) as one:
        if isinstance(one, str):
            print(f"long: {model.name}: {one}")
            return {"absent": one}
        outcome = one.generate(count)
    result = {
        "model": model.name,
        "requests": count,
        "budget_bytes": budget,
        "base_bytes": base,
        "tokens_per_s": work.tokens(count) / outcome["seconds"],
        "passes": outcome["passes"],
        "policy": outcome["policy"],
        **resident(outcome["resident_bytes"], outcome["peak_rss_bytes"], int(budget * 1.05) + base),
    }
    print_table(result)
    return result


def resident(seen: list[list[int]], peak: int, bound: int) -> dict[str, Any]:
    """``seen``: pairs of completions and resident bytes, the first when the run had settled, the last at its end."""
    settled, last = seen[0][1], seen[-1][1]
    return {
        "bound_bytes": bound,
        "peak_rss_bytes": peak,
        "share": peak / bound,
        "settled_bytes": settled,
        "last_bytes": last,
        "growth_bytes": last - settled,
        "resident_bytes": seen,
    }


def print_table(result: dict[str, Any]) -> None:
    """Two lines."""
    print(
        f"long: {result['model']}, {result['requests']} requests, budget {result['budget_bytes'] / MiB:.0f} MiB: "
        f"{result['tokens_per_s']:.1f} tok/s in {result['passes']} passes"
    )
    print(
        f"  peak {result['peak_rss_bytes'] / MiB:.0f} MiB, {result['share']:.0%} of the bound; after {SETTLED} "
        f"completions {result['settled_bytes'] / MiB:.0f} MiB, at the end {result['last_bytes'] / MiB:.0f} MiB"
    )
