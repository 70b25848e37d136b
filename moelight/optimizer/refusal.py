"""Why nothing fits: the tier that is short, by how much, and the smallest change that would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from moelight.core.errors import BudgetError
from moelight.core.units import format_bytes
from moelight.optimizer.homes import fill, room_of
from moelight.optimizer.lattice import Choices, first_look
from moelight.optimizer.problem import Problem, settings
from moelight.optimizer.search import search

_TIERS = ("host", "device")  # what lacks host memory only has enough on the device, so it is mended more easily


def refusal(problem: Problem) -> BudgetError:
    """The error that says what the candidate nearest to fitting lacks."""
    nearest: tuple[int, int, str] | None = None
    for setting in settings(problem):
        choices = first_look(problem, setting)
        for index, tier in enumerate(_TIERS):
            needed = _least(problem, choices, tier)
            if needed is not None and (nearest is None or (index, needed) < nearest[:2]):
                nearest = (index, needed, tier)
    if nearest is None:
        return _on_disk(problem)
    _, needed, tier = nearest
    given = problem.capacity_bytes[tier]
    more = format_bytes(needed - given, round_up=True)
    text = (
        f"--{tier}-memory {format_bytes(given)} is too small for {problem.model.name}: at least "
        f"{format_bytes(needed, round_up=True)} is needed on this workload, {more} more"
    )
    return BudgetError(text + _without_a_fix(problem), tier=tier, needed_bytes=needed)


def _least(problem: Problem, choices: Choices, tier: str) -> int | None:
    """The least bytes of ``tier`` with which some candidate fits, the other tiers being as they are; None where more of
    it would not help, or where every candidate has enough."""
    if not choices.cells.batch_size.size or tier not in problem.capacity_bytes:
        return None
    given = problem.capacity_bytes[tier]
    plenty = replace(problem, capacity_bytes={**problem.capacity_bytes, tier: 1 << 60})
    fits = fill(plenty, choices.cells, choices.wanted).feasible
    if not np.any(fits):
        return None
    needed = _needed(problem, choices.at(np.flatnonzero(fits)), tier)
    least = int(np.min(needed))
    return least if least > given else None


def _needed(problem: Problem, choices: Choices, tier: str) -> Any:
    """Bytes of ``tier`` that each candidate needs at least: what has no choice, and the fewest slots of pages."""
    cells, room = choices.cells, room_of(problem, choices.cells)
    wanted = np.round(room.kv_blocks * np.nan_to_num(choices.wanted.device_kv))
    pages = room.pages - choices.wanted.computed
    holds_pages = (tier == "device") == (cells.ffn_device != "cpu")
    share = problem.share("weights.host" if cells.ffn_device == "cpu" else "weights.device")
    left, cache = (room.device, wanted) if tier == "device" else (room.host, room.kv_blocks - wanted)
    if holds_pages:
        resident = 0 * pages if share is None else np.minimum(np.round(share * room.pages), pages)
        if room.disk == 0 and cells.ffn_device == "cpu":
            resident = pages
        slots = np.minimum(resident + 2 * np.ceil((pages - resident) / room.layers), pages)
    elif tier == "device":
        slots = 0 * pages
    else:
        slots = _host_slots(problem, choices)
    return problem.capacity_bytes[tier] - left + slots * room.slot_bytes + cache * room.kv_block_bytes


def _host_slots(problem: Problem, choices: Choices) -> Any:
    """Slots in host memory beside a GPU: the pinned ring, what the CPU computes, and pages that fit nowhere else."""
    plenty = replace(problem, capacity_bytes={**problem.capacity_bytes, "host": 1 << 60})
    room = room_of(problem, choices.cells)
    resident = fill(plenty, choices.cells, choices.wanted).resident
    streamed = room.pages - choices.wanted.computed - resident
    ring = 2 * np.ceil(streamed / room.layers)
    elsewhere = np.minimum(streamed, room.disk // room.page_bytes)
    host, disk = problem.share("weights.host"), problem.share("weights.disk")
    if disk is not None:
        elsewhere = np.minimum(elsewhere, np.round(disk * room.pages))
    if host is not None:
        elsewhere = np.minimum(elsewhere, streamed - (np.round(host * room.pages) - choices.wanted.computed))
    return np.where(elsewhere > 0, ring, ring / 2) + choices.wanted.computed + streamed - elsewhere


def _without_a_fix(problem: Problem) -> str:
    """The one fixed value without which it fits, if there is one."""
    for key in problem.fixed:
        rest = {name: value for name, value in problem.fixed.items() if name != key}
        if search(replace(problem, fixed=rest)) is not None:
            return f"; without --fix {key}={problem.fixed[key]} it fits"
    return ""


def _on_disk(problem: Problem) -> BudgetError:
    """No memory helps alone: pages must lie somewhere."""
    room = [room_of(problem, first_look(problem, setting).cells) for setting in settings(problem)]
    needed = room[0].pages * room[0].page_bytes
    given = problem.capacity_bytes.get("disk", 0)
    return BudgetError(
        f"--disk {format_bytes(given)} is too small for {problem.model.name}: its experts take "
        f"{format_bytes(needed, round_up=True)}, {format_bytes(needed - given, round_up=True)} more"
        f"{_without_a_fix(problem)}",
        tier="disk",
        needed_bytes=needed,
    )
