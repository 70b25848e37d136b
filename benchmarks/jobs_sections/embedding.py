"""Embeddings of texts: `moelight generate --task embed` beside sentence-transformers' way with the same checkpoint,
texts, tokens and threads, in turns: transformers' `AutoModel` over batches of texts sorted by length, padded,
`--embedded-batch` at once, pooled by mask.

Texts have 8 to twice `--embedded-words` words. Seconds are those of the passes for ours, without loading, and of the
batches for theirs, whose texts are tokens already. Both are tried in float32 and bfloat16, ours by a job and theirs by
a few texts, and take turns in the faster of the two. The roof is that of products: every token once through all weights
but the embeddings and the head.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runner.roofs import Roofs
from runner.run import in_rounds
from runner.threads import spreading

from jobs_sections.scoring import WORDS
from moelight.batch.job import run_job
from moelight.batch.options import Durability, JobOptions
from moelight.batch.tasks import EMBED
from moelight.core.request import PROMPT_ONLY, PoolingParams
from moelight.engine.tokenizer import Tokenizer
from moelight.hrm.inventory import ENDS, inventory
from moelight.models.checkpoints import open_model

DTYPES = ("float32", "bfloat16")
OURS, THEIRS = "moelight", "transformers"
_SHORTEST = 8  # words
_TRIED = 4  # texts


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Texts and tokens a second of both, and how far they are apart."""
    opened = open_model(args.model)
    tokenizer, texts = Tokenizer.of(opened.directory), make_texts(args.embedded_rows, args.embedded_words)
    prompts = args.temporary / "texts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    ids = [tokenizer.encode(text) for text in texts]
    ours, theirs = Ours(prompts, args), Theirs(ids, args)
    contestants: dict[str, Ours | Theirs] = {OURS: ours, THEIRS: theirs}
    roofs = Roofs(0.25, args.threads)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _, turn in in_rounds(contestants, args.rounds):
        roofs.measure()
        for name in turn:
            seconds[name].append(contestants[name].seconds())
    roofs.measure()
    tokens = sum(map(len, ids))
    weights = inventory(opened.profile)
    least = 2 * (weights.active - weights.parameters[ENDS]) * tokens
    cosines = (ours.embeddings * theirs.embeddings).sum(1)
    result = {
        "model": Path(args.model).name,
        "rows": len(texts),
        "tokens": tokens,
        "pooling": args.embedded_pooling,
        "dtypes": {OURS: ours.dtype, THEIRS: theirs.dtype},
        "tried_s": {OURS: ours.tried_s, THEIRS: theirs.tried_s},
        **{f"{name}_tokens_per_s": round(tokens / statistics.median(taken), 1) for name, taken in seconds.items()},
        "ratio": round(statistics.median(b / a for a, b in zip(seconds[OURS], seconds[THEIRS], strict=True)), 3),
        "roof_share": round(least / roofs.figures()["bf16_flops"] / statistics.median(seconds[OURS]), 3),
        "least_cosine": round(float(cosines.min()), 5),
        "bars": {"ratio": 1.3},
    }
    print("embedding ", "  ".join(f"{key} {value}" for key, value in result.items()))
    return result


def make_texts(count: int, words: int) -> list[str]:
    """Texts of other lengths and other words, the same in every run."""
    draw = random.Random(13)
    return [" ".join(draw.choices(WORDS, k=draw.randint(_SHORTEST, 2 * words))) for _ in range(count)]


class Ours:
    """A job as the command runs it, in the dtype in which it was faster."""

    def __init__(self, prompts: Path, args: argparse.Namespace) -> None:
        self._output = args.temporary / "embeddings.jsonl"
        self._options = {
            dtype: JobOptions(
                prompts=prompts,
                output=self._output,
                model=args.model,
                task=EMBED,
                sampling=PROMPT_ONLY,
                pooling=PoolingParams(pooling_type=args.embedded_pooling, normalize=True),
                device="cpu",
                dtype=dtype,
                durability=Durability(restart=True),
            )
            for dtype in DTYPES
        }
        self.dtype, self.embeddings = DTYPES[0], np.zeros((0, 0))
        self.tried_s = {dtype: round(self._seconds(dtype), 3) for dtype in DTYPES}
        self.dtype = min(DTYPES, key=lambda dtype: self.tried_s[dtype])

    def seconds(self) -> float:
        return self._seconds(self.dtype)

    def _seconds(self, dtype: str) -> float:
        result = run_job(self._options[dtype])
        assert result.stats is not None
        assert not result.failed
        lines = map(json.loads, self._output.read_text().splitlines())
        self.embeddings = np.array([line["embedding"] for line in lines])
        return result.stats.wall_s


class Theirs:
    """Batches of ``ids`` sorted by length, the longest first, as sentence-transformers' `encode` makes them."""

    def __init__(self, ids: list[list[int]], args: argparse.Namespace) -> None:
        from transformers import AutoModel

        torch.set_num_threads(args.threads)
        self._ids, self._pooling = ids, args.embedded_pooling
        order = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
        self._batches = [order[at : at + args.embedded_batch] for at in range(0, len(order), args.embedded_batch)]
        models = {dtype: AutoModel.from_pretrained(args.model, dtype=getattr(torch, dtype)).eval() for dtype in DTYPES}
        self.embeddings = np.zeros((len(ids), models[DTYPES[0]].config.hidden_size))
        self.tried_s = {dtype: round(self._tried(models[dtype]), 3) for dtype in DTYPES}
        self.dtype = min(DTYPES, key=lambda dtype: self.tried_s[dtype])
        self._model = models[self.dtype]

    def seconds(self) -> float:
        with spreading():
            began = time.perf_counter()
            for batch in self._batches:
                self._embed(self._model, batch)
            return time.perf_counter() - began

    def _tried(self, model: torch.nn.Module) -> float:
        """Seconds of the second of two runs over a few texts: torch may have no products of bfloat16."""
        batch = self._batches[len(self._batches) // 2][:_TRIED]
        self._embed(model, batch[:1])
        began = time.perf_counter()
        self._embed(model, batch)
        return time.perf_counter() - began

    @torch.inference_mode()
    def _embed(self, model: torch.nn.Module, rows: list[int]) -> None:
        lengths = torch.tensor([len(self._ids[row]) for row in rows])
        input_ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for at, row in enumerate(rows):
            input_ids[at, : len(self._ids[row])] = torch.tensor(self._ids[row])
        mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
        hidden = model(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state.float()
        if self._pooling == "mean":
            pooled = (hidden * mask[..., None]).sum(1) / lengths[:, None]
        else:
            pooled = hidden[torch.arange(len(rows)), lengths - 1]
        self.embeddings[rows] = torch.nn.functional.normalize(pooled, dim=1).double().numpy()
