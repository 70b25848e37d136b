"""transformers on the CPU as a contestant; the mode is its way of computing experts."""

from __future__ import annotations

import torch
from common import Facts, Generate, Ids, Task, serve
from transformers import AutoModelForCausalLM


def load(task: Task) -> Generate:
    """Prompts are of one length, so nothing is padded. Attention is PyTorch's own where the family allows that."""
    torch.set_num_threads(task.threads)
    model = AutoModelForCausalLM.from_pretrained(
        task.model, dtype=torch.bfloat16, experts_implementation=task.mode
    ).eval()
    new = task.new_tokens[0]
    how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def generate(count: int) -> tuple[Ids, Facts]:
        ids = torch.tensor(task.prompts[:count])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        return out[:, ids.shape[1] :].tolist(), {}

    return generate


if __name__ == "__main__":
    serve(load)
