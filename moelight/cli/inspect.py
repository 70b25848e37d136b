"""``moelight inspect``: parameters and memory of a model, computed from its config without loading weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from moelight.cli import REFUSED
from moelight.cli import planning_options as ask
from moelight.cli.options import argument, option, with_options
from moelight.cli.tables import (
    bar,
    indented,
    machine_words,
    open_console,
    plain_table,
    print_json,
    section,
    show,
    stacked,
    text,
)
from moelight.core.errors import BudgetError, ConfigError
from moelight.core.units import format_bytes
from moelight.observe.number_format import count_text, share_text

if TYPE_CHECKING:
    from rich.table import Table

    from moelight.hrm.inventory import Inventory
    from moelight.optimizer.plan import Plan
    from moelight.profiles.model import ModelProfile

_NEEDED = ("device", "host")


@with_options(without=("hw", "estimator", "fix", *ask.FORMATS))
def inspect(
    *,
    model: str = argument("MODEL", "Known model, or directory of a config.json."),
    hw: str | None = option("Hardware profile to show the memory use on.", metavar="NAME|FILE|auto"),
    check: bool = option("Validate the checkpoint as generate does, without reading its weights.", default=False),
    asked: ask.PlanningOptions,
    as_json: ask.Json = False,
) -> None:
    """Count a model's parameters and bytes, from its config alone.

    With --hw also the memory that the best plan uses in each tier of that machine, and the least that suffices. With
    --check the checkpoint is opened as generate opens it, without its weights: what its tensors are, what is not read
    and why, what does not fit and what to do (exit code 2), and which tokens end an answer.
    """
    if check:
        if hw is not None:
            raise ConfigError("--check looks at the files of a model, and --hw at a machine; give one of them")
        from moelight.cli.checkpoint_view import check_and_show

        if not check_and_show(model, as_json=as_json):
            raise typer.Exit(REFUSED)
        return
    from moelight.hrm.inventory import inventory

    profile = ask.load_model(model)
    parts = inventory(profile)
    plan, least = None, {}
    if hw is not None:
        question = ask.read_question(model, replace(asked, hw=hw))
        plan, least = question.plan(), least_bytes(question)
    if as_json:
        print_json(inspection_as_dict(profile, parts, plan, least))
    else:
        _print(profile, parts, plan, least)


def least_bytes(question: ask.Question) -> dict[str, int]:
    """Return, by tier, the fewest bytes with which a plan fits while the other tiers keep their sizes; 0 if none."""
    least = {}
    for tier in _NEEDED:
        if question.hardware.tier(tier) is None:
            continue
        options = replace(question.options, limits={**question.options.limits, tier: 1}, cache=False, proof=False)
        try:
            replace(question, options=options).plan()
            least[tier] = 0
        except BudgetError as error:
            if error.tier == tier:
                least[tier] = error.needed_bytes
    return least


def inspection_as_dict(
    model: ModelProfile, parts: Inventory, plan: Plan | None, least: dict[str, int]
) -> dict[str, Any]:
    """Return the inventory as plain values, sizes in bytes; ``machine``, ``memory`` and ``why`` only with ``plan``."""
    result: dict[str, Any] = {
        "model": model.name,
        "model_type": model.model_type,
        "dtype": parts.dtype,
        "layers": model.num_layers,
        "moe_layers": 0 if model.dense else model.num_moe_layers,
        "experts_per_layer": 0 if model.dense else model.experts.num_experts,
        "experts_per_token": 0 if model.dense else model.router.top_k,
        "parameters": parts.total_parameters,
        "active_parameters": parts.active,
        "parameters_by_kind": {kind: count for kind, count in parts.parameters.items() if count},
        "bytes": parts.total_bytes,
        "bytes_by_kind": {kind: size for kind, size in parts.bytes.items() if size},
        "page_bytes": parts.page_bytes,
        "mean_page_bytes": parts.mean_page_bytes,
        "pages": parts.pages,
        "kv_token_bytes": parts.kv_token_bytes,
        "state_bytes": parts.state_bytes,
        "state_token_bytes": parts.state_token_bytes,
    }
    if plan is not None:
        from moelight.optimizer.plan import plan_as_dict

        tiers = plan_as_dict(plan)["memory"]
        result["machine"] = plan.hardware
        result["memory"] = {tier: {**use, "least_bytes": least.get(tier)} for tier, use in tiers.items()}
        result["why"] = plan.why
    return result


def _print(model: ModelProfile, parts: Inventory, plan: Plan | None, least: dict[str, int]) -> None:
    some = "" if all(model.moe_layers) else f", {model.num_moe_layers} of them"
    chosen = f"with {model.experts.num_experts} experts, {model.router.top_k} for each token"
    shape = f"{model.num_layers} layers, dense" if model.dense else f"{model.num_layers} layers{some} {chosen}"
    paged = "one layer" if model.dense else "one expert of one layer (a page)"
    counted = text(
        (f"{count_text(parts.total_parameters)} parameters", "bold"),
        f", {count_text(parts.active)} ({share_text(parts.active / parts.total_parameters)}) active for a token; "
        f"{format_bytes(parts.total_bytes)} of weights",
    )
    sizes = {
        "keys and values of one token": parts.kv_token_bytes or None,
        "states of one sequence": parts.state_bytes or None,
        "more of one token": parts.state_token_bytes or None,
    }
    differ = parts.mean_page_bytes < parts.page_bytes
    up_to = f" on average, at most {format_bytes(parts.page_bytes)}" if differ else ""
    page = text(
        f"{paged}: {format_bytes(parts.mean_page_bytes)}{up_to}, {parts.pages:,} of them; "
        + "; ".join(f"{label}: {format_bytes(size)}" for label, size in sizes.items() if size)
    )
    show(
        open_console(),
        stacked(text((model.name, "bold"), f"  {model.model_type}, {parts.dtype}"), text((shape, "dim"))),
        counted,
        indented(_kinds(parts)),
        page,
        None if plan is None else section(f"memory on {machine_words(plan.hardware)}", _memory(plan, least)),
        None if plan is None else text((plan.why, "dim")),
    )


def _kinds(parts: Inventory) -> Table:
    table = plain_table("", ">parameters", ">bytes", "", "")
    for kind, size in parts.bytes.items():
        if size:
            share = size / parts.total_bytes
            count = count_text(parts.parameters[kind])
            table.add_row(kind, count, format_bytes(size), bar(share, 12), share_text(share))
    return table


def _memory(plan: Plan, least: dict[str, int]) -> Table:
    table = plain_table("", ">there is", ">best plan", "", ">least")
    for use in plan.memory:
        if not use.capacity_bytes:
            continue
        needed = least.get(use.tier)
        words = "–" if needed is None else format_bytes(needed, round_up=True) if needed else "none"
        taken = bar(use.total_bytes / use.capacity_bytes, 20)
        table.add_row(use.tier, format_bytes(use.capacity_bytes), format_bytes(use.total_bytes), taken, words)
    return table
