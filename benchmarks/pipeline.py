"""CGOPipe at the roof: whether the link that binds ever waits, on a machine without a GPU, beside orders and peers.

    python benchmarks/pipeline.py [--sections SECTION ...] [--models DIR DIR] [--big DIR] [--ring DIR]
        [--hf-python P] [--vllm-python P] [--openvino-python P] [--llamacpp DIR]

    disk      a model three times the memory it is given: the disk's busy share and rate against plain direct reads;
              orders of work; the model in fewer bytes (--disk-experts int4 Q4_K_M); accelerate's disk offload and
              llama.cpp's mapping under the same limit (--disk-peers llamacpp-Q4_K_M: on its file of that type)
    ring      a model of which two layers are more than the memory: a ring of a few pages, against plain direct reads
              and the tokens of the same model all in memory
    refill    ragged lengths: continuous refill against static batches on the same policy
    memory    resident models beside all peers at batch 1, 16 and 64 (`e2e.py`)
    overhead  time outside of any task, idle of the lane that binds
    long      resident memory over 2,000 requests through a constrained plan
    drafts    speculative decoding on and off: work that copies its prompt, and prose, and their last rows; bound by a
              disk, and resident
    gains     what K drafts gain at a set acceptance, measured and predicted
    ranks     a rank for each thread beside one process with all of them, resident
    links     two ranks with an emulated link each beside one process with one, which binds; and simulated
    budget    the peak of resident memory of `moelight generate --host-memory`, beside what it was allowed

Every section measures its roof in the same run. Models that are not given are made in --scratch (2 x 1.8 GB; 6.6 and
6.2 GB), where accelerate also writes a second copy of the big one. ``--figure`` measures nothing: it draws the README's
figure from the JSON of an earlier ``disk``. The last line is JSON.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from e2e import MODELS
from make_checkpoint import make_shape
from pipeline_sections import (
    budget,
    disk,
    draft_gains,
    drafts,
    figure,
    links,
    long,
    overhead,
    ranks,
    refill,
    resident,
    ring,
)
from pipeline_sections.setting import Setting
from runner.contestants import add_places, places_of
from runner.run import add_sections, run, run_sections

from moelight.core.policy import ACTIVATIONS
from moelight.core.units import parse_bytes

SECTIONS = {
    "disk": disk.run,
    "ring": ring.run,
    "refill": refill.run,
    "memory": resident.run,
    "overhead": overhead.run,
    "long": long.run,
    "budget": budget.run,
    "drafts": drafts.run,
    "gains": draft_gains.run,
    "ranks": ranks.run,
    "links": links.run,
}
BIG, RING = "mixtral-6g", "mixtral-6g-9l"


def main() -> None:
    run("pipeline", __doc__, _options, _measure, rounds=3)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.figure is not None:
        figure.draw(args.figure)
        return {"figure": str(args.figure)}
    scratch, sections = args.scratch, args.sections
    small = not set(sections) <= {"disk", "ring"}
    drafts_from_disk = ("drafts" in sections and (args.drafts_batches or args.drafts_tails)) or (
        "gains" in sections and args.gains_disk
    )
    setting = Setting(
        models=args.models or ([make_shape(name, scratch) for name in MODELS] if small else []),
        big=args.big or (make_shape(BIG, scratch) if "disk" in sections or drafts_from_disk else Path(BIG)),
        ring=args.ring or (make_shape(RING, scratch) if "ring" in sections else Path(RING)),
        places=places_of(args),
        scratch=args.temporary,
        threads=args.threads,
        rounds=args.rounds,
        options=vars(args),
    )
    return run_sections(SECTIONS, sections, setting)


def _options(parser: argparse.ArgumentParser) -> None:
    add_sections(parser, SECTIONS)
    parser.add_argument("--figure", type=Path, metavar="RESULTS.json", help="draw docs/throughput.png, measure nothing")
    parser.add_argument("--models", type=Path, nargs="+", help="resident models")
    parser.add_argument("--big", type=Path, help="the model of the disk section")
    parser.add_argument("--ring", type=Path, help="the model of the ring section")
    parser.add_argument("--ring-memory", default="1.2GiB", help="the real limit of the ring section")
    parser.add_argument("--ring-batches", type=int, nargs="+", default=[64, 128])
    parser.add_argument(
        "--disk-limit", type=parse_bytes, help="the real limit of the disk section; a third of the model"
    )
    parser.add_argument("--disk-batches", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--disk-prompt", type=int, default=32, help="tokens in a prompt of the disk section")
    parser.add_argument("--disk-new", type=int, default=16, help="new tokens there")
    parser.add_argument(
        "--disk-orders",
        nargs="+",
        default=disk.ORDERS,
        help="the first is held against the others; planned: the plan's; before: that of the checkout --before names",
    )
    parser.add_argument(
        "--disk-experts",
        nargs="+",
        default=["bf16"],
        help="forms of the big model: bf16, what `moelight convert --experts` takes, types of GGUF files; or drawn: "
        "nvfp4, gptq, awq, mlx, nf4",
    )
    parser.add_argument(
        "--disk-activations", nargs="+", choices=ACTIVATIONS, default=["auto"], help="of forms other than bf16"
    )
    parser.add_argument("--disk-peers", nargs="*", default=disk.PEERS)
    parser.add_argument("--limit-accelerate", action="store_true", help="hold it to the limit, too, once it has loaded")
    parser.add_argument(
        "--llamacpp-ubatch",
        type=int,
        default=2048,
        help="most tokens in a step of llama.cpp: each reads the model once, and more of them take more memory",
    )
    parser.add_argument("--peer-most-s", type=float, help="end peers that take longer for a batch")
    parser.add_argument("--peer-batches", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--peer-new", type=int, default=5, help="new tokens there for peers, whose steps take long")
    parser.add_argument("--refill-requests", type=int, default=192)
    parser.add_argument("--refill-batch", type=int, default=64, help="N of the refill section")
    parser.add_argument(
        "--refill-share", type=float, help="budget of the refill section over the weights; else resident"
    )
    parser.add_argument("--long-requests", type=int, default=2000)
    parser.add_argument("--long-share", type=float, default=0.6, help="budget of the long section over the weights")
    parser.add_argument("--drafts-batches", type=int, nargs="*", default=[16, 64], help="of drafts, bound by a disk")
    parser.add_argument(
        "--drafts-resident-batches", type=int, nargs="+", default=[1, 16, 64], help="of drafts, resident"
    )
    parser.add_argument(
        "--drafts-tails", type=int, nargs="*", default=[20], help="last rows of a job bound by a disk, of all lengths"
    )
    parser.add_argument("--gains-batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--gains-drafts", type=int, nargs="+", default=[1, 3], help="K of the gains section")
    parser.add_argument("--gains-acceptances", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument(
        "--gains-disk", action=argparse.BooleanOptionalAction, default=True, help="the big model, in bf16 and int4"
    )
    parser.add_argument("--drafts-prompt", type=int, default=160, help="tokens in a prompt of the drafts section")
    parser.add_argument("--drafts-new", type=int, default=64, help="new tokens there")
    parser.add_argument("--links-rate", default="200MB", help="bytes a second of an emulated link")
    parser.add_argument("--links-new", type=int, default=5, help="new tokens of the links section")
    parser.add_argument("--budgets", nargs="+", default=["1GiB", "768MiB", "least"], help="of the budget section")
    parser.add_argument("--budget-prompts", type=int, default=24)
    parser.add_argument("--budget-longest", type=int, default=160, help="words in the longest of its prompts")
    parser.add_argument("--budget-new", type=int, default=8, help="new tokens there")
    add_places(parser)


if __name__ == "__main__":
    main()
