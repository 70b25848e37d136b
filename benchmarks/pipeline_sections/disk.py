"""Bound by a disk: a model three times the memory. Orders of work against the roof and each other, and peers.

Every run is a process of its own in a control group of ``--disk-limit``, or one third of the model's bytes; moelight's
``host_memory`` is what that leaves beside torch. Only accelerate may be let out of the group, because prompts' steps
take more at large batch sizes, and then do not end; under the limit it enters the group after it has loaded. It puts
its files out of the page cache before each step. The roof, a plain direct read of the same files, is measured before
and after each run of ours. Peers decode fewer tokens than ours, because they take long; their time for as many tokens
as ours is their first step and their mean step as often as ours.

The same model in fewer bytes runs under the same limit: with experts rounded by ``moelight convert``, or as the file of
llama.cpp; with activations as they are, and in int8, as llama.cpp rounds them.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.contestants import BEFORE, GGUF, OURS, WHOLE, EndedError, Work, gguf, random_work
from runner.disk import direct_rate
from runner.drawn import CONFIGS, drawn_checkpoint
from runner.forms import converted
from runner.limits import measure_base
from runner.run import in_rounds

from pipeline_sections.setting import Setting, limits_memory, started, why_absent

ORDERS = ("cgopipe", "flexgen", "flexgen-loop", "serial")
PLANNED = "planned"  # in place of an order: the plan's own
GRAPH = "graph"  # the same, the model run as transformers' module graph
AS_PLANNED = (PLANNED, GRAPH, BEFORE)  # the last in the checkout that --before names
PEERS = ("accelerate-grouped_mm", "accelerate-eager", "llamacpp")
PLAN_SLACK = 1.05
CONVERTED = ("int4", "int8", "mxfp4", "fp8")  # other forms are drawn, or types of GGUF files


def run(setting: Setting) -> dict[str, Any]:
    """Orders of ours, then the peers."""
    model, options = setting.big, setting.options
    files = [model] if model.suffix == GGUF else sorted(model.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    limit, base = options["disk_limit"] or size // 3, measure_base()
    memory = int((limit - base) / PLAN_SLACK)
    work = _work(setting, options["disk_batches"], options["disk_new"])
    kinds = options["disk_experts"]
    rows = _orders(setting, work, files, limit, memory) if WHOLE in kinds else []
    forms = [row for kind in kinds if kind != WHOLE for row in _form(setting, work, kind, limit, memory)]
    peers = [row for name in options["disk_peers"] for row in _peer(setting, work, name, limit)]
    result = {
        "model": model.name,
        "bytes": size,
        "limit_bytes": limit,
        "limited": limits_memory(),
        "host_memory": memory,
        "base_bytes": base,
        "prompt_len": options["disk_prompt"],
        "new_tokens": options["disk_new"],
        "peer_new_tokens": options["peer_new"],
        "ours": [{key: value for key, value in row.items() if key != "ids"} for row in rows],
        "forms": [{key: value for key, value in row.items() if key != "ids"} for row in forms],
        "peers": peers,
        "bars": bars(rows, peers) | bars_of_forms(forms, rows, peers),
    }
    print_table(result)
    return result


def _orders(setting: Setting, work: Work, files: list[Path], limit: int, memory: int) -> list[dict[str, Any]]:
    """The first order at every batch size; all orders in rounds at the largest."""
    orders = setting.options["disk_orders"]
    rows = [measured(setting, work, files, batch, orders[0], limit, memory) for batch in work.batches[:-1]]
    batch, absent = work.batches[-1], set[str]()
    for _, turn in in_rounds(orders, setting.rounds):
        for order in turn:
            if order not in absent:
                rows.append(measured(setting, work, files, batch, order, limit, memory))
                absent |= {order} if "absent" in rows[-1] else set()
    return rows


def _form(setting: Setting, work: Work, kind: str, limit: int, memory: int) -> list[dict[str, Any]]:
    """The model in the form ``kind`` in the first order, at every batch size. Its files lie beside the model."""
    model = setting.big
    path = _in_form(model, kind)
    if not path.exists():
        return [
            {"experts": kind, "absent": f"no {path.name} beside the checkpoint; quality.py --sections files makes it"}
        ]
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    original, order = replace(work, model=path), setting.options["disk_orders"][0]
    size = sum(file.stat().st_size for file in files)
    return [
        {"experts": kind, "bytes": size, "activations": activations}
        | measured(setting, original, files, batch, order, limit, memory, activations=activations)
        for activations in setting.options["disk_activations"]
        for batch in work.batches
    ]


def _in_form(model: Path, kind: str) -> Path:
    if kind in CONVERTED:
        return converted(model, kind, model.parent)
    return drawn_checkpoint(model, kind) if kind in CONFIGS else gguf(model, kind)


def _work(setting: Setting, batches: list[int], new: int) -> Work:
    maximum = max(batches)
    return random_work(
        setting.big, [setting.options["disk_prompt"]] * maximum, [new] * maximum, sorted(batches), setting.threads
    )


def measured(
    setting: Setting, work: Work, files: list[Path], batch: int, order: str, limit: int, memory: int, **more: Any
) -> dict[str, Any]:
    """One limited run of ours in ``order``, beside the rate of plain direct reads before and after it. ``more`` options
    go to the generator."""
    row: dict[str, Any] = {"order": order, "batch": batch}
    alone = replace(work, batches=[batch], prompts=work.prompts[:batch], new_tokens=work.new_tokens[:batch])
    before = direct_rate(files)
    fixed = {} if order in AS_PLANNED else {"schedule": order}
    options = {"host_memory": memory, "batch_size": batch, "watch": True, **fixed, **more}
    with started(BEFORE if order == BEFORE else f"{OURS}-{order}", setting, alone, limit=limit, **options) as one:
        if isinstance(one, str):
            return row | {"absent": one}
        result = one.generate(batch)
        peak = one.samples.peak_rss_bytes
    roof = statistics.mean((before, direct_rate(files)))
    print(
        f"moelight {order}, {work.model.name}, batch {batch}: {alone.tokens(batch) / result['seconds']:.1f} tok/s",
        file=sys.stderr,
    )
    disk = result["decode_lanes"].get("disk", {"busy_share": 0.0, "bytes_per_s": 0.0, "busy_bytes_per_s": 0.0})
    return row | {
        "tokens_per_s": alone.tokens(batch) / result["seconds"],
        "decode_tokens_per_s": result["decode_tokens"] / result["decode_s"] if result["decode_s"] else 0.0,
        "decode_passes": result["decode_passes"],
        "passes": result["passes"],
        "disk_busy_share": disk["busy_share"],
        "disk_bytes_per_s": disk["bytes_per_s"],
        "disk_busy_bytes_per_s": disk["busy_bytes_per_s"],
        "roof_bytes_per_s": roof,
        "roof_share": disk["bytes_per_s"] / roof,
        "lanes": result["decode_lanes"],
        "python_share": result["python_share"],
        "peak_rss_bytes": peak,
        "policy": result["policy"],
        "ids": result["ids"],
    }


def _peer(setting: Setting, work: Work, name: str, limit: int) -> list[dict[str, Any]]:
    absent = why_absent(name, setting, setting.big)
    if absent is not None:
        return [{"peer": name, "absent": absent}]
    short = _work(setting, setting.options["peer_batches"], setting.options["peer_new"])
    rows: list[dict[str, Any]] = []
    limited = None if name.startswith("accelerate") and not setting.options["limit_accelerate"] else limit
    llamacpp = {"ubatch": setting.options["llamacpp_ubatch"], "unified": True, "repack": False}
    with started(name, setting, short, limit=limited, **llamacpp) as one:
        if isinstance(one, str):
            return [{"peer": name, "absent": one}]
        for batch in short.batches:
            try:
                result = one.generate(batch, most_s=setting.options["peer_most_s"])
            except EndedError as ended:
                rows.append({"peer": name, "batch": batch, "absent": ended.args[0]})
                break
            rows.append(
                {"peer": name, "batch": batch, **_rates(result, batch, work.new_tokens[0], short.new_tokens[0])}
            )
            print(f"{name}, batch {batch}: {rows[-1]}", file=sys.stderr)
            facts = {"load_s": one.samples.load_s, "limited": limited is not None}
            rows[-1] |= facts | {"disk_bytes": result.get("disk_bytes"), "peak_rss_bytes": one.samples.peak_rss_bytes}
    return rows


def _rates(result: dict[str, Any], batch: int, new: int, short: int) -> dict[str, float]:
    """Tokens per second of decoding, and of the whole work had it been ``new`` tokens long instead of ``short``."""
    step_s = result["decode_s"] / (short - 1)
    return {
        "tokens_per_s": batch * new / (result["first_s"] + step_s * (new - 1)),
        "decode_tokens_per_s": batch / step_s,
        "first_s": result["first_s"],
        "step_s": step_s,
    }


def bars(rows: list[dict[str, Any]], peers: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the first order at the largest batch size: share and rate of the disk, ratios to other orders; of its best:
    ratios to the best of each peer. Whether all orders gave the same tokens."""
    ran = [row for row in rows if "absent" not in row]
    ours = [row for row in ran if row["order"] == rows[0]["order"]]
    if not ours:
        return {}
    first = ours[0]["order"]
    batch = max(row["batch"] for row in ours)
    result: dict[str, Any] = {
        name: statistics.median(row[name] for row in ours if row["batch"] == batch)
        for name in ("disk_busy_share", "roof_share")
    }
    rates = {
        order: statistics.median(row["tokens_per_s"] for row in ran if (row["order"], row["batch"]) == (order, batch))
        for order in {row["order"] for row in ran if row["batch"] == batch}
    }
    result |= {f"over {order}": rates[first] / rate for order, rate in rates.items() if order != first}
    best = max(row["tokens_per_s"] for row in ours)
    best_decode = max(row["decode_tokens_per_s"] for row in ours)
    for name in sorted({row["peer"] for row in peers}):
        theirs = [row for row in peers if row["peer"] == name and "absent" not in row]
        if theirs:
            result[f"over {name}"] = best / max(row["tokens_per_s"] for row in theirs)
            result[f"over {name}, decoding"] = best_decode / max(row["decode_tokens_per_s"] for row in theirs)
    same = [row["ids"] for row in ran if row["batch"] == batch]
    return result | {"identical_tokens": all(ids == same[0] for ids in same)}


