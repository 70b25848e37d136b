"""``moelight compare``: how far the predictions of a model are from those of another one, on the user's own texts."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelight.cli import planning_options as ask
from moelight.cli.options import argument, option, with_options
from moelight.cli.tables import open_console, plain_table, print_json, show, stacked, text
from moelight.core.errors import ConfigError
from moelight.core.units import parse_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from moelight.batch.compare import Comparison, Estimated


@with_options()
def compare(
    *,
    model: str = argument("MODEL", "A directory, a hub id, or demo: the model that is measured."),
    prompts: Path = argument("PROMPTS", "JSON lines, text, CSV or Parquet, as for generate."),
    against: str | None = option("The reference: the checkpoint that MODEL was made of.", metavar="REFERENCE"),
    format: str = option("auto, openai, simple, text, csv or parquet.", default="auto"),  # noqa: A002
    host_memory: str | None = option("The most host memory, e.g. 3GiB.", metavar="SIZE"),
    device_memory: str | None = option("The most GPU memory, e.g. 10GiB.", metavar="SIZE"),
    device: str = option("auto, cpu, cuda, xpu, or a card as in cuda:1.", default="auto"),
    activations: str | None = option("Of MODEL: auto, or int8 as for generate.", metavar="auto|int8"),
    space: str = option("The most temporary files; they hold the reference's distributions.", default="8GiB"),
    as_json: ask.Json = False,
) -> None:
    """Measure how far the predictions of MODEL are from those of another checkpoint.

    Both models read the tokens of all prompts and predict each from those before it. KL divergence, agreement of the
    likeliest tokens, and both perplexities, each with an interval over prompts. The models are loaded one after the
    other.
    """
    from moelight.batch.compare import CompareOptions, compare_models
    from moelight.optimizer.fixed_values import check_activations

    if against is None:
        raise ConfigError("against which model? give --against REFERENCE")
    check_activations(activations)
    found = compare_models(
        CompareOptions(
            model=model,
            reference=against,
            prompts=prompts,
            format=format,
            activations=activations,
            space_bytes=parse_bytes(space, what="--space"),
            planning={"host_memory": host_memory, "device_memory": device_memory, "device": device},
        ),
        _tell,
    )
    if as_json:
        print_json({"model": model, "reference": against, **comparison_as_dict(found)})
        return
    kept = "all tokens of the vocabulary" if found.kept == found.vocabulary else _kept_words(found)
    show(
        open_console(),
        text((model, "bold"), " against ", (against, "bold")),
        _table(found),
        stacked(
            text((f"{found.tokens:,} tokens of {found.prompts:,} prompts; {kept}", "dim")),
            text(("intervals: 95 %, by bootstrap over prompts", "dim")),
        ),
    )


def comparison_as_dict(found: Comparison) -> dict[str, Any]:
    """Plain values; ``exact``: the divergence is over the whole vocabulary, else a lower bound."""
    return {"exact": found.kept == found.vocabulary, "intervals": "95 %, bootstrap over prompts", **asdict(found)}


def _kept_words(found: Comparison) -> str:
    return (
        f"the reference's {found.kept:,} likeliest tokens ({100 * found.mass:.3g} % of its probability) and the others "
        "as one, so the divergence is a lower bound"
    )


def _table(found: Comparison) -> Table:
    rows = (
        ("KL divergence, nats a token", found.kl, 1.0, ""),
        ("same likeliest token", found.top1, 100.0, " %"),
        ("perplexity", found.perplexity, 1.0, ""),
        ("perplexity of the reference", found.reference_perplexity, 1.0, ""),
        ("ratio of perplexities", found.ratio, 1.0, ""),
    )
    view = plain_table("", ">", "")
    for name, figure, factor, unit in rows:
        view.add_row(text(name), text((f"{figure.value * factor:.4g}{unit}", "bold")), text(_interval(figure, factor)))
    view.show_header = False
    return view


def _interval(figure: Estimated, factor: float) -> str:
    if figure.low is None or figure.high is None:
        return "(a single prompt: no interval)"
    return f"{figure.low * factor:.4g} to {figure.high * factor:.4g}"


def _tell(whose: str, done: int, total: int) -> None:
    """One line for each model, or, on a terminal, one that counts prompts."""
    live = sys.stderr.isatty()
    if live or done == total:
        end = "\n" if done == total else ""
        print(f"{chr(13) if live else ''}{whose}: {done:,} of {total:,} prompts", end=end, file=sys.stderr, flush=True)
