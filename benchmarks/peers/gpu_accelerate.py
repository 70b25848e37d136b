"""accelerate's offload of a checkpoint to host memory under a cap on device memory, in its own environment.

    python gpu_accelerate.py MODEL --cap BYTES --prompt 77 --new 32 --batches 16 64

Needs torch, transformers and accelerate, and nothing of moelight. The last line is JSON: tokens per second of the best
batch, and of each; a batch that does not fit is left out with its reason.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

SHARE_FOR_WEIGHTS = 0.6  # of the cap; activations, cache and the pages on their way take the rest
SHARE_OF_HOST = 0.9


def load(path: str, cap: int) -> Any:
    """The model with as many layers on the device as the share of ``cap`` holds, the others in host memory."""
    _, full = torch.cuda.mem_get_info(0)
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / full), 0)
    room = {0: int(SHARE_FOR_WEIGHTS * cap), "cpu": int(SHARE_OF_HOST * psutil.virtual_memory().available)}
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map="auto", max_memory=room).eval()


def tokens_per_s(model: Any, batch: int, prompt: int, new: int) -> float:
    """Of one generation of ``batch`` random prompts, end to end."""
    ids = torch.randint(3, model.config.vocab_size, (batch, prompt), device="cuda")
    how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    torch.cuda.synchronize()
    return batch * new / (time.perf_counter() - began)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cap", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=77)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64])
    args = parser.parse_args()
    began = time.perf_counter()
    model = load(args.model, args.cap)
    load_s, result, unable = time.perf_counter() - began, dict[int, float](), dict[int, str]()
    for batch in args.batches:
        try:
            result[batch] = tokens_per_s(model, batch, args.prompt, args.new)
        except torch.OutOfMemoryError as error:
            unable[batch] = str(error)[:200]
    print(
        json.dumps(
            {
                "tokens_per_s": max(result.values(), default=0.0),
                "by_batch": result,
                "unable_by_batch": unable,
                "load_s": load_s,
                "device_peak_bytes": torch.cuda.max_memory_reserved(0),
            }
        )
    )


if __name__ == "__main__":
    main()
