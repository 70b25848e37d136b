"""The table of families, measured: errors of logits of suspended graphs against transformers' eager forward, and tokens
of the engine against its greedy search.

python -m tests.models.graph.measured [FAMILY…]   # measures these (default: all); writes the table, and the page of it
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine.engine import Engine
from moelight.models.graph import self_test
from moelight.models.graph.family_table import TABLE, Family, Table
from moelight.models.graph.support import judge_family, moe_families
from tests.models.graph import drawn
from tests.models.graph.drawn import VOCABULARY
from tests.models.graph.released import RELEASED
from tests.tiny import save_byte_tokenizer

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "models.md"
PROMPTS = 32
NEW = 6  # tokens of each
SEEDS = (1, 2)  # the next where one differs: scores of a router that tie but for rounding do not repeat
DRAWN_PROMPTS = 8  # of a drawn shape
_BLOCK = 64  # of linear attention, which no config says
_SIZES = {"batch_size": 16, "micro_batch_size": 8, "micro_batch_tokens": 512}


def config_of(model_type: str, **changes: Any) -> Any:
    """The config of ``model_type`` with the switches of a released checkpoint."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**RELEASED.get(model_type, {}), **changes})


def longest_of(config: Any) -> int:
    """Three times the longest window, block or compression of the tiny ``config``."""
    rates = getattr(config.get_text_config(), "compress_rates", None) or {}
    return 3 * max([_BLOCK, *rates.values()])


def prompts_of(longest: int, count: int = PROMPTS) -> list[list[int]]:
    """Ragged, from one token to ``longest``; more of the short ones."""
    draw = torch.Generator().manual_seed(7)
    lengths = [1 + round((longest - 1) * (number / (count - 1)) ** 2) for number in range(count)]
    return [torch.randint(3, 250, (length,), generator=draw).tolist() for length in lengths]


def family_of(name: str, model_type: str) -> Family:
    """The row of one family."""
    family = judge_family(name, model_type, RELEASED.get(model_type, {}))
    if family.how is None:
        return family
    if (differs := self_test.self_test(config_of(model_type)).differs) is not None:
        return replace(family, how=None, reason=f"differs from transformers in {differs}")
    config = sized(self_test.tiny(config_of(model_type)))
    error, same = measured(config, prompts_of(longest_of(config)))
    family = replace(family, error=float(f"{error:.1e}"), same=same, prompts=PROMPTS)
    return with_shapes(family)


def with_shapes(family: Family) -> Family:
    """``family`` with what its drawn shapes gave."""
    equal, shapes, differences = 0, 0, list[str]()
    for config, fields in drawn.shapes(config_of(family.model_type), family.name):
        shapes += 1
        reason = judged(config)
        equal += reason is None
        if reason is not None:
            differences.append(f"{json.dumps(fields)}: {reason}")
    return replace(family, shapes=shapes, shapes_equal=equal, shapes_differ=tuple(differences))


def judged(config: Any) -> str | None:
    """Why the model of the drawn ``config`` does not run, or that its tokens differ; None if they are equal."""
    try:
        error, same = measured(config, prompts_of(longest_of(config), DRAWN_PROMPTS))
    except ConfigError as refused:
        return str(refused).replace(tempfile.gettempdir(), "")
    if same < DRAWN_PROMPTS or error > self_test.TOLERANCE:
        return f"{same} of {DRAWN_PROMPTS} prompts have the tokens of transformers, logits differ by {error:.1e}"
    return None


def sized(config: Any) -> Any:
    """``config``, a tiny one, with the vocabulary of the tokenizer."""
    text = config.get_text_config()
    for name in ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"):
        if getattr(text, name, None):
            setattr(text, name, VOCABULARY)
    return config


def measured(config: Any, prompts: list[list[int]]) -> tuple[float, int]:
    """`measure` by the first of `SEEDS` that shows no difference, else by the last."""
    for seed in SEEDS:
        error, same = measure(config, prompts, seed)
        if error <= self_test.TOLERANCE and same == len(prompts):
            break
    return error, same


