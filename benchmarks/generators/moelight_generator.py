"""moelight on the CPU as a contestant: the plan that it makes itself, or one that `options` change. In mode ``graph``
a family that it has a decoder for runs as transformers' module graph like any other; in mode ``int8`` activations are
rounded to int8, as llama.cpp does.

``options``: ``host_memory``, ``batch_size``, ``activations`` (what the plan is made for), ``schedule``, ``admission``
(what is put in its place afterwards), ``watch`` (say what lanes did), ``resident_after`` (say the resident set after so
many completions, and at the end), ``speculate``, ``answers`` (token ids for each prompt, which are played: tokens are
chosen, and these take their place), ``drafts`` (`PlantedDrafts` through which generations go).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Facts, Generate, Ids, Task, serve
from planted_drafts import PlantedDrafts
from torch import Tensor

from moelight import Engine, SamplingParams, Workload
from moelight.core.policy import INT8
from moelight.core.units import parse_bytes
from moelight.engine.batcher import SampledRow
from moelight.engine.engine import requests_from
from moelight.engine.options import EngineOptions
from moelight.engine.output_processor import OutputProcessor
from moelight.engine.planning import plan_for
from moelight.engine.ranks import count_ranks, open_for
from moelight.models import checkpoints
from moelight.runtime.machine import find_machine
from moelight.runtime.measure import current_rss_bytes, peak_rss_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from runner.lanes import Watched


def load(task: Task) -> Generate:
    """The engine stays open until the process ends."""
    torch.set_num_threads(task.threads)
    if (answers := task.options.get("answers")) is not None:
        _play(answers)
    engine = _engine(task).__enter__()
    how = [SamplingParams(max_tokens=new, ignore_eos=True) for new in task.new_tokens]
    planted = None if "drafts" not in task.options else PlantedDrafts(engine, answers or [], task.options["drafts"])

    def generate(count: int) -> tuple[Ids, Facts]:
        before, watched, resident = engine.stats, Watched(began=time.perf_counter()), _Resident(task.options)
        tokens = [engine.progress_tokens]
        if planted is not None:
            planted.begin()

        def on_pass() -> None:
            if planted is not None:
                planted.on_pass()
            timeline = engine.timeline
            if task.options.get("watch") and timeline is not None:
                watched.add(timeline.spans, engine.progress_tokens - tokens[0], time.perf_counter())
                tokens[0] = engine.progress_tokens

        requests = requests_from(task.prompts[:count], how[:count], engine.tokenizer)
        done = []
        for completion in engine.run(requests, on_pass=on_pass):
            done.append(completion)
            resident.look(len(done))
            if planted is not None:
                planted.on_completion()
        after = engine.stats
        wall_s = after.wall_s - before.wall_s
        facts = {
            "python_share": (after.python_s - before.python_s) / wall_s,
            "passes": after.passes - before.passes,
            "policy": _policy(engine),
            **_lanes(watched, min(count, engine.policy.batch_size)),
            **resident.facts(),
            **({} if planted is None else {"planted": planted.facts(count, _middle(task, count))}),
            "drafts": {
                name: after.counts.get(name, 0) - before.counts.get(name, 0)
                for name in ("drafted_tokens", "accepted_tokens", "drafted_passes")
            },
        }
        return [list(item.token_ids) for item in sorted(done, key=lambda item: item.index)], facts

    return generate


def _engine(task: Task) -> Engine:
    """Planned for the whole work; then what the benchmark fixes is put in the plan's place."""
    count = max(task.batches)
    lengths, new = [len(ids) for ids in task.prompts], task.new_tokens
    workload = Workload(
        num_requests=count,
        prompt_len=round(sum(lengths) / len(lengths)),
        max_prompt_len=max(lengths),
        gen_len=max(new),
    )
    options = task.options
    if task.mode == "graph":
        checkpoints.FAMILIES = {}
    tp = options.get("tp", "1")
    source = open_for(str(task.model), count_ranks(tp, "cpu"))
    memory = options.get("host_memory")
    plan = plan_for(
        task.model,
        source,
        find_machine("cpu"),
        EngineOptions(
            host_memory=None if memory is None else parse_bytes(str(memory)),
            batch_size=options.get("batch_size"),
            activations=INT8 if task.mode == INT8 else options.get("activations"),
            tp=tp,
        ),
        workload,
    )
    changes = {name: options[name] for name in ("schedule", "admission") if name in options}
    policy = replace(plan.policy, **changes) if changes else plan
    how: dict[str, Any] = {"speculate": options.get("speculate", "off"), "tp": tp}
    if settings := options.get("drafts"):
        how["num_speculative_tokens"] = max(count for count, _ in settings)
    return Engine(policy, device="cpu", source=source, prefix_caching=False, **how)  # rounds have the same prompts


def _middle(task: Task, count: int) -> float:
    """Tokens of a sequence, on average, when half of its answer is there."""
    return sum(len(ids) + new / 2 for ids, new in zip(task.prompts[:count], task.new_tokens, strict=False)) / count


def _play(answers: list[list[int]]) -> None:
    """Have the tokens of ``answers`` follow each prompt, whatever is chosen."""
    choose = OutputProcessor.choose

    def played(self: OutputProcessor, sampled: Sequence[SampledRow], logits: Tensor) -> Tensor:
        tokens = choose(self, sampled, logits)
        ids = [answers[row.chunk.sequence.request.index][row.earlier] for row in sampled]
        return tokens.copy_(torch.tensor(ids, dtype=tokens.dtype))

    OutputProcessor.choose = played  # type: ignore[method-assign]


def _policy(engine: Engine) -> dict[str, Any]:
    policy = engine.policy
    names = ("batch_size", "micro_batch_size", "micro_batch_tokens", "kv_tokens", "schedule", "admission")
    names = (*names, "ring_pages")
    return {name: getattr(policy, name) for name in names} | {"resident": policy.weights.host}


def _lanes(watched: Watched, sequences: int) -> Facts:
    if not watched.tokens:
        return {}
    steady = watched.steady(sequences)
    return {
        "decode_passes": len(steady),
        "decode_s": watched.seconds(steady),
        "decode_tokens": sum(watched.tokens[number] for number in steady),
        "decode_lanes": watched.figures(steady),
        "lanes": watched.figures(range(len(watched.tokens))),
    }


class _Resident:
    """The resident set after some completions, now and then."""

    def __init__(self, options: Facts) -> None:
        self._first = options.get("resident_after")
        self._seen: list[tuple[int, int]] = []

    def look(self, completions: int) -> None:
        """At the first that counts, and at every hundredth after it."""
        if self._first and completions >= self._first and (completions - self._first) % 100 == 0:
            self._seen.append((completions, current_rss_bytes()))

    def facts(self) -> Facts:
        """With what is resident at the end."""
        if not self._first:
            return {}
        return {"resident_bytes": [*self._seen, (-1, current_rss_bytes())], "peak_rss_bytes": peak_rss_bytes()}


if __name__ == "__main__":
    serve(load)
