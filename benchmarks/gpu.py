"""Everything that a card must show, in one run of a few minutes: `make gpu`.

    python benchmarks/gpu.py [--device auto] [--minutes 9] [--parts NAME ...] [--out DIR]
    python benchmarks/gpu.py --device twin --out DIR            # the same code where there is no card, smaller
    python benchmarks/gpu.py --join FILE.json ... --out DIR     # one report out of several runs' JSON

    environment  card, driver, link, processors, libraries
    tokens       a tiny checkpoint in three orders: the CPU's tokens
    tests        pytest -m gpu, with Triton's kernels compiled on the device
    profile      `moelight profile`: what all further parts plan with
    shapes       models of 0.9 billion parameters: predicted against measured, launches and waits
    quantised    quantised experts beside 16 bits: the kernels alone, and rounded checkpoints
    least        the least device memory that a refusal names
    small-card   `gpu_small_card.py` at 16 and 24 GiB, accelerate beside it
    long         2,000 requests: memory and clocks
    streams      tokens under random sleeps in every lane

Parts run in this order, each in processes of its own and with a limit of its own; the last one has all the time that is
left, and what does not fit is said to be not started. A part that fails stops no other. DIR holds the report so far as
``gpu_CARD_DATE.json`` and ``.md``, the log of every program, traces and the machine's profile. The last line is JSON.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gpu_sections import environment, least, long, machine, quantised, shapes, small_card, suites, tokens
from gpu_sections.goals import goals
from gpu_sections.setting import ROOT, FailedError, NeedsCardError, Setting, TimeOverError


class Part(NamedTuple):
    """``seconds``: its limit, unless it is the last; ``lines`` says what it found, for people."""

    run: Callable[[Setting], None]
    lines: Callable[[dict[str, Any]], list[str]]
    seconds: float


PARTS = {
    "environment": Part(environment.run, environment.lines, 60),
    "tokens": Part(tokens.run, tokens.lines, 90),
    "tests": Part(suites.run, suites.lines, 110),
    "profile": Part(machine.run, machine.lines, 120),
    "shapes": Part(shapes.run, shapes.lines, 120),
    "quantised": Part(quantised.run, quantised.lines, 90),
    "least": Part(least.run, least.lines, 50),
    "small-card": Part(small_card.run, small_card.lines, 300),
    "long": Part(long.run, long.lines, 90),
    "streams": Part(suites.stress, suites.lines, 120),
}
_RESERVE_S = 3.0  # for the report
_LEAST_PART_S = 5.0


def main() -> None:
    """The command line."""
    args = _arguments()
    name = f"gpu_{_slug(environment.card_name(args.device))}_{dt.date.today().isoformat()}"
    directory = args.out or ROOT / "build" / "gpu" / name.removeprefix("gpu_")
    directory.mkdir(parents=True, exist_ok=True)
    if args.join:
        report = joined([json.loads(path.read_text(encoding="utf-8")) for path in args.join])
        write(report, directory / args.join[0].stem)
    else:
        report = measured(args, directory, name)
    print(json.dumps(_said(report)))


def measured(args: argparse.Namespace, directory: Path, name: str) -> dict[str, Any]:
    """Run the parts; the report is written whenever it grows."""
    ends = time.monotonic() + 60 * args.minutes - _RESERVE_S
    if args.began is not None:  # what came before counts: the installation
        ends -= max(0.0, time.time() - args.began)
    report: dict[str, Any] = {
        "benchmark": "gpu",
        "card": environment.card_name(args.device),
        "date": dt.datetime.now().isoformat(timespec="seconds"),
        "device": args.device,
        "minutes": args.minutes,
        "parts": {},
    }
    with tempfile.TemporaryDirectory(prefix="moelight-gpu-", dir=args.scratch) as scratch:
        for part in args.parts:
            last = part == args.parts[-1]
            result: dict[str, Any] = {"state": "running"}
            report["parts"][part] = result
            setting = Setting(
                device=args.device,
                small=args.device.startswith("twin"),
                host_memory=args.host_memory,
                scratch=Path(scratch),
                results=directory,
                until=ends if last else min(ends, time.monotonic() + PARTS[part].seconds),
                figures=result,
                written=lambda: write(report, directory / name),
            )
            carry_out(part, setting)
            print("\n".join([f"{part}: {_state(result)}", *(f"  {line}" for line in _lines(part, result))]), flush=True)
    return report


def carry_out(part: str, setting: Setting) -> None:
    """Run one part: how it ended is its ``state``, and ``why`` in one line."""
    began, figures = time.monotonic(), setting.figures
    state, reason = "done", ""
    try:
        if setting.left_s < _LEAST_PART_S:
            state, reason = "not started", "the time was over"
        else:
            PARTS[part].run(setting)
    except NeedsCardError as error:
        state, reason = "left out", str(error)
    except TimeOverError as error:
        state, reason = "cut", str(error)
    except FailedError as error:
        state, reason = "failed", str(error)
    except Exception as error:  # noqa: BLE001 - no part's failure stops the others
        state, reason = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:300]
        setting.log(f"{part}: {traceback.format_exc()}")
    unable = [row["unable"] for row in figures.get("rows", []) if "unable" in row]
    if state == "done" and unable:
        state, reason = "failed", unable[0]
    setting.keep(state=state, why=reason, seconds=round(time.monotonic() - began, 1))


def joined(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report: of every part, the last run that came to anything."""
    parts: dict[str, dict[str, Any]] = {}
    for report in reports:
        for name, result in report["parts"].items():
            if name not in parts or result["state"] not in ("not started", "left out"):
                parts[name] = result
    return {**reports[-1], "parts": {name: parts[name] for name in PARTS if name in parts}}


