"""Speculative decoding on and off in one run: work that copies its prompt and free prose, bound by a disk and resident.

Weights are random, so answers are played: every choice is computed, and a token of real text takes its place
(`generators/moelight_generator.py`). The text is that of Python's language reference. Copying: the prompt is a passage,
the answer the same passage with every tenth word replaced. Prose: the answer is what follows the passage. Bound by a
disk, every run is a process of its own in a control group of one third of the model's bytes, off and auto in turns.
Resident, both are loaded together and take turns. *Tail*: the last rows of a job, of which one has the full length, and
the next one a row's part less, down to one part.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any

from runner.contestants import Work, take_turns
from runner.limits import measure_base
from runner.run import in_rounds

from moelight.engine.tokenizer import Tokenizer
from pipeline_sections.disk import PLAN_SLACK
from pipeline_sections.setting import Setting, limits_memory, started

KINDS = ("copying", "prose")
MODES = ("off", "auto")
REPLACED = 10  # words of which one is replaced
TAIL = " tail"  # behind the kind of work
LEAST_GAIN, LEAST_OF_TAIL, LEAST = 1.8, 1.3, 0.98  # bars: of copying work bound by a disk, of its tail, and of all else


def run(setting: Setting) -> dict[str, Any]:
    """The big model bound by the disk, the others resident."""
    options = setting.options
    rows = [_disk_bound(setting, kind, batch) for kind in KINDS for batch in options["drafts_batches"]]
    rows += [_disk_bound(setting, kind + TAIL, batch) for kind in KINDS for batch in options["drafts_tails"]]
    batches = options["drafts_resident_batches"]
    rows += [_resident(setting, model, kind, batch) for model in setting.models for kind in KINDS for batch in batches]
    result = {
        "prompt_len": options["drafts_prompt"],
        "new_tokens": options["drafts_new"],
        "limited": limits_memory(),
        "rows": rows,
        "bars": bars(rows),
    }
    print_table(result)
    return result


def _disk_bound(setting: Setting, kind: str, batch: int) -> dict[str, Any]:
    model = setting.big
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    limit = size // 3
    memory = int((limit - measure_base()) / PLAN_SLACK)
    work, answers = played_work(setting, model, kind, batch)
    turns: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _, turn in in_rounds(MODES, setting.rounds):
        for mode in turn:
            options = {"host_memory": memory, "batch_size": batch, "speculate": mode, "answers": answers}
            with started(f"moelight-{mode}", setting, work, limit=limit, **options) as one:
                if isinstance(one, str):
                    return {"model": model.name, "bound": "disk", "kind": kind, "batch": batch, "absent": one}
                turns[mode].append(one.generate(batch))
            rate = work.tokens(batch) / turns[mode][-1]["seconds"]
            print(f"disk, {kind}, batch {batch}: {mode}: {rate:.1f} tok/s", file=sys.stderr)
    return _row(model, "disk", kind, batch, work, turns)


def _resident(setting: Setting, model: Path, kind: str, batch: int) -> dict[str, Any]:
    work, answers = played_work(setting, model, kind, batch)
    options: dict[str, Any] = {"batch_size": batch, "answers": answers, "warm": True}
    with (
        started("moelight-off", setting, work, speculate="off", **options) as off,
        started("moelight-auto", setting, work, speculate="auto", **options) as auto,
    ):
        alive = [one for one in (off, auto) if not isinstance(one, str)]
        take_turns(alive, work, setting.rounds)
    turns = {one.name.partition("-")[2]: one.samples.turns[batch] for one in alive}
    return _row(model, "memory", kind, batch, work, turns)


def played_work(setting: Setting, model: Path, kind: str, batch: int) -> tuple[Work, list[list[int]]]:
    """Prompts, and the answers that are played; the same every time."""
    kind, _, tail = kind.partition(" ")
    prompt_len, new = setting.options["drafts_prompt"], setting.options["drafts_new"]
    tokenizer, random = Tokenizer.of(model), Random(7)
    texts = [text for name in sorted(topics) if len(text := topics[name]) > 12 * (prompt_len + new)]
    prompts, answers = [], []
    for number in range(batch):
        words = re.findall(r"\S+\s*", texts[number % len(texts)])
        words = words[random.randrange(max(1, len(words) - prompt_len - new)) :]
        passage = tokenizer.encode("".join(words), add_special_tokens=False)
        answer = passage[prompt_len:]
        if kind == "copying":
            edited = [random.choice(words) if at % REPLACED == REPLACED - 1 else word for at, word in enumerate(words)]
            answer = tokenizer.encode("".join(edited), add_special_tokens=False)
        prompts.append(passage[:prompt_len])
        answers.append((answer * new)[:new])
    lengths = [max(1, new * (batch - number) // batch) if tail else new for number in range(batch)]
    work = Work(model=model, prompts=prompts, new_tokens=lengths, batches=[batch], threads=setting.threads)
    return work, answers


def _row(
    model: Path, bound: str, kind: str, batch: int, work: Work, turns: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    seconds = {mode: statistics.median(turn["seconds"] for turn in some) for mode, some in turns.items()}
    ratios = [off["seconds"] / auto["seconds"] for off, auto in zip(turns["off"], turns["auto"], strict=True)]
    return {
        "model": model.name,
        "bound": bound,
        "kind": kind,
        "batch": batch,
        "tokens_per_s": {mode: work.tokens(batch) / value for mode, value in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "passes": {mode: some[-1]["passes"] for mode, some in turns.items()},
        "counts": turns["auto"][-1]["drafts"],
        "policy": turns["auto"][-1]["policy"],
        "identical_tokens": all(one["ids"] == turns["off"][0]["ids"] for some in turns.values() for one in some),
    }


def bars(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The least ratios: of copying work bound by a disk, of its tail, of all else; and whether they are high enough."""
    ran, least = [row for row in rows if "absent" not in row], {"copying": LEAST_GAIN, f"copying{TAIL}": LEAST_OF_TAIL}
    result: dict[str, Any] = {"identical_tokens": all(row["identical_tokens"] for row in ran)}
    for kind, bar in least.items():
        if ratios := [row["ratio"] for row in ran if row["bound"] == "disk" and row["kind"] == kind]:
            result |= {f"{kind} from disk": min(ratios), f"{kind} gains": min(ratios) >= bar}
    if ratios := [row["ratio"] for row in ran if row["bound"] != "disk" or row["kind"] not in least]:
        result |= {"elsewhere": min(ratios), "elsewhere loses nothing": min(ratios) >= LEAST}
    return result


def print_table(result: dict[str, Any]) -> None:
    """A line for each model, kind of work and batch size."""
    print(
        f"drafts: prompts of {result['prompt_len']} tokens, {result['new_tokens']} new ones"
        f"{'' if result['limited'] else ' (NOT limited: no control groups)'}"
    )
    print(f"{'':44}{'off':>9}{'auto':>9}{'ratio':>8}{'passes':>14}{'drafted':>9}{'accepted':>10}")
    for row in result["rows"]:
        label = f"{row['model']}, {row['bound']}, {row['kind']}, batch {row['batch']}"
        if "absent" in row:
            print(f"{label:44}  absent: {row['absent']}")
            continue
        rates, passes, counts = row["tokens_per_s"], row["passes"], row["counts"]
        print(
            f"{label:44}{rates['off']:>9.1f}{rates['auto']:>9.1f}{row['ratio']:>8.2f}"
            f"{passes['off']:>8} ->{passes['auto']:>4}{counts['drafted_tokens']:>9}{counts['accepted_tokens']:>10}"
        )
    for name, value in result["bars"].items():
        print(f"  {name}: {value if isinstance(value, bool) else f'{value:.2f}'}")
