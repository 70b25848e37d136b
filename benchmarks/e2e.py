"""End to end, resident: moelight beside its peers on the same checkpoint, prompts, cores and minutes.

    python benchmarks/e2e.py [--models DIR ...] [--groups NAME,NAME ...] [--batches 1 16 64] [--rounds 5]
        [--hf-python P] [--vllm-python P] [--openvino-python P] [--llamacpp DIR] [--out DIR]

Without --models two bf16 checkpoints of 0.9 billion parameters are made: few large experts (mixtral), and many small
ones (qwen3_moe). Every contestant is a process of its own; all of a group load, and generate once for every batch size
to warm up; then they take turns, one generation each, every other round backwards, so drift of a shared machine falls
on all alike. Groups follow one another, because not everybody fits the memory at once; moelight is in each. Figures are
medians over rounds; ratios are taken within a round, so each is of one group. A model may be a GGUF file, which
llama.cpp reads too, with experts or dense: --models MODEL-Q8_0.gguf --groups llamacpp,moelight-int8 (the same with
activations in int8). The published dense files are those that `python -m tests.real` fetches into build/real.

Printed beside them: the roofs measured in the same run, the share of them reached, the interpreter's own share of a
pass, and how many prompts have moelight's first token (and all tokens): bfloat16 sums of another order differ at ties.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from make_checkpoint import make_shape
from runner.contestants import OURS, Places, Work, add_places, all_of, figures, places_of, random_work, take_turns
from runner.roofs import Roofs
from runner.run import run

MODELS = ("mixtral-0p9b", "qwen3moe-0p9b")
GROUPS = (("vllm-compiled", "vllm-eager"), ("openvino", "llamacpp"), ("transformers-eager", "transformers-grouped_mm"))
ROOF_GIB = 0.5


def main() -> None:
    run("e2e", __doc__, _options, _measure, rounds=5)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=Path, nargs="+")
    parser.add_argument("--groups", nargs="+", type=lambda text: tuple(text.split(",")), default=GROUPS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    add_places(parser)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    models = args.models or [make_shape(name, args.scratch) for name in MODELS]
    result, count = [], max(args.batches)
    for model in models:
        lengths, new = [args.prompt_len] * count, [args.new_tokens] * count
        work = random_work(model, lengths, new, args.batches, args.threads)
        result.append(compare(work, args.groups, places_of(args), args.rounds, args.temporary))
        print_table(result[-1])
    return {"models": result}


def compare(work: Work, groups: Sequence[Sequence[str]], places: Places, rounds: int, scratch: Path) -> dict[str, Any]:
    """All groups on one model, one after the other; the figures of moelight are those of all its turns."""
    rows: dict[int, dict[str, Any]] = {batch: {} for batch in work.batches}
    shares: dict[int, list[dict[str, Any]]] = {batch: [] for batch in work.batches}
    roofs = Roofs(ROOF_GIB, work.threads)
    absent = {name: reason for name in chain(*groups) if (reason := places.lacks(name, work.model)) is not None}
    present = [[name for name in group if name not in absent] for group in groups]
    for names in [group for group in present if group] or [[]]:
        with all_of((OURS, *names), places, work, scratch, absent=absent) as alive:
            roofs.measure()
            take_turns(alive, work, rounds)
            roofs.measure()
            ours = alive[0].samples
            for batch in work.batches:
                shares[batch].extend(ours.turns[batch])
                for one in alive[1:]:
                    rows[batch][one.name] = figures(one.samples, ours, batch, work.tokens(batch))
                rows[batch].setdefault(OURS, figures(ours, ours, batch, work.tokens(batch)))
    for name, reason in absent.items():
        print(f"{name}: absent: {reason}", file=sys.stderr)
    return _result(work, rounds, rows, shares, roofs) | {"absent": absent}


def _result(
    work: Work,
    rounds: int,
    rows: dict[int, dict[str, Any]],
    shares: dict[int, list[dict[str, Any]]],
    roofs: Roofs,
) -> dict[str, Any]:
    table, roof = [], roofs.figures()
    for batch, contestants in rows.items():
        seconds = statistics.median(turn["seconds"] for turn in shares[batch])
        contestants[OURS]["tokens_per_s"] = work.tokens(batch) / seconds
        others = {name: row["moelight_ratio"] for name, row in contestants.items() if name != OURS}
        best = min((ratio for name, ratio in others.items() if not name.startswith(OURS)), default=None)
        forms = {name: ratio for name, ratio in others.items() if name.startswith(OURS)}
        table.append(
            {
                "batch": batch,
                "contestants": contestants,
                "roof_share": bound_s(work, batch, roof) / seconds,
                "ratio_to_best_peer": best,
                "forms_to_best_peer": {} if best is None else {name: best / ratio for name, ratio in forms.items()},
                "python_share": statistics.median(turn["python_share"] for turn in shares[batch]),
            }
        )
    return {
        "model": work.model.name,
        "prompt_len": len(work.prompts[0]),
        "new_tokens": work.new_tokens[0],
        "rounds": rounds,
        "threads": work.threads,
        "roof": roof,
        "batches": table,
    }


def bound_s(work: Work, batch: int, roof: dict[str, float], alive: int | None = None) -> float:
    """The least time the job could take with ``alive`` sequences (None: all) in a pass: prompts at the product rate;
    each decode pass at the slower of that rate and one reading of the weights it needs (of the experts, those that
    random tokens choose)."""
    from moelight.core.dtypes import dtype_named
    from moelight.hrm import costs
    from moelight.hrm.estimate import flops_per_token
    from moelight.models.profiles import profile_of_checkpoint
    from moelight.profiles.model_files import load_model_profile

    alive = alive or batch
    model = load_model_profile(str(work.model), profile_of_checkpoint)
    dtype = dtype_named(model.dtype)
    flops = flops_per_token(model)
    touched = 1 - (1 - model.router.top_k / model.experts.num_experts) ** alive
    item = costs.page_bytes(model, dtype)
    layers = model.stored.pages if model.stored else [item * sparse for sparse in model.moe_layers]
    experts = model.experts.num_experts * sum(layers)
    retained = costs.keeps_stored(model, dtype, discrete=False)
    weights = costs.dense_bytes(model, dtype, as_stored=retained) + touched * experts
    prompt_tokens = sum(map(len, work.prompts[:batch]))
    decode_s = max(alive * flops / roof["bf16_flops"], weights / roof["read_bytes_per_s"])
    passes = (work.tokens(batch) - batch) / alive
    return prompt_tokens * flops / roof["bf16_flops"] + passes * decode_s


def print_table(result: dict[str, Any]) -> None:
    """One block for every batch size, and the roofs."""
    roof = result["roof"]
    for outcome in result["batches"]:
        batch = outcome["batch"]
        heading = f"{result['model'] + ', batch ' + str(batch):26}{'tok/s':>9}{'ours is':>10}{'cores':>7}{'load s':>9}"
        print(f"{heading}{'peak GiB':>10}{'first token':>13}{'all tokens':>12}")
        for name, row in outcome["contestants"].items():
            equal = "" if row["prompts_equal"] is None else f"{row['prompts_equal']}/{batch}"
            first = "" if row["first_tokens_equal"] is None else f"{row['first_tokens_equal']}/{batch}"
            print(
                f"{name:26}{row['tokens_per_s']:>9.1f}{row['moelight_ratio']:>8.2f} x{row['busy_cores']:>7.2f}"
                f"{row['load_s']:>9.1f}{row['peak_rss_bytes'] / 2**30:>10.2f}{first:>13}{equal:>12}"
            )
        for name, ratio in outcome["forms_to_best_peer"].items():
            print(f"{name} is {ratio:.2f} x the best of the others")
        print(
            f"{'share of the roof':26}{outcome['roof_share']:>9.0%}; Python's own share {outcome['python_share']:.1%}"
        )
    print(f"roof: reads {roof['read_bytes_per_s'] / 1e9:.1f} GB/s, products {roof['bf16_flops'] / 1e9:.0f} Gflop/s")


if __name__ == "__main__":
    main()
