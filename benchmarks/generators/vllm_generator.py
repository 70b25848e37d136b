"""vLLM on the CPU as a contestant, compiled or eager, in its own environment; ``vllm-scores`` generates nothing, and
says the log-likelihood of each prompt's tokens from the position in ``options["scored_from"]`` on.

Prefix caching is off: every generation has the same prompts, and nobody else remembers them.
"""

from __future__ import annotations

import os
from typing import Any

from common import Facts, Generate, Ids, Task, serve

KV_GIB = 1


def load(task: Task) -> Generate:
    """Threads are bound to the first processors, as vLLM does by itself; its environment must be set before import."""
    cores = sorted(os.sched_getaffinity(0))[: task.threads]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    engine = LLM(
        task.model,
        dtype=task.options.get("dtype", "bfloat16"),
        enforce_eager=task.mode == "eager",
        max_model_len=task.longest,
        max_num_seqs=max(task.batches),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    if task.mode == "scores":
        return _scoring(engine, SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False), task)
    how = SamplingParams(temperature=0.0, max_tokens=task.new_tokens[0], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in task.prompts]

    def generate(count: int) -> tuple[Ids, Facts]:
        result = engine.generate(prompts[:count], how, use_tqdm=False)
        return [list(item.outputs[0].token_ids) for item in result], {}

    return generate


def _scoring(engine: Any, how: Any, task: Task) -> Generate:
    prompts = [{"prompt_token_ids": ids} for ids in task.prompts]
    firsts: list[int] = task.options["scored_from"]

    def score(count: int) -> tuple[Ids, Facts]:
        result = engine.generate(prompts[:count], how, use_tqdm=False)
        sums = []
        for item, ids, first in zip(result, task.prompts, firsts):  # noqa: B905 - Python 3.9 reads it
            positions = item.prompt_logprobs[first:]
            sums.append(sum(one[token].logprob for one, token in zip(positions, ids[first:])))  # noqa: B905
        return [], {"scores": sums}

    return score


if __name__ == "__main__":
    serve(load)
