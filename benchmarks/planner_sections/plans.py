"""Plans of every shipped machine, model and workload, and of random questions, beside random policies.

The roof of a plan is the bound that the planner proves: no policy of its space is faster; `of_bound` is the share of it
that the plan reaches. `best_sample` is the best of the random policies over the plan (1 at most, or the plan was not
the best). `solve_s` is the planner's own figure; `process_s`, for a few of the pairs, the whole command with --json and
--no-cache. Nothing but times is measured.

The attack asks random questions (`random_questions.py`) instead, until there were so many and so many minutes have
passed, and holds random policies over every key against each plan: `above_plan` counts the questions with one that is
more than 1 % faster than the plan, `above_bound` those with one beyond the bound. Both must be 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from moelight.core.errors import BudgetError
from moelight.hrm.estimate import estimate
from moelight.hrm.footprint import footprint
from moelight.hrm.machine_model import speeds_of
from moelight.optimizer.optimize import best_plan, capacities, compute_dtype
from moelight.optimizer.problem import Problem
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import load_workload
from planner_sections.random_questions import question
from planner_sections.sampled_policies import best_of_samples

ROOT = Path(__file__).resolve().parents[2]
EQUAL = 1e-6
MOST_SOLVE_S, MOST_PROCESS_S = 1.0, 2.0
BEHIND = 0.01  # what a plan may be behind the best policy
AT_ONCE = 20  # questions of one task


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


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every shipped question."""
    print(
        f"{'machine':>12} {'model':>18} {'workload':>20} {'solve s':>8} {'tokens/s':>10} {'of bound':>9} {'sample':>9}"
    )
    rows = []
    for machine, model, workload in product(args.machines, args.models, args.workloads):
        rows.append(row(machine, model, workload, args.samples or 10_000))
        print(line(rows[-1]), flush=True)
    processes = [process_s(*names) for names in spread(list(product(args.machines, args.models)), args.processes)]
    summary = figures(rows, processes)
    print("\n".join(f"{name}: {value}" for name, value in summary.items()))
    return {**summary, "rows": [asdict(row) for row in rows]}


def row(machine: str, model: str, workload: str, samples: int) -> Row:
    """One plan, and the best of ``samples`` random policies beside it."""
    hardware, profile = load_hardware_profile(machine), load_model_profile(model)
    problem = Problem(
        name=model,
        model=profile,
        speeds=speeds_of(hardware),
        workload=load_workload(workload),
        capacity_bytes=capacities(hardware, {}),
        dtype=compute_dtype(profile, hardware),
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
        policy=plan.why if tokens / best.seconds <= plan.estimate.tokens_per_s * (1 + EQUAL) else str(best.policy),
    )


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """One random question: the best sampled policy over the plan, the plan over its bound, and policies that fitted."""

    seed: int
    samples: int
    solve_s: float
    best_sample: float
    of_bound: float
    policy: str


def attack(args: argparse.Namespace) -> dict[str, Any]:
    """Random questions until there were enough of them, for as long as was asked."""
    questions, samples, minutes, jobs, seed = args.questions, args.samples or 2000, args.minutes, args.jobs, args.seed
    began_s, rows, seen = time.monotonic(), [], 0
    with ProcessPoolExecutor(jobs) as pool:
        while len(rows) < questions or time.monotonic() - began_s < 60 * minutes:
            seeds = [range(seed + seen + AT_ONCE * job, seed + seen + AT_ONCE * (job + 1)) for job in range(jobs)]
            seen += AT_ONCE * jobs
            for result in pool.map(_attacked, seeds, [samples] * jobs):
                rows += result
            print(
                f"{(time.monotonic() - began_s) / 60:6.1f} min  {seen} questions  {json.dumps(attacks(rows))}",
                flush=True,
            )
            for row in rows[-AT_ONCE * jobs :]:
                if row.best_sample > 1 + BEHIND or row.best_sample * row.of_bound > 1 + EQUAL:
                    print(
                        f"  seed {row.seed}: {row.best_sample:.4f} of plan, bound {1 / row.of_bound:.4f}: {row.policy}"
                    )
    return {"minutes": round((time.monotonic() - began_s) / 60, 1), "asked": seen, **attacks(rows)}


def attacks(rows: list[Attacked]) -> dict[str, float]:
    """What is claimed, in numbers."""
    if not rows:
        return {"questions": 0}
    shares = np.array([row.of_bound for row in rows])
    return {
        "questions": len(rows),
        "least_samples": min(row.samples for row in rows),
        "samples": sum(row.samples for row in rows),
        "above_plan": sum(row.best_sample > 1 + BEHIND for row in rows),
        "above_bound": sum(row.best_sample * row.of_bound > 1 + EQUAL for row in rows),
        "best_sample": round(max(row.best_sample for row in rows), 5),
        "median_of_bound": round(float(np.median(shares)), 4),
        "tenth_of_bound": round(float(np.quantile(shares, 0.1)), 4),
        "least_of_bound": round(float(shares.min()), 4),
        "median_solve_s": round(statistics.median(row.solve_s for row in rows), 3),
        "longest_solve_s": round(max(row.solve_s for row in rows), 3),
        **{f"above_plan_{share:g}": count for share, count in _behind(rows).items()},
    }


def _behind(rows: list[Attacked]) -> dict[float, int]:
    counts: Counter[float] = Counter({0.001: 0, 0.005: 0})
    for row in rows:
        counts.update(share for share in counts if row.best_sample > 1 + share)
    return dict(counts)


def _attacked(seeds: range, samples: int) -> list[Attacked]:
    """Those of the questions that have an answer, and policies enough that fit."""
    return [result for seed in seeds if (result := attacked(seed, samples)) is not None]


def attacked(seed: int, samples: int) -> Attacked | None:
    """The plan of one random question and its bound, against random policies; None where nothing fits."""
    problem, hardware = question(seed)
    began_s = time.process_time()
    try:
        plan = best_plan(problem, hardware, {})
    except BudgetError:
        return None
    took_s = time.process_time() - began_s
    if plan.policy.ring_pages:  # beside a GPU only where nothing else fits
        problem = replace(problem, small_rings=True)
    best = best_of_samples(problem, plan.policy, samples, seed)
    if best.count < samples or best.policy is None:
        return None
    policy = best.policy
    taken = footprint(problem.model, policy, dtype=problem.dtype)
    if any(taken.total(tier) > size for tier, size in problem.capacity_bytes.items() if tier != "disk"):
        raise RuntimeError(f"question {seed}: a sampled policy does not fit: {policy}")
    price = estimate(problem.model, policy, problem.workload, problem.speeds, dtype=problem.dtype).tokens_per_s
    return Attacked(
        seed=seed,
        samples=best.count,
        solve_s=took_s,
        best_sample=price / plan.estimate.tokens_per_s,
        of_bound=plan.estimate.tokens_per_s / plan.bound_tokens_per_s,
        policy=str(policy),
    )


def line(result: Row) -> str:
    names = f"{result.machine:>12} {result.model:>18} {result.workload:>20} {result.solve_s:>8.2f}"
    if not result.tokens_per_s:
        return f"{names} {'refused':>10}"
    better = "  better: " + result.policy if result.best_sample > 1 + EQUAL else ""
    return f"{names} {result.tokens_per_s:>10.1f} {result.of_bound:>9.1%} {result.best_sample:>9.6f}{better}"


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
