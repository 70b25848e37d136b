"""Thousands of short requests: whether memory grows, on the host and on the device, and whether spans keep the clock.

    python -m gpu_sections.long MODEL --device cuda --device-memory 1GiB --requests 2000

The clock: the end of a pass's last span against `time.perf_counter` when the pass is told. That lies a little later
always; a device's clock that runs away from the host's makes it later and later. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from gpu_sections.setting import FailedError, Setting
from gpu_sections.shapes import MODELS, make_model, with_enough
from moelight.core.errors import UserError
from moelight.core.request import Request, SamplingParams
from moelight.core.units import MiB
from moelight.profiles.workload import Workload

PROMPT, NEW = 64, 16
REQUESTS, FEW = 2000, 12
MOST_SEQUENCES = 128  # so that there are hundreds of passes
_SETTLED = 0.2  # share of the requests after which memory must not grow
_SPREAD = 10  # the first and the last of so many parts are compared


def run(setting: Setting) -> None:
    """The first model, most of whose experts stream."""
    model = make_model(setting, MODELS[0])
    options = ["--device", setting.device]
    options += ["--requests", FEW if setting.small else REQUESTS, "--seconds", f"{max(1.0, setting.left_s - 15):.0f}"]
    ended, memory = with_enough(
        setting,
        model,
        lambda memory: setting.python("gpu_sections.long", model, *options, "--device-memory", memory),
    )
    result = json.loads(ended.check().out.splitlines()[-1])
    setting.keep(device_memory_bytes=memory, **result)
    if result["completed"] < result["requests"]:
        raise FailedError(f"the time was over after {result['completed']:,} of {result['requests']:,} requests")


def lines(figures: dict[str, Any]) -> list[str]:
    """For the summary."""
    if "completed" not in figures:
        return []
    grown, clock = figures["grown_bytes"], figures["clock"]
    return [
        f"{figures['completed']:,} requests in {figures['wall_s']:.1f} s, {figures['passes']:,} passes, "
        f"{figures['tokens_per_s']:.0f} tok/s",
        f"host {figures['rss_bytes'] / MiB:.0f} MiB at the end, {grown['host'] / MiB:+.1f} since {_SETTLED:.0%}; the "
        f"device's allocator {figures['reserved_bytes'] / MiB:.0f} MiB, {grown['device'] / MiB:+.1f}",
        f"spans end {clock['first_s'] * 1e6:.0f} us before the clock at first, {clock['last_s'] * 1e6:.0f} us at last",
    ]


class Watch:
    """Memory and clocks after every pass."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.rows: list[tuple[int, int, int, float]] = []  # completions, host bytes, device bytes, seconds of lag
        self.completed = 0

    def on_pass(self) -> None:
        """Called after every pass."""
        from moelight.runtime.measure import current_rss_bytes

        now, timeline = time.perf_counter(), self._engine.timeline
        lag = now - timeline.end_s if timeline is not None and timeline.spans else 0.0
        reserved = self._engine.stats.device_peak_bytes
        self.rows.append((self.completed, current_rss_bytes(), reserved, lag))


def figures_of(rows: list[tuple[int, int, int, float]], requests: int) -> dict[str, Any]:
    """Growth since a share of the requests was done; the median lag of spans in the first and in the last part."""
    settled = next((row for row in rows if row[0] >= _SETTLED * requests), rows[-1])
    part = max(1, len(rows) // _SPREAD)
    lags = [row[3] for row in rows]
    return {
        "rss_bytes": rows[-1][1],
        "reserved_bytes": rows[-1][2],
        "grown_bytes": {"host": rows[-1][1] - settled[1], "device": rows[-1][2] - settled[2]},
        "clock": {"first_s": statistics.median(lags[:part]), "last_s": statistics.median(lags[-part:])},
    }


def main() -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--device-memory", required=True)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seconds", type=float, default=1e9, help="the run ends after this time")
    args = parser.parse_args()

    try:
        print(json.dumps(measure(args)))
    except UserError as error:
        print(f"long: {error}", file=sys.stderr)
        return 2
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests, or as many as there is time for."""
    from moelight.engine.engine import Engine

    draw = random.Random(0)
    work = Workload(num_requests=args.requests, prompt_len=PROMPT // 2, max_prompt_len=PROMPT, gen_len=NEW)
    options = {"device": args.device, "device_memory": args.device_memory, "workload": work}
    with Engine.from_pretrained(args.model, batch_size=min(args.requests, MOST_SEQUENCES), **options) as engine:
        vocabulary, watch, until = engine.profile.vocab_size, Watch(engine), time.perf_counter() + args.seconds

        def one(index: int) -> Request:
            ids = tuple(draw.randrange(3, vocabulary) for _ in range(draw.randint(1, PROMPT)))
            how = SamplingParams(max_tokens=draw.randint(4, NEW), ignore_eos=True, seed=index)
            return Request(index=index, token_ids=ids, sampling=how)

        requests = map(one, range(args.requests))
        for _ in engine.run(requests, on_pass=watch.on_pass, until=lambda: time.perf_counter() > until):
            watch.completed += 1
        stats = engine.stats
        policy = {name: getattr(engine.policy, name) for name in ("schedule", "batch_size", "micro_batch_size")}
    return {
        "requests": args.requests,
        "completed": watch.completed,
        "wall_s": stats.wall_s,
        "passes": stats.passes,
        "tokens_per_s": stats.tokens_per_s,
        "peak_rss_bytes": stats.peak_rss_bytes,
        "policy": policy,
        **figures_of(watch.rows, args.requests),
    }


if __name__ == "__main__":
    sys.exit(main())
