"""Terminal views of plans: of one, its policy, predicted speed, memory use, binding lane and what-ifs; of several, the
machines that could be rented for a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from moelight.cli.planning_options import PlannedJob
from moelight.cli.tables import bar, indented, plain_table, section, show, stacked, text, title
from moelight.core.units import format_bytes
from moelight.observe.number_format import rate_or_count, seconds_text, share_text
from moelight.optimizer.allowed import AUTO
from moelight.optimizer.offers import Offer
from moelight.optimizer.plan import Plan, TierUse
from moelight.profiles.prices import Prices
from moelight.profiles.workload import Workload

_PALETTE = ("blue", "cyan", "green", "magenta", "yellow", "bright_black")
_LANE_WORDS = {
    "disk": "reads of pages",
    "stage": "staging copies",
    "h2d": "link up",
    "d2h": "link down",
    "device": "GPU",
    "cpu": "CPU",
    "dram": "host memory",
    "exchange": "sums over ranks",
}


def print_plan(console: Console, plan: Plan, *, workload_name: str, quality: str = "", ranks: str = "") -> None:
    """Print ``plan``, on 80 columns or more; ``quality``: what was measured of the model, if anything was; ``ranks``:
    whose plan it is, and what several give."""
    show(
        console,
        _head(plan, workload_name, quality),
        section("policy", _policy(plan)),
        section("lanes in a decode pass", _lanes(plan, console.width)),
        section("memory", memory_view(plan, console.width)),
        section("what would help most", _what_if(plan)) if plan.what_if else None,
        section("why", text(plan.why)),
        section("ranks", text(ranks)) if ranks else None,
    )


def _head(plan: Plan, workload_name: str, quality: str) -> RenderableType:
    policy, estimate = plan.policy, plan.estimate
    speed = text(
        (f"{rate_or_count(estimate.tokens_per_s)} tokens/s", "bold green"),
        f" end to end, {rate_or_count(estimate.decode_tokens_per_s)} while decoding; "
        f"a decode pass takes {seconds_text(estimate.pass_s)}",
    )
    measured = [text(quality)] if quality else []
    cannot = [text((f"cannot be run yet: {'; '.join(plan.why_not)}", "bold yellow"))] if plan.why_not else []
    heading = title(policy.model, plan.hardware), _work_line(plan.workload, workload_name), text()
    return stacked(*heading, speed, *measured, _proof(plan), *cannot)


def _work_line(work: Workload, workload_name: str) -> Text:
    longest = "" if work.max_prompt_len == work.prompt_len else f" (at most {work.max_prompt_len:,})"
    named = f"{workload_name}: " if workload_name else ""
    line = (
        f"{named}{work.num_requests:,} prompts of {work.prompt_len:,} tokens{longest}, {work.gen_len:,} generated each"
    )
    return text((line, "dim"))


def _proof(plan: Plan) -> Text:
    if plan.estimator == "paper":
        return text((f"the paper's estimator, over its whole grid; solved in {seconds_text(plan.solve_s)}", "dim"))
    gap = plan.bound_tokens_per_s / plan.estimate.tokens_per_s - 1 if plan.bound_tokens_per_s else 0.0
    condition = f" with {', '.join(plan.fixed)} as fixed" if plan.fixed else ""
    best = "no policy is faster" if gap < 5e-4 else f"no policy is more than {share_text(gap)} faster"
    proof = f"proven for the cost model over every key{condition}: {best}"
    return text((f"{proof}; solved in {seconds_text(plan.solve_s)}", "dim"))


def _policy(plan: Plan) -> Table:
    policy = plan.policy
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    count = policy.num_micro_batches
    batches = "1 micro-batch" if count == 1 else f"{count:,} micro-batches of {policy.micro_batch_size:,}"
    grid.add_row("batch", f"{policy.batch_size:,} sequences in {batches}")
    grid.add_row("prompts", f"in micro-batches of {policy.micro_batch_tokens:,} tokens")
    grid.add_row("attention", f"on the {policy.attention_device.upper()}; keys and values {_shares(policy.kv)}")
    experts = {"cpu": "on the CPU", "gpu": "on the GPU", "split": "on both"}[policy.ffn_device]
    if policy.ffn_device == "split":
        experts += f", {share_text(policy.cpu_experts)} of them by the CPU where they lie"
    grid.add_row("experts", f"{experts}; weights {_shares(policy.weights)}")
    as_stored = policy.weight_dtype == policy.kv_dtype == "auto"
    dtypes = f"experts {_dtype(policy.weight_dtype)}, keys and values {_dtype(policy.kv_dtype)}"
    grid.add_row("numbers", "as the model has them" if as_stored else dtypes)
    if policy.activations != "auto":
        grid.add_row("activations", f"rounded to {policy.activations} before they meet the experts' integers")
    ring = f" behind a ring of {policy.ring_pages} experts, which run as they arrive" if policy.ring_pages else ""
    grid.add_row("order", policy.schedule + ring)
    return grid


def _shares(shares: object) -> str:
    used = {tier: getattr(shares, tier) for tier in ("device", "host", "disk") if getattr(shares, tier) > 0}
    if len(used) == 1:
        return {"device": "in device memory", "host": "in host memory", "disk": "on disk"}[next(iter(used))]
    return ", ".join(f"{share_text(share)} {tier}" for tier, share in used.items())


def _dtype(name: str) -> str:
    return "as the model has them" if name == "auto" else f"in {name}"


def _lanes(plan: Plan, width: int) -> Table:
    estimate = plan.estimate
    room = max(12, min(44, width - 56))
    table = plain_table("lane", "", ">at work", ">of pass", "")
    longest = max((*estimate.lanes.values(), estimate.pass_s)) or 1.0
    for lane, seconds in sorted(estimate.lanes.items(), key=lambda item: -item[1]):
        if seconds <= 0:
            continue
        binds = lane == estimate.binding
        drawn = bar(seconds / longest, room, style="yellow" if binds else "blue")
        note = text((_LANE_WORDS.get(lane, ""), "dim"))
        if binds:
            note.append(", binds", style="bold yellow not dim")
        share = share_text(seconds / estimate.pass_s) if estimate.pass_s else ""
        table.add_row(text((lane, "bold" if binds else "")), drawn, seconds_text(seconds), share, note)
    return table


def memory_view(plan: Plan, width: int) -> RenderableType:
    """Return each tier as a bar of its purposes, with their sizes below."""
    blocks: list[RenderableType] = []
    room = max(12, min(44, width - 46))
    for use in plan.memory:
        if not use.total_bytes:
            continue
        share = use.total_bytes / use.capacity_bytes if use.capacity_bytes else 1.0
        full = f"{format_bytes(use.total_bytes)} of {format_bytes(use.capacity_bytes)}, "
        line = text(f"{use.tier:<8}").append_text(_stacked(use, room)).append(f"  {full}{share_text(share)}")
        blocks += [line, indented(_purposes(use, width - 10), by=8)]
    return stacked(*blocks)


def _parts(use: TierUse) -> list[tuple[str, int, str]]:
    """Return the purposes with bytes > 0, largest first: name, bytes, colour."""
    parts = sorted(((name, size) for name, size in use.by_purpose if size), key=lambda part: -part[1])
    return [(name, size, _PALETTE[min(n, len(_PALETTE) - 1)]) for n, (name, size) in enumerate(parts)]


def _stacked(use: TierUse, room: int) -> Text:
    parts, drawn = _parts(use), text()
    for position in range(room):
        at = (position + 0.5) / room * max(use.capacity_bytes, use.total_bytes)
        colour, end = "", 0
        for _, size, style in parts:
            end += size
            if at < end:
                colour = style
                break
        drawn.append("█" if colour else "·", style=colour or "grey30")
    return drawn


def _purposes(use: TierUse, room: int) -> Text:
    """Return the legend of the colours in lines of at most ``room`` characters."""
    words, line = text(), 0
    for name, size, colour in _parts(use):
        item = f" {name.replace('_', ' ')} {format_bytes(size)}"
        if line and line + 3 + len(item) > room:
            words.append("\n")
            line = 0
        words.append("  " if line else "").append("■", style=colour).append(item, style="dim")
        line += (2 if line else 0) + 1 + len(item)
    return words


def _what_if(plan: Plan) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="green", no_wrap=True)
    grid.add_column()
    for what_if in plan.what_if:
        grid.add_row(share_text(what_if.gain, signed=True), what_if.change)
    return grid


def print_offers(
    console: Console, job: PlannedJob, offers: Sequence[Offer], prices: Prices, *, plot: Path | None = None
) -> None:
    """Print ``offers``, cheapest first, on 80 columns or more, and why others cannot run; ``plot``: where they are
    drawn."""
    able, unable = [offer for offer in offers if offer.plan], [offer for offer in offers if not offer.plan]
    priced = f"prices: {prices.name} of {prices.date}, {prices.currency} an hour"
    heading = text((job.name, "bold"), " on machines to rent"), _work_line(job.workload, job.workload_name)
    show(
        console,
        stacked(*heading, text((priced, "dim"))),
        section("cheapest first; ● where no other is at once as fast and as cheap", _offers(able)) if able else None,
        section("these cannot run it", _reasons(unable)) if unable else None,
        stacked(*_notes(job, able, prices, plot)) if able else None,
    )


def _offers(offers: Sequence[Offer]) -> Table:
    forms = any(offer.weight_dtype != AUTO for offer in offers)
    dtypes = ("experts",) if forms else ()
    table = plain_table("", "machines", *dtypes, ">tokens/s", ">time", ">per M", ">the job", "binds")
    for offer in offers:
        assert offer.plan is not None
        style = "bold green" if offer.on_front else ""
        form = ("as stored" if offer.weight_dtype == AUTO else offer.weight_dtype,) if forms else ()
        cells = (
            "●" if offer.on_front else "",
            offer.machine if offer.nodes == 1 else f"{offer.nodes:,} × {offer.machine}",
            *form,
            rate_or_count(offer.tokens_per_s),
            seconds_text(offer.seconds),
            _price(offer.price_per_million),
            _price(offer.price),
            offer.plan.estimate.binding,
        )
        table.add_row(*(text((cell, style)) for cell in cells))
    return table


def _price(price: float | None) -> str:
    if price is None:
        return "–"
    if price >= 1:
        return f"{price:,.0f}" if price >= 1000 else f"{price:.2f}"
    return f"{price:.3f}" if price >= 0.001 else f"{price:.1g}"


def _reasons(offers: Sequence[Offer]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for offer in offers:
        grid.add_row(text(offer.label), text((offer.reason, "dim")))
    return grid


def _notes(job: PlannedJob, offers: Sequence[Offer], prices: Prices, plot: Path | None) -> list[Text]:
    setup = f"time and price include {seconds_text(prices.setup_s)} of setup; " if prices.setup_s else ""
    notes = [f"{setup}per M: of a million generated tokens, in {prices.currency}"]
    if any(offer.nodes > 1 or offer.engines > 1 for offer in offers):
        engines = {offer.machine: offer.engines for offer in offers if offer.engines > 1}
        several = f"; an engine for each GPU of {', '.join(engines)}" if engines else ""
        notes.append(f"several engines are a Ray cluster (generate --ray){several}")
    forms = dict.fromkeys(offer.weight_dtype for offer in offers if offer.weight_dtype != AUTO)
    notes += [f"{form}: after moelight convert {job.name} OUT --experts {form}" for form in forms]
    notes += [f"figure: {plot}"] if plot is not None else []
    return [text((note, "dim")) for note in notes]