def write(report: dict[str, Any], position: Path) -> None:
    """``position``.json and ``position``.md, each whole at any moment."""
    report["goals"] = goals(report["parts"], fast=not report["device"].startswith("twin"))
    for suffix, text in ((".json", json.dumps(report, indent=1) + "\n"), (".md", summary(report))):
        part = position.with_name(f".{position.name}{suffix}")
        part.write_text(text, encoding="utf-8")
        part.replace(position.with_name(f"{position.name}{suffix}"))


def summary(report: dict[str, Any]) -> str:
    """The report for people, in Markdown: goals, then every part."""
    lines = [f"# {report['card']}, {report['date']}", "", "`make gpu`", ""]
    if report["goals"]:
        met = {True: "yes", False: "NO"}
        lines += ["| goal | found | met |", "|---|---|---|"]
        lines += [f"| {item['goal']} | {item['found']} | {met[item['met']]} |" for item in report["goals"]]
    for part, result in report["parts"].items():
        lines += ["", f"## {part}: {_state(result)}", ""]
        lines += [f"- {line}" if not line.startswith(" ") else f"  - {line.strip()}" for line in _lines(part, result)]
    return "\n".join(lines) + "\n"


def _state(result: dict[str, Any]) -> str:
    reason = f": {result['why']}" if result.get("why") else ""
    return f"{result['state']}{reason}" + (f", {result['seconds']:.0f} s" if "seconds" in result else "")


def _lines(part: str, result: dict[str, Any]) -> list[str]:
    """A part that broke off may lack what its lines are made of."""
    if result["state"] in ("not started", "left out"):
        return []
    try:
        return PARTS[part].lines(result)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        return [f"not all of it can be shown ({type(error).__name__}: {error})"]


def _said(report: dict[str, Any]) -> dict[str, Any]:
    """The report in one line: states and goals."""
    retained = ("state", "why", "seconds")
    states = {
        name: {key: result[key] for key in retained if result.get(key)} for name, result in report["parts"].items()
    }
    return {**{key: report[key] for key in ("benchmark", "card", "date", "goals")}, "parts": states}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "card"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="as moelight --device takes it")
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing runs longer")
    parser.add_argument("--began", type=float, help="seconds since the epoch from which they count; now if not given")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, help="the directory of the report; build/gpu/CARD_DATE if not given")
    parser.add_argument("--host-memory", help="of the small card's models; 90 %% of what is free if not given")
    parser.add_argument("--scratch", type=Path, help="a directory on a disk, for checkpoints of up to 15 GB")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE.json", help="measure nothing: join these reports")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
