"""What is lost around the work at batch 64, resident: time in which no lane works, and the idle of the lane that binds;
with ``--before``, the same of that checkout, in turns.

Work is what runs inside of tasks. The share of time in which no lane has a task is building and walking schedules and
bookkeeping.
"""

from __future__ import annotations

import statistics
from typing import Any

from e2e import ROOF_GIB, bound_s
from runner.contestants import BEFORE, OURS, all_of, random_work, take_turns
from runner.lanes import binding
from runner.roofs import Roofs

from pipeline_sections.setting import Setting

BATCH = 64


def run(setting: Setting) -> dict[str, Any]:
    """Every resident model."""
    rows = []
    roofs = Roofs(ROOF_GIB, setting.threads)
    names = [OURS, BEFORE] if setting.places.before else [OURS]
    for model in setting.models:
        work = random_work(model, [128] * BATCH, [32] * BATCH, [BATCH], setting.threads)
        with all_of(names, setting.places, work, setting.scratch, warm=True, options={"watch": True}) as alive:
            roofs.measure()
            take_turns(alive, work, setting.rounds)
            roofs.measure()
        roof = roofs.figures()
        ours, *others = [one.samples.turns[BATCH] for one in alive]
        rows.append(_row(ours, bound_s(work, BATCH, roof), work.tokens(BATCH)) | {"model": model.name, "roof": roof})
        if others:
            rows[-1][BEFORE] = _beside(others[0], ours)
        print_row(rows[-1])
    return {"rows": rows}


def _row(turns: list[dict[str, Any]], bound: float, tokens: int) -> dict[str, Any]:
    """Medians over turns."""
    lane = binding(turns[-1]["lanes"])
    idle = [1 - turn["lanes"][lane]["busy_share"] for turn in turns]
    decode_idle = [1 - turn["decode_lanes"][lane]["busy_share"] for turn in turns if turn["decode_lanes"]]
    seconds = statistics.median(turn["seconds"] for turn in turns)
    return {
        "binding": lane,
        "overhead_share": statistics.median(turn["python_share"] for turn in turns),
        "binding_idle_share": statistics.median(idle),
        "binding_idle_share_decoding": statistics.median(decode_idle) if decode_idle else None,
        "tokens_per_s": tokens / seconds,
        "roof_share": bound / seconds,
    }


def _beside(turns: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times faster ours is than another checkout whose turns are given, and whether tokens are equal."""
    pairs = list(zip(turns, ours, strict=True))
    return {
        "ratio": statistics.median(other["seconds"] / one["seconds"] for other, one in pairs),
        "overhead_share": statistics.median(turn["python_share"] for turn in turns),
        "same_tokens": all(other["ids"] == one["ids"] for other, one in pairs),
    }


def print_row(row: dict[str, Any]) -> None:
    """One line."""
    decoding = row["binding_idle_share_decoding"]
    print(
        f"overhead: {row['model']}, batch {BATCH}: {row['overhead_share']:.2%} of the time outside of any task; "
        f"lane {row['binding']} idle {row['binding_idle_share']:.2%}"
        + ("" if decoding is None else f" ({decoding:.2%} while decoding)")
        + f"; {row['tokens_per_s']:.1f} tok/s, {row['roof_share']:.0%} of the roof"
        + ("" if BEFORE not in row else f"; {row[BEFORE]['ratio']:.3f} x before")
    )
