"""A small card: mixtral-8x7b in host memory beside a GPU of which a plan may use only so much.

    python benchmarks/gpu_small_card.py [--caps 16GiB 24GiB] [--new 32 64 128 256] [--results DIR]
    python benchmarks/gpu_small_card.py --device twin --tiny      # the same code on any machine, in a minute

Weights are random; their shape is mixtral-8x7b's, with as many layers as host memory holds. The checkpoint on disk is
hollow (its experts are holes), and the engine's pages are filled from random bytes in memory; with ``--real SHAPE`` it
is whole, and pages are read from it. For every cap and every contestant one engine is planned and opened: cgopipe with
refill, cgopipe with static batches, and flexgen, all on the same kernels. One full batch is filled and then decodes
alone, which gives the link's busy share and rate beside the rate of a plain pinned copy of the same run; then the
mtbench job runs for each number of new tokens. A job that does not end in --job-seconds is cut; "whole" is what filling
a batch and a decode pass, as measured, make of all of it. Nothing starts after --minutes; what has ended is in
--results. The last line is JSON.

Without ``--hw`` the plan is for this machine, which is measured in ten seconds unless `moelight profile` did before.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from gpu_sections.mtbench import MEAN_PROMPT, mtbench_requests, mtbench_workload
from make_checkpoint import SHAPES, make_checkpoint, scaled_config
from torch import Tensor

from moelight import __version__
from moelight.core.errors import UserError
from moelight.core.request import Request, SamplingParams
from moelight.core.schedule import Lane, Page
from moelight.core.timeline import Timeline
from moelight.core.units import GiB, format_bytes, parse_bytes
from moelight.engine import loaded_model
from moelight.engine.engine import Engine
from moelight.engine.options import EngineOptions
from moelight.engine.planning import plan_for
from moelight.hrm import costs
from moelight.hrm.footprint import footprint
from moelight.kernels.device import Device
from moelight.models.checkpoints import open_model
from moelight.observe.trace import TraceHeader, write_trace
from moelight.optimizer.plan import Plan, policy_as_dict
from moelight.paging.arena import page_locked
from moelight.profiles.workload import Workload
from moelight.runtime.machine import Machine, find_machine
from moelight.runtime.machine_profile import accelerator_name, machine_profile
from moelight.runtime.measure import available_bytes
from moelight.weights.tensor_map import OpenCheckpoint
from moelight.weights.torch_dtypes import to_torch

CONTESTANTS = {"cgopipe": ("cgopipe", "refill"), "static": ("cgopipe", "static"), "flexgen": ("flexgen", "refill")}
STEADY_PASSES = 6
ROOM_BESIDE_WEIGHTS = 28 * GiB
POOL_BYTES = 1 << 30
TINY = {"layers": 3, "hidden": 64, "intermediate": 96, "experts": 4, "heads": 4, "kv_heads": 2, "vocab": 512}


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """Passes in which a full batch decodes. ``lanes`` is the busy share of each lane; rates in bytes/s."""

    sequences: int
    prompt_tokens: int
    pass_s: float
    fill_s: float
    lanes: dict[str, float]
    h2d_bytes_per_s: float
    h2d_share_of_roof: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One mtbench job; ``whole_tokens_per_s`` is of all its requests, as the steady figures make it."""

    new_tokens: int
    requests: int
    tokens: int
    seconds: float
    cut: bool
    tokens_per_s: float
    whole_tokens_per_s: float


