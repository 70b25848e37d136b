"""Report as one self-contained HTML page: figures, a Gantt chart that zooms and pans, and the policy.

Style and script are ``page.css`` and ``page.js``. All text from a trace is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from moelight.core.schedule import Lane, TaskKind
from moelight.core.units import format_bytes
from moelight.observe.bubbles import Bubble, cause_of
from moelight.observe.number_format import rate_text, seconds_text, share_text
from moelight.observe.report import LaneReport, Report
from moelight.observe.trace import Recording

MOST_TASKS_SHOWN = 60_000
MOST_WINDOWS = 1200
_HERE = Path(__file__).parent

# One hue per family of tasks: experts blue, attention amber, weights green, transfers for attention violet, ends grey.
COLOURS = {
    TaskKind.LAYERS: "#4a63d8",
    TaskKind.POST_ATTENTION: "#2f6fde",
    TaskKind.CPU_EXPERTS: "#0e9bb5",
    TaskKind.COMBINE: "#7db3f5",
    TaskKind.EXPERTS: "#1d4fb8",
    TaskKind.ROUTE: "#5b9bd5",
    TaskKind.PRE_ATTENTION: "#7d6ff0",
    TaskKind.ATTENTION: "#f59e0b",
    TaskKind.CPU_ATTENTION: "#e8873a",
    TaskKind.STORE_KV: "#d9b44a",
    TaskKind.READ_PAGE: "#15803d",
    TaskKind.STAGE_PAGE: "#5fb36a",
    TaskKind.SEND_PAGE: "#2e9e5b",
    TaskKind.PREFETCHED_PAGE: "#a7d7b5",
    TaskKind.READ_EXPERTS: "#0f6b3a",
    TaskKind.SEND_EXPERTS: "#23a05f",
    TaskKind.READ_AHEAD: "#86b93f",
    TaskKind.SEND_AHEAD: "#a8cf6b",
    TaskKind.RESIDENT_EXPERTS: "#3f63c9",
    TaskKind.PREDICT_EXPERTS: "#9db8d9",
    TaskKind.SUM_EXPERTS: "#b45309",
    TaskKind.OFFLOAD_QKV: "#c04fb0",
    TaskKind.LOAD_HIDDEN: "#e0559b",
    TaskKind.OFFLOAD_KV: "#b07cc6",
    TaskKind.LOAD_KV: "#9c3f8f",
    TaskKind.OFFLOAD_HIDDEN: "#d98cc0",
    TaskKind.LOAD_EXPERTS: "#f2a0c4",
    TaskKind.EMBED: "#94a3b8",
    TaskKind.SAMPLE: "#64748b",
}
_PALE = 150
_KINDS = tuple(TaskKind)
_CAUSES = tuple(dict.fromkeys(cause_of(waiting, last) for waiting in TaskKind for last in TaskKind))


def page_text(report: Report, recording: Recording, *, title: str) -> Iterator[str]:
    """Yield the page in pieces; ``title`` names the trace.

    Of a long run the page holds evenly spread passes, at most `MOST_TASKS_SHOWN` tasks, with a note.
    """
    shown = shown_passes([figures.tasks for figures in report.passes], MOST_TASKS_SHOWN)
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    yield "<!doctype html>\n<html lang=en><meta charset=utf-8>\n"
    yield "<meta name=viewport content='width=device-width, initial-scale=1'>\n"
    yield (
        "<meta http-equiv=Content-Security-Policy "
        "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
    )
    yield f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n<main>\n"
    yield from _head(report, title)
    yield from _lanes(report)
    yield from _bubbles(report)
    yield from _chart(report, shown, set(recording.bars.kinds))
    yield from _policy(report)
    version = f"moelight {escape(report.about.version)}".rstrip()
    yield f"<footer>{version}, from {escape(title)}. Nothing on this page is fetched from anywhere.</footer>\n</main>\n"
    yield f"<script id=trace type=application/json>{_data(report, recording, shown)}</script>\n"
    yield f"<script>\n{script}</script>\n</html>\n"


def shown_passes(tasks: Sequence[int], limit: int) -> list[int]:
    """Return the positions of the passes whose ``tasks`` fit in ``limit``: all, or evenly spread, and at least one."""
    count, total = len(tasks), max(sum(tasks), 1)
    num_shown = min(count, limit * count // total)
    while num_shown > 1:
        spread = sorted({round(k * (count - 1) / (num_shown - 1)) for k in range(num_shown)})
        if sum(tasks[position] for position in spread) <= limit:
            return spread
        num_shown = min(num_shown - 1, num_shown * 9 // 10)
    return [count // 2]


def _head(report: Report, title: str) -> Iterator[str]:
    policy, machine = report.about.policy, report.about.hardware
    yield f"<header><p class=kicker>moelight report · {report.source}</p>\n"
    yield f"<h1>{escape(str(policy.get('model', title)))}</h1>\n"
    words = ["on this machine" if machine == "auto" else f"on {machine}"] if machine else []
    words += list(_policy_words(policy))
    yield f"<p>{escape(' · '.join(words))}</p></header>\n<div class=cards>\n"
    binding = report.binding
    cards = [
        (f"{len(report.passes):,}", "passes" if len(report.passes) != 1 else "pass"),
        (seconds_text(report.wall_s), "whole run"),
        (seconds_text(report.pass_s), f"median pass, {report.source}"),
    ]
    if report.predicted_pass_s is not None:
        cards.append((seconds_text(report.predicted_pass_s), "decode pass, predicted"))
    cards.append((f"{escape(binding.lane)} {share_text(binding.busy_share)}", "the binding lane at work"))
    for figure, meaning in cards:
        yield f"<div class=card><b>{figure}</b><span>{meaning}</span></div>\n"
    yield "</div>\n"


def _policy_words(policy: Mapping[str, Any]) -> Iterator[str]:
    if "batch_size" in policy and "micro_batch_size" in policy:
        yield f"N = {policy['batch_size']} in micro-batches of {policy['micro_batch_size']}"
    if "attention_device" in policy and "ffn_device" in policy:
        yield f"attention on {policy['attention_device']}, experts on {policy['ffn_device']}"
    if "schedule" in policy:
        yield f"schedule {policy['schedule']}"


def _lanes(report: Report) -> Iterator[str]:
    source = report.source
    if report.predicted_pass_s is None:
        yield f"<section><h2>Lanes, {source}</h2>\n"
        yield "<p class=note>This trace brings no prediction, so only what happened is shown. "
    else:
        yield f"<section><h2>Lanes: predicted beside {source}</h2>\n"
        yield f"<p class=note>Predicted is one steady decode pass, {source} the median over all passes, lane by lane; "
        yield f"off by is how much longer the {source} one is. "
    yield "Rates are bytes over seconds in work, over the whole run; of a lane that moves nothing, predicted over "
    yield f"{source} seconds stand for the share of the roof. Busy and idle are of the whole run.</p>\n"
    keys = f"{_key('var(--predicted)')}predicted&ensp;{_key('var(--measured)')}{source}"
    heads = ("lane", keys, "predicted", source, "off by", "bytes, predicted", f"bytes, {source}")
    longest = max(max(lane.busy_s, lane.predicted_s or 0.0) for lane in report.lanes) or 1.0
    rows = [_lane(lane, longest) for lane in report.lanes]
    yield _table((*heads, "rate", "of its roof", "busy", "idle"), rows) + "</section>\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of ``rows``: a name, which is escaped, the bar or bars, and further cells."""
    lines = ["".join(f"<th>{head}</th>" for head in heads)]
    for name, bars, *cells in rows:
        rest = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<td>{escape(name)}</td><td class=bars>{bars}</td>{rest}")
    return "<div class=wide><table>" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table></div>"


