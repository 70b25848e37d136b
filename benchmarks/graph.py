"""Graph models: transformers' module graphs beside our own decoder, and beside transformers and vLLM.

    python benchmarks/graph.py [--sections native disk peers] [--models DIR ...] [--big DIR] [--graphs DIR ...]
        [--scratch DIR] [--hf-python P] [--vllm-python P]

    native    families that we compute ourselves, once so and once as graphs, resident, batch 1, 16 and 64
    disk      Mixtral's proportions of 6.6 GB in a control group of a third of that: our decoder against the graph
    peers     gpt_oss, deepseek_v2 and qwen3_next of 0.8 to 0.9 GB, resident, batch 16 and 64, beside transformers
              (experts eager and `grouped_mm`) and vLLM, compiled

Comparisons of resident models are those of `e2e.py`, that from the disk is `pipeline.py`'s. Who cannot run a family is
absent, with its own words. Checkpoints that are not given are made in --scratch. The last line is JSON: of each section
its figures, and what it misses of its bars.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import e2e
import torch
from make_checkpoint import make_shape, write_tokenizer
from pipeline_sections.disk import GRAPH, PLANNED, measured
from pipeline_sections.setting import Setting, limits_memory
from runner.contestants import OURS, add_places, places_of, random_work
from runner.limits import forget
from runner.run import add_sections, in_rounds, run, run_sections

NATIVE = ("mixtral-0p9b", "qwen3moe-0p9b", "olmoe-0p9b")
BIG = "mixtral-6g"
OURS_AS_GRAPH = f"{OURS}-{GRAPH}"
PEERS = ("transformers-eager", "transformers-grouped_mm", "vllm-compiled")
# Bars: the graph's seconds over those of our decoder at most, by batch size; transformers' best over the graph at least
SLOWER = {64: 1.10}
SLOWER_FROM_DISK = 1.03
FASTER = {"transformers": 1.3}
SLACK = 1.05  # a budget of memory may be exceeded by so much
_BASE = (
    "import greenlet, torch, moelight.engine.engine; from transformers import AutoModelForCausalLM as _;"
    "torch.ones(64, 64) @ torch.ones(64, 64);"
    "from moelight.runtime.measure import peak_rss_bytes; print(peak_rss_bytes())"
)
_PROVE = "import pathlib, sys; from moelight.models.graph.self_test import prove; prove(pathlib.Path(sys.argv[1]))"


def main() -> None:
    run("graph", __doc__, _options, _measure, rounds=2)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    setting = Setting(
        models=args.models or [],
        big=args.big or Path(BIG),
        ring=Path(),
        places=places_of(args),
        scratch=args.temporary,
        threads=args.threads,
        rounds=args.rounds,
        options=vars(args),
    )
    return run_sections({"native": native, "disk": disk, "peers": peers}, args.sections, setting)


def _options(parser: argparse.ArgumentParser) -> None:
    add_sections(parser, {"native": native, "disk": disk, "peers": peers})
    parser.add_argument("--models", type=Path, nargs="+", help="checkpoints of families with a decoder of ours")
    parser.add_argument("--big", type=Path, help="one of them for the disk section")
    parser.add_argument("--graphs", type=Path, nargs="+", help="checkpoints for the section of peers")
    parser.add_argument("--native-batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--native-prompt", type=int, default=16, help="tokens in a prompt of the native section")
    parser.add_argument("--native-new", type=int, default=24, help="new tokens there")
    parser.add_argument("--disk-batch", type=int, default=32)
    parser.add_argument("--disk-prompt", type=int, default=16)
    parser.add_argument("--disk-new", type=int, default=8)
    parser.add_argument("--peer-batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--peer-prompt", type=int, default=128)
    parser.add_argument("--peer-new", type=int, default=32)
    parser.add_argument("--peers", nargs="*", default=PEERS)
    add_places(parser)


def native(setting: Setting) -> dict[str, Any]:
    """Each family by our decoder and as a graph, in one run."""
    models = setting.models or [make_shape(name, setting.options["scratch"]) for name in NATIVE]
    result = [_compared(setting, model, (OURS_AS_GRAPH,), "native") for model in models]
    return {"models": result, "below": [miss for item in result for miss in _slower(item)]}


def peers(setting: Setting) -> dict[str, Any]:
    """Each family as a graph, beside libraries that have it."""
    options = setting.options
    models = options["graphs"] or [make_graph_shape(name, options["scratch"]) for name in SHAPES]
    result = [_compared(setting, model, options["peers"], "peer") for model in models]
    return {"models": result, "below": [miss for item in result for miss in _below_peers(item)]}


def _compared(setting: Setting, model: Path, others: tuple[str, ...], section: str) -> dict[str, Any]:
    prompt, new, batches = (setting.options[f"{section}_{name}"] for name in ("prompt", "new", "batches"))
    count = max(batches)
    work = random_work(model, [prompt] * count, [new] * count, batches, setting.threads)
    result = e2e.compare(work, [others], setting.places, setting.rounds, setting.scratch)
    e2e.print_table(result)
    return result


def _slower(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Batch sizes at which the graph takes longer than its bar."""
    rows = [(item["batch"], item["contestants"][OURS_AS_GRAPH]["moelight_ratio"]) for item in result["batches"]]
    return [
        {"model": result["model"], "batch": batch, "ratio": ratio, "bar": SLOWER[batch]}
        for batch, ratio in rows
        if ratio > SLOWER.get(batch, ratio)
    ]


