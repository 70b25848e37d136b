"""The planner on every shipped machine, model and workload: its time, how far its plan can be from the best, and
whether any of many random policies is better.

    python benchmarks/planner.py [--machines t4 l4 ...] [--models ...] [--workloads ...]
        [--samples 10000] [--processes 6]

The roof of a plan is the bound that the planner proves: no policy of its space is faster; `of_bound` is the share of it
that the plan reaches. `best_sample` is the best of the random policies over the plan (1 at most, or the plan was not
the best). `solve_s` is the planner's own figure; `process_s`, for a few of the pairs, the whole command with --json and
--no-cache. Nothing but times is measured. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from sampled_policies import best_of_samples

from moelight.core.errors import BudgetError
from moelight.hrm.speeds import speeds_of
from moelight.optimizer.optimize import best_plan, capacities, compute_dtype
from moelight.optimizer.problem import Problem
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload_files import load_workload

ROOT = Path(__file__).resolve().parents[1]
EQUAL = 1e-6
MOST_SOLVE_S, MOST_PROCESS_S = 1.0, 2.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One question. A machine too small for the model has no plan, and its figures are those of a refusal."""

    machine: str
    model: str
    workload: str
    solve_s: float
    tokens_per_s: float
    of_bound: float
    samples: int
    best_sample: float
    policy: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in ("hardware", "model", "workload"):
        names = sorted(path.stem for path in (ROOT / f"{kind}_profiles").glob("*.yaml"))
        option = {"hardware": "--machines", "model": "--models", "workload": "--workloads"}[kind]
        parser.add_argument(option, nargs="+", default=names)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=6, help="how many pairs to run as whole processes")
    args = parser.parse_args()
    print(
        f"{'machine':>12} {'model':>18} {'workload':>20} {'solve s':>8} {'tokens/s':>10} {'of bound':>9} {'sample':>9}"
    )
    rows = []
    for machine, model, workload in product(args.machines, args.models, args.workloads):
        rows.append(row(machine, model, workload, args.samples))
        print(line(rows[-1]), flush=True)
    processes = [process_s(*names) for names in spread(list(product(args.machines, args.models)), args.processes)]
    summary = figures(rows, processes)
    print("\n".join(f"{name}: {value}" for name, value in summary.items()))
    print(json.dumps({"benchmark": "planner", **summary, "rows": [asdict(row) for row in rows]}))


def row(machine: str, model: str, workload: str, samples: int) -> Row:
    """One plan, and the best of ``samples`` random policies beside it."""
    hardware, profile = load_hardware_profile(machine), load_model_profile(model)
    problem = Problem(
        name=model,
        model=profile,
        speeds=speeds_of(hardware),
        workload=load_workload(workload),
        capacity_bytes=capacities(hardware, {}),
        dtype=compute_dtype(profile),
    )
    began_s = time.perf_counter()
    try:
        plan = best_plan(problem, hardware, {})
    except BudgetError as error:
        took_s = time.perf_counter() - began_s
        return Row(
            machine=machine,
            model=model,
            workload=workload,
            solve_s=took_s,
            tokens_per_s=0.0,
            of_bound=1.0,
            samples=0,
            best_sample=0.0,
            policy=str(error),
        )
    tokens = problem.workload.num_requests * problem.workload.gen_len
    best = best_of_samples(problem, plan.policy, samples)
    return Row(
        machine=machine,
        model=model,
        workload=workload,
        solve_s=plan.solve_s,
        tokens_per_s=plan.estimate.tokens_per_s,
        of_bound=plan.estimate.tokens_per_s / plan.bound_tokens_per_s,
        samples=best.count,
        best_sample=tokens / best.seconds / plan.estimate.tokens_per_s,
        policy=plan.why if tokens / best.seconds <= plan.estimate.tokens_per_s * (1 + EQUAL) else best.policy,
    )


def line(found: Row) -> str:
    names = f"{found.machine:>12} {found.model:>18} {found.workload:>20} {found.solve_s:>8.2f}"
    if not found.tokens_per_s:
        return f"{names} {'refused':>10}"
    better = "  better: " + found.policy if found.best_sample > 1 + EQUAL else ""
    return f"{names} {found.tokens_per_s:>10.1f} {found.of_bound:>9.1%} {found.best_sample:>9.6f}{better}"


def spread(pairs: list[tuple[str, str]], count: int) -> Iterator[tuple[str, str]]:
    """``count`` of ``pairs``, from all over the list."""
    for index in range(min(count, len(pairs))):
        yield pairs[index * len(pairs) // count]


def process_s(machine: str, model: str) -> float:
    """Seconds of the whole command, refused or not."""
    command = [sys.executable, "-m", "moelight.cli.main", "optimize", "--hw", machine, "--model", model]
    began_s = time.perf_counter()
    done = subprocess.run([*command, "--json", "--no-cache"], check=False, capture_output=True, cwd=ROOT)
    took_s = time.perf_counter() - began_s
    print(f"{'process':>12} {machine:>18} {model:>20} {took_s:>8.2f}  (exit {done.returncode})", flush=True)
    return took_s


def figures(rows: list[Row], processes: list[float]) -> dict[str, float]:
    """What is claimed, in numbers."""
    plans = [row for row in rows if row.tokens_per_s]
    return {
        "questions": len(rows),
        "refused": len(rows) - len(plans),
        "median_solve_s": round(statistics.median(row.solve_s for row in rows), 3),
        "longest_solve_s": round(max(row.solve_s for row in rows), 3),
        "solved_in_time": round(sum(row.solve_s <= MOST_SOLVE_S for row in rows) / len(rows), 4),
        "longest_process_s": round(max(processes, default=0.0), 3),
        "processes_in_time": sum(took <= MOST_PROCESS_S for took in processes) / max(len(processes), 1),
        "median_of_bound": round(statistics.median(row.of_bound for row in plans), 4) if plans else 1.0,
        "least_of_bound": round(min((row.of_bound for row in plans), default=1.0), 4),
        "samples": sum(row.samples for row in plans),
        "best_sample": max((row.best_sample for row in plans), default=0.0),
        "better_samples": sum(row.best_sample > 1 + EQUAL for row in plans),
        "beyond_bound": sum(row.best_sample * row.of_bound > 1 + EQUAL for row in plans),
    }


if __name__ == "__main__":
    main()