def _lane(lane: LaneReport, longest: float) -> Sequence[str]:
    none = "<span class=none>–</span>"
    bars = "" if lane.predicted_s is None else _bar("p", lane.predicted_s / longest)
    off = none if lane.error is None else share_text(lane.error, signed=True)
    if lane.far_off:
        off = f"<span class=off>{off}</span>"
    return (
        lane.lane,
        bars + _bar("m", lane.busy_s / longest),
        none if lane.predicted_s is None else seconds_text(lane.predicted_s),
        seconds_text(lane.busy_s),
        off,
        format_bytes(lane.predicted_bytes) if lane.predicted_bytes else none,
        format_bytes(round(lane.bytes)) if lane.bytes else none,
        none if lane.bytes_per_s is None else rate_text(lane.bytes_per_s),
        none if lane.share_of_roof is None else share_text(lane.share_of_roof),
        share_text(lane.busy_share),
        seconds_text(lane.idle_s),
    )


def _bubbles(report: Report) -> Iterator[str]:
    """Yield the idle time of the binding lane by cause; the script links the longest pieces to the chart."""
    binding = report.binding
    yield f"<section><h2>Why {escape(binding.lane)} stood still</h2>\n<p class=note>The binding lane did nothing for "
    yield f"{seconds_text(binding.idle_s)}, {share_text(1 - binding.busy_share)} of the run. A cause is what its next "
    yield "task waited for last: another task; its launch, once nothing was missing; or the host, between passes.</p>\n"
    if report.bubbles:
        longest = max(bubble.seconds for bubble in report.bubbles.values())
        heads = ("cause", "", "seconds", "of the run", "times", "longest", "before")
        yield _table(heads, (_bubble(*bubble, longest, report.wall_s) for bubble in report.bubbles.items()))
    yield "</section>\n"