def measure(config: Any, prompts: list[list[int]], seed: int) -> tuple[float, int]:
    """The largest error of logits, relative to the largest of their row, and for how many of ``prompts`` the engine's
    greedy tokens, with streamed experts, are transformers'; of a random model of the tiny ``config``."""
    text, eager = config.get_text_config(), self_test.random_model(config, seed)
    with tempfile.TemporaryDirectory() as directory:
        eager.save_pretrained(directory, save_original_format=text is config)  # without encoders, no mapping back
        config.save_pretrained(directory)
        save_byte_tokenizer(Path(directory))
        result = _tokens(directory, prompts)
    expected, same = [], 0
    with torch.inference_mode():
        for prompt, more in zip(prompts, result, strict=True):
            ids = torch.tensor([[*prompt, *more]])
            expected.append(eager(input_ids=ids, use_cache=False).logits[0].float())
            same += expected[-1].argmax(-1)[len(prompt) - 1 : -1].tolist() == more
    full = [torch.tensor([*prompt, *more]) for prompt, more in zip(prompts, result, strict=True)]
    error = max(self_test.relative(*item) for item in zip(_logits(config, seed, full), expected, strict=True))
    return error, same


def _tokens(position: str, prompts: list[list[int]]) -> list[list[int]]:
    """By the engine, experts from disk in every pass."""
    how = SamplingParams(max_tokens=NEW, ignore_eos=True)
    policy = Policy(model=position, weights=Shares(disk=1.0), kv_tokens=16 * (max(map(len, prompts)) + NEW), **_SIZES)
    with Engine(policy, device="cpu") as engine:
        return [list(item.token_ids) for item in engine.generate(prompts, how)]


def _logits(config: Any, seed: int, full: Sequence[Tensor]) -> list[Tensor]:
    """Of suspended runs: all rows but `NEW` of each sequence at once, in micro-batches of eight, then row by row."""
    bench = self_test.Bench(self_test.random_model(config, seed))
    sequences = [self_test.Tokens(item) for item in full]
    groups = [range(first, first + 8) for first in range(0, len(full), 8)]
    logits: list[list[Tensor]] = [[] for _ in full]
    for step in range(NEW + 1):
        rows = [[(sequences[n], 1 if step else len(full[n]) - NEW) for n in group] for group in groups]
        for group, batch, result in zip(groups, rows, bench.run(rows), strict=True):
            for number, part in zip(group, result.split([count for _, count in batch]), strict=True):
                logits[number].append(part)
    return [torch.cat(logit) for logit in logits]


def page_of(table: Table) -> Iterator[str]:
    """The lines of the page between its marks."""
    runs = [family for family in table.families if family.how is not None]
    shapes, equal = sum(run.shapes for run in runs), sum(run.shapes_equal for run in runs)
    yield f"transformers {table.transformers}: {len(runs)} of {len(table.families)} families run; of {shapes} drawn"
    yield f"shapes and switches, {equal} run with the tokens of transformers."
    yield ""
    yield "| family | runs | mixers | largest error | greedy tokens | drawn shapes | why not |"
    yield "|---|---|---|---|---|---|---|"
    for family in table.families:
        if family.how is None:
            yield f"| {family.name} | no | | | | | {family.reason} |"
        else:
            mixers, error = ", ".join(family.mixers), f"{family.error:.1e}"
            same = f"{family.same} of {family.prompts}"
            shapes = f"{family.shapes_equal} of {family.shapes}" if family.shapes else ""
            reasons = "; ".join(family.shapes_differ).replace("|", "\\|")
            yield f"| {family.name} | {family.how} | {mixers} | {error} | {same} | {shapes} | {reasons} |"


_MARKS = "<!-- written by make families -->", "<!-- as far as here -->"


def on_page() -> list[str]:
    """The lines between the marks, as they are."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return lines[lines.index(_MARKS[0]) + 2 : lines.index(_MARKS[1]) - 1]


def main() -> None:
    """Measure what is named, keep the rows of the others, write both files."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    named, families = sys.argv[1:], moe_families()
    named = named or list(families)
    rows = {family.name: family for family in Table.read().families} if TABLE.exists() else {}
    for name, model_type in families.items():
        if name in named:
            rows[name] = family_of(name, model_type)
            print(rows[name], flush=True)
            listed = tuple(rows[family] for family in families if family in rows)
            Table(transformers=transformers.__version__, families=listed).write(TABLE)
    write_page()


def write_page() -> None:
    """Put the table into its page."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(_MARKS[0])[0], text.split(_MARKS[1])[1]
    PAGE.write_text(
        "\n".join((before + _MARKS[0], "", *page_of(Table.read()), "", _MARKS[1] + after)), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
