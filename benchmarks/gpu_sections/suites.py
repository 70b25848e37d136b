"""Tests on the card: those marked `gpu` (kernels compiled on the device among them), and, over and over with random
sleeps in every lane, those that compare tokens, which would show work that streams do not order."""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_sections.outcomes import read_outcomes
from gpu_sections.setting import ROOT, Setting, TimeOverError

_FIRST = ("tests/kernels", "tests/paging", "tests/runtime")
_TOKENS = "tests/engine/test_invariance.py"
_ON_A_CARD = "test_a_real_device_gives_the_same_tokens"
_ON_A_TWIN = "test_every_schedule_on_every_kind_of_lane_gives_the_same_tokens and cgopipe and gpu-pinned"
_OUR_OPTIONS = ("-q", "--no-header", "--tb=short", "--continue-on-collection-errors", "-W", "default")
_ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # whatever plugins the machine's Python has
_MOST_RESTARTS, _MOST_FAILURES, _MOST_SHARDS = 8, 12, 4
_RUNS = (0, 1, 5)  # all passed, some failed, none selected: pytest came to its end


def run(setting: Setting) -> None:
    """The tests of the GPU's kernels, compiled on the device, then all others marked `gpu`, each in a few processes; on
    a twin, some that Triton interprets."""
    shards = max(1, min(_MOST_SHARDS, (os.cpu_count() or 1) // 4))
    if setting.twin:
        setting.keep(note="needs a card: tests marked gpu; these are some that Triton interprets")
        result = run_tests(setting, "kernels", [*kernel_files(), "-k", "interpreted and test_route"])
    else:
        result = run_tests(setting, "kernels", kernel_files(), shards=shards)
        setting.keep(**summary(result))
        others = [name for name in marked_files() if name not in kernel_files()]
        result |= run_tests(setting, "others", [*others, "-m", "gpu"], shards=shards)
    setting.keep(**summary(result))


def stress(setting: Setting) -> None:
    """Tokens on the device under sleeps of random length, as often as there is time, and once without the caching of
    device memory: a tensor that is freed too early is then really gone."""
    few = 2 if setting.small else 25
    keyword = _ON_A_TWIN if setting.twin else _ON_A_CARD
    if setting.twin:
        setting.keep(note="on a twin, whose streams are the host's threads")
    else:
        uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        result = run_tests(
            setting, "uncached", [_TOKENS, "-k", keyword], environment=uncached, seconds=setting.left_s / 3
        )
        setting.keep(uncached=summary(result))
    options = [_TOKENS, "-k", keyword, "--turns", str(few), "--jitter", "1"]
    setting.keep(**summary(run_tests(setting, "jittered", options)))


def kernel_files() -> list[str]:
    """The files of the GPU's kernels; not what compiles them for other cards."""
    return [name for name in _test_files("tests/kernels/test_gpu_*.py") if not name.endswith("_compiles.py")]


def marked_files() -> list[str]:
    """The files with tests marked `gpu`, kernels first, then what stands on them. Others are not collected: they may
    need libraries that a card's machine has not."""
    result = [name for name in _test_files("tests/**/test_*.py") if "mark.gpu" in (ROOT / name).read_text("utf-8")]
    return sorted(result, key=lambda name: not name.startswith(_FIRST))


def _test_files(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def run_tests(
    setting: Setting,
    name: str,
    options: Sequence[str],
    *,
    shards: int = 1,
    environment: dict[str, str] | None = None,
    seconds: float = 1e9,
) -> dict[str, dict[str, Any]]:
    """Outcomes by test. Shards run beside each other; each starts again after a crash, without the tests it had."""
    until_s = setting.left_s - min(seconds, setting.left_s)

    def shard(number: int) -> dict[str, dict[str, Any]]:
        path = setting.scratch / f"{name}-{number}.outcomes.jsonl"
        path.unlink(missing_ok=True)
        original = ["-p", "gpu_sections.outcomes", "--outcomes", str(path), "--shard", f"{number}/{shards}"]
        for _ in range(_MOST_RESTARTS):
            before = len(read_outcomes(path))
            limit_s = setting.left_s - until_s
            if limit_s < 1:
                break
            arguments = [*_OUR_OPTIONS, "-p", "no:cacheprovider", *original, *options]
            ended = setting.python("pytest", *arguments, limit_s=limit_s, environment={**_ALONE, **(environment or {})})
            result = read_outcomes(path)
            _close(path, result, ended.why if ended.code is not None else "cut")
            if ended.code in _RUNS or ended.code is None:
                break
            if len(result) == before:
                _append(path, {"test": f"pytest, shard {number}", "outcome": "failed", "said": ended.why})
                break
        return read_outcomes(path)

    if setting.left_s < 1:
        raise TimeOverError("no time was left to start it")
    with ThreadPoolExecutor(shards) as pool:
        return {test: line for part in pool.map(shard, range(shards)) for test, line in part.items()}


def _close(path: Path, result: dict[str, dict[str, Any]], reason: str) -> None:
    """Tests that began and never ended took their process with them, or were cut."""
    for test, line in result.items():
        if line["outcome"] == "begun":
            _append(path, {"test": test, "outcome": "cut" if reason == "cut" else "crashed", "said": reason})


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def summary(result: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts, the first failures with what they said, the slowest tests, and why tests were skipped."""
    counts = Counter(line["outcome"] for line in result.values())
    bad = [line for line in result.values() if line["outcome"] in ("failed", "crashed")]
    ran = [line for line in result.values() if "seconds" in line]
    slowest = sorted(ran, key=lambda line: -line["seconds"])[:5]
    reasons = Counter(line["said"] for line in result.values() if line["outcome"] == "skipped")
    return {
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "crashed", "skipped", "cut")},
        "tests": len(result),
        "median_s": statistics.median(line["seconds"] for line in ran) if ran else 0.0,
        "failures": [{"test": line["test"], "said": line["said"]} for line in bad[:_MOST_FAILURES]],
        "slowest": [{"test": line["test"], "seconds": line["seconds"]} for line in slowest],
        "skipped_for": dict(reasons.most_common(3)),
    }


def lines(figures: dict[str, Any]) -> list[str]:
    """For the summary."""
    told = [figures["note"]] if "note" in figures else []
    for name, result in (("", figures), ("without the caching of device memory: ", figures.get("uncached", {}))):
        if "tests" in result:
            told.append(
                f"{name}{result['passed']} passed, {result['failed']} failed, {result['crashed']} crashed, "
                f"{result['skipped']} skipped, {result['cut']} cut"
            )
            told += [f"{item['test']}: {item['said']}" for item in result["failures"]]
    return told
