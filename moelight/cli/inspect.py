"""``moelight inspect``: parameters and memory of a model, computed from its config without loading weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moelight.cli import planning_options as ask

if TYPE_CHECKING:
    from rich.console import RenderableType

    from moelight.hrm.inventory import Inventory
    from moelight.optimizer.plan import Plan
    from moelight.profiles.model import ModelProfile

_Model = Annotated[str, typer.Argument(metavar="MODEL", help="A known model, or the directory of a config.json.")]
_Hw = Annotated[
    str | None, typer.Option("--hw", metavar="NAME|FILE|auto", help="Say what memory this machine would need, too.")
]
_NEEDED = ("device", "host")


def inspect(
    model: _Model,
    hw: _Hw = None,
    workload: ask.WorkloadName = None,
    prompt_len: ask.PromptLen = None,
    max_prompt_len: ask.MaxPromptLen = None,
    gen_len: ask.GenLen = None,
    num_requests: ask.NumRequests = None,
    device_memory: ask.DeviceMemory = None,
    host_memory: ask.HostMemory = None,
    disk: ask.Disk = None,
    as_json: ask.Json = False,
    no_cache: ask.NoCache = False,
) -> None:
    """Count a model's parameters and bytes, from its config alone.

    With --hw also what the best plan takes of each memory of that machine, and the least that would do.
    """
    from moelight.hrm.inventory import inventory

    profile = ask.load_model(model)
    parts = inventory(profile)
    plan, least = None, {}
    if hw is not None:
        question = ask.read_question(
            hw=hw,
            model=model,
            workload=workload,
            prompt_len=prompt_len,
            max_prompt_len=max_prompt_len,
            gen_len=gen_len,
            num_requests=num_requests,
            device_memory=device_memory,
            host_memory=host_memory,
            disk=disk,
            no_cache=no_cache,
        )
        plan, least = question.plan(), least_bytes(question)
    if as_json:
        typer.echo(json.dumps(inspection_as_dict(profile, parts, plan, least), indent=2))
    else:
        _print(profile, parts, plan, least)


def least_bytes(question: ask.Question) -> dict[str, int]:
    """Return the fewest bytes of each tier with which a plan fits while the other tiers keep their sizes; 0 if none."""
    from dataclasses import replace

    from moelight.core.errors import BudgetError

    found = {}
    for tier in _NEEDED:
        if question.hardware.tier(tier) is None:
            continue
        try:
            replace(question, limits={**question.limits, tier: 1}, cache=False).plan()
            found[tier] = 0
        except BudgetError as error:
            if error.tier == tier:
                found[tier] = error.needed_bytes
    return found


def inspection_as_dict(
    model: ModelProfile, parts: Inventory, plan: Plan | None, least: dict[str, int]
) -> dict[str, Any]:
    """Return the inventory as plain values, in bytes; ``machine`` and ``memory`` only if ``plan`` is given."""
    found: dict[str, Any] = {
        "model": model.name,
        "model_type": model.model_type,
        "dtype": parts.dtype,
        "layers": model.num_layers,
        "moe_layers": model.num_moe_layers,
        "experts_per_layer": model.experts.num_experts,
        "experts_per_token": model.router.top_k,
        "parameters": parts.total_parameters,
        "active_parameters": parts.active,
        "parameters_by_kind": {kind: count for kind, count in parts.parameters.items() if count},
        "bytes": parts.total_bytes,
        "bytes_by_kind": {kind: size for kind, size in parts.bytes.items() if size},
        "page_bytes": parts.page_bytes,
        "pages": parts.pages,
        "kv_token_bytes": parts.kv_token_bytes,
    }
    if plan is not None:
        from moelight.optimizer.plan import plan_as_dict

        tiers = plan_as_dict(plan)["memory"]
        found["machine"] = plan.hardware
        found["memory"] = {tier: {**use, "least_bytes": least.get(tier)} for tier, use in tiers.items()}
        found["why"] = plan.why
    return found


def _print(model: ModelProfile, parts: Inventory, plan: Plan | None, least: dict[str, int]) -> None:
    from rich.text import Text

    from moelight.cli.tables import heading, indented, machine_words, open_console, printable
    from moelight.core.units import format_bytes
    from moelight.observe.number_format import count_text, share_text

    console = open_console()
    console.print(Text.assemble((printable(model.name), "bold"), f"  {model.model_type}, {parts.dtype}"))
    some = "" if all(model.moe_layers) else f", {model.num_moe_layers} of them"
    shape = (
        f"{model.num_layers} layers{some} with {model.experts.num_experts} experts, {model.router.top_k} for each token"
    )
    console.print(Text(shape, style="dim"))
    console.print()
    share = parts.active / parts.total_parameters
    console.print(
        Text.assemble(
            (f"{count_text(parts.total_parameters)} parameters", "bold"),
            f", {count_text(parts.active)} ({share_text(share)}) active for a token; ",
            f"{format_bytes(parts.total_bytes)} of weights",
        )
    )
    console.print()
    console.print(indented(_kinds(parts)))
    console.print()
    console.print(
        Text(
            f"one expert of one layer (a page): {format_bytes(parts.page_bytes)}, {parts.pages:,} of them; "
            f"keys and values of one token: {format_bytes(parts.kv_token_bytes)}"
        )
    )
    if plan is not None:
        console.print()
        console.print(heading(f"memory on {machine_words(plan.hardware)}"))
        console.print(indented(_memory(plan, least)))
        console.print()
        console.print(Text(printable(plan.why), style="dim"))


def _kinds(parts: Inventory) -> RenderableType:
    from moelight.cli.tables import bar, plain_table
    from moelight.core.units import format_bytes
    from moelight.observe.number_format import count_text, share_text

    table = plain_table("", "parameters", "bytes", "", "", numbers=("parameters", "bytes"))
    for kind, size in parts.bytes.items():
        if size:
            share = size / parts.total_bytes
            table.add_row(
                kind, count_text(parts.parameters[kind]), format_bytes(size), bar(share, 12), share_text(share)
            )
    return table


def _memory(plan: Plan, least: dict[str, int]) -> RenderableType:
    from moelight.cli.tables import bar, plain_table
    from moelight.core.units import format_bytes

    table = plain_table("", "there is", "best plan", "", "least", numbers=("there is", "best plan", "least"))
    for use in plan.memory:
        if not use.capacity_bytes:
            continue
        needed = least.get(use.tier)
        words = "–" if needed is None else format_bytes(needed, round_up=True) if needed else "none"
        taken = bar(use.total_bytes / use.capacity_bytes, 20)
        table.add_row(use.tier, format_bytes(use.capacity_bytes), format_bytes(use.total_bytes), taken, words)
    return table
