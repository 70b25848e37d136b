"""accelerate's disk offload as a contestant; the mode is transformers' way of computing experts.

Every layer and the output matrix lie on the disk: the memory it may use for weights is told to be next to nothing. It
writes a second copy of them (``options["offload"]`` names an empty directory) where transformers stores a layer's
experts as one tensor. Before each step the weight files are put out of the page cache, else that would serve them.
A control group is entered once it has loaded, because loading takes the whole model's memory.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from common import Facts, Generate, Ids, Task, serve
from transformers import AutoModelForCausalLM

CPU_MEMORY = "300MB"


def load(task: Task) -> Generate:
    """Prompts are of one length, so nothing is padded."""
    torch.set_num_threads(task.threads)
    offload = Path(task.options["offload"])
    model = AutoModelForCausalLM.from_pretrained(
        task.model,
        dtype=torch.bfloat16,
        experts_implementation=task.mode,
        attn_implementation="sdpa",
        device_map="auto",
        max_memory={"cpu": CPU_MEMORY},
        offload_folder=str(offload),
    ).eval()
    files = [path for position in (Path(task.model), offload) for path in position.glob("*") if path.is_file()]

    def generate(count: int) -> tuple[Ids, Facts]:
        ids = torch.tensor(task.prompts[:count])
        steps, read = [], _bytes_read()
        new: list[torch.Tensor] = []
        began = time.perf_counter()
        with torch.inference_mode():
            cache, step = None, ids
            for _ in range(task.new_tokens[0]):
                forget(files)
                out = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, step = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
                new.append(step)
                steps.append(time.perf_counter() - began)
        decode_s = steps[-1] - steps[0]
        facts = {"first_s": steps[0], "decode_s": decode_s, "disk_bytes": _bytes_read() - read}
        return torch.cat(new, 1).tolist(), facts

    return generate


def forget(files: list[Path]) -> None:
    """Put ``files`` out of the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


if __name__ == "__main__":
    serve(load, loads_outside=True)