class RandomPages(loaded_model.PageReader):
    """Pages out of a pool of random weights, wherever the checkpoint has holes."""

    pool = torch.empty(0, dtype=torch.uint8)

    def start(self, page: Page, dest: Tensor, begin: int = 0) -> None:
        """Fill ``dest`` with weights that depend on the page, and on where in it they ``begin``."""
        pool, done = RandomPages.pool, 0
        start = (4096 * (page.layer * 131 + page.expert * 17) + begin) % (pool.numel() // 2)
        while done < dest.numel():
            piece = pool[start : start + dest.numel() - done]
            dest[done : done + piece.numel()].copy_(piece)
            done, start = done + piece.numel(), 0


class _EnoughError(Exception):
    """The time of a job is over."""


class Card:
    """One model on one machine: what all contestants share."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args, self.began = args, time.perf_counter()
        self.machine: Machine = find_machine(args.device)
        if args.hw == "auto" and not self.machine.twin:
            machine_profile(args.device)  # kept from now on, for `plan_for`
        self.model = _model(args, scratch)
        self.source: OpenCheckpoint = open_model(str(self.model))
        self.page_bytes = costs.page_bytes(self.source.profile, self.machine.native_dtype(self.source.weight_map.dtype))
        self.context_bytes = _context_bytes(self.machine)
        self.roof = pinned_rate(self.machine, self.page_bytes)
        dtype = to_torch(self.machine.native_dtype(self.source.weight_map.dtype).page_dtype)
        size = max(4096, min(POOL_BYTES, 4 * self.page_bytes))
        RandomPages.pool = torch.empty(size // 2, dtype=dtype).normal_(std=0.02).view(torch.uint8)

    @property
    def left_s(self) -> float:
        """Seconds until nothing more is started."""
        return 60.0 * float(self.args.minutes) - (time.perf_counter() - self.began)

    def plan(self, schedule: str, admission: str, cap: int) -> Plan:
        """The best policy of ``schedule`` under ``cap``, with room for the longest answers."""
        args = self.args
        plan = plan_for(
            str(self.model),
            self.source,
            self.machine,
            EngineOptions(
                hw=args.hw,
                host_memory=parse_bytes(args.host_memory, label="--host-memory") if args.host_memory else None,
                device_memory=cap - self.context_bytes,
                batch_size=args.batch_size,
                micro_batch_size=args.micro_batch_size,
                schedule=schedule,
            ),
            self.workload(args.requests or 5120, max(args.new)),
        )
        return replace(plan, policy=replace(plan.policy, admission=admission))

    def workload(self, count: int, new: int) -> Workload:
        """MTBench's, or prompts of one length."""
        length = self.args.prompt_len
        if length is None:
            return mtbench_workload(count, new)
        return Workload(num_requests=count, prompt_len=length, max_prompt_len=length, gen_len=new)

    def requests(self, count: int, new: int) -> list[Request]:
        """The same, as the engine takes them."""
        vocabulary, length = self.source.profile.vocab_size, self.args.prompt_len
        if length is None:
            return mtbench_requests(count, new, vocabulary)
        how, draw = SamplingParams(max_tokens=new, ignore_eos=True), Random(1)
        ids = [tuple(draw.randrange(3, vocabulary) for _ in range(length)) for _ in range(count)]
        return [Request(index=index, token_ids=item, sampling=how) for index, item in enumerate(ids)]

    def measure(self, name: str, cap: int) -> dict[str, Any]:
        """Everything of one contestant under one cap."""
        plan = self.plan(*CONTESTANTS[name], cap)
        gc.collect()
        Device(self.machine.device).limit_memory(cap - self.context_bytes)
        options = {"device": self.args.device, "lanes": self.args.lanes, "source": self.source}
        with Engine(plan, **options, prefix_caching=False) as engine:
            steady, trace = self.steady(engine)
            self.keep(f"{name}-{cap // GiB or cap}", plan, trace)
            news = self.args.new if self.args.rounds else ()
            jobs = [self.job(engine, steady, new) for new in news if self.left_s > self.args.job_seconds]
            return {
                "contestant": name,
                "cap_bytes": cap,
                "policy": policy_as_dict(engine.policy),
                "admission": engine.policy.admission,
                "host_pages": [engine.policy.host_pages, engine.host_pages_reason],
                "load_s": engine.stats.load_s,
                "predicted_pass_s": plan.estimate.pass_s,
                "predicted_lanes": dict(plan.estimate.lanes),
                "steady": asdict(steady),
                "jobs": [asdict(job) for job in jobs],
                **self.memory(engine, cap),
            }

    def memory(self, engine: Engine, cap: int) -> dict[str, Any]:
        """What of the cap was used, the device's context included; on a twin, what the plan takes."""
        dtype = self.machine.native_dtype(self.source.weight_map.dtype)
        planned = footprint(self.source.profile, engine.policy, dtype=dtype).total("device")
        used = planned if self.machine.twin else self.context_bytes + engine.stats.device_peak_bytes
        return {
            "device_planned_bytes": planned,
            "device_peak_bytes": engine.stats.device_peak_bytes,
            "device_context_bytes": self.context_bytes,
            "device_used_share": used / cap,
            "device_exceeded": used > cap,
        }

    def steady(self, engine: Engine) -> tuple[Steady, list[Timeline]]:
        """A full batch is filled, and then decodes alone."""
        n, timelines, began = engine.policy.batch_size, list[Timeline](), time.perf_counter()
        ends: list[float] = []
        requests = self.requests(n, STEADY_PASSES + 6)

        def on_pass() -> None:
            ends.append(time.perf_counter())
            if engine.timeline is not None:
                timelines.append(engine.timeline)

        for _ in engine.run(requests, on_pass=on_pass):
            pass
        last = timelines[-STEADY_PASSES - 1 : -1]  # the very last pass fetches for nobody
        seconds = last[-1].end_s - last[0].start_s
        busy = {str(lane): sum(item.busy_s().get(lane, 0.0) for item in last) / seconds for lane in Lane}
        moved = sum(span.task.bytes for item in last for span in item.spans if span.task.lane is Lane.H2D)
        rate = moved / max(busy["h2d"] * seconds, 1e-9)
        pass_s = seconds / len(last)
        return Steady(
            sequences=n,
            prompt_tokens=sum(len(request.token_ids) for request in requests),
            pass_s=pass_s,
            fill_s=max(0.0, ends[-1] - began - (STEADY_PASSES + 5) * pass_s),
            lanes={lane: share for lane, share in busy.items() if share},
            h2d_bytes_per_s=rate,
            h2d_share_of_roof=rate / self.roof,
        ), last

    def job(self, engine: Engine, steady: Steady, new: int) -> Job:
        """``--rounds`` full batches of mtbench prompts, ``new`` tokens each."""
        count = self.args.requests or self.args.rounds * steady.sequences
        until, before, cut = time.perf_counter() + self.args.job_seconds, engine.progress_tokens, False

        def on_pass() -> None:
            if time.perf_counter() > until:
                raise _EnoughError

        began = time.perf_counter()
        try:
            for _ in engine.run(self.requests(count, new), on_pass=on_pass):
                pass
        except _EnoughError:
            cut = True
        seconds, tokens = time.perf_counter() - began, engine.progress_tokens - before
        whole_s = math.ceil(count / steady.sequences) * (steady.fill_s + (new - 1) * steady.pass_s)
        return Job(
            new_tokens=new,
            requests=count,
            tokens=tokens,
            seconds=seconds,
            cut=cut,
            tokens_per_s=tokens / seconds,
            whole_tokens_per_s=count * new / whole_s,
        )

    def keep(self, name: str, plan: Plan, timelines: Sequence[Timeline]) -> None:
        """The steady passes as a trace, if results are kept."""
        if self.args.results is not None:
            self.args.results.mkdir(parents=True, exist_ok=True)
            about = TraceHeader(
                version=__version__,
                source="measured",
                policy=policy_as_dict(plan.policy),
                hardware=plan.hardware,
                roofs={str(Lane.H2D): self.roof},
            )
            with (self.args.results / f"{name}.trace.json").open("wb") as file:
                write_trace(file.write, timelines, about)

    def accelerate(self, cap: int) -> dict[str, Any]:
        """accelerate's offload to host memory, in an environment of its own."""
        args = self.args
        script = Path(__file__).parent / "peers" / "gpu_accelerate.py"
        options = ["--cap", str(cap), "--new", str(args.new[0]), "--batches", *map(str, args.accelerate_batches)]
        options += ["--prompt", str(args.prompt_len or MEAN_PROMPT)]
        command = [str(args.accelerate_python), str(script), str(self.model), *options]
        alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, timeout=max(1.0, self.left_s), env=alone
            )
            message: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
            message = {"unable": f"{type(error).__name__}: {error}"[:300]}
        return {"contestant": "accelerate", "cap_bytes": cap, **message}


