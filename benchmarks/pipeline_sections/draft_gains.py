"""What drafts gain, measured and predicted: K drafts of every sequence, each right with a set probability, against the
prices by which ``--speculate auto`` and ``optimize --acceptance`` decide.

Answers are played (`drafts.played_work`), and so are drafts (`generators/planted_drafts.py`). One process goes through
no drafts and all settings in turns. ``predicted`` comes from prices corrected by its first passes without drafts,
``ledger`` from those of the measured machine alone, which is measured first unless it has been. Rates are of passes in
which all sequences decode. The big model runs bound by a disk in a control group of one third of its bytes, as it is
and with experts of four bits.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

from runner.forms import converted
from runner.limits import measure_base

from moelight.runtime.machine_profile import machine_profile
from pipeline_sections.disk import PLAN_SLACK
from pipeline_sections.drafts import played_work
from pipeline_sections.setting import Setting, limits_memory, started

LEAST, MOST = 0.9, 1.1  # bars: measured over predicted gain


def run(setting: Setting) -> dict[str, Any]:
    """Every model, batch size and setting."""
    options = setting.options
    os.environ["OMP_NUM_THREADS"] = str(setting.threads)  # as contestants have it: a profile is of so many threads
    machine_profile("cpu", disk_dir=setting.scratch)
    models: list[tuple[Path, int | None]] = [(model, None) for model in setting.models]
    if options["gains_disk"]:
        forms = (setting.big, converted(setting.big, "int4", setting.big.parent))
        models += [(model, sum(path.stat().st_size for path in model.glob("*.safetensors")) // 3) for model in forms]
    batches = options["gains_batches"]
    rows = [row for model, limit in models for batch in batches for row in _rows(setting, model, limit, batch)]
    ran = [row for row in rows if "absent" not in row]
    result = {
        "limited": limits_memory(),
        "rows": rows,
        "bars": {
            "settings": len(ran),
            "within a tenth": sum(LEAST <= row["measured"] / row["predicted"] <= MOST for row in ran),
        },
    }
    print_table(result)
    return result


def _rows(setting: Setting, model: Path, limit: int | None, batch: int) -> list[dict[str, Any]]:
    options = setting.options
    settings = [(count, share) for count in options["gains_drafts"] for share in options["gains_acceptances"]]
    work, answers = played_work(setting, model, "prose", batch)
    told: dict[str, Any] = {"batch_size": batch, "speculate": "auto", "answers": answers}
    if limit is not None:
        told["host_memory"] = int((limit - measure_base()) / PLAN_SLACK)
    label = {"model": model.name, "bound": "memory" if limit is None else "disk", "batch": batch}
    turns: dict[tuple[int, float], list[dict[str, Any]]] = {}
    with started("moelight-auto", setting, work, limit=limit, drafts=[(0, 0.0), *settings], **told) as one:
        if isinstance(one, str):
            return [label | {"absent": one}]
        for _ in range(setting.rounds):
            for _ in (None, *settings):
                figures = one.generate(batch)["planted"]
                turns.setdefault((figures["num_speculative_tokens"], figures["acceptance"]), []).append(figures)
                print(f"{model.name}, batch {batch}: {figures}", file=sys.stderr)
    plain = turns[0, 0.0]
    return [
        label
        | {name: turns[key][0][name] for name in ("num_speculative_tokens", "acceptance", "predicted", "ledger")}
        | {
            "tokens_per_pass": statistics.mean(turn["tokens_per_pass"] for turn in turns[key]),
            "measured": statistics.median(
                turn["decode_tokens_per_s"] / base["decode_tokens_per_s"]
                for turn, base in zip(turns[key], plain, strict=True)
            ),
        }
        for key in settings
    ]


def print_table(result: dict[str, Any]) -> None:
    """A line for each setting."""
    print(f"gains of drafts{'' if result['limited'] else ' (NOT limited: no control groups)'}")
    names = ("drafts", "accepted", "a pass", "measured", "predicted", "ledger")
    print(f"{'':44}" + "".join(f"{name:>10}" for name in names))
    for row in result["rows"]:
        label = f"{row['model']}, {row['bound']}, batch {row['batch']}"
        if "absent" in row:
            print(f"{label:44}  absent: {row['absent']}")
            continue
        keys = ("acceptance", "tokens_per_pass", "measured", "predicted", "ledger")
        print(f"{label:44}{row['num_speculative_tokens']:>10}" + "".join(f"{row[key]:>10.2f}" for key in keys))
    print(f"  within a tenth: {result['bars']['within a tenth']} of {result['bars']['settings']}")