def _bubble(cause: str, bubble: Bubble, longest: float, wall_s: float) -> Sequence[str]:
    where = f"data-from={1e6 * bubble.longest_at_s:.3f} data-length={1e6 * bubble.longest_s:.3f}"
    before = "the end"
    if bubble.pass_number >= 0:
        before = f"pass {bubble.pass_number}" + (f", layer {bubble.layer}" if bubble.layer >= 0 else "")
    return (
        cause,
        _bar("i", bubble.seconds / longest),
        seconds_text(bubble.seconds),
        share_text(bubble.seconds / wall_s),
        f"{bubble.count:,}",
        f"<button class=goto {where} title='show it in the chart'>{seconds_text(bubble.longest_s)}</button>",
        before,
    )


def _bar(kind: str, share: float) -> str:
    return f"<div class='bar {kind}' style='width:{100 * share:.2f}%'></div>"


def _key(colour: str) -> str:
    return f"<span class=key style='background:{colour}'></span>"


def _chart(report: Report, shown: Sequence[int], kinds: set[int]) -> Iterator[str]:
    yield "<section><h2>What every lane did when</h2>\n<p class=note>"
    if len(shown) < len(report.passes):
        which = "1 pass" if len(shown) == 1 else f"{len(shown):,} passes, evenly spread,"
        yield f"Of {len(report.passes):,} passes this page holds the tasks of {which} and the figures of all. "
    yield (
        "Scroll to zoom, drag to move, double-click for a pass; with the chart in focus also the arrow keys, + and −, "
        "n and p for passes, 0 for all. A share beside a lane is how busy it is in the window.</p>\n"
    )
    yield "<div class=tools><button id=before>‹ pass</button><select id=pass aria-label=Pass></select>"
    yield "<button id=after>pass ›</button><span class=space></span><button id=closer>zoom in</button>"
    yield "<button id=farther>zoom out</button><button id=whole>whole run</button></div>\n"
    yield "<canvas id=overview height=60></canvas>\n<div class=stage><canvas id=gantt tabindex=0 height=240></canvas>"
    yield "<div id=tip></div></div>\n<noscript><p class=note>The chart needs JavaScript.</p></noscript>\n"
    used = (kind for n, kind in enumerate(TaskKind) if n in kinds)
    keys = "".join(f"<span>{_key(COLOURS[kind])}{kind}</span>" for kind in used)
    yield f"<div class=legend>{keys}</div></section>\n"


