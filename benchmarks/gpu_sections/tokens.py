"""The first proof that anything runs: a tiny checkpoint on the card in three orders, tokens compared with the CPU's.

The checkpoint is in float32, where sums in another order change no greedy token of it; pages lie on every tier, so the
disk, the link and the device all work. The bundled model, in 16 bits, is compared beside it, and may differ at ties.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from make_checkpoint import make_checkpoint, scaled_config

from gpu_sections.setting import ROOT, FailedError, Setting, TimeOverError
from moelight.core.policy import Policy, Shares
from moelight.profiles.policy_files import policy_text

TINY = {"layers": 4, "hidden": 256, "intermediate": 512, "experts": 8, "heads": 8, "kv_heads": 4, "vocab": 512}
SMALLER = {"layers": 2, "hidden": 64, "intermediate": 64, "experts": 4, "heads": 4, "kv_heads": 2, "vocab": 512}
ORDERS: dict[str, dict[str, Any]] = {
    "cgopipe": {"attention_device": "cpu"},
    "module": {"attention_device": "gpu"},
    "flexgen": {"attention_device": "gpu"},
}
_WORDS = ["the", "river", "runs", "past", "a", "mill", "and", "miller", "counts", "sacks", "until", "evening"]


def run(setting: Setting) -> None:
    """Orders one after another; the CPU first."""
    model = setting.scratch / "tiny"
    if not model.exists():
        make_checkpoint(model, scaled_config("mixtral-8x7b", **(SMALLER if setting.small else TINY)), dtype="float32")
    prompts = setting.scratch / "tiny.jsonl"
    texts = [" ".join(_WORDS[(n * 7 + k) % len(_WORDS)] for k in range(2 + 5 * n)) for n in range(8)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    truth = _tokens(setting, prompts, Policy(model=str(model), weights=Shares(host=1.0)), "cpu", "truth")
    for order, devices in ORDERS.items():
        policy = Policy(
            model=str(model),
            batch_size=8,
            micro_batch_size=4,
            micro_batch_tokens=64,
            schedule=order,
            ffn_device="gpu",
            weights=Shares(device=0.25, host=0.5, disk=0.25),
            **devices,
        )
        setting.add_row(**_row(setting, prompts, policy, f"tiny, float32: {order}", truth))
    if not setting.small:
        examples = ROOT / "examples" / "prompts.jsonl"
        bundled = Policy(model="demo", batch_size=8, micro_batch_size=4)
        truth = _tokens(setting, examples, bundled, "cpu", "demo-truth")
        policy = Policy(model="demo", batch_size=8, micro_batch_size=4, ffn_device="gpu", weights=Shares(host=1.0))
        setting.add_row(**_row(setting, examples, policy, "bundled, 16 bits: cgopipe", truth), ties=True)


def _row(setting: Setting, prompts: Path, policy: Policy, name: str, truth: list[list[int]]) -> dict[str, Any]:
    row: dict[str, Any] = {"run": name}
    key = "".join(item if item.isalnum() else "-" for item in name)
    try:
        result = _tokens(setting, prompts, policy, setting.device, key)
        stats = json.loads((setting.scratch / f"{key}.stats.json").read_text())
        report = setting.moelight("report", setting.scratch / f"{key}.trace.json", "--json").check()
    except TimeOverError:
        raise
    except FailedError as error:
        return row | {"unable": str(error)}
    lanes = json.loads(report.out)["lanes"]
    return row | {
        "identical": result == truth,
        "identical_rows": sum(selected == other for selected, other in zip(result, truth, strict=True)),
        "rows": len(truth),
        "load_s": stats["load_s"],
        "wall_s": stats["wall_s"],
        "passes": stats["passes"],
        "tasks": {name: lane["tasks"] for name, lane in lanes.items()},
    }


def _tokens(setting: Setting, prompts: Path, policy: Policy, device: str, key: str) -> list[list[int]]:
    """Token ids of every row, as the command line writes them."""
    position = setting.scratch / key
    position.with_suffix(".yaml").write_text(policy_text(policy), encoding="utf-8")
    out = position.with_suffix(".out.jsonl")
    files = ["--policy", position.with_suffix(".yaml"), "-o", out, "--stats", f"{position}.stats.json"]
    options = ["--trace", f"{position}.trace.json", "--device", device, "--max-tokens", "4" if setting.small else "16"]
    setting.moelight("generate", prompts, *files, *options, "--ignore-eos", "--token-ids", "--restart").check()
    return [json.loads(line)["token_ids"] for line in out.read_text().splitlines()]


def lines(figures: dict[str, Any]) -> list[str]:
    """For the summary."""
    return [
        f"{row['run']}: "
        + (
            row.get("unable")
            or f"{row['identical_rows']} of {row['rows']} rows as on the CPU, "
            f"{row['passes']} passes in {row['wall_s']:.2f} s, loaded in {row['load_s']:.1f} s"
        )
        for row in figures.get("rows", [])
    ]
