"""Choices scored after a prompt, of which nothing is generated: `moelight generate --task score` beside the class of
lm-evaluation-harness for transformers models and vLLM (`--vllm-python`), on the same checkpoint, rows, tokens and
threads, in turns.

A row is a prompt of `--scored-words` words and four choices. Seconds are those of the passes for ours, without loading,
and of `loglikelihood` for the harness, which scores the longest requests first, `--harness-batch` at once, in
`--harness-dtype`: without products of bfloat16 in the processor torch is far faster in float32. vLLM computes
log-likelihoods of prompts, in the same dtype; it schedules all requests itself. The roof is that of products: one
computation of each prompt and of each choice.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from runner.contestants import Contestant, Places, Work
from runner.roofs import Roofs
from runner.run import in_rounds
from runner.threads import spreading

from moelight.batch.fields import RowContext, SamplingCache
from moelight.batch.job import run_job
from moelight.batch.options import Durability, JobOptions
from moelight.batch.rows import Row
from moelight.batch.scoring import EncodedPrompt, encode_choices
from moelight.batch.simple import read_values
from moelight.batch.tasks import SCORE
from moelight.core.request import PROMPT_ONLY
from moelight.engine.tokenizer import Tokenizer
from moelight.hrm.inventory import inventory
from moelight.models.checkpoints import open_model

CHOICES = 4
WORDS = (
    "river",
    "stone",
    "light",
    "green",
    "number",
    "seven",
    "window",
    "paper",
    "letter",
    "under",
    "house",
    "morning",
)
OURS, THEIRS, VLLM = "moelight", "harness", "vllm"
BARS = {THEIRS: 1.5, VLLM: 1.3}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Scores a second of both, and how far they are apart."""
    rows = questions(args.scored_rows, args.scored_words)
    prompts = args.temporary / "questions.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    contestants: dict[str, Ours | Harness | VllmScores] = {OURS: Ours(prompts, args), THEIRS: Harness(rows, args)}
    if args.vllm_python is not None:
        contestants[VLLM] = VllmScores(rows, args)
    roofs = Roofs(0.25, args.threads)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant.seconds()  # warm
    for _, turn in in_rounds(contestants, args.rounds):
        roofs.measure()
        for name in turn:
            seconds[name].append(contestants[name].seconds())
    roofs.measure()
    count = args.scored_rows * CHOICES
    least = 2 * inventory(open_model(args.model).profile).active * least_tokens(args.model, rows)
    ours, peers = contestants[OURS], [name for name in contestants if name != OURS]
    result = {
        "model": Path(args.model).name,
        "rows": args.scored_rows,
        "peers_dtype": args.harness_dtype,
        "scores": count,
        **{f"{name}_scores_per_s": round(count / statistics.median(taken), 2) for name, taken in seconds.items()},
        **{
            f"ratio_to_{name}": round(
                statistics.median(b / a for a, b in zip(seconds[OURS], seconds[name], strict=True)), 3
            )
            for name in peers
        },
        "roof_share": round(least / roofs.figures()["bf16_flops"] / statistics.median(seconds[OURS]), 3),
        **{f"median_difference_to_{name}": _difference(ours.scores, contestants[name].scores) for name in peers},
        "bars": {f"ratio_to_{name}": BARS[name] for name in peers},
    }
    print("scoring ", "  ".join(f"{key} {value}" for key, value in result.items()))
    return result


def _difference(ours: list[float], peer: list[float]) -> float:
    return round(statistics.median(abs(a / b - 1) for a, b in zip(ours, peer, strict=True)), 5)


def questions(count: int, words: int) -> list[dict[str, Any]]:
    draw = random.Random(11)
    return [
        {
            "prompt": " ".join(draw.choices(WORDS, k=words)),
            "choices": [" " + " ".join(draw.choices(WORDS, k=3)) + f" {choice}" for choice in range(CHOICES)],
        }
        for _ in range(count)
    ]


def least_tokens(model: str, rows: list[dict[str, Any]]) -> int:
    """Tokens of all prompts and choices, each once; the last token of a choice is not computed."""
    total = 0
    for encoded in _encoded(model, rows):
        total += encoded[0].scored_from + sum(len(one.token_ids) - one.scored_from - 1 for one in encoded)
    return total


def _encoded(model: str, rows: list[dict[str, Any]]) -> Iterator[Sequence[EncodedPrompt]]:
    tokenizer, context = Tokenizer.of(open_model(model).directory), RowContext(task=SCORE)
    for number, values in enumerate(rows):
        row = read_values(values, number, number + 1, context, SamplingCache(context))
        assert isinstance(row, Row)
        yield encode_choices(row, tokenizer, 1 << 20)


class Ours:
    """A job as the command runs it."""

    def __init__(self, prompts: Path, args: argparse.Namespace) -> None:
        self._output = args.temporary / "scores.jsonl"
        self._options = JobOptions(
            prompts=prompts,
            output=self._output,
            model=args.model,
            task=SCORE,
            sampling=PROMPT_ONLY,
            device="cpu",
            dtype="bfloat16",
            durability=Durability(restart=True),
        )
        self.scores: list[float] = []

    def seconds(self) -> float:
        result = run_job(self._options)
        assert result.stats is not None
        assert not result.failed
        lines = map(json.loads, self._output.read_text().splitlines())
        self.scores = [score["logprob"] for line in lines for score in line["scores"]]
        return result.stats.wall_s


class Harness:
    """Its class for transformers models, loaded once."""

    def __init__(self, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
        from lm_eval.models.huggingface import HFLM

        torch.set_num_threads(args.threads)
        self._model = HFLM(pretrained=args.model, device="cpu", dtype=args.harness_dtype, batch_size=args.harness_batch)
        self._requests = [
            SimpleNamespace(args=(row["prompt"], choice), task_name="scoring")
            for row in rows
            for choice in row["choices"]
        ]
        self.scores: list[float] = []

    def seconds(self) -> float:
        with spreading():
            began = time.perf_counter()
            scored = self._model.loglikelihood(self._requests, disable_tqdm=True)
            taken = time.perf_counter() - began
        self.scores = [score for score, _ in scored]
        return taken


class VllmScores:
    """vLLM in its own process, loaded once."""

    def __init__(self, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
        choices = [choice for encoded in _encoded(args.model, rows) for choice in encoded]
        self._count = len(choices)
        work = Work(
            model=Path(args.model),
            prompts=[list(choice.token_ids) for choice in choices],
            new_tokens=[1] * self._count,
            batches=[self._count],
            threads=args.threads,
        )
        options = {"scored_from": [choice.scored_from for choice in choices], "dtype": args.harness_dtype}
        self._process = Contestant(
            f"{VLLM}-scores", Places(vllm=args.vllm_python), work, args.temporary, warm=False, options=options
        )
        self._process.wait()
        self.scores: list[float] = []

    def seconds(self) -> float:
        result = self._process.generate(self._count)
        self.scores = result["scores"]
        return float(result["seconds"])
