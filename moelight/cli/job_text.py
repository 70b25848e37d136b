"""Text of the lines that a job prints: at its start, every half minute, at its end, and when it is interrupted."""

from __future__ import annotations

from moelight.batch.progress import JobCounts, JobStart
from moelight.core.units import format_bytes
from moelight.observe.number_format import scaled_text, seconds_text, share_text
from moelight.observe.stats import Binding, RunStats

_MANY_TOKENS = 100_000


def about_text(seconds: float) -> str:
    """Return a duration such as ``about 2 h 10 min``, rounded to the precision of a forecast."""
    if seconds < 4.5:
        return "a few seconds"
    if seconds < 90:
        return f"about {5 * round(seconds / 5)} s"
    if seconds < 3570:
        return f"about {round(seconds / 60)} min"
    minutes = round(seconds / 60) if seconds < 10_800 else 10 * round(seconds / 600)
    if minutes < 48 * 60:
        return f"about {minutes // 60} h {minutes % 60} min" if minutes % 60 else f"about {minutes // 60} h"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"about {days} days {hours} h" if hours else f"about {days} days"


def clock_text(seconds: float) -> str:
    """Return elapsed time, such as ``0:07`` or ``1:02:09``."""
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}" if minutes >= 60 else f"{minutes}:{left:02}"


def tokens_text(count: float) -> str:
    """Return a number of tokens, such as ``16,384`` or ``1.23M``."""
    return f"{count:,.0f}" if count < _MANY_TOKENS else scaled_text(count)


def rows_text(counts: JobCounts) -> str:
    """Return the progress in rows, such as ``12,340/100,000 rows (12 %)``."""
    share = f" ({share_text(counts.done / counts.total)})" if counts.total else ""
    return f"{counts.done:,}/{counts.total:,} rows{share}"


def start_line(start: JobStart) -> str:
    """Return the start line: the input, the plan and the predicted time."""
    beside = [f"{start.refused:,} with errors"] if start.refused else []
    beside += [f"{start.resumed:,} done before"] if start.resumed else []
    read = [start.detected] if start.detected else []
    rows = "1 row" if start.total == 1 else f"{start.total:,} rows"
    read.append(rows + (f" ({', '.join(beside)})" if beside else ""))
    if start.prompt_tokens:
        read.append(f"{tokens_text(start.prompt_tokens)} prompt tokens")
    if start.expected_tokens:
        read.append(f"at most {tokens_text(start.expected_tokens)} to generate")
    parts = [f"{start.input}: {', '.join(read)}"]
    parts += [start.plan] if start.plan else []
    parts += [f"{about_text(start.predicted_s)} at most"] if start.predicted_s is not None else []
    return "; ".join(parts)


def log_line(counts: JobCounts, left_s: float | None, binding: Binding | None = None) -> str:
    """Return the progress line: rows, failures, speed, binding lane and time left."""
    said = [rows_text(counts)]
    if counts.failed:
        said.append(f"{counts.failed:,} failed")
    if counts.tokens_per_s:
        said.append(f"{counts.tokens_per_s:,.0f} tok/s")
    if binding is not None:
        said.append(f"{binding.lane} {share_text(binding.share)}")
    if left_s is not None and counts.state == "in_progress":
        said.append(f"{about_text(left_s)} left")
    return ", ".join(said)


def end_line(stats: RunStats, *, completed: int, failed: int, output: str = "") -> str:
    """Return the end line: completions, tokens, speed and peak memory; ``output`` is the path of the rows."""
    bad = f", {failed:,} failed" if failed else ""
    where = f" -> {output}" if output else ""
    return (
        f"{completed:,} completions{bad}, {stats.completion_tokens:,} tokens in {seconds_text(stats.wall_s)} "
        f"({stats.tokens_per_s:,.0f} tok/s), load {stats.load_s:.1f} s, "
        f"peak memory {format_bytes(stats.peak_rss_bytes)}{where}"
    )


def interrupted_line(counts: JobCounts | None, *, output: str, command: str) -> str:
    """Return the line for an interrupted job: the rows that are kept and the ``command`` that resumes.

    ``counts`` is None if the job ended before it counted rows. An empty ``output`` means that no rows are kept.
    """
    rows = "" if counts is None else f"{counts.done:,} of {counts.total:,} rows "
    if not output:
        return (
            f"interrupted{f': {rows}were answered' if rows else ''}; rows can be kept, and gone on with, in a file (-o)"
        )
    return f"interrupted: {rows or 'the rows that were finished '}are kept in {output}; continue with: {command}"
