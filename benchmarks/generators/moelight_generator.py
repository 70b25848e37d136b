"""moelight, resident on the CPU, as a contestant."""

from __future__ import annotations

import torch
from common import Facts, Generate, Ids, Task, serve

from moelight import Engine, SamplingParams, Workload


def load(task: Task) -> Generate:
    """The engine stays open until the process ends."""
    torch.set_num_threads(task.threads)
    length = max(map(len, task.prompts))
    workload = Workload(
        num_requests=len(task.prompts), prompt_len=length, max_prompt_len=length, gen_len=task.new_tokens
    )
    how = SamplingParams(max_tokens=task.new_tokens, ignore_eos=True)
    engine = Engine.from_pretrained(task.model, device="cpu", workload=workload).__enter__()

    def generate() -> tuple[Ids, Facts]:
        before = engine.stats
        completions = engine.generate(task.prompts, how)
        after = engine.stats
        wall_s = after.wall_s - before.wall_s
        facts = {"python_share": (after.python_s - before.python_s) / wall_s, "passes": after.passes - before.passes}
        return [list(completion.token_ids) for completion in completions], facts

    return generate


if __name__ == "__main__":
    serve(load)
