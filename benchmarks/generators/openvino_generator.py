"""OpenVINO GenAI as a contestant: continuous batching, products in bfloat16, in its own environment.

The checkpoint is exported once (``options["ir"]`` names the directory, beside the checkpoint), by optimum-intel.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from common import Facts, Generate, Ids, Task, serve

KV_GIB = 1


def load(task: Task) -> Generate:
    """Prefix caching is off: every generation has the same prompts, and nobody else remembers them."""
    ir = Path(task.options["ir"])
    if not ir.exists():
        _export(task.model, ir)
    import openvino
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = KV_GIB
    scheduling.max_num_seqs = max(task.batches)
    scheduling.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": task.threads}
    pipeline = genai.ContinuousBatchingPipeline(ir, scheduling, "CPU", properties)
    how = genai.GenerationConfig()
    how.max_new_tokens = how.min_new_tokens = task.new_tokens[0]
    how.ignore_eos = True
    how.do_sample = False
    prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in task.prompts]

    def generate(count: int) -> tuple[Ids, Facts]:
        result = pipeline.generate(prompts[:count], [how] * count)
        return [list(item.m_generation_ids[0]) for item in result], {}

    return generate


def _export(model: str, ir: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    unfinished = ir.with_name(ir.name + ".unfinished")
    main_export(
        model,
        unfinished,
        task="text-generation-with-past",
        ov_config=OVConfig(dtype="fp16"),
        convert_tokenizer=True,
        library_name="transformers",
    )
    unfinished.rename(ir)


if __name__ == "__main__":
    serve(load)
