"""A benchmark from its options to its last line: scratch directories, rounds, sections, and files of results."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from moelight.runtime.measure import processor_name
from runner import report

T = TypeVar("T")
Options = argparse.ArgumentParser
Result = dict[str, Any]


def run(
    name: str,
    doc: str | None,
    options: Callable[[Options], object],
    measure: Callable[[argparse.Namespace], Result],
    *,
    rounds: int | None = None,
    threads: bool = True,
) -> Result:
    """Parse the command line, call ``measure``, write its tables and its result to ``--out``, print the result as the
    last line, and return it. ``measure`` gets ``scratch`` (where what was made stays for another time, if it was named)
    and ``temporary``; ``rounds`` is the default of ``--rounds``, for benchmarks whose contestants take turns."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help="turns of each contestant (default: %(default)s)"
        )
    if threads:
        import torch

        parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument("--scratch", type=Path, help="a directory on a disk, where files stay for another time")
    parser.add_argument("--out", type=Path, help=f"write {name}_MACHINE_DATE.json and .md into this directory")
    args = parser.parse_args()
    if threads:
        torch.set_num_threads(args.threads)
    with (
        tempfile.TemporaryDirectory(dir=args.scratch) as temporary,
        contextlib.redirect_stdout(report.Printed()) as printed,
    ):
        args.temporary = Path(temporary)
        args.scratch = args.scratch or args.temporary
        facts = {"threads": args.threads} if threads else {}
        result = {"benchmark": name, "cpu": processor_name(), **facts, **measure(args)}
    if args.out is not None:
        command = shlex.join([f"benchmarks/{name}.py", *sys.argv[1:]])
        report.write(args.out, name, command, printed.getvalue(), result)
    print(json.dumps(result))
    return result


def in_rounds(contestants: Iterable[T], rounds: int) -> Iterator[tuple[int, list[T]]]:
    """The number of each round and the contestants in their order: every other round backwards, so that drift of a
    shared machine falls on all alike."""
    selected = list(contestants)
    for number in range(rounds):
        yield number, selected if number % 2 == 0 else selected[::-1]


def add_sections(parser: Options, table: Mapping[str, object], default: Sequence[str] = ()) -> None:
    """``--sections``, all of ``table`` unless ``default`` names some."""
    parser.add_argument("--sections", nargs="+", choices=table, default=list(default or table))


def run_sections(table: Mapping[str, Callable[[T], Result]], names: Sequence[str], setting: T) -> Result:
    """The results of sections by name. Their seconds go to stderr."""
    results: Result = {}
    for name in names:
        began = time.perf_counter()
        results[name] = table[name](setting)
        print(f"{name}: {(time.perf_counter() - began) / 60:.1f} minutes", file=sys.stderr)
    return results
