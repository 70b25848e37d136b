"""Reads from a disk into memory: ours beside a plain direct read of the same file, and beside what else could read.

    python benchmarks/reads.py [--directory DIR] [--gib 2.0] [--rounds 5] [--depth 4] [--chunk-mib 4]

Every contender reads the same file, as parts of ``--part-mib`` into a ring of slots, as the disk lane does with pages.
The roof is a plain sequential direct read of 8 MiB blocks into memory on huge pages, one after the other. Contenders
take turns within a round; each begins with the file out of the page cache. Figures are medians over rounds, shares of
the roof medians of the shares of each round. `cpu_s_per_gb`: of this process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from moelight.kernels import native
from moelight.kernels.reads import FileReader, ReadPart

MIB = 1 << 20
BLOCK = 8 * MIB
HUGE_PAGE = 2 * MIB
SLOTS = 4
Contender = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where the file is made; its disk is what is measured")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--chunk-mib", type=float, default=4.0)
    parser.add_argument("--part-mib", type=float, default=24.0)
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile(dir=args.directory, prefix=".moelight-") as made:
        file = Path(made.name)
        size = write(file, int(args.gib * 1024**3) // BLOCK)
        rows = measure(contenders(file, size, args), file, size, args.rounds)
    print(f"{'':44}{'GB/s':>8}{'of roof':>9}{'CPU s/GB':>10}{'busy':>7}")
    for row in rows:
        busy = f"{row['busy_share']:.0%}" if row["busy_share"] else ""
        figures = f"{row['gb_per_s']:>8.2f}{row['share_of_roof']:>9.0%}{row['cpu_s_per_gb']:>10.3f}"
        print(f"{row['contender']:44}{figures}{busy:>7}")
    facts = {"extension": native.reason(), "bytes": size, "depth": args.depth, "chunk_mib": args.chunk_mib}
    print(json.dumps({"benchmark": "reads", **facts, "rows": rows}))


def contenders(file: Path, size: int, args: argparse.Namespace) -> dict[str, Contender]:
    """Each reads the whole file and says for which share of its time a read was in flight (0: unknown)."""
    part = int(args.part_mib * MIB)
    huge, small = (ring(SLOTS * (part + 8192), huge=huge) for huge in (True, False))
    full = part + 8 * 511  # parts begin at odd places in the file, as tensors do

    def ours(memory: Tensor, shift: int, **options: object) -> Contender:
        return lambda: reader_pass(file, size, args, memory, full, shift, **options)

    return {
        "plain direct read, blocks of 8 MiB": lambda: plain(file, size, huge),
        "ours, addresses agree, huge pages": ours(huge, -1),
        "ours, addresses disagree, huge pages": ours(huge, 64),
        "ours, addresses agree, pages of 4 KiB": ours(small, -1),
        "ours, addresses disagree, pages of 4 KiB": ours(small, 64),
        "ours, addresses agree, one at a time": ours(huge, -1, depth=1),
        "ours, through the page cache": ours(huge, 64, direct=False),
        "os.preadv, through the page cache": lambda: buffered(file, size, huge, full),
        "copy from a mapping": lambda: mapped(file, size, huge, full),
    }


def measure(contenders: dict[str, Contender], file: Path, size: int, rounds: int) -> list[dict[str, float | str]]:
    seconds = {name: list[float]() for name in contenders}
    cpu = {name: list[float]() for name in contenders}
    busy = {name: list[float]() for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            forget(file)
            began, spent = time.perf_counter(), time.process_time()
            busy[name].append(run())
            seconds[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - spent)
    roof = next(iter(seconds.values()))
    return [
        {
            "contender": name,
            "gb_per_s": size / statistics.median(seconds[name]) / 1e9,
            "share_of_roof": statistics.median(r / s for r, s in zip(roof, seconds[name], strict=True)),
            "cpu_s_per_gb": statistics.median(cpu[name]) / size * 1e9,
            "busy_share": statistics.median(busy[name]),
        }
        for name in contenders
    ]


def reader_pass(
    file: Path, size: int, args: argparse.Namespace, memory: Tensor, full: int, shift: int, **options: object
) -> float:
    """All parts, a ring's worth in flight. ``shift``: where in a page parts begin in memory; -1: as in the file."""
    settings = {"depth": args.depth, "chunk_bytes": int(args.chunk_mib * MIB), **options}
    with FileReader([file], **settings) as reader:
        running = []
        began = time.perf_counter()
        for number, offset in enumerate(range(0, size, full)):
            if len(running) == SLOTS:
                running.pop(0).wait()
            slot = memory[number % SLOTS * (len(memory) // SLOTS) :]
            start = ((offset if shift < 0 else shift) - slot.data_ptr()) % 4096
            running.append(reader.submit([ReadPart(file, offset, slot[start : start + min(full, size - offset)])]))
        for ticket in running:
            ticket.wait()
        return reader.counts().busy_s / (time.perf_counter() - began)


def plain(file: Path, size: int, memory: Tensor) -> float:
    block = memory[:BLOCK].numpy().data
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        for offset in range(0, size, BLOCK):
            assert os.preadv(descriptor, [block], offset) == BLOCK
    finally:
        os.close(descriptor)
    return 0.0


def buffered(file: Path, size: int, memory: Tensor, full: int) -> float:
    with open(file, "rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for offset in range(0, size, full):
            left, at = memory[: min(full, size - offset)].numpy().data, offset
            while left:
                count = os.preadv(opened.fileno(), [left], at)
                left, at = left[count:], at + count
    return 0.0


def mapped(file: Path, size: int, memory: Tensor, full: int) -> float:
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ) as mapping:
        to = memory.numpy()
        for offset in range(0, size, full):
            stop = min(offset + full, size)
            to.data[: stop - offset] = memoryview(mapping)[offset:stop]
    return 0.0


def ring(size: int, *, huge: bool) -> Tensor:
    """Touched memory of ``size`` bytes, all on huge pages or all on small ones."""
    memory = mmap.mmap(-1, size + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    start = -raw.data_ptr() % HUGE_PAGE
    return raw[start : start + size]


def write(file: Path, blocks: int) -> int:
    """Random blocks on the disk; their bytes."""
    with open(file, "wb") as opened:
        block = bytearray(os.urandom(BLOCK))
        for number in range(blocks):
            block[:8] = number.to_bytes(8, "little")
            opened.write(block)
        os.fsync(opened.fileno())
    return blocks * BLOCK


def forget(file: Path) -> None:
    """Out of the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
