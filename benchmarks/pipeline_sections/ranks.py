"""Several ranks of one processor beside one process with all threads: the price of dividing a model where nothing is
gained, since both have the same cores and memory. In turns, resident, in bfloat16."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

from runner.contestants import OURS, random_work, take_turns

from pipeline_sections.setting import Setting, started

BATCHES = (16, 64)
PROMPT, NEW = 128, 32


def run(setting: Setting) -> dict[str, Any]:
    """Every resident model."""
    rows = []
    for model in setting.models:
        work = random_work(model, [PROMPT] * max(BATCHES), [NEW] * max(BATCHES), BATCHES, setting.threads)
        with ExitStack() as opened:
            sides = [
                opened.enter_context(started(name, setting, work, warm=True, tp=str(count)))
                for name, count in ((OURS, 1), (f"{OURS}-ranks", setting.threads))
            ]
            if any(isinstance(side, str) for side in sides):
                rows.append({"model": model.name, "absent": [side for side in sides if isinstance(side, str)]})
                continue
            take_turns(sides, work, setting.rounds)
        rows += [_row(model.name, batch, *(side.samples.turns[batch] for side in sides)) for batch in BATCHES]
    for row in rows:
        print_row(row)
    return {"ranks": setting.threads, "rows": rows}


def _row(model: str, batch: int, one: list[dict[str, Any]], several: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = list(zip(one, several, strict=True))
    return {
        "model": model,
        "batch": batch,
        "tokens_per_s": batch * NEW / statistics.median(turn["seconds"] for turn in several),
        "ratio": statistics.median(alone["seconds"] / turn["seconds"] for alone, turn in pairs),
        "answers_equal": sum(a == b for a, b in zip(one[-1]["ids"], several[-1]["ids"], strict=True)),
    }


def print_row(row: dict[str, Any]) -> None:
    """One line."""
    if "absent" in row:
        print(f"ranks: {row['model']}: absent: {row['absent']}")
        return
    print(
        f"ranks: {row['model']}, batch {row['batch']}: {row['tokens_per_s']:.1f} tok/s, {row['ratio']:.3f} x one "
        f"process; {row['answers_equal']} of {row['batch']} answers the same"
    )
