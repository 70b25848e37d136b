"""A dense model of several times the memory: layers as pages from the disk, beside the disk's plain rate.

    python benchmarks/dense.py [--shapes llama-4g llama-7b] [--prompts 64] [--prompt-len 64] [--new-tokens 8]
        [--scratch DIR]

Each shape is written once to the scratch directory (4.2 and 13.5 GB) and run as a job, `moelight generate`, in a
process that really has no more memory than said (a control group, its page cache included), with the file out of the
page cache before. ``read_share`` is what the passes read in a second of the job's generation over the rate of a plain
direct read of the checkpoint right after it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from limited import limited_job
from make_checkpoint import RandomTensor, write_tokenizer, write_weights
from reads import BLOCK, ring

from moelight.core.dtypes import BFLOAT16
from moelight.core.units import parse_bytes

# Sizes of a Llama, the memory of the process, and what of it moelight plans with.
SHAPES: dict[str, tuple[dict[str, int], str, str]] = {
    "llama-4g": (
        {"hidden": 2048, "intermediate": 5632, "layers": 48, "heads": 32, "kv_heads": 4, "vocab": 8192},
        "1GiB",
        "560MiB",
    ),
    "llama-7b": (
        {"hidden": 4096, "intermediate": 11008, "layers": 32, "heads": 32, "kv_heads": 32, "vocab": 32000},
        "4GiB",
        "3GiB",
    ),
}
_KEYS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--scratch", type=Path, help="a directory on a disk, where checkpoints stay for another time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as temporary:
        rows = [run(name, args, args.scratch or Path(temporary), Path(temporary)) for name in args.shapes]
    print(json.dumps({"benchmark": "dense", "rows": rows}))


def make(name: str, directory: Path) -> Path:
    """The checkpoint ``name`` in bfloat16: made unless it is there; its place."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    out = directory / name
    if (out / "model.safetensors.index.json").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**{_KEYS[key]: size for key, size in SHAPES[name][0].items()}, dtype="bfloat16")
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    tensors = [
        RandomTensor(name=name, shape=tuple(item.shape), std=None if item.ndim == 1 else 0.02)
        for name, item in module.state_dict().items()
    ]
    module.config.save_pretrained(out)
    write_tokenizer(out, config.vocab_size)
    write_weights(out, tensors, BFLOAT16, shard_size=2_000_000_000, seed=0)
    return out


def run(name: str, args: argparse.Namespace, scratch: Path, temporary: Path) -> dict[str, Any]:
    """One job under its limit, and the disk's rate."""
    _, memory, planned = SHAPES[name]
    model, prompts = make(name, scratch), temporary / f"{name}.jsonl"
    draw = random.Random(0)
    texts = ["".join(draw.choice("abcdefgh ") for _ in range(args.prompt_len)) for _ in range(args.prompts)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    result = limited_job(
        model, prompts, temporary, memory=parse_bytes(memory), planned=planned, new_tokens=args.new_tokens
    )
    return {
        "shape": name,
        "bytes": sum(path.stat().st_size for path in model.glob("*.safetensors")),
        **result,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "plain_bytes_per_s": plain_rate(model),
    }


def plain_rate(model: Path) -> float:
    """Bytes a second of direct reads of 8 MiB, one after the other, over the first file of ``model``."""
    file = min(model.glob("*.safetensors"))
    block, blocks = ring(BLOCK, huge=True)[:BLOCK].numpy().data, file.stat().st_size // BLOCK
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        began = time.perf_counter()
        for number in range(blocks):
            os.preadv(descriptor, [block], number * BLOCK)
        return blocks * BLOCK / (time.perf_counter() - began)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
