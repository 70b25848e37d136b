"""A model class of lm-evaluation-harness as a contestant of `harness.py`: moelight's, or the harness's own for
transformers models, on the same requests.

A line on stdin is ``{"kind": "scores" | "texts", "turn": t, "count": n, "batch_size": b}``: it answers the first n
requests of that kind, with t in front, and says ``{"seconds": ..., "cores": ..., "answers": [...], "tokens": {...}}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    began = time.perf_counter()
    lm = _ours(task) if task["who"] == "moelight" else _theirs(task)
    print(json.dumps({"load_s": time.perf_counter() - began}), file=out)
    for line in sys.stdin:
        told = json.loads(line)
        # Every turn its own prompts: nothing of them is in a cache yet.
        asked = [(f"{told['turn']:02}{context}", more) for context, more in task[told["kind"]][: told["count"]]]
        if task["who"] != "moelight":
            lm.batch_size_per_gpu = told["batch_size"]
        answer = lm.loglikelihood if told["kind"] == "scores" else lm.generate_until
        requests = [SimpleNamespace(args=args, task_name=told["kind"]) for args in asked]
        before, began, used = _generated(lm), time.perf_counter(), _cpu_s()
        answers = answer(requests, disable_tqdm=True)
        wall_s, cpu_s, new = time.perf_counter() - began, _cpu_s() - used, _generated(lm) - before
        message = {"seconds": wall_s, "cores": cpu_s / wall_s, "answers": answers}
        print(json.dumps({**message, "tokens": {**_prompt_tokens(lm, asked), "new": new}}), file=out)


def _ours(task: dict[str, Any]) -> Any:
    from moelight.integrations.lm_eval import MoELightLM

    return MoELightLM(task["model"])


def _theirs(task: dict[str, Any]) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=task["model"],
        device="cpu",
        dtype="bfloat16",
        batch_size=1,
        experts_implementation=task["experts"],
        attn_implementation="sdpa",
    )


def _cpu_s() -> float:
    return sum(os.times()[:4])


def _generated(lm: Any) -> int:
    """Tokens that moelight has generated so far; 0 of others, and before it is loaded."""
    engine = getattr(lm, "engine", None)
    return 0 if engine is None else int(engine.stats.completion_tokens)


def _prompt_tokens(lm: Any, asked: list[tuple[Any, Any]]) -> dict[str, int]:
    """Those that the model must see (the last one of a continuation is only scored), and how many different
    beginnings they have: a token whose beginning was seen need not be computed again."""
    prompts = [
        tuple(lm.tok_encode(context + more)[:-1] if isinstance(more, str) else lm.tok_encode(context))
        for context, more in asked
    ]
    distinct = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    return {"prompts": sum(map(len, prompts)), "distinct": len(distinct)}


if __name__ == "__main__":
    main()
