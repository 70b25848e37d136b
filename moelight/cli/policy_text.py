"""Text of generated expert policies: ``.moe`` source with comments, and a short form for tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moelight.experts.policy import ExpertPolicy

WIDTH = 100


def commented(policy: ExpertPolicy, header: Iterable[str], reasons: Mapping[tuple[str, str], str] | None = None) -> str:
    """Return the text of a policy file with ``header`` above it and each reason above its (block, key)."""
    from moelight.lang.format import INDENT, format_policy

    reasons = reasons or {}
    out = [line for words in header for line in _comment(words, "")]
    block = ""
    for line in format_policy(policy, written=reasons.keys()).splitlines():
        words = line.split()
        if line.startswith(INDENT) and not line.startswith(2 * INDENT) and words[-1] == "{":
            block = words[0]
        elif line.startswith(2 * INDENT) and (block, words[0]) in reasons:
            out += _comment(reasons[block, words[0]], 2 * INDENT)
        out.append(line)
    return "".join(f"{line}\n" for line in out)


def _comment(words: str, indent: str) -> list[str]:
    # Names of models and machines may be anything; a line break in one would end the comment.
    flat = "".join(c if c.isprintable() else " " for c in words)
    return textwrap.wrap(flat, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def in_words(policy: ExpertPolicy) -> str:
    """Return a short form such as ``lru per layer; previous 4; hybrid``."""
    rules = policy.cache
    parameter = {
        "lfu": f" {rules.frequency_decay:g}",
        "score": f" {rules.score_ema_alpha:g}",
        "frequency_threshold": f" {rules.freq_threshold:.2g} of {rules.freq_window}",
    }
    said = " | ".join(name + parameter.get(name, "") for name in rules.eviction)
    if policy.per_layer is not None:
        said += {"uniform": " per layer", "entropy": " by entropy"}[policy.per_layer.allocation]
    if policy.prefetch.strategy != "none":
        said += f"; {policy.prefetch.strategy} {policy.prefetch.budget}"
    if policy.schedule.mode != "gpu_only":
        said += f"; {policy.schedule.mode}"
    return said