def _below_peers(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Libraries of whose best form the graph is not faster by its bar."""
    misses = []
    for outcome in result["batches"]:
        for library, bar in FASTER.items():
            rows = [row for name, row in outcome["contestants"].items() if name.startswith(library)]
            ratio = min((row["moelight_ratio"] for row in rows), default=bar)
            if ratio < bar:
                misses.append({"model": result["model"], "batch": outcome["batch"], "ratio": ratio, "bar": bar})
    return misses


def disk(setting: Setting) -> dict[str, Any]:
    """Our decoder and the graph of one model that is three times its memory, alone in turns."""
    options = setting.options
    model = setting.big if options["big"] else make_shape(BIG, options["scratch"])
    files = sorted(model.glob("*.safetensors"))
    limit = sum(path.stat().st_size for path in files) // 3
    base = int(subprocess.run([sys.executable, "-c", _BASE], check=True, stdout=subprocess.PIPE, text=True).stdout)
    memory, batch = int((limit - base) / SLACK), options["disk_batch"]
    lengths, new = [options["disk_prompt"]] * batch, [options["disk_new"]] * batch
    work = random_work(model, lengths, new, [batch], setting.threads)
    subprocess.run([sys.executable, "-c", _PROVE, model], check=True)  # once, not within the limit
    rows: dict[str, list[dict[str, Any]]] = {PLANNED: [], GRAPH: []}
    for _, order in in_rounds(rows, setting.rounds):
        for name in order:
            row = measured(setting, work, files, batch, name, limit, memory)
            if "absent" in row:
                raise SystemExit(f"{name}: {row['absent']}")
            rows[name].append({key: value for key, value in row.items() if key != "ids"})
    forget(model)
    pairs = zip(rows[PLANNED], rows[GRAPH], strict=True)
    ratios = [ours["decode_tokens_per_s"] / theirs["decode_tokens_per_s"] for ours, theirs in pairs]
    ratio = statistics.median(ratios)
    print(f"{model.name} from disk: the graph's seconds over our decoder's {ratio:.3f} ({ratios})")
    return {
        "model": model.name,
        "limit_bytes": limit,
        "limited": limits_memory(),
        "host_memory": memory,
        "base_bytes": base,
        "rows": rows,
        "ratio": ratio,
        "ratios": ratios,
        "below": [] if ratio <= SLOWER_FROM_DISK else [{"ratio": ratio, "bar": SLOWER_FROM_DISK}],
    }


# ---- Checkpoints of families that run as graphs: of their mechanisms, 0.8 to 0.9 GB each in bfloat16, random weights,
# written by transformers.

_COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "intermediate_size": 768,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "deepseek_v2": {
        "moe_intermediate_size": 512,
        "intermediate_size": 1024,
        "n_routed_experts": 48,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
    "qwen3_next": {
        "moe_intermediate_size": 448,
        "shared_expert_intermediate_size": 448,
        "num_experts": 48,
        "num_experts_per_tok": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}
_DEVIATION = 0.03


def make_graph_shape(name: str, directory: Path) -> Path:
    """The checkpoint ``name`` of `SHAPES` in ``directory``: made unless it is there."""
    from transformers import AutoConfig, AutoModelForCausalLM

    out = directory / f"{name}-graph"
    if not (out / "config.json").exists():
        unfinished = directory / f"{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        config = AutoConfig.for_model(name, **_COMMON, **SHAPES[name])
        torch.manual_seed(0)
        with torch.no_grad():
            module: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            for weight in module.parameters():
                if weight.ndim > 1:
                    weight.normal_(0, _DEVIATION)
            module.save_pretrained(unfinished)
        write_tokenizer(unfinished, config.vocab_size)
        unfinished.rename(out)
    return out


if __name__ == "__main__":
    main()