def bars_of_forms(
    forms: list[dict[str, Any]], rows: list[dict[str, Any]], peers: list[dict[str, Any]]
) -> dict[str, float]:
    """Of each form its tokens a second over those of the model as it is and over each peer's, all at their best batch
    size; with activations as they are, and rounded, apart."""
    forms = [row | {"experts": _form_name(row)} for row in forms]
    others = [({"form": "moelight"} | row) for row in rows] + [({"form": row["peer"]} | row) for row in peers]
    best = _best(others, "form")
    return {
        f"{kind} over {name}": row["tokens_per_s"] / other["tokens_per_s"]
        for kind, row in _best(forms, "experts").items()
        for name, other in best.items()
    }


def _form_name(row: dict[str, Any]) -> str:
    """Of experts, and of activations where they are rounded."""
    rounded_to = row.get("activations", "auto")
    return str(row["experts"]) if rounded_to == "auto" else f"{row['experts']}, {rounded_to} activations"


def _best(rows: list[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    """By ``key`` the row with most tokens a second."""
    result: dict[str, dict[str, Any]] = {}
    for row in rows:
        if (
            "absent" not in row
            and row["tokens_per_s"] > result.get(row[key], row | {"tokens_per_s": 0.0})["tokens_per_s"]
        ):
            result[row[key]] = row
    return result


def print_table(result: dict[str, Any]) -> None:
    """Ours, peers, and what came of the bars."""
    print(
        f"disk: {result['model']}, {result['bytes'] / 1e9:.2f} GB, limited to {result['limit_bytes'] / 1e9:.2f} GB"
        f"{'' if result['limited'] else ' (NOT: no control groups)'}; prompts of {result['prompt_len']}, "
        f"{result['new_tokens']} new tokens"
    )
    print(f"{'':32}{'batch':>6}{'tok/s':>8}{'decode':>8}{'disk busy':>11}{'GB/s':>7}{'roof':>7}{'share':>7}{'GiB':>7}")
    for row in (*result["ours"], *result["forms"]):
        message = _form_name(row) if "experts" in row else row.get("order", "")
        label = f"{'moelight ' + message:32}{row.get('batch', ''):>6}"
        if "absent" in row:
            print(f"{label}  absent: {row['absent']}")
            continue
        print(
            f"{label}{row['tokens_per_s']:>8.1f}{row['decode_tokens_per_s']:>8.1f}{row['disk_busy_share']:>11.0%}"
            f"{row['disk_bytes_per_s'] / 1e9:>7.2f}{row['roof_bytes_per_s'] / 1e9:>7.2f}{row['roof_share']:>7.0%}"
            f"{row['peak_rss_bytes'] / 2**30:>7.2f}"
        )
    for row in result["peers"]:
        label = f"{row['peer']:32}{row.get('batch', ''):>6}"
        if "absent" in row:
            print(f"{label}  absent: {row['absent']}")
            continue
        print(f"{label}{row['tokens_per_s']:>8.1f}{row['decode_tokens_per_s']:>8.1f}")
    for name, value in result["bars"].items():
        print(f"  {name}: {value if isinstance(value, bool) else f'{value:.2f}'}")
