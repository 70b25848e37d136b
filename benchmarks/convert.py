"""`moelight convert` beside a plain read of its input and a plain write of as much as its output.

    python benchmarks/convert.py MODEL [--directory DIR] [--experts int4 int8] [--rounds 3]

Contenders take turns within a round; each begins with the checkpoint out of the page cache, and writes end with fsync.
A conversion is a process of its own, whose peak of resident memory is reported; its time is that from the first read to
the last fsync. `share`: the slower of reading and writing over it, the median over rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from moelight.convert.checkpoint import ConvertOptions, convert_checkpoint
from moelight.formats.compressed_tensors import ROUNDED, Rounding
from moelight.weights.source import Checkpoint, resolve_model

BLOCK = 16 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint directory")
    parser.add_argument("--directory", type=Path, help="where outputs are made; its disk is what is measured")
    parser.add_argument("--experts", nargs="+", choices=ROUNDED, default=["int4"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    files = sorted({info.file for info in Checkpoint.open(resolve_model(args.model)).tensors.values()})
    size = sum(file.stat().st_size for file in files)
    print(f"{'':10}{'read GB/s':>10}{'write GB/s':>11}{'convert GB/s':>13}{'CPU s/GB':>9}{'share':>7}{'peak MiB':>9}")
    rows = []
    for kind in args.experts:
        rounds = [measured(args.model, files, kind, args.directory) for _ in range(args.rounds)]
        row = {key: statistics.median(item[key] for item in rounds) for key in rounds[0]}
        row["bytes"] = size
        rates = f"{size / row['read_s'] / 1e9:>10.2f}{row['written'] / row['write_s'] / 1e9:>11.2f}"
        speed = f"{size / row['convert_s'] / 1e9:>13.2f}{row['cpu_s'] / size * 1e9:>9.2f}"
        print(f"{kind:10}{rates}{speed}{row['share']:>7.0%}{row['peak_bytes'] / 2**20:>9.0f}")
        rows.append({"experts": kind, **row})
    print(json.dumps({"benchmark": "convert", "model": args.model, "rounds": args.rounds, "rows": rows}))


def measured(model: str, files: list[Path], kind: str, directory: Path | None) -> dict[str, Any]:
    """A round: the conversion, then plain reads and writes of the same numbers of bytes."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".moelight-") as position:
        drop(files)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            result = pool.apply(converted, (model, Path(position) / "out", kind))
        result["read_s"] = timed_read(files)
        result["write_s"] = timed_write(Path(position) / "plain", result["written"])
    result["share"] = max(result["read_s"], result["write_s"]) / result["convert_s"]
    return result


def converted(model: str, out: Path, kind: str) -> dict[str, Any]:
    """In a process of its own."""
    began = [0.0, 0.0]

    def progress(done: int, _total: int) -> None:
        if not done:
            began[:] = time.perf_counter(), time.process_time()

    options = ConvertOptions(model=model, output=out, experts=Rounding.of(kind))
    made = convert_checkpoint(options, progress)
    return {
        "convert_s": time.perf_counter() - began[0],
        "cpu_s": time.process_time() - began[1],
        "written": made.bytes,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def drop(files: list[Path]) -> None:
    """Take ``files`` out of the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed_read(files: list[Path]) -> float:
    drop(files)
    buffer, began = bytearray(BLOCK), time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - began


def timed_write(path: Path, size: int) -> float:
    block, began = os.urandom(BLOCK), time.perf_counter()
    with path.open("wb", buffering=0) as opened:
        for begin in range(0, size, BLOCK):
            opened.write(block[: size - begin])
        os.fsync(opened.fileno())
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
