"""Launches, copies and synchronisations of steady decode passes, as CUDA's own profiler counts them.

    python -m gpu_sections.launches POLICY.yaml --device cuda

A process of its own: the profiler slows what it watches, so nothing here is timed but kernels. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moelight.core.request import Request, SamplingParams

FIRST_PASS, PASSES = 10, 4  # prompts have gone by; watched
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")
COPIES = ("cudaMemcpy", "cudaMemset", "cuMemcpy", "cuMemset")
ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHost", "cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease")
WAITS = ("Synchronize", "cudaMemcpy")  # ends of names
_CALLS = ("cuda_runtime", "cuda_driver")
_MOST_KERNELS = 10


def figures_of(events: Iterable[Mapping[str, Any]], passes: int, layers: int, micro_batches: int) -> dict[str, Any]:
    """``events`` of a Chrome trace that torch's profiler wrote over ``passes``: calls of each kind a pass, copies by
    their kind, and the kernels that take longest."""
    calls, kernels, kernel_us = Counter[str](), Counter[str](), Counter[str]()
    copies: dict[str, dict[str, float]] = {}
    for event in events:
        category, name = event.get("cat"), str(event.get("name"))
        if category in _CALLS:
            calls[name] += 1
        elif category == "kernel":
            kernels[name] += 1
            kernel_us[name] += event.get("dur", 0.0)
        elif category == "gpu_memcpy":
            row = copies.setdefault(name, {"count": 0, "bytes": 0, "us": 0.0})
            row["count"] += 1 / passes
            row["bytes"] += event.get("args", {}).get("bytes", 0) / passes
            row["us"] += event.get("dur", 0.0) / passes

    def per_pass(beginnings: tuple[str, ...]) -> float:
        return sum(count for name, count in calls.items() if name.startswith(beginnings)) / passes

    return {
        "passes": passes,
        "launches": per_pass(LAUNCHES),
        "launches_per_layer_and_micro_batch": per_pass(LAUNCHES) / (layers * micro_batches),
        "copies": per_pass(COPIES),
        "waits": sum(count for name, count in calls.items() if name.endswith(WAITS)) / passes,
        "allocations": per_pass(ALLOCATIONS),
        "calls": {name: count / passes for name, count in calls.most_common()},
        "copied": copies,
        "kernel_s": sum(kernel_us.values()) / passes / 1e6,
        "kernels": [
            {"name": name[:120], "count": kernels[name] / passes, "us": us / passes}
            for name, us in kernel_us.most_common(_MOST_KERNELS)
        ],
    }


class Watch:
    """Starts and stops the profiler between passes."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._passes = 0

    def on_pass(self) -> None:
        """Called after every pass."""
        self._passes += 1
        if self._passes == FIRST_PASS:
            self._profiler.start()
        elif self._passes == FIRST_PASS + PASSES:
            self._profiler.stop()

    def events(self) -> list[dict[str, Any]]:
        """What was seen; SystemExit where the run was too short."""
        if self._passes < FIRST_PASS + PASSES:
            raise SystemExit(f"the run had {self._passes} passes, and {FIRST_PASS + PASSES} are needed")
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "profile.json"
            self._profiler.export_chrome_trace(str(path))
            return list(json.loads(path.read_text())["traceEvents"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", type=Path, help="a policy file, which names its checkpoint")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", type=int, default=64)
    args = parser.parse_args()

    from gpu_small_card import pinned_rate

    from moelight.engine.engine import Engine
    from moelight.profiles.policy_files import load_policy
    from moelight.runtime.machine import find_machine

    policy = load_policy(args.policy)
    count, how = policy.batch_size, SamplingParams(max_tokens=FIRST_PASS + PASSES + 6, ignore_eos=True)
    with Engine(policy, device=args.device, adapt=False, prefix_caching=False) as engine:
        vocabulary, watch = engine.profile.vocab_size, Watch()
        ids = [[3 + (31 * n + 7 * k) % (vocabulary - 3) for k in range(args.prompt)] for n in range(count)]
        requests = [Request(index=n, token_ids=tuple(item), sampling=how) for n, item in enumerate(ids)]
        for _ in engine.run(requests, on_pass=watch.on_pass):
            pass
        layers, micro_batches = engine.profile.num_layers, math.ceil(count / policy.micro_batch_size)
    result = figures_of(watch.events(), PASSES, layers, micro_batches)
    rate = pinned_rate(find_machine(args.device), 64 << 20)
    print(json.dumps({**result, "micro_batches": micro_batches, "layers": layers, "pinned_h2d_bytes_per_s": rate}))


if __name__ == "__main__":
    main()
