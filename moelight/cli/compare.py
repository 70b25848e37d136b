"""``moelight compare``: how far the predictions of a model are from those of another one, on the user's own texts."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelight.cli import planning_options as ask
from moelight.cli.options import argument, check_output, option, with_options, write_output
from moelight.cli.tables import open_console, plain_table, print_json, say_missing_kernels, show, stacked, text
from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.units import parse_bytes

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from moelight.convert.compare import Comparison, Estimated


@with_options()
def compare(
    *,
    model: str = argument("MODEL", "Model to evaluate: a directory, a Hugging Face hub id, or demo."),
    prompts: Path = argument("PROMPTS", "Input file: JSON lines, text, CSV or Parquet, as for generate."),
    against: str | None = option("Reference: the checkpoint that MODEL was converted from.", metavar="REFERENCE"),
    format: str = option("Input format: auto, openai, simple, text, csv or parquet.", default="auto"),  # noqa: A002
    host_memory: int | None = option("Maximum host memory to use, e.g. 3GiB.", metavar="SIZE"),
    device_memory: int | None = option("Maximum GPU memory to use, e.g. 10GiB.", metavar="SIZE"),
    device: str = option("Device to use: auto, cpu, cuda, xpu, or one card (cuda:1).", default="auto"),
    kv_dtype: str = option("Data type of MODEL's KV cache: auto or int8.", metavar="auto|int8", default="auto"),
    activations: str | None = option("Activations of MODEL: auto or int8, as for generate.", metavar="auto|int8"),
    space: str = option("Maximum size of the temporary files that hold the reference's distributions.", default="8GiB"),
    output: Path | None = option(
        "JSON file to write; optimize shows MODEL/quality.json.", "--output", "-o", metavar="FILE.json"
    ),
    as_json: ask.Json = False,
) -> None:
    """Measure how far the predictions of MODEL are from those of another checkpoint.

    Both models read the tokens of all prompts and predict each from those before it. KL divergence, agreement of the
    likeliest tokens, and both perplexities, each with an interval over prompts. The models are loaded one after the
    other.
    """
    from moelight.batch.output import STANDARD_OUTPUT
    from moelight.convert.compare import CompareOptions, compare_models
    from moelight.engine.options import EngineOptions
    from moelight.optimizer.fixed_values import check_activations

    if against is None:
        raise ConfigError("against which model? give --against REFERENCE")
    _check_kv_dtype(kv_dtype)
    check_activations(activations)
    check_output(output, as_json=as_json)
    say_missing_kernels()
    memory: dict[str, Any] = {"host_memory": host_memory, "device_memory": device_memory}
    comparison = compare_models(
        CompareOptions(
            model=model,
            reference=against,
            prompts=prompts,
            format=format,
            space_bytes=parse_bytes(space, label="--space"),
            engine=EngineOptions(device=device, **memory, kv_dtype=kv_dtype, activations=activations),
        ),
        _tell,
    )
    measured = {"model": model, "reference": against, "kv_dtype": kv_dtype, "activations": activations or "auto"}
    figures = measured | comparison_as_dict(comparison)
    if output is not None:
        write_output(output, [json.dumps(figures, indent=2), "\n"])
    if as_json:
        print_json(figures)
    if as_json or output == STANDARD_OUTPUT:
        return
    rounded = {"keys and values": kv_dtype, "activations": activations}
    words = "".join(f", {name} in int8" for name, how in rounded.items() if how == "int8")
    _show(text((model, "bold"), f"{words}{',' * bool(words)} against ", (against, "bold")), comparison)


def _show(heading: Text, comparison: Comparison) -> None:
    show(
        open_console(),
        heading,
        _table(comparison),
        stacked(
            text((f"{comparison.tokens:,} tokens of {comparison.prompts:,} prompts; {_kept_words(comparison)}", "dim")),
            text(("intervals: 95 %, by bootstrap over prompts", "dim")),
        ),
    )


def _check_kv_dtype(kv_dtype: str) -> None:
    choices = ("auto", "int8")
    if kv_dtype not in choices:
        raise ConfigError(
            f"--kv-dtype {kv_dtype!r} is not one of {', '.join(choices)}{did_you_mean(kv_dtype, choices)}"
        )


def comparison_as_dict(comparison: Comparison) -> dict[str, Any]:
    """Plain values; ``exact``: the divergence is over the whole vocabulary, else a lower bound."""
    return {
        "exact": comparison.kept == comparison.vocabulary,
        "intervals": "95 %, bootstrap over prompts",
        **asdict(comparison),
    }


def _kept_words(result: Comparison) -> str:
    if result.kept == result.vocabulary:
        return "all tokens of the vocabulary"
    return (
        f"the reference's {result.kept:,} likeliest tokens ({100 * result.mass:.3g} % of its probability) and "
        "the others as one, so the divergence is a lower bound"
    )


def _table(comparison: Comparison) -> Table:
    rows = (
        ("KL divergence, nats a token", comparison.kl, 1.0, ""),
        ("same likeliest token", comparison.top1, 100.0, " %"),
        ("perplexity", comparison.perplexity, 1.0, ""),
        ("perplexity of the reference", comparison.reference_perplexity, 1.0, ""),
        ("ratio of perplexities", comparison.ratio, 1.0, ""),
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
