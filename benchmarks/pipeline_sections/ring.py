"""A model whose two layers are more than the memory: a ring of a few pages, against the disk's rate and all in memory.

Every limited run is a process of its own in a control group of ``--ring-memory``; moelight's ``host_memory`` is what
that leaves beside torch, and the planner chooses the ring. The roof, a plain direct read of the same files, is measured
before and after each. Then the same prompts run with the whole model in memory, unlimited: the tokens must be the same.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from runner.contestants import Work, random_work
from runner.limits import measure_base

from moelight.core.units import parse_bytes
from pipeline_sections.disk import PLAN_SLACK, measured
from pipeline_sections.setting import Setting, limits_memory, started

ORDER = "module"  # the schedule that runs with any ring


def run(setting: Setting) -> dict[str, Any]:
    """The limited runs by batch size, and whether each gave the tokens of the resident one."""
    model, options = setting.ring, setting.options
    files, base = sorted(model.glob("*.safetensors")), measure_base()
    limit = parse_bytes(options["ring_memory"], label="--ring-memory")
    memory, batches = int((limit - base) / PLAN_SLACK), sorted(options["ring_batches"])
    count = max(batches)
    lengths, new = [options["disk_prompt"]] * count, [options["disk_new"]] * count
    work = random_work(model, lengths, new, batches, setting.threads)
    rows = [
        measured(setting, work, files, batch, ORDER, limit, memory) for batch in batches for _ in range(setting.rounds)
    ]
    resident = {batch: _resident(setting, work, batch) for batch in batches}
    ran = [row for row in rows if "absent" not in row]
    result = {
        "model": model.name,
        "bytes": sum(path.stat().st_size for path in files),
        "limit_bytes": limit,
        "limited": limits_memory(),
        "host_memory": memory,
        "base_bytes": base,
        "prompt_len": options["disk_prompt"],
        "new_tokens": options["disk_new"],
        "rows": [{key: value for key, value in row.items() if key != "ids"} for row in rows],
        "resident": {batch: result["tokens_per_s"] for batch, result in resident.items()},
        "bars": {
            "roof_share": max((_median(ran, batch) for batch in batches), default=0.0),
            "tokens_as_resident": len(ran) == len(rows)
            and all(row["ids"] == resident[row["batch"]]["ids"] for row in ran),
        },
    }
    _print_table(result)
    return result


def _median(rows: list[dict[str, Any]], batch: int) -> float:
    return statistics.median([row["roof_share"] for row in rows if row["batch"] == batch] or [0.0])


def _resident(setting: Setting, work: Work, batch: int) -> dict[str, Any]:
    """The same prompts with every expert in memory."""
    alone = replace(work, batches=[batch], prompts=work.prompts[:batch], new_tokens=work.new_tokens[:batch])
    with started("moelight-resident", setting, alone, batch_size=batch) as one:
        if isinstance(one, str):
            raise SystemExit(f"{work.model}: does not run in memory: {one}")
        result = one.generate(batch)
    return {"ids": result["ids"], "tokens_per_s": alone.tokens(batch) / result["seconds"]}


def _print_table(result: dict[str, Any]) -> None:
    limited = "" if result["limited"] else " (NOT: no control groups)"
    print(
        f"ring: {result['model']}, {result['bytes'] / 1e9:.2f} GB, limited to {result['limit_bytes'] / 2**30:.2f} GiB"
        f"{limited}; prompts of {result['prompt_len']}, {result['new_tokens']} new tokens"
    )
    print(
        f"{'batch':>6}{'ring':>6}{'tok/s':>8}{'decode':>8}{'GB/s':>7}{'roof':>7}{'share':>7}{'GiB':>7}{'resident':>10}"
    )
    for row in result["rows"]:
        if "absent" in row:
            print(f"{row['batch']:>6}  absent: {row['absent']}")
            continue
        print(
            f"{row['batch']:>6}{row['policy']['ring_pages']:>6}{row['tokens_per_s']:>8.1f}"
            f"{row['decode_tokens_per_s']:>8.1f}{row['disk_bytes_per_s'] / 1e9:>7.2f}"
            f"{row['roof_bytes_per_s'] / 1e9:>7.2f}{row['roof_share']:>7.0%}{row['peak_rss_bytes'] / 2**30:>7.2f}"
            f"{result['resident'][row['batch']]:>10.1f}"
        )
    for name, value in result["bars"].items():
        print(f"  {name}: {value if isinstance(value, bool) else f'{value:.2f}'}")