def _model(args: argparse.Namespace, scratch: Path) -> Path:
    """The checkpoint of ``args``, made unless it is there: of mixtral-8x7b's shape and without experts, which take no
    room on the disk, or whole."""
    out = Path(args.model or scratch / "model")
    if not (out / "config.json").exists():
        sizes = TINY if args.tiny else {} if args.real else {"layers": _layers(args)}
        config = scaled_config("mixtral-8x7b" if args.tiny or not args.real else args.real, **sizes)
        unfinished = out.with_name(f"{out.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        make_checkpoint(unfinished, config, hollow=args.real is None, shard_size=5_000_000_000)
        unfinished.rename(out)
    return out


def _layers(args: argparse.Namespace) -> int:
    """As many of mixtral-8x7b's as host memory holds beside `ROOM_BESIDE_WEIGHTS`."""
    config = scaled_config("mixtral-8x7b")
    layer = 2 * 3 * config["hidden_size"] * config["intermediate_size"] * config["num_local_experts"]
    host = parse_bytes(args.host_memory, label="--host-memory") if args.host_memory else available_bytes()
    fits = max(2, (host - ROOM_BESIDE_WEIGHTS) // layer)
    return int(args.layers or min(config["num_hidden_layers"], fits))


def _context_bytes(machine: Machine) -> int:
    """What the device's own context and libraries take before anything is loaded."""
    if machine.twin:
        return 0
    some = torch.ones(64, 64, device=machine.device)
    (some @ some).sum().item()
    module = torch.get_device_module(machine.device)
    free, full = module.mem_get_info(machine.device)
    return int(full - free - module.memory_reserved(machine.device))


def pinned_rate(machine: Machine, size: int, rounds: int = 9) -> float:
    """bytes/s of one pinned page after another over the link; medians."""
    here = page_locked(4 * size, machine.device) if not machine.twin else torch.empty(4 * size, dtype=torch.uint8)
    here.zero_()
    present = torch.empty(4 * size, dtype=torch.uint8, device=machine.device)
    seconds = []
    for _ in range(rounds):
        _finish(machine)
        began = time.perf_counter()
        for start in range(0, 4 * size, size):
            present[start : start + size].copy_(here[start : start + size], non_blocking=True)
        _finish(machine)
        seconds.append(time.perf_counter() - began)
    return 4 * size / statistics.median(seconds)


def _finish(machine: Machine) -> None:
    if not machine.twin:
        torch.accelerator.synchronize()


def _told(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table for people."""
    yield f"{'cap':>8}  {'who':<11}{'N':>6}{'µ':>6}{'s/pass':>8}{'h2d busy':>9}{'of roof':>8}{'of cap':>8}  tokens/s"
    for row in rows:
        cap = format_bytes(row["cap_bytes"])
        if "steady" not in row:
            yield f"{cap:>8}  {row['contestant']:<11}{row.get('unable', row.get('tokens_per_s', ''))}"
            continue
        steady, micro = row["steady"], row["policy"]["micro_batch_size"]
        jobs = [
            f"{job['new_tokens']}: {job['tokens_per_s']:.1f}{' cut' if job['cut'] else ''} (whole "
            f"{job['whole_tokens_per_s']:.1f})"
            for job in row["jobs"]
        ]
        yield (
            f"{cap:>8}  {row['contestant']:<11}{steady['sequences']:>6}{micro:>6}{steady['pass_s']:>8.3f}"
            f"{steady['lanes'].get('h2d', 0.0):>9.1%}{steady['h2d_share_of_roof']:>8.1%}"
            f"{row['device_used_share']:>8.1%}  {', '.join(jobs)}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cuda, xpu or twin")
    parser.add_argument("--lanes", default="auto")
    parser.add_argument(
        "--hw", default="auto", help="hardware profile to plan with; auto: as `moelight profile` left it"
    )
    parser.add_argument("--caps", nargs="+", help="device memory, one run for each; 16GiB 24GiB if not given")
    parser.add_argument("--host-memory", help="of the plan; 90 %% of what is free if not given")
    parser.add_argument("--model", type=Path, help="a checkpoint, hollow or not; made there if it is absent")
    parser.add_argument("--real", choices=SHAPES, help="a whole checkpoint of this shape, whose pages are read from it")
    parser.add_argument("--prompt-len", type=int, help="tokens of every prompt, instead of MTBench's")
    parser.add_argument("--layers", type=int, help="instead of as many as host memory holds")
    parser.add_argument("--batch-size", type=int, help="instead of the plan's")
    parser.add_argument("--micro-batch-size", type=int, help="instead of the plan's")
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--new", nargs="+", type=int, help="new tokens, one job for each; 32 64 128 256 if not given")
    parser.add_argument("--requests", type=int, help="in a job, instead of --rounds full batches")
    parser.add_argument("--rounds", type=int, default=2, help="full batches in a job; 0: no jobs")
    parser.add_argument("--job-seconds", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--accelerate-python", type=Path, help="an environment with accelerate and transformers")
    parser.add_argument("--accelerate-batches", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep results and traces here")
    parser.add_argument("--tiny", action="store_true", help="a small model and short jobs: shows that everything runs")
    args = parser.parse_args()
    args.caps = args.caps or (["123MiB"] if args.tiny else ["16GiB", "24GiB"])
    args.new = args.new or ([3, 5] if args.tiny else [32, 64, 128, 256])
    if args.tiny:
        args.host_memory, args.requests, args.job_seconds = args.host_memory or "512MiB", 12, 120.0
        args.batch_size, args.micro_batch_size = args.batch_size or 6, args.micro_batch_size or 2
    return args


def main() -> int:
    """The command line; returns its exit code."""
    args, rows = _arguments(), list[dict[str, Any]]()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.real is None:
            stack.callback(setattr, loaded_model, "PageReader", loaded_model.PageReader)
            loaded_model.PageReader = RandomPages  # type: ignore[misc]
        try:
            card = Card(args, scratch)
            for cap in (parse_bytes(text, label="--caps") for text in args.caps):
                for name in args.contestants:
                    if card.left_s > 0:
                        rows.append(card.measure(name, cap))
                        print("\n".join(_told(rows[-1:])), flush=True)
                        _keep(card, rows)
                if args.accelerate_python is not None and card.left_s > 0:
                    rows.append(card.accelerate(cap))
                    _keep(card, rows)
        except UserError as error:
            print(f"gpu_small_card: {error}", file=sys.stderr)
            return 2
        report = _keep(card, rows)
    print(f"\n{report['device']}, {report['layers']} layers, pinned copies at {card.roof / 1e9:.1f} GB/s")
    print("\n".join(_told(rows)))
    print(json.dumps(report))
    return 0


def _keep(card: Card, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The report so far; written, if results are kept."""
    args = card.args
    report = {
        "benchmark": "gpu_small_card",
        "device": "twin" if card.machine.twin else accelerator_name(str(card.machine.device)) or "cpu",
        "files": args.real or "hollow",
        "prompt_len": args.prompt_len,
        "layers": card.source.profile.num_layers,
        "page_bytes": card.page_bytes,
        "pinned_h2d_bytes_per_s": card.roof,
        "wall_s": time.perf_counter() - card.began,
        "rows": list(rows),
    }
    if args.results is not None:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / "gpu_small_card.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    return report


if __name__ == "__main__":
    sys.exit(main())