def _policy(report: Report) -> Iterator[str]:
    about = report.about
    if not (about.policy or about.notes):
        return
    yield "<section><h2>Policy</h2><dl>\n"
    for name, value in (*about.policy.items(), *about.notes.items()):
        yield f"<div><dt>{escape(str(name))}</dt><dd>{escape(_plain(value))}</dd></div>\n"
    yield "</dl></section>\n"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _data(report: Report, recording: Recording, shown: Sequence[int]) -> str:
    """Return the data of the script as JSON that is safe inside a script element."""
    lanes = [lane.lane for lane in report.lanes]
    data = {
        "end": max(figures.end_us for figures in report.passes) or 1.0,
        "lanes": lanes,
        "roofs": [lane.roof_bytes_per_s for lane in report.lanes],
        "kinds": [{"name": str(kind), "colour": COLOURS[kind], "dark": _is_dark(COLOURS[kind])} for kind in TaskKind],
        "causes": _CAUSES,
        "numPasses": len(report.passes),
        "passes": _windows(report, shown),
        "first": len(shown) // 2,
        "bars": _bars(recording, {report.passes[position].number for position in shown}, lanes),
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _windows(report: Report, shown: Sequence[int]) -> list[dict[str, Any]]:
    """Return windows of passes in order, each from the end of the one before; hidden passes may share a window."""
    positions = [n for n, lane in enumerate(Lane) if any(str(lane) == lane_row.lane for lane_row in report.lanes)]
    window_size, shown_set = -(-len(report.passes) // MOST_WINDOWS), set(shown)
    groups: list[list[int]] = []
    for position in range(len(report.passes)):
        if position in shown_set or not groups or groups[-1][-1] in shown_set or len(groups[-1]) >= window_size:
            groups.append([])
        groups[-1].append(position)
    windows = []
    for group in groups:
        passes = [report.passes[position] for position in group]
        first, last, length = passes[0], passes[-1], sum(figures.length_us for figures in passes)
        shares = [sum(figures.busy_us[n] for figures in passes) / length if length else 0.0 for n in positions]
        windows.append(
            {
                "name": str(first.number) if first is last else f"{first.number}–{last.number}",
                "shown": group[0] in shown_set,
                "start": round(first.end_us - first.length_us, 1),
                "end": round(last.end_us, 1),
                "shares": [round(share, 3) for share in shares],
            }
        )
    return windows


def _bars(recording: Recording, passes: set[int], lanes: Sequence[str]) -> dict[str, list[float]]:
    bars, names = recording.bars, [str(lane) for lane in Lane]
    rows = {n: lanes.index(name) for n, name in enumerate(names) if name in lanes}
    indices = [i for i, number in enumerate(bars.passes) if number in passes]
    indices = sorted(indices, key=bars.start_us.__getitem__)[:MOST_TASKS_SHOWN]
    return {
        "start": [round(bars.start_us[i], 1) for i in indices],
        "length": [round(bars.length_us[i], 2) for i in indices],
        "lane": [rows[bars.lanes[i]] for i in indices],
        "kind": [bars.kinds[i] for i in indices],
        "pass": [bars.passes[i] for i in indices],
        "layer": [bars.layers[i] for i in indices],
        "batch": [bars.micro_batches[i] for i in indices],
        "expert": [bars.experts[i] for i in indices],
        "bytes": [bars.bytes[i] for i in indices],
        "cause": [_cause(recording, i) for i in indices],
        "until": [round(bars.until_us[i], 1) for i in indices],
    }


def _cause(recording: Recording, i: int) -> int:
    """Return the position in `_CAUSES` of the cause that task ``i`` waited for; -1 if none or not recorded."""
    kind, last = recording.bars.kinds[i], recording.bars.waited_for[i]
    return -1 if last < 0 else _CAUSES.index(cause_of(_KINDS[kind], _KINDS[last]))


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < _PALE
