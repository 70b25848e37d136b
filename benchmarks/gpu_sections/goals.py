"""What a first run on a card must show, beside what it showed, and published figures scaled to this machine.

A pass that streams experts ends neither before its weights have crossed the link nor before the device has read them.
So a published figure scales, at best, with the smaller of two ratios: this machine's pinned copies over the published
card's link, and this device's memory rate over that card's (theirs by data sheet, ours measured). A model of fewer
layers than Mixtral's is faster by as much, which the goal accounts for. Host memory, which bounds N, is not scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner_sections.published import CARDS, GENERATED, MOE_GEN, PUBLISHED, Card

from gpu_sections.shapes import link, link_binds
from gpu_sections.small_card import contestants

_LAYERS = 32  # of Mixtral 8x7B
_CAPS = {"16GiB": "S1", "24GiB": "S2"}
_CLOCK_S = 1e-3
_GROWN_SHARE = 0.02
Goal = dict[str, Any]
Parts = dict[str, dict[str, Any]]


def goals(parts: Parts, *, fast: bool = True) -> list[Goal]:
    """Every goal for which something was measured: ``goal``, ``found`` (text), ``met``; those of speed if ``fast``."""
    return [*_right(parts), *_sturdy(parts), *([*_fast(parts), *_scaled(parts)] if fast else [])]


def _goal(goal: str, result: str, met: bool) -> Goal:
    return {"goal": goal, "found": result, "met": met}


def _right(parts: Parts) -> Iterator[Goal]:
    exact = [row for row in _rows(parts, "tokens") if not row.get("ties")]
    if exact:
        same = sum(row.get("identical", False) for row in exact)
        yield _goal("float32 tokens in every order are the CPU's", f"{same} of {len(exact)} orders", same == len(exact))
    for name, label in (("tests", "tests marked gpu pass"), ("streams", "tokens stay under random sleeps")):
        result = parts.get(name, {})
        if "tests" in result and "note" not in result:  # a twin runs some of them
            runs = (result, result.get("uncached", {}))
            bad = sum(run.get("failed", 0) + run.get("crashed", 0) for run in runs)
            yield _goal(label, f"{result['passed']} passed, {bad} did not", bad == 0 and result["passed"] > 0)


def _fast(parts: Parts) -> Iterator[Goal]:
    for row in _rows(parts, "shapes"):
        if "unable" in row:
            continue
        name, calls = f"{row['model']}, {row['run']}", row.get("calls", {})
        predicted = row["report"]["predicted_pass_s"]
        if predicted:
            error = row["report"]["pass_s"] / predicted - 1
            yield _goal(f"{name}: predicted pass within 10 %", f"{error:+.1%}", abs(error) <= 0.1)
        if row["run"].startswith("cgopipe") and link_binds(row):
            yield _link_goal(name, link(row)["busy_share"], link(row)["share_of_pinned"])
        if "launches" in calls:
            item, waits = calls["launches_per_layer_and_micro_batch"], calls["waits"]
            yield _goal(f"{name}: at most 20 launches a layer and micro-batch", f"{item:.1f}", item <= 20)
            yield _goal(f"{name}: no wait for the device a layer", f"{waits:.1f} a pass", waits < calls["layers"])
    for name, report, row in contestants(parts.get("small-card", {})):
        if row["contestant"] != "cgopipe" or name not in _CAPS:
            continue
        steady, predicted = row["steady"], row.get("predicted_pass_s")
        planned = row["predicted_lanes"]
        other = max(planned, key=planned.__getitem__)
        where = "" if other == "h2d" else f" (planned so that {other} binds)"
        yield _link_goal(f"small card {name}{where}", steady["lanes"].get("h2d", 0.0), steady["h2d_share_of_roof"])
        if predicted:
            error = steady["pass_s"] / predicted - 1
            yield _goal(f"small card {name}: predicted pass within 10 %", f"{error:+.1%}", abs(error) <= 0.1)
        theirs = [item for item in report["rows"] if item["contestant"] == "accelerate" and item.get("tokens_per_s")]
        if theirs and row["jobs"]:
            ratio = _rate(row["jobs"][0]) / theirs[0]["tokens_per_s"]
            yield _goal(f"small card {name}: 3 x accelerate", f"{ratio:.1f} x", ratio >= 3)


def _link_goal(name: str, busy: float, rate: float) -> Goal:
    goal = f"{name}: link 90 % busy at 90 % of pinned copies"
    return _goal(goal, f"{busy:.1%} at {rate:.1%}", busy >= 0.9 and rate >= 0.9)


def _sturdy(parts: Parts) -> Iterator[Goal]:
    least = _rows(parts, "least")
    if least:
        ran = sum("unable" not in row for row in least)
        label = "the least device memory that a refusal names runs"
        yield _goal(label, f"{ran} of {len(least)} orders", ran == len(least))
    long = parts.get("long", {})
    if "grown_bytes" in long:
        host, device = long["grown_bytes"]["host"], long["grown_bytes"]["device"]
        calm = host <= _GROWN_SHARE * long["rss_bytes"] and device <= _GROWN_SHARE * max(1, long["reserved_bytes"])
        yield _goal("memory does not grow over 2,000 requests", f"host {host:+,} bytes, device {device:+,}", calm)
        drift = long["clock"]["last_s"] - long["clock"]["first_s"]
        yield _goal("spans keep the host's clock within 1 ms", f"{drift * 1e6:+.0f} us", abs(drift) <= _CLOCK_S)


def _scaled(parts: Parts) -> Iterator[Goal]:
    rates = parts.get("profile", {})
    if "links" not in rates:
        return
    ours = Card(name="", link=rates["links"]["host_to_device"], memory=rates["bytes_per_s"]["device"])
    for name, report, row in contestants(parts.get("small-card", {})):
        if row["contestant"] != "cgopipe" or "steady" not in row:
            continue
        layers, steady = report["layers"], row["steady"]
        setting = _CAPS.get(name.removesuffix("-orders"))
        for job in row["jobs"] if setting else ():
            if job["new_tokens"] in GENERATED:
                published = PUBLISHED[setting, "MoE-Lightning"][GENERATED.index(job["new_tokens"])]
                label = f"MoE-Lightning, {CARDS[setting].name}, {job['new_tokens']} new tokens"
                yield _published(label, published, CARDS[setting], ours, layers, _rate(job))
        if name == "moe-gen":
            prefill = steady["prompt_tokens"] / steady["fill_s"] if steady["fill_s"] else 0.0
            decode = steady["sequences"] / steady["pass_s"]
            for kind, result in (("prefill", prefill), ("decode", decode)):
                yield _published(f"MoE-Gen, A5000, {kind}", MOE_GEN[kind], CARDS["A5000"], ours, layers, result)


def scale(theirs: Card, ours: Card, layers: int) -> float:
    """By how much a figure of ``theirs`` may grow on ``ours``."""
    return min(ours.link / theirs.link, ours.memory / theirs.memory) * _LAYERS / layers


def _published(label: str, published: float, theirs: Card, ours: Card, layers: int, result: float) -> Goal:
    goal = published * scale(theirs, ours, layers)
    return _goal(f"{label}: {published:.0f} tok/s published, {goal:.0f} scaled", f"{result:.0f} tok/s", result >= goal)


def _rate(job: dict[str, Any]) -> float:
    return float(job["whole_tokens_per_s"] if job["cut"] else job["tokens_per_s"])


def _rows(parts: Parts, name: str) -> list[dict[str, Any]]:
    return list(parts.get(name, {}).get("rows", ()))
