"""Kernels against the roof they run under, and against what a user would call otherwise.

    GOMP_SPINCOUNT=10000 python benchmarks/kernels.py [--gib 1.0] [--rounds 7] [--threads N] [--isa auto avx2 ...]

(Without the variable torch's threads go on spinning for a millisecond after each of its operations and take the core
from whatever runs next: half a millisecond a call on two cores.)

Decode attention reads every key and value once: its roof is the machine's read rate, measured in the same run by
torch.sum over as many bytes with as many threads. Keys and values rotate over sets that together exceed the caches.
Contenders take turns within a round, so drift of a shared machine falls on all alike; figures are medians over rounds.
`others` is how many cores other processes kept busy meanwhile: above 0.1, believe ratios only.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from moelight.kernels import native
from moelight.kernels.attention import cpu_gqa_decode

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 32
DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Row:
    case: str
    isa: str
    ms: float
    gb_per_s: float
    roof_gb_per_s: float
    share_of_roof: float
    times_sdpa: float
    others: float


class Context:
    """Sets of equally shaped paged caches over one flat memory, which SDPA sees as contiguous sequences."""

    def __init__(self, lengths: list[int], total_bytes: int) -> None:
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        block_elements = KV_HEADS * BLOCK_SIZE * HEAD_DIM
        self.bytes = 2 * KV_HEADS * HEAD_DIM * sum(lengths) * DTYPE.itemsize
        sets = max(1, round(total_bytes / (2 * sum(blocks) * block_elements * DTYPE.itemsize)))
        self.k = torch.empty(sets * sum(blocks), KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=DTYPE).normal_()
        self.v = self.k.clone()
        self.q = torch.randn(len(lengths), Q_HEADS, HEAD_DIM).to(DTYPE)
        self.lens = torch.tensor(lengths, dtype=torch.int32)
        self.out = torch.empty_like(self.q)
        self._lengths, self._blocks = lengths, blocks
        order = torch.randperm(len(self.k), dtype=torch.int32).view(sets, -1)
        self._tables = cycle([self._table(row) for row in order])
        self._starts = cycle(range(0, self.k.numel(), sum(blocks) * block_elements))

    def _table(self, order: Tensor) -> Tensor:
        table = torch.zeros(len(self._blocks), max(self._blocks), dtype=torch.int32)
        for row, part in zip(table, order.split(self._blocks), strict=True):
            row[: len(part)] = part
        return table

    def moelight(self, threads: int) -> None:
        tables = next(self._tables)
        cpu_gqa_decode(self.q, self.k, self.v, tables, self.lens, HEAD_DIM**-0.5, out=self.out, threads=threads)

    def sdpa(self) -> None:
        """One call a sequence on contiguous keys and values, the query heads of a group folded into the query rows."""
        at = next(self._starts)
        flat_k, flat_v = self.k.view(-1), self.v.view(-1)
        for b, length in enumerate(self._lengths):
            size = KV_HEADS * length * HEAD_DIM
            k, v = (flat[at : at + size].view(1, KV_HEADS, length, HEAD_DIM) for flat in (flat_k, flat_v))
            q = self.q[b].view(1, KV_HEADS, -1, HEAD_DIM)
            self.out[b] = functional.scaled_dot_product_attention(q, k, v).view(Q_HEADS, HEAD_DIM)
            at += size


def cases() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(0)
    return {
        "16 x 512": [512] * 16,
        "64 x 512": [512] * 64,
        "16 x 2048": [2048] * 16,
        "64 x 2048": [2048] * 64,
        "1 x 32768": [32768],
        "64 x 32..992": torch.randint(32, 993, (64,), generator=generator).tolist(),
    }


def seconds(call: Callable[[], object], repeats: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def busy_cores() -> float:
    """Core-seconds that all processes together have used since the machine started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def measure(case: str, lengths: list[int], isa: str, args: argparse.Namespace, buffer: Tensor) -> Row:
    context = Context(lengths, int(args.gib * 2**30))
    ours, theirs, reads = [], [], []
    repeats = max(1, round(0.2 * 2**30 / context.bytes))
    context.moelight(args.threads)
    context.sdpa()
    began, busy, own = time.perf_counter(), busy_cores(), time.process_time()
    for _ in range(args.rounds):
        reads.append(buffer.nbytes / seconds(buffer.sum) / 1e9)
        ours.append(seconds(lambda: context.moelight(args.threads), repeats))
        theirs.append(seconds(context.sdpa, repeats))
    others = (busy_cores() - busy - (time.process_time() - own)) / (time.perf_counter() - began)
    took, roof = statistics.median(ours), statistics.median(reads)
    rate = context.bytes / took / 1e9
    return Row(
        case=case,
        isa=isa,
        ms=round(took * 1e3, 3),
        gb_per_s=round(rate, 1),
        roof_gb_per_s=round(roof, 1),
        share_of_roof=round(rate / roof, 3),
        times_sdpa=round(statistics.median(theirs) / took, 2),
        others=round(max(0.0, others), 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="bytes that the rotating sets take together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", nargs="+", default=["auto"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    extension = native.module()
    if extension is None:
        raise SystemExit(f"nothing to measure: {native.reason()}")
    buffer = torch.ones(int(args.gib * 2**28))
    print(
        f"decode attention, bf16, {Q_HEADS}/{KV_HEADS} heads of {HEAD_DIM}, "
        f"blocks of {BLOCK_SIZE}, {args.threads} threads"
    )
    print(f"{'sequences':>14} {'isa':>7} {'ms':>9} {'GB/s':>6} {'roof':>6} {'share':>6} {'x SDPA':>7} {'others':>7}")
    rows = []
    for name in args.isa:
        extension.set_isa(name)
        for case, lengths in cases().items():
            row = measure(case, lengths, extension.isa(), args, buffer)
            rows.append(row)
            print(
                f"{row.case:>14} {row.isa:>7} {row.ms:>9.3f} {row.gb_per_s:>6.1f} {row.roof_gb_per_s:>6.1f} "
                f"{row.share_of_roof:>6.0%} {row.times_sdpa:>7.2f} {row.others:>7.2f}",
                flush=True,
            )
    features = [name for name, present in native.cpu_features().items() if present]
    machine = {
        "processor": platform.processor() or platform.machine(),
        "features": features,
        "torch": torch.__version__,
    }
    print(json.dumps({"machine": machine, "threads": args.threads, "decode": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
